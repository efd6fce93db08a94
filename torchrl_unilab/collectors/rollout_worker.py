"""What fills the slots of the rollout ring: the same loop in a worker process and in ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_unilab.collectors.metrics import PHASES, EpisodeLog, LatestMetrics, PhaseClock
from torchrl_unilab.data import RolloutRingStorage
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import PeerGoneError
from torchrl_unilab.modules import PerEnvNoise
from torchrl_unilab.runtime import Link, trace
from torchrl_unilab.runtime.trace import TraceSettings, span
from torchrl_unilab.weight_update import UniLabShmScheme

__all__ = [
    "ADDED",
    "POLICY_VERSION",
    "TRAJECTORIES",
    "RolloutWorker",
    "WorkerSetup",
    "collect_rollouts",
    "example_rollout",
    "fill_slot",
    "own_randomness",
    "serve",
]

POLICY_VERSION = ("next", "policy_version")
TRAJECTORIES = ("collector", "traj_ids")
ADDED = (POLICY_VERSION, TRAJECTORIES)
_CLAIM_SECONDS = 0.1  # between two looks at the parent's requests


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs beside the memory it shares: picklable, equal for all workers.

    Attributes:
        payload: Pickled (environment factories, policy), by value, so that pickling moves
            none of the learner's tensors into shared memory.
        num_steps: Steps of each environment in a rollout.
        exploration_type: How the policy acts.
        trace: The trace that the worker's events go to, if one is recorded.
    """

    payload: bytes
    num_steps: int
    exploration_type: ExplorationType
    trace: TraceSettings | None


def example_rollout(env: EnvBase, policy: TensorDictModuleBase, num_steps: int) -> TensorDictBase:
    """Return a rollout of `num_steps` in shape and dtypes, its content meaningless.

    Args:
        env: Is reset and stepped once.
        policy: Acts once.
        num_steps: Steps of each environment.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        step, _ = env.step_and_maybe_reset(policy(env.reset()))
    step = step.detach().clone()
    for key in ADDED:
        step.set(key, torch.zeros(env.batch_size, dtype=torch.int64))
    time_dim = len(env.batch_size)
    return step.unsqueeze(time_dim).expand(*env.batch_size, num_steps)


class Stateful(Protocol):
    """What can be saved and go on."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that it goes on from."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        ...


class RolloutWorker:
    """Steps one environment with one policy and writes whole rollouts.

    Args:
        env: The environment, of any batch size [...]. Closed with the worker.
        policy: Acts on it, on the CPU.
        num_steps: Steps of each environment in a rollout.
        worker: Number of the worker: trajectory ids of workers do not overlap.
        workers: How many workers there are.
        scheme: Where the policy's weights come from, connected; None leaves them alone.
        exploration_type: How the policy acts.

    Attributes:
        kept: What else is saved with the worker's state, by name.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: TensorDictModuleBase,
        num_steps: int,
        *,
        worker: int = 0,
        workers: int = 1,
        scheme: UniLabShmScheme | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
    ) -> None:
        self.env = env
        self.policy = policy
        self.num_steps = num_steps
        self.scheme = scheme
        self.exploration_type = exploration_type
        self.frames = 0
        self.clock = PhaseClock()
        self.num_envs = env.batch_size.numel()
        self._stride = workers
        self._next_trajectory = worker
        self._carrier: TensorDictBase | None = None
        self.log = EpisodeLog(self.num_envs)
        base = env
        while isinstance(base, TransformedEnv):
            base = base.base_env
        self._simulation = base if isinstance(base, MujocoBatchEnv) else None
        self.kept: dict[str, Stateful] = {}
        self._noise = [module for module in policy.modules() if isinstance(module, PerEnvNoise)]

    def seed(self, env_seed: int, torch_seed: int) -> None:
        """Seed environment and policy noise; the next rollout starts new episodes."""
        self.env.set_seed(env_seed)
        torch.manual_seed(torch_seed)
        self._carrier = None

    def reset(self) -> None:
        """Start new episodes with the next rollout."""
        self._carrier = None

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next rollouts follow from, but the weights.

        The state of the environment and its transforms, the step that comes next, episodes
        that have not ended, the random state, what noise keeps, and all counts.
        """
        simulation, carrier = self._simulation, self._carrier
        going = simulation is not None and carrier is not None
        return {
            "env": None if self.env is simulation else self.env.state_dict(),
            "simulation": None if simulation is None else simulation.snapshot(),
            "carrier": carrier.to_dict() if going else None,  # type: ignore[union-attr]
            "trajectories": self._trajectories if going else None,
            "next_trajectory": self._next_trajectory,
            "random": torch.get_rng_state(),
            "noise": [noise.std for noise in self._noise],
            "log": self.log.state_dict(),
            "seconds": dict(self.clock.seconds),
            "frames": self.frames,
            "kept": {name: part.state_dict() for name, part in self.kept.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.

        With a `MujocoBatchEnv`, transformed or not, the next rollout goes on in the midst of
        the episodes, bit for bit; other environments start new ones.

        Raises:
            ValueError: The state is of another environment.
        """
        if self._simulation is not None and state["simulation"] is not None:
            self._simulation.restore(state["simulation"])
        if state["env"] is not None:
            self.env.load_state_dict(state["env"])
        torch.set_rng_state(state["random"])
        for noise, std in zip(self._noise, state["noise"], strict=True):
            noise.std = std
        for name, part in self.kept.items():
            part.load_state_dict(state["kept"][name])
        self.log.load_state_dict(state["log"])
        self.clock.seconds.update(state["seconds"])
        self.frames = state["frames"]
        self._next_trajectory = state["next_trajectory"]
        self._carrier = None
        if state["carrier"] is not None:
            batch = {"batch_size": self.env.batch_size, "device": self.env.device}
            self._carrier = TensorDict(state["carrier"], **batch)
            self._trajectories = state["trajectories"]

    def tell(self, metrics: LatestMetrics, worker: int) -> None:
        """Put all counts where the learner reads them, as worker `worker`'s."""
        metrics.put(worker, self.frames, self._next_trajectory, self.log, self.clock)

    def succeed(self, told: Mapping[str, torch.Tensor]) -> None:
        """Count on from what a worker told last, in whose place this one is."""
        self.frames = int(told["frames"])
        self.log.episodes = int(told["episodes"])
        self.log.last[...] = told["last"].numpy()
        self.clock.seconds.update(zip(PHASES, told["seconds"].tolist(), strict=True))
        # Of its last rollout, which it did not tell of, all frames may have begun one.
        untold = self.num_envs * (self.num_steps + 1)
        first = max(self._next_trajectory, int(told["trajectories"]))
        self._next_trajectory = first + untold * self._stride

    def _start(self) -> TensorDictBase:
        self.log.restart()
        self._trajectories = self._new_trajectories(
            torch.ones(self.env.batch_size, dtype=torch.bool)
        )
        return self.env.reset()

    def _new_trajectories(self, where: torch.Tensor) -> torch.Tensor:
        ids = torch.zeros(where.shape, dtype=torch.int64)
        if self._carrier is not None:
            ids.copy_(self._trajectories)
        count = int(where.sum())
        first = self._next_trajectory
        self._next_trajectory += count * self._stride
        ids[where] = torch.arange(first, self._next_trajectory, self._stride)
        return ids

    @torch.no_grad()
    def rollout(self, slot: TensorDictBase) -> None:
        """Collect one rollout into `slot`, a TensorDict [..., num_steps] as `example_rollout`'s.

        Its time is counted as physics, policy and writing.
        """
        clock, scheme, env, policy = self.clock, self.scheme, self.env, self.policy
        every_step = scheme is not None and scheme.pull_at == "step"
        if scheme is not None and scheme.pull_at != "manual":
            scheme.pull()
        clock.start()
        carrier = self._carrier
        if carrier is None:
            carrier = self._start()
            clock.to("physics")
        keys = [key for key in slot.keys(True, True) if key not in ADDED]
        columns: list[list[torch.Tensor]] = [[] for _ in keys]
        trajectories, versions = [], []
        with set_exploration_type(self.exploration_type):
            for _ in range(self.num_steps):
                if every_step:
                    scheme.pull()  # type: ignore[union-attr]
                versions.append(0 if scheme is None else scheme.applied_version)
                carrier = policy(carrier)
                clock.to("policy")
                step, carrier = env.step_and_maybe_reset(carrier)
                clock.to("physics")
                for column, key in zip(columns, keys, strict=True):
                    column.append(step.get(key))
                trajectories.append(self._trajectories)
                self._carrier = carrier
                done = step.get(("next", "done"))
                if done.any():
                    self._trajectories = self._new_trajectories(done.reshape(env.batch_size))
                clock.to("write")
        time_dim = len(env.batch_size)
        for column, key in zip(columns, keys, strict=True):
            torch.stack(column, time_dim, out=slot.get(key))
        slot.get(POLICY_VERSION).copy_(torch.tensor(versions))
        torch.stack(trajectories, time_dim, out=slot.get(TRAJECTORIES))
        after = slot.get("next")
        shape = (self.num_envs, self.num_steps)
        self.log.add(
            *(after.get(key).reshape(shape).numpy() for key in ("reward", "done", "terminated"))
        )
        self.frames += slot.numel()
        clock.to("write")

    def close(self) -> None:
        """Close the environment. Idempotent."""
        if not self.env.is_closed:
            self.env.close()


def collect_rollouts(
    link: Link,
    storage: RolloutRingStorage,
    setup: WorkerSetup,
    scheme: UniLabShmScheme,
    metrics: LatestMetrics,
    worker: int,
    workers: int,
) -> None:
    """A worker process: collect rollouts into the ring, as many as the parent asks for.

    Requests: ``("collect", n)``, rollouts from now on, -1 for no end, 0 to pause; those of
    `serve` are answered between rollouts.

    Args:
        link: To the parent.
        storage: The ring to fill, as writer `worker`.
        setup: What to step and how.
        scheme: Where the policy's weights come from.
        metrics: Where to tell about the work.
        worker: Number of this worker.
        workers: How many there are.
    """
    with contextlib.suppress(FileNotFoundError):  # the trace has been stopped since
        trace.join(setup.trace, f"collector {worker}")
    create_env, policy = cloudpickle.loads(setup.payload)
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker)
    scheme.connect(worker_idx=worker)
    rollouts = RolloutWorker(
        create_env[worker](),
        policy,
        setup.num_steps,
        worker=worker,
        workers=workers,
        scheme=scheme,
        exploration_type=setup.exploration_type,
    )
    storage.use_writer(worker)
    link.ready()
    wanted = 0
    try:
        while True:
            request = link.request(block=wanted == 0)
            if request is not None and request[0] == "collect":
                wanted = int(request[1])
            elif request is not None:
                serve(link, rollouts, request, metrics, worker)
            elif fill_slot(storage, rollouts, metrics, worker, timeout=_CLAIM_SECONDS):
                wanted -= wanted > 0
    except PeerGoneError:
        pass  # the learner has ended
    finally:
        rollouts.close()
        storage.close()


def fill_slot(
    storage: RolloutRingStorage,
    rollouts: RolloutWorker,
    metrics: LatestMetrics,
    worker: int,
    *,
    timeout: float | None,
) -> bool:
    """Collect one rollout into the ring; return False if no slot was free in time.

    The metrics know of a rollout before the learner has it.
    """
    rollouts.clock.start()
    slot = storage.claim(timeout)
    rollouts.clock.to("wait")
    if slot is None:
        return False
    try:
        with span("rollout"):
            rollouts.rollout(slot)
    except BaseException:
        storage.abandon()
        raise
    rollouts.tell(metrics, worker)
    storage.commit()
    return True


def serve(
    link: Link,
    rollouts: RolloutWorker,
    request: tuple[Any, ...],
    metrics: LatestMetrics,
    worker: int,
) -> None:
    """Serve and answer a request about a worker's state.

    Args:
        link: To the parent.
        rollouts: The worker.
        request: ``("seed", env_seed, torch_seed)``, ``("reset",)``, ``("frames", count)``,
            ``("state",)``, ``("load", state)`` or ``("succeed", told)``, the last two with
            what is pickled by value.
        metrics: Where to tell about what was loaded.
        worker: Number of the worker.

    Raises:
        ValueError: It is none of them.
    """
    kind, *arguments = request
    if kind == "seed":
        rollouts.seed(*arguments)
        link.answer()
    elif kind == "reset":
        rollouts.reset()
        link.answer()
    elif kind == "state":
        link.answer(cloudpickle.dumps(rollouts.state_dict()))
    elif kind == "load":
        rollouts.load_state_dict(cloudpickle.loads(*arguments))
        rollouts.tell(metrics, worker)
        link.answer()
    elif kind == "succeed":
        rollouts.succeed(cloudpickle.loads(*arguments))
        link.answer()
    elif kind == "frames":
        (rollouts.frames,) = arguments
        rollouts.tell(metrics, worker)
        link.answer()
    else:
        raise ValueError(f"request of the parent: {kind!r} (expected a known one). Update both.")


@contextlib.contextmanager
def own_randomness(state: list[torch.Tensor]) -> Iterator[None]:
    """Run with the random state in `state[0]` instead of the process's; keep what becomes of it."""
    before = torch.get_rng_state()
    torch.set_rng_state(state[0])
    try:
        yield
    finally:
        state[0] = torch.get_rng_state()
        torch.set_rng_state(before)
