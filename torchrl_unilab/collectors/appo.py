"""`APPOCollector`: workers fill a ring of rollouts, and the learner takes them as they come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType
from torchrl.weight_update import WeightSyncScheme

from torchrl_unilab.collectors.base import (
    CreateEnv,
    WorkerCollector,
    env_factories,
    policy_scheme,
)
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
from torchrl_unilab.errors import ConfigError, WaitTimeoutError, WorkerError
from torchrl_unilab.runtime import WorkerGroup, trace
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm.ring import Overflow

__all__ = ["APPOCollector"]


class APPOCollector(WorkerCollector):
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
        slots: Slots of the ring, shared out evenly among the workers and rounded up. By default
            one per worker, so that a worker starts its next rollout when its last was taken, with
            the newest weights there are.
        overflow: ``"block"`` or ``"overwrite"``.
        max_policy_lag: Rollouts that began more published versions ago than this are
            dropped and counted in `stale`; None takes all.
        use_buffers: Yield borrowed memory, valid until the next rollout is asked for,
            instead of a copy.
        num_threads: Torch threads of each worker.
        exploration_type: How the policy acts.
        seed: Seeds environments and noise; from the operating system if None.
        timeout: Seconds to wait for a rollout; None waits as long as all workers live.
        restart_workers: How many workers that are lost (killed, stopped, or failed) are replaced
            in the run before the loss of one is an error. A new one acts with the newest
            weights, starts new episodes from seeds of its own and counts on; what was lost is
            at most the rollout in the making. Such a run is not repeatable.

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
        restart_workers: int = 0,
    ) -> None:
        factories = env_factories(create_env_fn, num_collectors)
        workers = len(factories)
        super().__init__(
            policy,
            workers,
            policy_scheme(weight_sync_schemes),
            total_frames=total_frames,
            timeout=timeout,
            restart_workers=restart_workers,
        )
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
        self.lockstep = lockstep
        self.max_policy_lag = max_policy_lag
        self.use_buffers = use_buffers
        self.stale = 0
        self._lease: RolloutLease | None = None  # lent out
        self._waiting: list[RolloutLease] = []  # of this round of lockstep, not yet yielded
        self._coming = 0  # rollouts of this round that are not there yet
        self._restored: list[TensorDictBase] = []  # of such a round, from a checkpoint

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
            self._memory = RolloutRingStorage(
                -(-slots // workers),
                example=example_rollout(env, policy, num_steps),
                writers=workers,
                overflow="block" if lockstep else overflow,
            )
            self._share_policy()
            if inline:
                copied, scheme = self._inline_policy()
                self._inline = RolloutWorker(
                    env, copied, num_steps, scheme=scheme, exploration_type=exploration_type
                )
            else:
                payload = cloudpickle.dumps((factories, policy))
                memory = self._memory.without_buffers()
                setup = WorkerSetup(payload, num_steps, exploration_type, trace.settings())
                self._group = WorkerGroup(
                    collect_rollouts,
                    [
                        (memory, setup, self.scheme, self._latest, worker, workers)
                        for worker in range(workers)
                    ],
                    name="collector",
                    num_threads=num_threads,
                )
            self._connect(seed)
        except BaseException:
            self.shutdown()
            raise
        finally:
            if self._inline is None or self._inline.env is not env:
                env.close()

    # Collecting

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield rollouts until `total_frames`; what workers fill meanwhile stays in the ring.

        Raises:
            WorkerError: A worker failed.
            WaitTimeoutError: No rollout came within `timeout` seconds.
        """
        self._check_open()
        if not self.lockstep:
            self._collect(-1)
        while self.total_frames < 0 or self._frames < self.total_frames:
            self._give_back()
            if self._restored:
                rollout = self._restored.pop(0)
                self._frames += rollout.numel()
                yield rollout
                continue
            with span("sample"):
                lease = self._next_of_round() if self.lockstep else self._next_fresh()
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
            self._collect(0)
            self._owing.clear()

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
        storage, group = self._open_storage(), self._group
        if group is not None:
            self._persist(group.check)  # a lost worker shows also while the others go on
        for held in storage.leases:
            if held is not self._lease and held not in self._waiting:
                return held  # an interrupt kept it from this collector
        while (lease := storage.acquire()) is None:
            assert group is not None
            try:
                with span("wait"):
                    arrived = group.wait(storage.filenos(), self.timeout)
            except WorkerError as lost:
                self._replace(lost)
                continue
            if not arrived:
                raise WaitTimeoutError(
                    f"no rollout within {self.timeout:g} s (expected one). Raise the timeout, "
                    "or look at what the workers do."
                )
        return lease

    def _next_of_round(self) -> RolloutLease:
        """Return the next rollout of a round: all workers collect at once, one each.

        What is there of a round that was interrupted stays, and the rest is waited for.
        """
        storage = self._open_storage()
        if not self._waiting and not self._coming:
            if self._inline is None:
                self._coming = self.num_workers
                self._collect(1)
            else:
                with own_randomness(self._random):
                    fill_slot(storage, self._inline, self._open_metrics(), 0, timeout=None)
                self._coming = 1
        self._settle()
        return self._waiting.pop(0)

    def _settle(self) -> None:
        self._ask_the_rest()
        while self._coming:
            lease = self._take()
            self._waiting.append(lease)
            self._coming -= 1
            self._owing.discard(lease.writer)
            self._waiting.sort(key=lambda lease: lease.writer)

    def _recover(self, worker: int) -> None:
        super()._recover(worker)
        if self.lockstep and self._open_storage().unread(worker):
            self._owing.discard(worker)  # it did what it was asked for

    def _give_back(self) -> None:
        """Release the rollout that was lent out."""
        if self._lease is not None and self._memory is not None:
            if self._lease in self._memory.leases:  # an interrupt may have come after the release
                self._memory.release(self._lease)
            self._lease = None

    def _open_storage(self) -> RolloutRingStorage:
        self._check_open()
        storage: RolloutRingStorage = self._memory
        return storage

    # Checkpoints

    def state_dict(self, *, workers: bool = True) -> OrderedDict[str, Any]:
        """Return what `WorkerCollector.state_dict` does, and what waits of a lockstep's round.

        What workers that run ahead have left in the ring is not part of it.
        """
        state = super().state_dict(workers=workers)
        waiting = [*self._restored, *(lease.rollout for lease in self._waiting)]
        state["waiting"] = [(tuple(r.batch_size), r.clone().to_dict()) for r in waiting]
        state["version"] = self.scheme.version
        state["stale"] = self.stale
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: The state is of another number of workers.
        """
        super().load_state_dict(state_dict)
        for lease in self._waiting:
            self._open_storage().release(lease)
        self._waiting = []
        self.stale = state_dict["stale"]
        self._restored = [TensorDict(entries, size) for size, entries in state_dict["waiting"]]
        for rollout in self._restored:
            # As far behind as it was: what is loaded is published next.
            rollout.get(POLICY_VERSION).add_(self.scheme.version + 1 - state_dict["version"])

    # What there is to know

    @property
    def storage(self) -> RolloutRingStorage:
        """The ring."""
        return self._open_storage()

    @property
    def dropped(self) -> int:
        """Rollouts that were overwritten before they were read."""
        return sum(self._open_storage().dropped)

    def status(self) -> dict[str, float]:
        """Return how full the ring is, and how many rollouts were lost, and why."""
        storage = self._open_storage()
        return {
            "ring_occupancy": len(storage) / storage.max_size,
            "dropped": self.dropped,
            "stale": self.stale,
            **super().status(),
        }

    def _give_up_memory(self) -> None:
        self._lease, self._waiting, self._restored = None, [], []
        self._memory.close()

    def __repr__(self) -> str:
        return (
            f"APPOCollector({self.num_workers} workers, {self.frames_per_batch} frames each, "
            f"lockstep={self.lockstep})"
        )
