"""The physics of an environment: a task's simulations, and what happens when one diverges."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mujoco import mjtStage, mjtWarning
from mujoco.batch import DATA_FIELDS, MODEL_FIELDS, Batch, SimulationError
from numpy.typing import NDArray

from torchrl_unilab.checks import as_instance
from torchrl_unilab.envs.mujoco_engine import stop_physics_clock
from torchrl_unilab.envs.randomization import Ids, ModelRandomizer, Randomize
from torchrl_unilab.envs.task import Array, MujocoTask
from torchrl_unilab.errors import ConfigError, LayoutKeyError

_NO_IDS = np.empty(0, dtype=np.int32)
_BAD = slice(mjtWarning.mjWARN_BADQPOS.value, mjtWarning.mjWARN_BADCTRL.value)


class _Fields(dict[str, NDArray[Any]]):
    """What a task may read, by name."""

    def __missing__(self, name: str) -> NDArray[Any]:
        remedy = "Give the task `commands`" if name == "command" else "Add it to `reads`"
        raise LayoutKeyError(f"field {name!r}: not read (expected one of {[*self]}). {remedy}.")


class Simulations:
    """Simulations of one task's model, each of them a row.

    The physics derives all other fields from the state; after a step they are those of one
    substep before it. They cannot be recomputed from the state, and the batch does not let them
    be written. So after a load, `fields` has the loaded values of these until the physics runs.

    Args:
        task: The task, which has the model and names the fields to read.
        num_envs: Number of simulations.
        num_threads: Physics threads.
        randomization: How their models differ; None as the task says.

    Attributes:
        batch: The `mujoco.batch.Batch`.
        num_controls: Controls of each simulation.
        fields: What the task reads, and the commands, ``(n, ...)`` each: live views, which change
            with every call; loaded values in place of derived ones until the physics runs.
        randomizer: Holds what differs between the models.
        start: The model's default positions ``(nq,)`` and velocities ``(nv,)``, read-only.

    Raises:
        ConfigError: The task reads a field that does not exist, or the model does not have
            what is randomised.
    """

    def __init__(
        self,
        task: MujocoTask,
        num_envs: int,
        num_threads: int,
        randomization: Sequence[Randomize] | None = None,
    ) -> None:
        stop_physics_clock()
        model = task.load_model()
        try:
            self.batch = batch = Batch(model, num_envs, num_threads)
            batch.reset()
        except (SimulationError, ValueError) as error:
            raise ConfigError(
                f"cannot make {num_envs} simulations of {task.name}: {_line(error)} (expected a "
                "model that mujoco.batch takes, and as many as fit memory). Change the model, or "
                "lower num_envs."
            ) from error
        if randomization is None:
            randomization = task.randomization
        what, remedy = f"randomization of {task.name}", "Give a tuple of Randomize."
        for spec in as_instance(what, randomization, Sequence, remedy):
            as_instance(what, spec, Randomize, remedy)
        self.randomizer = ModelRandomizer(batch, randomization, task.name, task.reads)
        self._name, self._frame_skip = task.name, task.frame_skip
        names = ("qpos", "qvel", *task.reads)
        self.fields = _Fields({name: _field(batch, name, task.name) for name in names})
        if task.command_size:
            self.fields["command"] = np.zeros((num_envs, task.command_size))
        data = {name: self.fields[name] for name in names if name in DATA_FIELDS}
        self._derived = {name: view for name, view in data.items() if not view.flags.writeable}
        self._loaded: dict[str, NDArray[Any]] = {}
        self._ctrl = batch.bind("ctrl")
        self.num_controls = int(self._ctrl.shape[1])
        # MuJoCo resets a simulation that diverges and leaves one of these counts
        self._warnings = batch.warning
        # time, positions, velocities and activations, which lead in the row of a state
        self._moving = batch.state[:, : 1 + model.nq + model.nv + model.na]
        _ALIVE.add(self)
        self.start = self.fields["qpos"][0].copy(), self.fields["qvel"][0].copy()
        for values in self.start:
            values.flags.writeable = False

    def step(self, action: NDArray[Any], ids: Ids | None = None) -> NDArray[np.bool_] | None:
        """Take the task's physics steps of one control step.

        Args:
            action: ``(n, nu)``, finite.
            ids: The simulations to step, sorted; None for all.

        Returns:
            Which of them diverged, ``(n,)``, and were put back to the model's default pose;
            None if none did.
        """
        failed = _NO_IDS
        rows = slice(None) if ids is None else ids
        self._ctrl[rows] = action[rows]
        try:
            self.batch.step(ids, nstep=self._frame_skip)
        except SimulationError as error:
            failed = error.ids
        diverged = self._diverged(failed)
        if diverged is not None:
            self.batch.reset(diverged)
        self._show_derived(ids)
        return diverged

    def _diverged(self, failed: NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """Return which simulations the last step left without a finite state; None if none."""
        moving = self._moving
        # most steps end here
        if not len(failed) and not np.count_nonzero(self._warnings) and all_finite(moving):
            return None
        diverged: NDArray[np.bool_] = self._warnings[:, _BAD, 1].any(axis=1)
        diverged |= ~np.isfinite(moving).all(axis=1)
        diverged[failed] = True
        return diverged if diverged.any() else None

    def place(self, ids: Ids, qpos: Array, qvel: Array) -> None:
        """Put simulations `ids`, sorted, into these states, and reset everything else in them.

        Raises:
            ConfigError: MuJoCo cannot compute one of the states.
        """
        self.batch.reset(ids, stage=mjtStage.mjSTAGE_NONE.value)
        self.fields["qpos"][ids] = qpos
        self.fields["qvel"][ids] = qvel
        try:
            self.batch.forward(ids)
        except SimulationError as error:
            raise ConfigError(
                f"reset of {self._name}: {_line(error)} (expected states that MuJoCo computes). "
                "Change the model, or `initial_state` of the task."
            ) from error
        self._show_derived(ids)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that the next steps follow from."""
        return {
            "task": self._name,
            "state": self.batch.state.copy(),
            "derived": {name: self.fields[name].copy() for name in self._derived},
            "command": self.fields["command"].copy() if "command" in self.fields else None,
            "randomizer": self.randomizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in simulations like these.

        Raises:
            ConfigError: The state is of another task or number of simulations. Nothing has
                changed then.
        """
        own = self.state_dict()
        if missing := own.keys() - {"task"} - state.keys():  # older ones have no name
            raise ConfigError(
                f"restore: no {sorted(missing)} in it (expected what `snapshot` returned). "
                "Restore that."
            )
        found, expected = ((one.get("task", self._name), *_shapes(one)) for one in (state, own))
        if found != expected:
            raise ConfigError(
                f"restore: a snapshot of task and shapes {found} (expected {expected}). Restore "
                "one of the same task and number of simulations."
            )
        self.randomizer.load_state_dict(state["randomizer"])
        self.batch.state[...] = state["state"]
        self._loaded = {name: field.copy() for name, field in state["derived"].items()}
        self.fields.update(self._loaded)
        if "command" in self.fields:
            self.fields["command"][...] = state["command"]

    def _show_derived(self, ids: Ids | None) -> None:
        """End the use of loaded values in simulations `ids`, which have run; in all for None."""
        if ids is None and self._loaded:
            self.fields.update(self._derived)
            self._loaded = {}
        for name, loaded in self._loaded.items():
            loaded[ids] = self._derived[name][ids]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _keep_inherited() -> None:
    """Keep batches for ever in a forked process: freeing one would wait for lost threads."""
    for simulations in _ALIVE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(simulations.batch))


_ALIVE: weakref.WeakSet[Simulations] = weakref.WeakSet()
os.register_at_fork(after_in_child=_keep_inherited)


def _shapes(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return shapes of a state's arrays: the batch's, derived fields' by name, and commands'."""
    derived = {name: field.shape for name, field in state["derived"].items()}
    return state["state"].shape, derived, np.shape(state["command"])


def all_finite(array: NDArray[Any]) -> bool:
    """Return whether all of an array is finite; counting reads less memory than reducing."""
    return bool(np.count_nonzero(np.isfinite(array)) == array.size)


def _field(batch: Batch, name: str, task: str) -> NDArray[Any]:
    """Return a field of the physics or of the model, one row per simulation."""
    if name not in DATA_FIELDS and name not in MODEL_FIELDS:
        raise ConfigError(
            f"MujocoBatchEnv: {task} reads {name!r} (expected a field of MjData that "
            "mujoco.batch binds or of MjModel that it expands). Correct `reads`."
        )
    own: NDArray[Any] | None = batch.bind(name) if name in DATA_FIELDS else batch.expanded(name)
    if own is not None:
        return own
    owner, _, attribute = name.rpartition(".")
    value = np.asarray(getattr(batch.model.opt if owner else batch.model, attribute))
    return np.broadcast_to(value, (batch.nsim, *value.shape))
