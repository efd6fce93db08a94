"""`RolloutWorker`: steps one environment with one policy and writes whole rollouts.

Its state determines the next rollouts, apart from the weights, which it pulls from a scheme.
`WorkerService` drives it.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch.nn.parameter import is_lazy
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_unilab.checks import as_instance, entry_of
from torchrl_unilab.collectors.metrics import PHASES, EpisodeLog, PhaseClock
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import LayoutKeyError, LayoutShapeError
from torchrl_unilab.weight_update import UniLabShmScheme

POLICY_VERSION = ("next", "policy_version")
TRAJECTORIES = ("collector", "traj_ids")
_CPU = torch.device("cpu")
ADDED = (POLICY_VERSION, TRAJECTORIES)

Policy = Callable[[TensorDictBase], TensorDictBase]

Measure = Callable[[EnvBase], Mapping[str, float]]
"""Returns metrics of a worker's environment by name, always the same names."""


def base_env(env: EnvBase) -> EnvBase:
    """Return the environment below all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def close_env(env: EnvBase) -> None:
    """Close an environment if it is open: TorchRL's batches of them open with their first reset."""
    if not env.is_closed:
        env.close()


def check_env(env: object) -> None:
    """Refuse anything but an environment of TorchRL; a ConfigError."""
    as_instance("create_env returned", env, EnvBase, "Return an environment of TorchRL.")


@contextlib.contextmanager
def closing_env(env: EnvBase) -> Iterator[EnvBase]:
    """Close an environment in the end, by `close_env`.

    Raises:
        ConfigError: `env` is no environment.
    """
    check_env(env)
    try:
        yield env
    finally:
        close_env(env)


def reward_terms(env: EnvBase) -> dict[str, float]:
    """Return the means of the parts of a `MujocoBatchEnv`'s newest rewards; none of others.

    Examples:
        >>> from torchrl_unilab.collectors.worker import reward_terms
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> env = MujocoBatchEnv("HalfCheetah-v5", num_envs=2, num_threads=1)
        >>> _ = env.rollout(3)
        >>> sorted(reward_terms(env))
        ['reward_ctrl', 'reward_forward']
    """
    base = base_env(env)
    terms = base.reward_terms if isinstance(base, MujocoBatchEnv) else {}
    return {f"reward_{name.removeprefix('reward_')}": float(v.mean()) for name, v in terms.items()}


def rewards_of(
    after: TensorDictBase, keys: Sequence[NestedKey], shape: Sequence[int]
) -> torch.Tensor:
    """Return an environment's rewards, summed over agents and over keys, float64 of `shape`."""
    rewards = [after.get(key).reshape(*shape, -1).sum(-1) for key in keys]
    return torch.stack(rewards).sum(0).double()


def act(policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    """Return a step with the policy's action, whether it writes in place or returns another."""
    written = policy(tensordict)
    return tensordict if written is tensordict else tensordict.update(written)


def act_on(
    device: torch.device, policy: TensorDictModuleBase, tensordict: TensorDictBase
) -> TensorDictBase:
    """Act on another device than the environment's: what the policy reads goes there and back."""
    read = tensordict.select(*policy.in_keys).to(device)
    return tensordict.update(policy(read).to("cpu"))


def on_host(policy: TensorDictModuleBase) -> TensorDictModuleBase:
    """Return a policy that acts on the CPU: itself if it is there, else a copy."""
    tensors = (*policy.parameters(), *policy.buffers())
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return policy
    return copy.deepcopy(policy).to("cpu")


def example_rollout(env: EnvBase, policy: TensorDictModuleBase, num_steps: int) -> TensorDictBase:
    """Return a rollout in shape and dtypes, of an environment that is reset and stepped once."""
    acting = on_host(policy)
    buffers = [buffer for buffer in acting.buffers() if not is_lazy(buffer)]
    kept = [buffer.clone() for buffer in buffers]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        acted = act(acting, env.reset())
        for key in env.action_keys:
            entry_of("step of the policy", acted, key, "Have it in the policy's out_keys.")
        step, _ = env.step_and_maybe_reset(acted)
        for buffer, before in zip(buffers, kept, strict=True):
            # Running statistics are restored; a buffer that got its size in this step stays.
            if buffer.shape == before.shape and not torch.equal(buffer, before):
                buffer.copy_(before)
    step = step.detach().clone()
    for key in ADDED:
        step.set(key, torch.zeros(env.batch_size, dtype=torch.int64, device="cpu"))
    return step.unsqueeze(len(env.batch_size)).expand(*env.batch_size, num_steps)


@runtime_checkable
class Snapshotting(Protocol):
    """An environment or a module with state that weights and ``state_dict`` do not hold."""

    def snapshot(self) -> Any:
        """Return the state."""

    def restore(self, snapshot: Any) -> None:
        """Resume from a state; None resets a module."""


def _pickled_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy, by pickling: `deepcopy` refuses tensors with a graph."""
    copied: dict[str, Any] = pickle.loads(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
    return copied


def _has_snapshots(part: object) -> TypeGuard[Snapshotting]:
    """Return whether it has snapshots, by its class: asking it would start a lazy ParallelEnv."""
    return issubclass(type(part), Snapshotting)


def _check_fits(
    tensor: torch.Tensor | None, out: torch.Tensor, key: NestedKey, time_dim: int
) -> None:
    """Refuse a tensor of a step whose rollout is not of the memory's shape.

    Stacking into it would resize it, over memory that others have written.

    Raises:
        LayoutKeyError: Steps do not have the tensor.
        LayoutShapeError: The tensor is of another shape.
    """
    expected = (*out.shape[:time_dim], *out.shape[time_dim + 1 :])
    if tensor is None or tensor.shape != expected:
        error = LayoutKeyError if tensor is None else LayoutShapeError
        found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
        raise error(
            f"rollout: {key!r} of a step {found} (expected {expected}, as the first worker's "
            "environment has). Make the same environment in each worker."
        )


class RolloutWorker:
    """Steps one environment with one policy and writes whole rollouts.

    Args:
        env: The environment, of any batch size [...]. Closed with the worker.
        policy: Acts on it.
        num_steps: Steps of each environment in a rollout.
        worker: Number of the worker: trajectory ids of workers do not overlap.
        workers: How many workers there are.
        first_trajectory: Id of the first trajectory of all workers.
        scheme: Where the policy's weights come from, connected; None leaves them alone.
        exploration_type: How the policy acts.
        random_frames: Frames with random actions at the start.
        device: Where the policy is. Noise that is drawn elsewhere than on the CPU is no part of
            `state_dict`.
        measure: Returns further metrics of the environment.

    Attributes:
        frames: Frames collected.
        next_trajectory: Id of the next trajectory.
        log: Episodes.
        clock: Seconds per phase.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: TensorDictModuleBase,
        num_steps: int,
        *,
        worker: int = 0,
        workers: int = 1,
        first_trajectory: int = 0,
        scheme: UniLabShmScheme | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        random_frames: int = 0,
        device: torch.device = _CPU,
        measure: Measure = reward_terms,
    ) -> None:
        self.env = env
        self.policy = policy if device == _CPU else partial(act_on, device, policy)
        self.num_steps, self.measure = num_steps, measure
        self.scheme, self.exploration_type = scheme, exploration_type
        self.random_frames, self.frames = random_frames, 0
        self.clock = PhaseClock()
        self.num_envs = env.batch_size.numel()
        self.next_trajectory = first_trajectory + worker
        self._stride = workers
        self._carrier: TensorDictBase | None = None
        self._trajectories = torch.zeros(env.batch_size, dtype=torch.int64, device="cpu")
        base = base_env(env)
        self._staggers = isinstance(base, MujocoBatchEnv) and base.stagger
        self._to_stagger = self._staggers  # whether the next reset staggers episodes
        self.log = EpisodeLog(self.num_envs)
        self._simulation = base if _has_snapshots(base) else None
        self._modules = [module for module in policy.modules() if _has_snapshots(module)]
        self._reset_modules()  # the policy may have acted before it was sent here

    def seed(self, env_seed: int, torch_seed: int) -> None:
        """Seed environment and policy noise; the next rollout starts new episodes."""
        self.env.set_seed(env_seed)
        torch.manual_seed(torch_seed)
        self._reset_modules()
        self._carrier = None
        self._to_stagger = self._staggers

    def _reset_modules(self) -> None:
        for module in self._modules:
            module.restore(None)

    def reset(self) -> None:
        """Start new episodes with the next rollout."""
        self._carrier = None

    def state_dict(self) -> dict[str, Any]:
        """Return all that determines the next rollouts, apart from the weights.

        The state of the environment and its transforms, the step that comes next, episodes
        that have not ended, the random state, what modules of the policy keep, and all counts.
        """
        simulation = self._simulation
        carrier = None if simulation is None else self._carrier  # without one, new episodes start
        # Lazy parameters and buffers get their size in the first step.
        sized = not any(map(is_lazy, (*self.env.parameters(), *self.env.buffers())))
        state = {
            "env": self.env.state_dict() if sized and self.env is not simulation else None,
            "simulation": None if simulation is None else simulation.snapshot(),
            "carrier": None if carrier is None else carrier.to_dict(),
            "trajectories": None if carrier is None else self._trajectories,
            "next_trajectory": self.next_trajectory,
            "random": torch.get_rng_state(),
            "modules": [module.snapshot() for module in self._modules],
            "log": self.log.state_dict(),
            "seconds": self.clock.seconds,
            "frames": self.frames,
        }
        return _pickled_copy(state)  # later rollouts do not change it

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        With an environment that has snapshots, transformed or not, the next rollout continues
        its episodes, bit for bit; other environments start new ones.
        """
        state = _pickled_copy(state)  # it may be loaded again
        if state["env"] is not None:  # transforms such as CatFrames size their buffers in a step
            self.env.rand_step(self.env.reset())
            self.env.load_state_dict(state["env"])
        if self._simulation is not None and state["simulation"] is not None:
            self._simulation.restore(state["simulation"])
        torch.set_rng_state(state["random"])
        for module, snapshot in zip(self._modules, state["modules"], strict=True):
            module.restore(snapshot)
        self.log.load_state_dict(state["log"])
        self.clock.seconds.update(state["seconds"])
        self.frames = state["frames"]
        self.next_trajectory = state["next_trajectory"]
        self._carrier = None
        if state["carrier"] is not None:
            self._carrier = TensorDict(state["carrier"], self.env.batch_size, self.env.device)
            self._trajectories = state["trajectories"]
            self._to_stagger = False

    def count_on(self, totals: Mapping[str, Any]) -> None:
        """Count on from the totals of another collector's workers, an equal share each.

        Args:
            totals: Fields of `CollectorMetrics`, ``frames`` among them.
        """
        share = {phase: s / self._stride for phase, s in totals.get("seconds", {}).items()}
        self.clock.seconds.update(share)
        self.frames = totals["frames"] // self._stride
        self._skip_trajectories(totals.get("next_trajectory", 0))

    def resume_from(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Count on from the last metrics of the worker that this one replaces."""
        self.frames = int(snapshot["frames"])
        self.log.episodes = int(snapshot["episodes"])
        self.log.last[...] = snapshot["last"].numpy()
        self.clock.seconds.update(zip(PHASES, snapshot["seconds"].tolist(), strict=True))
        self._skip_trajectories(int(snapshot["trajectories"]))

    def _skip_trajectories(self, first: int) -> None:
        """Skip the ids below `first`, and those that one more rollout may have used.

        The metrics do not count the last rollout, in which each frame may have started a
        trajectory.
        """
        uncounted = self.num_envs * (self.num_steps + 1)
        behind = -(-max(0, first - self.next_trajectory) // self._stride)
        self.next_trajectory += (behind + uncounted) * self._stride

    def _start_episodes(self) -> TensorDictBase:
        self.log.restart(staggered=self._to_stagger)
        self._to_stagger = False
        self._begin_trajectories(torch.ones(self.env.batch_size, dtype=torch.bool, device="cpu"))
        return self.env.reset()

    def _begin_trajectories(self, where: torch.Tensor) -> None:
        ids = self._trajectories.clone()
        first = self.next_trajectory
        self.next_trajectory += int(where.sum()) * self._stride
        ids[where] = torch.arange(first, self.next_trajectory, self._stride, device="cpu")
        self._trajectories = ids

    @torch.no_grad()
    def rollout(self, slot: TensorDictBase) -> None:
        """Collect one rollout into `slot`, a TensorDict [..., num_steps] as `example_rollout`'s.

        Its time is counted as physics, policy and writing.
        """
        clock, scheme, env = self.clock, self.scheme, self.env
        policy = env.rand_action if self.frames < self.random_frames else self.policy
        per_step = scheme if scheme is not None and scheme.pull_at == "step" else None
        if scheme is not None:
            scheme.pull()
        version = 0 if scheme is None else scheme.applied_version
        clock.start()
        carrier = self._carrier
        if carrier is None:
            carrier = self._start_episodes()
            clock.to("physics")
        keys = [key for key in slot.keys(True, True) if key not in ADDED]
        columns: list[list[torch.Tensor]] = [[] for _ in keys]
        trajectories, versions = [], []
        with set_exploration_type(self.exploration_type):
            for _ in range(self.num_steps):
                if per_step is not None:
                    per_step.pull()
                    version = per_step.applied_version
                versions.append(version)
                carrier = act(policy, carrier)
                clock.to("policy")
                step, carrier = env.step_and_maybe_reset(carrier)
                clock.to("physics")
                for column, key in zip(columns, keys, strict=True):
                    column.append(step.get(key))
                trajectories.append(self._trajectories)
                self._carrier = carrier
                done = step.get(("next", "done"))
                if done.any():
                    self._begin_trajectories(done.reshape(env.batch_size))
                clock.to("write")
        time_dim = len(env.batch_size)
        for column, key in zip(columns, keys, strict=True):
            out = slot.get(key)
            _check_fits(column[0], out, key, time_dim)
            torch.stack(column, time_dim, out=out)
        slot.get(POLICY_VERSION).copy_(torch.tensor(versions, device="cpu"))
        torch.stack(trajectories, time_dim, out=slot.get(TRAJECTORIES))
        after = slot.get("next")
        shape = (self.num_envs, self.num_steps)
        ends = (after.get(key).reshape(shape).numpy() for key in ("done", "terminated"))
        self.log.add(rewards_of(after, env.reward_keys, shape).numpy(), *ends)
        self.frames += slot.numel()
        clock.to("write")

    def close(self) -> None:
        """Close the environment. Idempotent."""
        close_env(self.env)
