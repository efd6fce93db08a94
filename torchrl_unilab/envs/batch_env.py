"""A TorchRL environment that steps many MuJoCo simulations in one call.

Specs, tensors and pictures; what happens in the simulations is in `EnvState`. Observations
are copies of the physics' arrays, which change with each step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict, TensorDictBase
from torch.utils._pytree import tree_map_only
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_unilab.checks import as_choice, as_instance
from torchrl_unilab.envs.constructor import Constructor
from torchrl_unilab.envs.env_state import EnvState, simulations_of
from torchrl_unilab.envs.randomization import Ids, Randomize
from torchrl_unilab.envs.registry import make_task
from torchrl_unilab.envs.rendering import BatchRenderer, Camera, Pictures, Pixels
from torchrl_unilab.envs.task import Array, MujocoTask, join_observation, observation_shapes
from torchrl_unilab.errors import ConfigError

_FLAGS = ("done", "terminated", "truncated")
_NUMPY_DTYPE = {torch.float32: np.float32, torch.float64: np.float64}


class MujocoBatchEnv(EnvBase, metaclass=Constructor):
    """Many simulations of one MuJoCo task, as one batched environment.

    Physics runs in float64 through `mujoco.batch.Batch`, on its own threads; for a Gymnasium task
    the results are Gymnasium's, bit for bit, at any number of threads. ``step`` returns the true
    next observation also where an episode ends; ``step_and_maybe_reset``, or ``reset`` with a
    ``"_reset"`` mask, starts the next episode in those rows only.

    The keys, with ``n = num_envs``: ``observation`` ``(n, nobs)``, and the task's other groups of
    observations, and ``reward`` ``(n, 1)`` of ``dtype``; ``action`` ``(n, nu)``, within the model's
    control range; ``done``, ``terminated`` and ``truncated`` ``(n, 1)`` bool, where ``done =
    terminated | truncated``; and, if asked for, each part of the reward, ``(n, 1)``, under
    ``reward_terms``.

    A simulation that diverges is terminated with reward 0 and reset to the model's default pose,
    which is what its last observation shows. It is logged, and counted in `num_diverged`; the
    others are unaffected.

    Copying or pickling it makes a new environment with the same arguments, which starts new
    episodes, from the same states if a seed was given.

    Once it is closed, everything that needs the simulations raises a UsageError.

    From the first environment on, MuJoCo does not time its steps in this process
    (`torchrl_unilab.envs.mujoco_engine.stop_physics_clock`).

    Args:
        task: A task, or the name of one, as `torchrl_unilab.envs.make_task` takes it.
        num_envs: Number of simulations.
        num_threads: Physics threads; by default one for each CPU that this process may use, minus
            one for the learner, and at least two if there are two CPUs.
        seed: Seed of the initial states; simulation ``i`` draws from its own generator, seeded
            ``seed + i`` as in Gymnasium's vector environments. None: from the operating system.
        max_episode_steps: Steps after which an episode is truncated; by default the task's.
        device: Device of the tensors, by default the CPU. Physics is on the CPU.
        dtype: torch.float32 or torch.float64.
        with_reward_terms: Whether steps also return the parts of the reward.
        randomization: How the simulations' models differ; by default as the task
            says, and not at all if empty. Follows from the seed.
        stagger: Whether the first episodes have limits drawn at random, up to the limit, so that
            the simulations' episodes do not all end in the same step. A second reset, as in
            `check_env_specs`, begins whole episodes; `set_seed` staggers those that follow.
        from_pixels: Whether resets and steps also return a picture of each simulation
            under ``pixels``, ``(n, render_height, render_width, 3)`` uint8.
        pixels_only: Whether ``pixels`` then replace the observations, as in ``GymEnv``.
        render_width: Width of pictures in pixels.
        render_height: Height of pictures in pixels.
        render_camera: Camera, as for `torchrl_unilab.envs.rendering.BatchRenderer`.
        render_ids: The simulations in ``pixels``, distinct; None for all. The
            pictures of the others stay black and take no time.

    Attributes:
        task: The task.
        max_episode_steps: Steps after which an episode is truncated.
        stagger: Whether the first episodes after a seed have limits of their own.
        dt: Seconds of simulated time that a step takes.
        randomizer: Holds what differs between the simulations' models.
        phase_seconds: Seconds since construction spent in ``physics``, ``reward``,
            ``observation`` and ``reset`` (whose observations count as observations).

    Raises:
        ConfigError: An argument is out of range or names no task, or pictures cannot be drawn.

    Examples:
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> env = MujocoBatchEnv("Hopper-v5", num_envs=4, seed=0)
        >>> env.rollout(10, break_when_any_done=False)["observation"].shape
        torch.Size([4, 10, 11])
        >>> env.close()
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

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
        stagger: bool = False,
        from_pixels: bool = False,
        pixels_only: bool = True,
        render_width: int = 320,
        render_height: int = 240,
        render_camera: Camera = None,
        render_ids: ArrayLike | None = None,
    ) -> None:
        task = make_task(task) if isinstance(task, str) else task
        as_instance("MujocoBatchEnv task", task, MujocoTask, "Make one of the class, or name one.")
        as_choice("MujocoBatchEnv dtype", dtype, _NUMPY_DTYPE, "Cast the outputs to other types.")
        try:
            device = torch.empty(0, device="cpu" if device is None else device).device
        except (AssertionError, RuntimeError, TypeError) as error:
            raise ConfigError(
                f"MujocoBatchEnv: device is {device!r} (expected one that PyTorch has). Use 'cpu'."
            ) from error
        state = EnvState(task, num_envs, num_threads, max_episode_steps, randomization, stagger)
        super().__init__(device=device, batch_size=[num_envs])
        self._state = state
        self.task = task
        self.max_episode_steps, self.stagger = state.episodes.limit, stagger
        self._with_reward_terms = with_reward_terms
        self._torch_dtype, self.dtype = dtype, _NUMPY_DTYPE[dtype]
        self.dt, self.randomizer = state.dt, state.randomizer
        self.phase_seconds = state.phase_seconds
        size = {"width": render_width, "height": render_height}
        self._renderer = BatchRenderer(state.physics.batch, **size, camera=render_camera)
        seen = simulations_of("render_ids", render_ids, num_envs)
        self._pixels = Pixels(self._renderer, num_envs, seen) if from_pixels else None
        self._observes = not (from_pixels and pixels_only)
        self._make_specs()
        self._set_seed(seed)
        self.is_closed = False

    @property
    def num_diverged(self) -> int:
        """Simulations that have diverged since construction."""
        return self._state.num_diverged

    @property
    def reward_terms(self) -> dict[str, NDArray[Any]]:
        """The parts of the last step's reward by the task's names, ``(n,)`` each."""
        return self._state.reward_terms

    @property
    def info(self) -> dict[str, NDArray[Any]]:
        """Further quantities of the last step, by name, ``(n, ...)`` each."""
        return self._state.info

    def _make_specs(self) -> None:
        n, device, dtype = len(self._state), self.device, self._torch_dtype

        def unbounded(width: int) -> Unbounded:
            return Unbounded((n, width), dtype=dtype, device=device)

        low, high = torch.as_tensor(self._state.control_range(), dtype=dtype, device=device)
        shape = (n, len(low))
        bounds = low.expand(shape), high.expand(shape)
        self.action_spec = Bounded(*bounds, shape, dtype=dtype, device=device)
        groups = self.task.observations(self._state.physics.fields)
        self._shapes = observation_shapes(self.task.name, groups, n)
        observed = {k: unbounded(shape[1]) for k, shape in self._shapes.items() if self._observes}
        if self._pixels is not None:
            picture = self._pixels.shape
            observed["pixels"] = Bounded(0, 255, picture, dtype=torch.uint8, device=device)
        if self._with_reward_terms:
            terms = {name: unbounded(1) for name in self._state.expect_terms(self.dtype)}
            observed["reward_terms"] = Composite(terms, shape=[n], device=device)
        self.observation_spec = Composite(observed, shape=[n], device=device)
        self.reward_spec = unbounded(1)
        flags = {key: Categorical(2, (n, 1), dtype=torch.bool, device=device) for key in _FLAGS}
        self.done_spec = Composite(flags, shape=[n])

    def get_state(self) -> tuple[Array, Array]:
        """Return copies of ``qpos`` ``(n, nq)`` and ``qvel`` ``(n, nv)``, float64."""
        fields = self._state.physics.fields
        return fields["qpos"].copy(), fields["qvel"].copy()

    def set_state(
        self, qpos: ArrayLike, qvel: ArrayLike, ids: ArrayLike | None = None
    ) -> TensorDictBase:
        """Start new episodes from given states.

        Args:
            qpos: ``(k, nq)``, metres and radians as in the model.
            qvel: ``(k, nv)``, the same per second.
            ids: The ``k`` simulations to set, distinct; None for all.

        Of a transformed environment, call ``env.base_env.set_state``: transforms do not see it.

        Returns:
            What ``reset`` would return: the observation and flags of all rows.

        Raises:
            ConfigError: An argument has the wrong shape, is not finite, or names
                no simulation. Nothing has changed then.

        Examples:
            >>> from torchrl_unilab.envs import MujocoBatchEnv
            >>> env = MujocoBatchEnv("InvertedPendulum-v5", num_envs=3)
            >>> td = env.set_state([[0.0, 0.1]], [[0.0, 0.0]], ids=[1])
            >>> td["observation"][1].tolist()
            [0.0, 0.10000000149011612, 0.0, 0.0]
            >>> env.close()
        """
        self._outdate_pictures(self._state.set_state(qpos, qvel, ids))
        return self._output()

    def snapshot(self) -> dict[str, Any]:
        """Return all that determines the next steps: states, generators, models' differences.

        An environment of the same task that restores it continues bit for bit as this one. It
        consists of copies: tensors, numbers, and dicts and lists of them.

        Examples:
            >>> from torchrl_unilab.envs import MujocoBatchEnv
            >>> one, other = (MujocoBatchEnv("Hopper-v5", 2, seed=seed) for seed in (0, 1))
            >>> action = one.rand_action(one.rollout(5)[:, -1])
            >>> other.restore(one.snapshot())
            >>> bool((one.step(action.clone()) == other.step(action.clone())).all())
            True
        """
        # Tensors, which `torch.load` takes as they are, not arrays.
        kept: dict[str, Any] = tree_map_only(np.ndarray, torch.from_numpy, self._state.state_dict())
        return kept

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from what `snapshot` returned, here or in an environment like this one.

        Raises:
            ConfigError: The snapshot is of another task or number of simulations; nothing has
                changed.
        """
        self._state.load_state_dict(tree_map_only(torch.Tensor, torch.Tensor.numpy, snapshot))
        self._outdate_pictures()

    def render(self, ids: ArrayLike | None = None) -> Pictures:
        """Draw simulations as they are now.

        The first picture loads OpenGL: EGL or OSMesa without a display, or as ``MUJOCO_GL`` says.

        Args:
            ids: The ``k`` simulations to draw, distinct; None for all.

        Returns:
            ``(k, render_height, render_width, 3)`` uint8, in the order of ``ids``.

        Raises:
            ConfigError: `ids` names no simulation, or OpenGL cannot draw here.
        """
        self._state.physics  # noqa: B018 - an error where the environment is closed
        return self._renderer.render(simulations_of("render: ids", ids, len(self._state)))

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Free the simulations, their threads and the renderer. Closing again does nothing."""
        self._renderer.close()
        self.is_closed = True
        self._state.close()

    def _set_seed(self, seed: int | None) -> None:
        self._state.physics  # noqa: B018 - an error where the environment is closed
        self._state.seed(seed)

    def _reset(
        self, tensordict: TensorDictBase | None = None, *, seed: int | None = None, **kwargs: Any
    ) -> TensorDictBase:
        if seed is not None:
            self._set_seed(seed)
        ids = self._selected(None if tensordict is None else tensordict.get("_reset", None))
        self._state.start(np.arange(len(self._state)) if ids is None else ids)
        self._outdate_pictures(ids)
        return self._output()

    def _step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Do as the base class, without its masks and merges for environments of any shape."""
        keys = tensordict.keys()
        if "_step" in keys or self._post_step_mdp_hooks:
            tensordict, root = super()._step_and_maybe_reset(tensordict)
            return tensordict, root
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        tensordict = self.step(tensordict)
        root = self._step_mdp(tensordict)
        done = self._state.episodes.done
        if np.count_nonzero(done):  # takes a tenth of `any`
            # rows that continue get what the step returned
            fresh = self._reset(self._unchecked({"_reset": self._tensor(done)}))
            others = root.exclude(*fresh.keys())
            if not done.all():
                # where an episode starts, entries that the policy wrote become 0
                going = self._tensor(~done)
                others = others.where(going, others.empty(), pad=0)
            root = fresh.update(others)
        return tensordict, root

    def rollout(self, max_steps: int, policy: Any = None, *args: Any, **kw: Any) -> TensorDictBase:
        """Do as the base class, whose random actions take longer than the Python code of a step."""
        # Not by an override of `rand_action`, which a TransformedEnv refuses if it changes actions.
        given = policy is not None or kw.get("actions") is not None
        if not given and type(self).rand_action is EnvBase.rand_action:
            spec, kw["trust_policy"] = self.action_spec, True
            return super().rollout(max_steps, lambda td: td.set("action", spec.rand()), *args, **kw)
        return super().rollout(max_steps, policy, *args, **kw)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Do as the base class, without what only a partial or a given next step needs."""
        keys = tensordict.keys()
        if "_step" in keys or "next" in keys:
            return super().step(tensordict)
        self._assert_tensordict_shape(tensordict)
        after = self._step(tensordict)
        if self.run_type_checks:  # else nothing is to be completed: each key has its final shape
            after = self._step_proc_data(after)
        return tensordict.set("next", after)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        ids = self._selected(tensordict.get("_step", None))
        reward = self._state.step(self._read_action(tensordict), ids)
        self._outdate_pictures(ids)
        return self._output(reward=self._tensor(reward[:, None].astype(self.dtype)))

    def _read_action(self, tensordict: TensorDictBase) -> NDArray[Any]:
        """Return the action as a contiguous array of floating-point numbers."""
        action = tensordict["action"]
        if action.requires_grad:
            action = action.detach()
        if action.dtype is not torch.float32 and action.dtype is not torch.float64:
            action = action.float()
        return np.ascontiguousarray(action.numpy(force=not action.is_cpu))

    def _selected(self, mask: torch.Tensor | None) -> Ids | None:
        """Return the simulations that a ``(n,)`` or ``(n, 1)`` mask selects; None for all."""
        return None if mask is None or mask.all() else np.flatnonzero(mask.cpu().numpy())

    def _outdate_pictures(self, ids: Ids | None = None) -> None:
        """Mark the pictures of these simulations as outdated; of all for None."""
        if self._pixels is not None:
            self._pixels.outdate(slice(None) if ids is None else ids)

    def _output(self, **entries: Any) -> TensorDict:
        """Return the present observation and flags, in new tensors, and `entries`."""
        start = time.perf_counter()
        state = self._state
        groups = self.task.observations(state.physics.fields) if self._observes else {}
        for key, parts in groups.items():
            array = join_observation(self.task.name, key, parts, self._shapes[key], self.dtype)
            entries[key] = self._tensor(array)
        if self._pixels is not None:
            entries["pixels"] = self._tensor(self._pixels.current().copy())
        for key, flags in zip(_FLAGS, state.episodes.flags(), strict=True):
            entries[key] = self._tensor(flags)
        if self._with_reward_terms:
            terms = state.shown_terms.items()
            entries["reward_terms"] = self._unchecked(
                {name: self._tensor(term[:, None].astype(self.dtype)) for name, term in terms}
            )
        state.count("observation", start)
        return self._unchecked(entries)

    def _unchecked(self, entries: dict[str, Any]) -> TensorDict:
        """Return a TensorDict made without checks, as TorchRL's own environments do."""
        return TensorDict._new_unsafe(entries, batch_size=self.batch_size, device=self.device)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        """Return a tensor on the environment's device; on the CPU it shares the array's memory."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)
