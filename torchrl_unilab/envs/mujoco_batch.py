"""A TorchRL environment that steps many MuJoCo simulations in one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mujoco import mjtStage, mjtWarning
from mujoco.batch import Batch, SimulationError
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_unilab.envs.tasks import Array, MujocoTask, make_task
from torchrl_unilab.runtime import available_cores

_NUMPY_DTYPE = {torch.float32: np.float32, torch.float64: np.float64}


class MujocoBatchEnv(EnvBase):
    """Many simulations of one MuJoCo task, as one batched environment.

    Physics runs in float64 through `mujoco.batch.Batch`, on its own threads; the
    results are those of Gymnasium's task of the same name, bit for bit, at any
    number of threads. ``step`` returns the true next observation also where an
    episode ends; ``step_and_maybe_reset``, or ``reset`` with a ``"_reset"`` mask,
    starts the next episode in those rows only.

    The keys, with ``n = num_envs``: ``observation`` ``(n, nobs)`` and ``reward``
    ``(n, 1)`` of ``dtype``; ``action`` ``(n, nu)``, within the model's control
    range; ``done``, ``terminated`` and ``truncated`` ``(n, 1)`` bool, where
    ``done = terminated | truncated``.

    A simulation that diverges is terminated with reward 0, is put back to the
    model's default pose, which is what its last observation shows, and is counted
    in `num_diverged`; the others are unaffected.

    Args:
        task: a task, or the name of one of `torchrl_unilab.envs.TASKS`.
        num_envs: number of simulations.
        num_threads: physics threads; by default one per CPU that this process
            may use.
        seed: seed of the initial states; simulation ``i`` draws from its own
            generator, seeded ``seed + i`` as in Gymnasium's vector environments.
            None seeds from the operating system.
        max_episode_steps: steps after which an episode is truncated; by default
            the task's.
        device: device of the tensors, by default the CPU. Physics is on the CPU.
        dtype: torch.float32 or torch.float64.

    Attributes:
        task: the task.
        max_episode_steps: steps after which an episode is truncated.
        num_diverged: simulations that have diverged since construction.
        reward_terms: the parts of the last step's reward, by Gymnasium's ``info``
            names, ``(n,)`` each.

    Raises:
        ValueError: if an argument is out of range or names no task.

    Example:
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> env = MujocoBatchEnv("Hopper-v5", num_envs=4, seed=0)
        >>> env.rollout(10, break_when_any_done=False)["observation"].shape
        torch.Size([4, 10, 11])
        >>> env.close()
    """

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
    ) -> None:
        """Compile the model and allocate the simulations."""
        if isinstance(task, str):
            task = make_task(task)
        if num_threads is None:
            num_threads = available_cores()
        if max_episode_steps is None:
            max_episode_steps = task.max_episode_steps
        _check_positive("num_envs", num_envs)
        _check_positive("num_threads", num_threads)
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
        self._dtype = _NUMPY_DTYPE[dtype]
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._terminated = np.zeros(num_envs, dtype=bool)
        self._truncated = np.zeros(num_envs, dtype=bool)

        model = task.load_model()
        batch = Batch(model, num_envs, num_threads)
        batch.reset()
        self._batch: Batch | None = batch
        self._dt = float(model.opt.timestep * task.frame_skip)
        # live views of the physics: they change with every call of the batch
        self._ctrl = batch.bind("ctrl")
        self._fields = {name: batch.bind(name) for name in ("qpos", "qvel", *task.derived)}
        # MuJoCo resets a simulation that diverges and leaves one of these counts
        bad = slice(mjtWarning.mjWARN_BADQPOS.value, mjtWarning.mjWARN_BADCTRL.value)
        self._warned = batch.warning[:, bad, 1]
        self._init_qpos = self._fields["qpos"][0].copy()
        self._init_qvel = self._fields["qvel"][0].copy()
        self._make_specs(model.actuator_ctrlrange, dtype)
        self._set_seed(seed)
        self.is_closed = False

    def _make_specs(self, ctrlrange: Array, dtype: torch.dtype) -> None:
        n, device = len(self._elapsed), self.device
        nobs = self.task.observation(self._fields).shape[1]
        low, high = torch.as_tensor(ctrlrange.T, dtype=dtype, device=device)
        shape = (n, len(low))
        self.action_spec = Bounded(
            low.expand(shape), high.expand(shape), shape, dtype=dtype, device=device
        )
        self.observation_spec = Composite(
            observation=Unbounded((n, nobs), dtype=dtype, device=device), shape=[n]
        )
        self.reward_spec = Unbounded((n, 1), dtype=dtype, device=device)
        self.done_spec = Composite(
            {
                key: Categorical(2, shape=(n, 1), dtype=torch.bool, device=device)
                for key in ("done", "terminated", "truncated")
            },
            shape=[n],
        )

    def get_state(self) -> tuple[Array, Array]:
        """Return copies of ``qpos`` ``(n, nq)`` and ``qvel`` ``(n, nv)``, float64.

        Raises:
            RuntimeError: if the environment is closed.
        """
        self._open_batch()
        return self._fields["qpos"].copy(), self._fields["qvel"].copy()

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
        self._open_batch()
        n = len(self._elapsed)
        rows = np.arange(n) if ids is None else np.asarray(ids)
        if (
            rows.ndim != 1
            or rows.dtype.kind not in "iu"
            or len(np.unique(rows)) != len(rows)
            or ((rows < 0) | (rows >= n)).any()
        ):
            raise ValueError(
                f"set_state: ids is {ids!r} (expected distinct integers from 0 to "
                f"{n - 1}). Correct ids."
            )
        order = np.argsort(rows)  # as the batch wants its ids
        values = []
        for name, value in (("qpos", qpos), ("qvel", qvel)):
            value = np.asarray(value, dtype=np.float64)
            shape = (len(rows), self._fields[name].shape[1])
            if value.shape != shape or not np.isfinite(value).all():
                raise ValueError(
                    f"set_state: {name} has shape {value.shape} and "
                    f"{(~np.isfinite(value)).sum()} non-finite values (expected "
                    f"{shape} and none). Give one row per simulation to set."
                )
            values.append(value[order])
        self._place(rows[order], *values)
        return self._output()

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Free the simulations and their threads. Closing again does nothing.

        Args:
            raise_if_closed: ignored; TorchRL passes it.
        """
        self.is_closed = True
        # the views keep the simulations alive, so they must go too
        self._batch = None
        self._fields = {}
        self._ctrl = self._warned = np.empty((0, 0))

    def _set_seed(self, seed: int | None) -> None:
        n = len(self._elapsed)
        self._rngs = [np.random.default_rng(None if seed is None else seed + i) for i in range(n)]

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._open_batch()
        mask = None if tensordict is None else tensordict.get("_reset", None)
        ids = self._rows(mask)
        self._start_episodes(np.arange(len(self._elapsed)) if ids is None else ids)
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
        done = self._terminated | self._truncated
        if done.any():
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

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        batch = self._open_batch()
        action = self._read_action(tensordict)
        ids = self._rows(tensordict.get("_step", None))
        rows = slice(None) if ids is None else ids
        task, fields, state = self.task, self._fields, batch.state

        before = task.progress(fields)
        self._ctrl[rows] = action[rows]
        failed = np.empty(0, dtype=np.int32)
        try:
            batch.step(ids, nstep=task.frame_skip)
        except SimulationError as error:
            failed = error.ids
        diverged: NDArray[np.bool_] | None = None
        if len(failed) or self._warned.any() or not np.isfinite(state).all():
            diverged = self._warned.any(axis=1) | ~np.isfinite(state).all(axis=1)
            diverged[failed] = True
            batch.reset(diverged)
        reward, terminated, self.reward_terms = task.outcome(fields, before, action, self._dt)
        if diverged is not None:
            self.num_diverged += int(diverged.sum())
            reward = np.where(diverged, 0.0, reward)
            terminated = terminated | diverged
        self._elapsed[rows] += 1
        self._terminated[rows] = terminated[rows]
        self._truncated[rows] = self._elapsed[rows] >= self.max_episode_steps
        if ids is not None:
            reward = np.where(np.isin(np.arange(len(reward)), ids), reward, 0.0)
        return self._output(reward=self._tensor(reward[:, None], self._dtype))

    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        # _step gives every key in its final shape, so there is nothing to complete
        if self.run_type_checks:
            return super()._step_proc_data(next_tensordict_out)
        return next_tensordict_out

    def _open_batch(self) -> Batch:
        if self._batch is None:
            raise RuntimeError(
                "MujocoBatchEnv: the environment is closed (expected an open one). "
                "Create a new one."
            )
        return self._batch

    def _read_action(self, tensordict: TensorDictBase) -> NDArray[Any]:
        """The action as a contiguous array, refused if it is malformed."""
        action = tensordict["action"].detach()
        if action.dtype is not torch.float64:
            action = action.float()
        array: NDArray[Any] = np.ascontiguousarray(action.cpu().numpy())
        if array.shape != self._ctrl.shape:
            raise ValueError(
                f"MujocoBatchEnv.step: action has shape {array.shape} (expected "
                f"{self._ctrl.shape}). Give one row of controls per simulation."
            )
        if not np.isfinite(array).all():
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
        nq, nv = len(self._init_qpos), len(self._init_qvel)
        noise = [self.task.noise(self._rngs[i], nq, nv) for i in ids]
        qpos = self._init_qpos + np.array([qpos for qpos, _ in noise])
        qvel = self._init_qvel + np.array([qvel for _, qvel in noise])
        self._place(ids, qpos, qvel)

    def _place(self, ids: NDArray[np.intp], qpos: Array, qvel: Array) -> None:
        """Start episodes of simulations ``ids``, sorted, from these states."""
        batch = self._open_batch()
        batch.reset(ids, stage=mjtStage.mjSTAGE_NONE.value)
        self._fields["qpos"][ids] = qpos
        self._fields["qvel"][ids] = qvel
        batch.forward(ids)
        self._elapsed[ids] = 0
        self._terminated[ids] = False
        self._truncated[ids] = False

    def _output(self, **entries: torch.Tensor) -> TensorDict:
        """The present observation and flags, in new tensors, and ``entries``."""
        terminated, truncated = self._terminated[:, None], self._truncated[:, None]
        entries["observation"] = self._tensor(self.task.observation(self._fields), self._dtype)
        entries["done"] = self._tensor(terminated | truncated, bool)
        entries["terminated"] = self._tensor(terminated, bool)
        entries["truncated"] = self._tensor(truncated, bool)
        # the constructor without its checks, as in TorchRL's own environments
        return TensorDict._new_unsafe(entries, batch_size=self.batch_size, device=self.device)

    def _tensor(self, array: NDArray[Any], dtype: type) -> torch.Tensor:
        """A tensor of a copy of ``array`` on the environment's device."""
        tensor = torch.from_numpy(array.astype(dtype))
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(
            f"MujocoBatchEnv: {name} is {value} (expected at least 1). Give a positive {name}."
        )
