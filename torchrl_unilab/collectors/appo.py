"""`APPOCollector`: workers fill a ring of rollouts, and the learner takes them as they come."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType
from torchrl.weight_update import WeightSyncScheme

from torchrl_unilab.collectors.metrics import CollectorMetrics, LatestMetrics
from torchrl_unilab.collectors.rollout_worker import (
    POLICY_VERSION,
    RolloutWorker,
    WorkerSetup,
    collect_rollouts,
    example_rollout,
    fill_slot,
    own_randomness,
)
from torchrl_unilab.data import RolloutLease, RolloutRingStorage
from torchrl_unilab.errors import ConfigError, RingTimeoutError, SegmentClosedError
from torchrl_unilab.runtime import WorkerGroup
from torchrl_unilab.shm.ring import Overflow
from torchrl_unilab.weight_update import UniLabShmScheme

__all__ = ["APPOCollector"]

CreateEnv = Callable[[], EnvBase]


class APPOCollector(BaseCollector):
    """Collects whole rollouts in worker processes, through a ring in shared memory.

    Each worker steps its own environment and writes its rollouts into slots of the ring;
    iterating yields them one by one, oldest first, as ``TensorDict`` [*env batch, T] with
    TorchRL's keys, the true next observations under ``next``, ``("next",
    "policy_version")`` and ``("collector", "traj_ids")``. Publishing weights waits for
    nobody, and nobody waits for the learner but for a free slot.

    Workers go on as long as there are free slots (``overflow="block"``) or always
    (``"overwrite"``: the oldest unread rollout is dropped and counted). With `lockstep` a
    worker collects its next rollout only when the collector is asked for it, so with what
    was published before, and runs are repeatable bit for bit. With `inline` the same parts
    do the same in this process: the serial oracle of the other two.

    Args:
        create_env_fn: Makes a worker's environment, of any TorchRL kind, or one such
            function per worker; cloudpickled. One environment is made here for its specs.
        policy: Acts in the workers, which get copies; needs parameters or buffers.
        frames_per_batch: Frames of one rollout of one worker, a multiple of the batch size
            of its environment.
        total_frames: Frames to yield, -1 for no end.
        num_collectors: Workers, if `create_env_fn` is one function.
        weight_sync_schemes: ``{"policy": UniLabShmScheme(...)}``, the default.
        lockstep: Collect when asked to, not ahead.
        inline: As `lockstep`, with one worker, in this process.
        slots: Slots of the ring. By default one per worker, so that a worker starts its
            next rollout when its last was taken, with the newest weights there are.
        overflow: ``"block"`` or ``"overwrite"``.
        max_policy_lag: Rollouts that began more published versions ago than this are
            dropped and counted in `stale`; None takes all.
        use_buffers: Yield borrowed memory, valid until the next rollout is asked for,
            instead of a copy.
        num_threads: Torch threads of each worker.
        exploration_type: How the policy acts.
        seed: Seeds environments and noise; from the operating system if None.
        timeout: Seconds to wait for a rollout; None waits as long as all workers live.

    Raises:
        ConfigError: A setting cannot work.
        SegmentSpaceError: The ring does not fit shared memory; says what would.
        WorkerError: A worker failed, while it started or while a rollout was waited for:
            carries its traceback or signal.

    Attributes:
        stale: Rollouts dropped because of `max_policy_lag`.

    Example:
        >>> collector = APPOCollector(  # doctest: +SKIP
        ...     partial(MujocoBatchEnv, "Hopper-v5", num_envs=64, num_threads=1),
        ...     actor,
        ...     frames_per_batch=64 * 32,
        ...     total_frames=1_000_000,
        ... )
        >>> for rollout in collector:  # doctest: +SKIP
        ...     improve(actor, rollout)
        ...     collector.update_policy_weights_()
    """

    init_random_frames = 0  # trainers ask: none of the actions are random

    def __init__(
        self,
        create_env_fn: CreateEnv | Sequence[CreateEnv],
        policy: TensorDictModuleBase,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        num_collectors: int | None = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        lockstep: bool = False,
        inline: bool = False,
        slots: int | None = None,
        overflow: Overflow = "block",
        max_policy_lag: int | None = None,
        use_buffers: bool = False,
        num_threads: int = 1,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        factories = _factories(create_env_fn, num_collectors)
        workers = len(factories)
        scheme = _scheme(weight_sync_schemes)
        lockstep = lockstep or inline
        if inline and workers > 1:
            raise ConfigError(f"inline: {workers} workers (expected 1). Use lockstep=True.")
        if max_policy_lag is not None and max_policy_lag < 0:
            raise ConfigError(
                f"max_policy_lag: {max_policy_lag} (expected at least 0). Use None for no bound."
            )
        slots = workers if slots is None else slots
        if lockstep and slots < workers:
            raise ConfigError(
                f"lockstep: {slots} slots (expected at least {workers}, one per worker). "
                "Leave slots out."
            )
        self.policy = policy
        self.policy_factory = [None] * workers
        self.policy_device = [torch.device("cpu")] * workers
        self.num_workers = workers
        self.total_frames = total_frames
        self.lockstep = lockstep
        self.max_policy_lag = max_policy_lag
        self.use_buffers = use_buffers
        self.timeout = timeout
        self.stale = 0
        self._frames = 0
        self._lease: RolloutLease | None = None  # lent out
        self._waiting: list[RolloutLease] = []  # of this round of lockstep, not yet yielded
        self._group: WorkerGroup | None = None
        self._storage: RolloutRingStorage | None = None
        self._inline: RolloutWorker | None = None

        env = factories[0]()
        self.num_envs: int = env.batch_size.numel()
        try:
            if frames_per_batch < 1 or frames_per_batch % self.num_envs:
                raise ConfigError(
                    f"frames_per_batch: {frames_per_batch} (expected a multiple of the "
                    f"environment's batch size, {self.num_envs}). Choose another."
                )
            self.frames_per_batch = self.requested_frames_per_batch = frames_per_batch
            num_steps = frames_per_batch // self.num_envs
            self._storage = RolloutRingStorage(
                slots,
                example=example_rollout(env, policy, num_steps),
                writers=workers,
                overflow="block" if lockstep else overflow,
            )
            self._latest = LatestMetrics(workers)
            scheme.init_on_sender(model_id="policy", context=self)
            self._weight_sync_schemes = {"policy": scheme}
            self.scheme = scheme
            if inline:
                env = self._start_inline(env, num_steps, exploration_type)
            else:
                payload = cloudpickle.dumps((factories, policy))
                setup = WorkerSetup(payload, num_steps, exploration_type)
                self._group = WorkerGroup(
                    collect_rollouts,
                    [
                        (self._storage, setup, scheme, self._latest, worker, workers)
                        for worker in range(workers)
                    ],
                    name="collector",
                    num_threads=num_threads,
                )
            scheme.connect()
            self.set_seed(seed)
        except BaseException:
            self.shutdown()
            raise
        finally:
            if self._inline is None or self._inline.env is not env:
                env.close()

    def _start_inline(
        self, env: EnvBase, num_steps: int, exploration_type: ExplorationType
    ) -> EnvBase:
        """Step `env` here, with a copy of the policy as a worker would have."""
        policy = copy.deepcopy(self.policy)
        scheme = copy.copy(self.scheme)  # of the same shared memory, as a receiver
        scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=0)
        scheme.connect(worker_idx=0)
        self._random = [torch.get_rng_state()]
        self._inline = RolloutWorker(
            env, policy, num_steps, scheme=scheme, exploration_type=exploration_type
        )
        return env

    # Collecting

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield rollouts until `total_frames`; what workers fill meanwhile stays in the ring.

        Raises:
            WorkerError: A worker failed.
            RingTimeoutError: No rollout came within `timeout` seconds.
        """
        self._check_open()
        if not self.lockstep:
            self._request("collect", -1)
        while self.total_frames < 0 or self._frames < self.total_frames:
            self._give_back()
            if not self.lockstep:
                lease = self._next_fresh()
            else:
                # All workers collect at once; their rollouts are taken in their order.
                self._waiting = self._waiting or self._one_each()
                lease = self._waiting.pop(0)
            self._frames += lease.rollout.numel()
            if self.use_buffers:
                self._lease = lease
                yield lease.rollout
            else:
                rollout = lease.rollout.clone()
                self._open_storage().release(lease)
                yield rollout
        self._give_back()
        if not self.lockstep:
            self._request("collect", 0)

    def _next_fresh(self) -> RolloutLease:
        """Return the oldest rollout that is not too far behind."""
        storage = self._open_storage()
        while True:
            lease = self._take()
            if self.max_policy_lag is None:
                return lease
            began = int(lease.rollout.get(POLICY_VERSION).reshape(-1)[0])
            if self.scheme.version - began <= self.max_policy_lag:
                return lease
            self.stale += 1
            storage.release(lease)

    def _take(self) -> RolloutLease:
        storage = self._open_storage()
        if self._group is not None:
            self._group.check()  # a lost worker shows also while the others go on
        while (lease := storage.acquire()) is None:
            assert self._group is not None
            if not self._group.wait([storage.fileno()], self.timeout):
                raise RingTimeoutError(
                    f"no rollout within {self.timeout:g} s (expected one). Raise the timeout, "
                    "or look at what the workers do."
                )
        return lease

    def _one_each(self) -> list[RolloutLease]:
        """Return one new rollout of each worker, in the order of the workers."""
        if self._inline is not None:
            with own_randomness(self._random):
                fill_slot(self._open_storage(), self._inline, self._latest, 0, timeout=None)
        else:
            self._request("collect", 1)
        leases = [self._take() for _ in range(self.num_workers)]
        return sorted(leases, key=lambda lease: lease.token.writer)

    def _give_back(self) -> None:
        """Release the rollout that was lent out."""
        lease, self._lease = self._lease, None
        if lease is not None and self._storage is not None:
            self._storage.release(lease)

    def _request(self, *request: Any) -> None:
        if self._group is not None:
            for worker in range(self.num_workers):
                self._group.send(worker, *request)

    def _ask(self, *requests: tuple[Any, ...]) -> list[Any]:
        """Ask each worker its own request; return the answers."""
        assert self._group is not None
        return [self._group.ask(worker, *request) for worker, request in enumerate(requests)]

    def _open_storage(self) -> RolloutRingStorage:
        if self._storage is None:
            raise SegmentClosedError(
                "cannot use the collector: it is shut down (expected a running one). "
                "Build a new one."
            )
        return self._storage

    def _check_open(self) -> None:
        self._open_storage()

    # What there is to know

    @property
    def storage(self) -> RolloutRingStorage:
        """The ring."""
        return self._open_storage()

    @property
    def dropped(self) -> int:
        """Rollouts that were overwritten before they were read."""
        return sum(self._open_storage().dropped)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [] if self._group is None else self._group.pids

    def metrics(self) -> CollectorMetrics:
        """Return what the workers last told about their work. Waits for nobody."""
        self._check_open()
        return self._latest.read()

    # BaseCollector

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int:
        """Seed environments and noise; the next rollouts start new episodes.

        Worker ``w`` seeds its environment with ``seed + w * num_envs``, and environments
        in a batch count on from there: no two environments share a seed. Rollouts that
        were collected before stay in the ring.

        Args:
            seed: The first seed; None takes one from the operating system.
            static_seed: Give all workers `seed` itself.

        Returns:
            The first seed that is not used yet.
        """
        self._check_open()
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        requests = []
        for worker in range(self.num_workers):
            noise = np.random.SeedSequence((seed, worker)).generate_state(1, np.uint64)[0]
            own = seed if static_seed else seed + worker * self.num_envs
            requests.append(("seed", own, int(noise)))
        if self._inline is not None:
            with own_randomness(self._random):
                self._inline.seed(*requests[0][1:])
        else:
            self._ask(*requests)
        return seed + self.num_workers * self.num_envs

    def reset(self) -> None:
        """Start new episodes with the workers' next rollouts."""
        self._check_open()
        if self._inline is not None:
            self._inline.reset()
        else:
            self._ask(*[("reset",)] * self.num_workers)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the workers' states and the count of frames. Safe while iterating."""
        self._check_open()
        if self._inline is not None:
            with own_randomness(self._random):
                states = [self._inline.state_dict()]
        else:
            answers = self._ask(*[("state",)] * self.num_workers)
            states = [cloudpickle.loads(answer) for answer in answers]
        return OrderedDict(workers=states, frames=self._frames)

    def load_state_dict(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Restore the workers' states; their next rollouts start new episodes.

        Raises:
            ValueError: The state is of another number of workers.
        """
        self._check_open()
        states = state_dict["workers"]
        if len(states) != self.num_workers:
            raise ValueError(
                f"state of {len(states)} workers (expected {self.num_workers}). "
                "Use as many workers as when it was saved."
            )
        if self._inline is not None:
            with own_randomness(self._random):
                self._inline.load_state_dict(states[0])
        else:
            self._ask(*(("load", cloudpickle.dumps(state)) for state in states))
        self._frames = state_dict["frames"]

    def shutdown(self, timeout: float | None = None, close_env: bool = True, **_: Any) -> None:
        """End the workers and free the ring. Idempotent."""
        if self._group is not None:
            self._group.stop() if timeout is None else self._group.stop(timeout)
            self._group = None
        if self._inline is not None and close_env:
            self._inline.close()
        if self._storage is not None:
            self._lease, self._waiting = None, []
            self._storage.close()
            self._storage = None
            if "_latest" in self.__dict__:
                self._latest.close()

    def __del__(self) -> None:
        if "_group" in self.__dict__:  # absent if __init__ refused its arguments
            self.shutdown()

    def __repr__(self) -> str:
        return (
            f"APPOCollector({self.num_workers} workers, {self.frames_per_batch} frames each, "
            f"lockstep={self.lockstep})"
        )


def _factories(
    create_env_fn: CreateEnv | Sequence[CreateEnv], num_collectors: int | None
) -> list[CreateEnv]:
    if callable(create_env_fn):
        workers = 1 if num_collectors is None else num_collectors
        if workers < 1:
            raise ConfigError(f"num_collectors: {workers} (expected at least 1). Use 1.")
        return [create_env_fn] * workers
    factories = list(create_env_fn)
    if not factories or num_collectors not in (None, len(factories)):
        raise ConfigError(
            f"num_collectors: {num_collectors} with {len(factories)} environment functions "
            "(expected one function for each). Leave num_collectors out."
        )
    return factories


def _scheme(schemes: Mapping[str, WeightSyncScheme] | None) -> UniLabShmScheme:
    scheme = UniLabShmScheme() if schemes is None else schemes.get("policy")
    if not isinstance(scheme, UniLabShmScheme) or (schemes is not None and len(schemes) != 1):
        raise ConfigError(
            f"weight_sync_schemes: {schemes!r} (expected {{'policy': UniLabShmScheme()}}). "
            "Leave it out."
        )
    return scheme
