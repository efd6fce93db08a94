"""A TorchRL environment that steps many MuJoCo simulations in one call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl import logger as torchrl_logger
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_unilab.envs.episodes import Episodes
from torchrl_unilab.envs.randomization import Randomize
from torchrl_unilab.envs.registry import make_task
from torchrl_unilab.envs.rendering import BatchRenderer, Camera, Pictures, Pixels
from torchrl_unilab.envs.simulations import Simulations, all_finite
from torchrl_unilab.envs.task import Array, MujocoTask
from torchrl_unilab.runtime import available_cores, plan_threads

_FLAGS = ("done", "terminated", "truncated")
_NUMPY_DTYPE = {torch.float32: np.float32, torch.float64: np.float64}


class MujocoBatchEnv(EnvBase):
    """Many simulations of one MuJoCo task, as one batched environment.

    Physics runs in float64 through `mujoco.batch.Batch`, on its own threads; for a
    task of Gymnasium's the results are Gymnasium's, bit for bit, at any number of
    threads. ``step`` returns the true next observation also where an
    episode ends; ``step_and_maybe_reset``, or ``reset`` with a ``"_reset"`` mask,
    starts the next episode in those rows only.

    The keys, with ``n = num_envs``: ``observation`` ``(n, nobs)``, and the task's
    other groups of observations, and ``reward`` ``(n, 1)`` of ``dtype``; ``action``
    ``(n, nu)``, within the model's control range; ``done``, ``terminated`` and
    ``truncated`` ``(n, 1)`` bool, where ``done = terminated | truncated``; and, if
    asked for, each part of the reward, ``(n, 1)``, under ``reward_terms``.

    A simulation that diverges is terminated with reward 0, is put back to the
    model's default pose, which is what its last observation shows, and is counted
    in `num_diverged` and logged; the others are unaffected.

    Copying or pickling it makes a new environment of the same arguments, which starts new
    episodes, from the same states if it was given a seed.

    From the first environment on, MuJoCo does not time its steps in this process; see
    `torchrl_unilab.envs.mujoco_engine.stop_physics_clock`.

    Args:
        task: a task, or the name of one, as `torchrl_unilab.envs.make_task` takes it.
        num_envs: number of simulations.
        num_threads: physics threads; by default one for each CPU that this process
            may use but one, which is the learner's, and at least two if there are two.
        seed: seed of the initial states; simulation ``i`` draws from its own
            generator, seeded ``seed + i`` as in Gymnasium's vector environments.
            None seeds from the operating system.
        max_episode_steps: steps after which an episode is truncated; by default
            the task's.
        device: device of the tensors, by default the CPU. Physics is on the CPU.
        dtype: torch.float32 or torch.float64.
        with_reward_terms: whether steps also return the parts of the reward.
        randomization: how the simulations' models differ; by default as the task
            says, and not at all if empty. Follows from the seed.
        from_pixels: whether resets and steps also return a picture of each simulation
            under ``pixels``, ``(n, render_height, render_width, 3)`` uint8.
        pixels_only: whether ``pixels`` then stand in place of the observations, as
            they do by default in ``GymEnv``.
        render_width: width of pictures in pixels.
        render_height: height of pictures in pixels.
        render_camera: camera of the pictures; see
            `torchrl_unilab.envs.rendering.BatchRenderer`.
        render_ids: the simulations in ``pixels``, distinct; None for all. The
            pictures of the others stay black and take no time.

    Attributes:
        task: the task.
        max_episode_steps: steps after which an episode is truncated.
        dt: seconds of simulated time that a step takes.
        num_diverged: simulations that have diverged since construction.
        randomizer: holds what differs between the simulations' models.
        reward_terms: the parts of the last step's reward, by the task's names
            (Gymnasium's in its ``info``), ``(n,)`` each.
        info: what else the task told of the last step, ``(n, ...)`` each.
        phase_seconds: seconds since construction spent in ``physics``,
            ``reward``, ``observation`` and ``reset`` (whose observations count
            as observations).

    Raises:
        ValueError: if an argument is out of range or names no task, and ConfigError,
            which is one, for pictures that cannot be drawn.

    Example:
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> env = MujocoBatchEnv("Hopper-v5", num_envs=4, seed=0)
        >>> env.rollout(10, break_when_any_done=False)["observation"].shape
        torch.Size([4, 10, 11])
        >>> env.close()
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> MujocoBatchEnv:
        """Keep the constructor's arguments, those of a derived class among them."""
        env: MujocoBatchEnv = super().__new__(cls, *args, **kwargs)
        env.__dict__["_arguments"] = (args, kwargs)  # no nn.Module yet
        return env

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to build such an environment: physics and its threads are not copied."""
        args, kwargs = self._arguments
        return partial(type(self), **kwargs), args

    def __init__(
        self,
        task: str | MujocoTask,
        num_envs: int = 64,
        *,
        num_threads: int | None = None,
        seed: int | None = None,
        max_episode_steps: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.float32,
        with_reward_terms: bool = False,
        randomization: Sequence[Randomize] | None = None,
        from_pixels: bool = False,
        pixels_only: bool = True,
        render_width: int = 320,
        render_height: int = 240,
        render_camera: Camera = None,
        render_ids: ArrayLike | None = None,
    ) -> None:
        """Compile the model and allocate the simulations."""
        if isinstance(task, str):
            task = make_task(task)
        if num_threads is None:
            num_threads = plan_threads(available_cores()).physics_threads
        if max_episode_steps is None:
            max_episode_steps = task.max_episode_steps
        _check_positive("num_envs", num_envs)
        _check_positive("num_threads", num_threads)
        _check_positive("frame_skip", task.frame_skip)
        _check_positive("max_episode_steps", max_episode_steps)
        if dtype not in _NUMPY_DTYPE:
            raise ValueError(
                f"MujocoBatchEnv: dtype is {dtype} (expected torch.float32 or "
                "torch.float64). Cast the outputs to other types."
            )
        super().__init__(device="cpu" if device is None else device, batch_size=[num_envs])
        self.task = task
        self.max_episode_steps = max_episode_steps
        self.num_diverged = 0
        self.reward_terms: dict[str, NDArray[Any]] = {}
        self.info: dict[str, NDArray[Any]] = {}
        self.phase_seconds = dict.fromkeys(("physics", "reward", "observation", "reset"), 0.0)
        self._with_reward_terms = with_reward_terms
        self._torch_dtype = dtype
        self._on_cpu = self.device.type == "cpu"
        self.dtype = _NUMPY_DTYPE[dtype]
        self._episodes = Episodes(num_envs, max_episode_steps)

        self._physics: Simulations | None = Simulations(task, num_envs, num_threads, randomization)
        self.randomizer = self._physics.randomizer
        model = self._physics.batch.model
        self.dt = float(model.opt.timestep * task.frame_skip)
        self._renderer = BatchRenderer(
            self._physics.batch, width=render_width, height=render_height, camera=render_camera
        )
        seen = _simulations("render_ids", render_ids, num_envs)
        self._pixels = Pixels(self._renderer, num_envs, seen) if from_pixels else None
        self._observes = not (from_pixels and pixels_only)
        self._make_specs(self._physics)
        self._set_seed(seed)
        self.is_closed = False

    def _make_specs(self, physics: Simulations) -> None:
        model, fields = physics.batch.model, physics.fields
        n, device, dtype = len(self._episodes), self.device, self._torch_dtype

        def unbounded(width: int) -> Unbounded:
            return Unbounded((n, width), dtype=dtype, device=device)

        limited = model.actuator_ctrllimited.astype(bool)
        if not limited.all():
            names = [model.actuator(int(i)).name for i in np.flatnonzero(~limited)]
            raise ValueError(
                f"MujocoBatchEnv: actuators {names} of {self.task.name} have no control range "
                "(expected one, which bounds the action). Give them a ctrlrange."
            )
        low, high = torch.as_tensor(model.actuator_ctrlrange.T, dtype=dtype, device=device)
        shape = (n, len(low))
        self.action_spec = Bounded(
            low.expand(shape), high.expand(shape), shape, dtype=dtype, device=device
        )
        groups = self.task.observations(fields)
        self._widths = {key: sum(part.shape[1] for part in parts) for key, parts in groups.items()}
        observed = {key: unbounded(width) for key, width in self._widths.items() if self._observes}
        if self._pixels is not None:
            observed["pixels"] = Bounded(
                0, 255, self._pixels.shape, dtype=torch.uint8, device=device
            )
        if self._with_reward_terms:
            action = np.zeros(shape, dtype=self.dtype)
            outcome = self.task.outcome(fields, self.task.before(fields), action, self.dt)
            terms = {name: unbounded(1) for name in outcome.terms}
            observed["reward_terms"] = Composite(terms, shape=[n], device=device)
            self.reward_terms = dict.fromkeys(outcome.terms, np.zeros(n))
        self.observation_spec = Composite(observed, shape=[n], device=device)
        self.reward_spec = unbounded(1)
        self.done_spec = Composite(
            {key: Categorical(2, shape=(n, 1), dtype=torch.bool, device=device) for key in _FLAGS},
            shape=[n],
        )

    def get_state(self) -> tuple[Array, Array]:
        """Return copies of ``qpos`` ``(n, nq)`` and ``qvel`` ``(n, nv)``, float64.

        Raises:
            RuntimeError: if the environment is closed.
        """
        fields = self._open_physics().fields
        return fields["qpos"].copy(), fields["qvel"].copy()

    def set_state(
        self, qpos: ArrayLike, qvel: ArrayLike, ids: ArrayLike | None = None
    ) -> TensorDictBase:
        """Start new episodes from given states.

        Args:
            qpos: ``(k, nq)``, metres and radians as in the model.
            qvel: ``(k, nv)``, the same per second.
            ids: the ``k`` simulations to set, distinct; None for all.

        Returns:
            What ``reset`` would return: the observation and flags of all rows.

        Raises:
            RuntimeError: if the environment is closed.
            ValueError: if an argument has the wrong shape, is not finite, or names
                no simulation. Nothing has changed then.

        Example:
            >>> from torchrl_unilab.envs import MujocoBatchEnv
            >>> env = MujocoBatchEnv("InvertedPendulum-v5", num_envs=3)
            >>> td = env.set_state([[0.0, 0.1]], [[0.0, 0.0]], ids=[1])
            >>> td["observation"][1].tolist()
            [0.0, 0.10000000149011612, 0.0, 0.0]
        """
        fields = self._open_physics().fields
        rows = _simulations("set_state: ids", ids, len(self._episodes))
        order = np.argsort(rows)  # as the batch wants its ids
        values = []
        for name, value in (("qpos", qpos), ("qvel", qvel)):
            value = np.asarray(value, dtype=np.float64)
            shape = (len(rows), fields[name].shape[1])
            if value.shape != shape or not np.isfinite(value).all():
                raise ValueError(
                    f"set_state: {name} has shape {value.shape} and "
                    f"{(~np.isfinite(value)).sum()} non-finite values (expected "
                    f"{shape} and none). Give one row per simulation to set."
                )
            values.append(value[order])
        self._place(rows[order], *values)
        return self._output()

    def snapshot(self) -> dict[str, Any]:
        """Return all that the next steps follow from.

        Simulations in the midst of their episodes, their generators and what differs between
        their models: an environment of the same task that restores it goes on bit for bit as
        this one does.

        Returns:
            Copies: arrays, numbers, and dicts and lists of them.

        Raises:
            RuntimeError: if the environment is closed.

        Example:
            >>> from torchrl_unilab.envs import MujocoBatchEnv
            >>> one, other = (MujocoBatchEnv("Hopper-v5", 2, seed=seed) for seed in (0, 1))
            >>> action = one.rand_action(one.rollout(5)[:, -1])
            >>> other.restore(one.snapshot())
            >>> bool((one.step(action.clone()) == other.step(action.clone())).all())
            True
        """
        return {
            **self._open_physics().state_dict(),
            "episodes": self._episodes.state_dict(),
            "reward_terms": {name: term.copy() for name, term in self.reward_terms.items()},
            "num_diverged": self.num_diverged,
            "generators": [rng.bit_generator.state for rng in self._rngs],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from what `snapshot` returned, here or in an environment like this one.

        Args:
            snapshot: remains as it is.

        Raises:
            RuntimeError: if the environment is closed.
            ValueError: if it is of another task or number of simulations. Nothing has
                changed then.
        """
        self._open_physics().load_state_dict(snapshot)
        self._episodes.load_state_dict(snapshot["episodes"])
        self.reward_terms = {name: term.copy() for name, term in snapshot["reward_terms"].items()}
        self.num_diverged = snapshot["num_diverged"]
        for rng, generator in zip(self._rngs, snapshot["generators"], strict=True):
            rng.bit_generator.state = generator
        self._mark()

    def render(self, ids: ArrayLike | None = None) -> Pictures:
        """Draw simulations as they are now.

        The first picture loads OpenGL, through EGL or OSMesa where there is no
        display; ``MUJOCO_GL`` chooses another way.

        Args:
            ids: the ``k`` simulations to draw, distinct; None for all.

        Returns:
            ``(k, render_height, render_width, 3)`` uint8, in the order of ``ids``.

        Raises:
            RuntimeError: if the environment is closed.
            ValueError: if ids names no simulation.
            ConfigError: if OpenGL cannot draw here; names what is missing.
        """
        self._open_physics()
        return self._renderer.render(_simulations("render: ids", ids, len(self._episodes)))

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Free the simulations, their threads and the renderer. Closing again does nothing.

        Args:
            raise_if_closed: ignored; TorchRL passes it.
        """
        self._renderer.close()
        self.is_closed = True
        if self._physics is not None:
            self._physics.close()
            self._physics = None

    def _set_seed(self, seed: int | None) -> None:
        n = len(self._episodes)
        self._rngs = [np.random.default_rng(None if seed is None else seed + i) for i in range(n)]
        self.randomizer.seed(self._rngs)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._open_physics()
        mask = None if tensordict is None else tensordict.get("_reset", None)
        ids = self._rows(mask)
        self._start_episodes(np.arange(len(self._episodes)) if ids is None else ids)
        return self._output()

    def _step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """The base class's method, with a short way through the reset.

        The base class passes the reset through masks, checks and merges for
        environments of any shape, which takes longer than the reset itself.
        """
        if tensordict.get("_step", None) is not None or self._post_step_mdp_hooks:
            return super()._step_and_maybe_reset(tensordict)  # type: ignore[no-any-return]
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        tensordict = self.step(tensordict)
        root = self._step_mdp(tensordict)
        if self._episodes.any_done:
            done = self._episodes.terminated | self._episodes.truncated
            self._start_episodes(np.flatnonzero(done))
            # in the rows that went on, this is what the step returned
            fresh = self._output()
            others = root.exclude(*fresh.keys())
            if not done.all():
                # what the policy wrote is zeroed where an episode starts
                going = self._tensor(~done, bool)
                others = others.where(going, others.empty(), pad=0)
            root = fresh.update(others)
        return tensordict, root

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The base class's method, past what only a partial or a given next step needs."""
        keys = tensordict.keys()
        if "_step" in keys or "next" in keys:
            return super().step(tensordict)
        self._assert_tensordict_shape(tensordict)
        return tensordict.set("next", self._step_proc_data(self._step(tensordict)))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = self._read_action(tensordict)
        ids = self._rows(tensordict.get("_step", None))
        task, physics = self.task, self._open_physics()
        start = time.perf_counter()
        before = task.before(physics.seen)
        diverged = physics.step(action, ids)
        if diverged is not None:
            self._report(diverged)
        start = self._end_phase("physics", start)
        outcome = task.outcome(physics.seen, before, action, self.dt)
        reward, terminated = outcome.reward, outcome.terminated
        # past what nn.Module does about attributes, which takes as long as some of the terms
        self.__dict__.update(reward_terms=outcome.terms, info=outcome.info)
        if diverged is not None:
            # what the task makes of the jump to the default pose means nothing
            reward = np.where(diverged, 0.0, reward)
            terminated = terminated | diverged
            self.reward_terms = {
                name: np.where(diverged, 0.0, term) for name, term in self.reward_terms.items()
            }
        self._mark(ids)
        self._episodes.advance(terminated, ids)
        if ids is not None:
            reward = np.where(np.isin(np.arange(len(reward)), ids), reward, 0.0)
        if task.command_steps is not None:
            due = self._episodes.elapsed % task.command_steps == 0
            self._draw_commands(np.flatnonzero(due) if ids is None else ids[due[ids]])
        self._end_phase("reward", start)
        return self._output(reward=self._tensor(reward[:, None], self.dtype))

    def _end_phase(self, phase: str, start: float) -> float:
        """Count the time since ``start`` for a phase; return the present."""
        now = time.perf_counter()
        self.phase_seconds[phase] += now - start
        return now

    def _report(self, diverged: NDArray[np.bool_]) -> None:
        """Count simulations that diverged; log the first and whenever they doubled."""
        known, count = self.num_diverged, int(diverged.sum())
        self.num_diverged = known + count
        if self.num_diverged.bit_length() > known.bit_length():
            torchrl_logger.warning(
                "MujocoBatchEnv: simulations %s of %s diverged (expected finite states); "
                "%d have since the start. They were reset. Check the actions, or give the "
                "model a smaller timestep.",
                np.flatnonzero(diverged).tolist(),
                self.task.name,
                self.num_diverged,
            )

    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        # _step gives every key in its final shape, so there is nothing to complete
        if self.run_type_checks:
            return super()._step_proc_data(next_tensordict_out)
        return next_tensordict_out

    def _open_physics(self) -> Simulations:
        if self._physics is None:
            raise RuntimeError(
                "MujocoBatchEnv: the environment is closed (expected an open one). "
                "Create a new one."
            )
        return self._physics

    def _read_action(self, tensordict: TensorDictBase) -> NDArray[Any]:
        """The action as a contiguous array, refused if it is malformed."""
        shape = (len(self._episodes), self._open_physics().num_controls)
        action = tensordict["action"]
        if action.requires_grad:
            action = action.detach()
        if action.dtype is not torch.float32 and action.dtype is not torch.float64:
            action = action.float()
        array: NDArray[Any] = np.ascontiguousarray(action.numpy(force=not action.is_cpu))
        if array.shape != shape:
            raise ValueError(
                f"MujocoBatchEnv.step: action has shape {array.shape} (expected "
                f"{shape}). Give one row of controls per simulation."
            )
        if not all_finite(array):
            raise ValueError(
                f"MujocoBatchEnv.step: action has {(~np.isfinite(array)).sum()} "
                "non-finite values (expected none). Check the policy for NaN."
            )
        return array

    def _rows(self, mask: torch.Tensor | None) -> NDArray[np.intp] | None:
        """The rows that a ``(n,)`` or ``(n, 1)`` mask selects; None for all."""
        if mask is None or mask.all():
            return None
        return np.flatnonzero(mask.cpu().numpy())

    def _start_episodes(self, ids: NDArray[np.intp]) -> None:
        """Start episodes of simulations ``ids``, sorted, from noisy states."""
        if not len(ids):
            return
        start = time.perf_counter()
        physics = self._open_physics()
        physics.randomizer.reset(ids)
        states = [self.task.initial_state(self._rngs[i], *physics.start) for i in ids]
        self._draw_commands(ids)
        self._place(ids, *(np.array(part) for part in zip(*states, strict=True)))
        self._end_phase("reset", start)

    def _draw_commands(self, ids: NDArray[np.intp]) -> None:
        """Draw new commands for simulations ``ids``, if the task has commands."""
        if self.task.command_size:
            command = self._open_physics().fields["command"]
            for i in ids:
                command[i] = self.task.command(self._rngs[i])

    def _place(self, ids: NDArray[np.intp], qpos: Array, qvel: Array) -> None:
        """Start episodes of simulations ``ids``, sorted, from these states."""
        self._open_physics().place(ids, qpos, qvel)
        if self._with_reward_terms:
            started = np.isin(np.arange(len(self._episodes)), ids)
            self.reward_terms = {
                name: np.where(started, 0.0, term) for name, term in self.reward_terms.items()
            }
        self._episodes.start(ids)
        self._mark(ids)

    def _mark(self, ids: NDArray[np.intp] | None = None) -> None:
        """Let the pictures of these simulations be drawn anew; of all for None."""
        if self._pixels is not None:
            self._pixels.outdate(slice(None) if ids is None else ids)

    def _output(self, **entries: torch.Tensor) -> TensorDict:
        """The present observation and flags, in new tensors, and ``entries``."""
        start = time.perf_counter()
        groups = self.task.observations(self._open_physics().seen) if self._observes else {}
        for key, parts in groups.items():
            # cast while they are put together: one copy out of the physics
            array = np.concatenate(parts, axis=1, dtype=self.dtype, casting="same_kind")
            entries[key] = self._placed(torch.from_numpy(array))
        if self._pixels is not None:
            entries["pixels"] = self._tensor(self._pixels.current(), np.uint8)
        for key, flags in zip(_FLAGS, self._episodes.flags(), strict=True):
            entries[key] = self._placed(torch.from_numpy(flags))
        # the constructor without its checks, as in TorchRL's own environments
        output = TensorDict._new_unsafe(entries, batch_size=self.batch_size, device=self.device)
        if self._with_reward_terms:
            terms = {
                name: self._tensor(term[:, None], self.dtype)
                for name, term in self.reward_terms.items()
            }
            output["reward_terms"] = TensorDict._new_unsafe(
                terms, batch_size=self.batch_size, device=self.device
            )
        self._end_phase("observation", start)
        return output

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the environment's device."""
        return tensor if self._on_cpu else tensor.to(self.device)

    def _tensor(self, array: NDArray[Any], dtype: type) -> torch.Tensor:
        """A tensor of a copy of ``array`` on the environment's device."""
        return self._placed(torch.from_numpy(array.astype(dtype)))


def _simulations(what: str, ids: ArrayLike | None, n: int) -> NDArray[np.intp]:
    """The simulations that ``ids`` names, distinct; all for None."""
    rows = np.arange(n) if ids is None else np.asarray(ids)
    if (
        rows.ndim != 1
        or rows.dtype.kind not in "iu"
        or len(np.unique(rows)) != len(rows)
        or ((rows < 0) | (rows >= n)).any()
    ):
        raise ValueError(
            f"{what} is {ids!r} (expected distinct integers from 0 to {n - 1}). Correct ids."
        )
    return rows


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(
            f"MujocoBatchEnv: {name} is {value} (expected at least 1). Give a positive {name}."
        )
