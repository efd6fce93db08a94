"""`APPOCollector`: workers fill a ring of rollouts, and the learner takes them as they come.

A worker owns the slot that it fills; the learner leases committed slots, oldest first, and the
collector copies or lends them. In lock-step a round is one rollout of each worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Unpack, get_args

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from torchrl_unilab.checks import as_choice, as_integer
from torchrl_unilab.collectors.arguments import CreateEnv, RolloutSettings
from torchrl_unilab.collectors.base import WorkerCollector
from torchrl_unilab.collectors.team import WorkerTeam
from torchrl_unilab.collectors.worker import POLICY_VERSION, RolloutWorker, example_rollout
from torchrl_unilab.data import RolloutRingStorage
from torchrl_unilab.data.rollouts.shared import RolloutLease
from torchrl_unilab.errors import ConfigError, WaitTimeoutError
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm.ring_writer import Overflow


@dataclass
class RingSink:
    """Stores rollouts in the slots of a ring, where the worker collects them in place.

    Attributes:
        storage: The ring.
    """

    storage: RolloutRingStorage

    def __reduce__(self) -> tuple[Any, ...]:
        return RingSink, (self.storage.without_buffers(),)

    def open(self, worker: int) -> None:
        """Become writer `worker` of the ring."""
        self.storage.use_writer(worker)

    def collect(
        self, rollouts: RolloutWorker, publish: Callable[[], None], timeout: float | None
    ) -> bool:
        """Collect one rollout into a slot; return False if no slot was free in time.

        The metrics count a rollout before the learner has it.
        """
        rollouts.clock.start()
        slot = self.storage.claim(timeout)
        rollouts.clock.to("wait")
        if slot is None:
            return False
        with span("rollout"):
            rollouts.rollout(slot)
        publish()
        self.storage.commit()
        return True

    def stored(self) -> int:
        """Return how many rollouts are committed; abandon the slot that is claimed here."""
        self.storage.abandon()
        return self.storage.write_count

    def recover(self, worker: int) -> None:
        """Free the slots that a dead worker held."""
        self.storage.recover(worker)


class APPOCollector(WorkerCollector):
    """Collects whole rollouts in worker processes, through a ring in shared memory.

    Each worker steps its environment and writes rollouts into slots of the ring; iterating yields
    them one by one, oldest first, as ``TensorDict`` [*env batch, T], the last dimension named
    ``"time"``, with TorchRL's keys, the true next observations under ``next``,
    ``("next", "policy_version")`` and ``("collector", "traj_ids")``. Publishing weights never
    waits, and workers wait for the learner only if no slot is free.

    Workers run ahead as long as there are free slots (``overflow="block"``) or always
    (``"overwrite"``: the oldest unread rollout is dropped and counted). With `lockstep` a worker
    collects its next rollout only on request of the collector.

    Args:
        create_env_fn: Makes a worker's environment, or one such function per worker.
        policy: Acts in the workers; its weights are published. None with ``policy_factory``.
        frames_per_batch: Frames of one rollout of one worker, a multiple of the batch size
            of its environment.
        slots: Slots of the ring, shared out evenly among the workers and rounded up. By default one
            per worker, so that a worker starts its next rollout once its last one was taken, with
            the newest weights; two with `use_buffers`, as one is lent, but in `lockstep`.
        overflow: ``"block"`` or ``"overwrite"``; always ``"block"`` with `lockstep`.
        max_policy_lag: Rollouts that started more published versions ago than this are
            dropped and counted in `stale`; None takes all.
        use_buffers: Yield borrowed memory, valid until the next rollout is requested, instead of a
            copy.
        **workers: Further arguments of `torchrl_unilab.collectors.base.WorkerCollector`, such as
            ``num_collectors``, ``lockstep``, ``seed``.

    Raises:
        ConfigError: A setting cannot work.
        SegmentSpaceError: The ring does not fit shared memory; says what size would.
        WorkerError: A worker failed, at its start or during a rollout; carries its traceback or
            signal.

    Attributes:
        stale: Rollouts dropped because of `max_policy_lag`.

    Examples:
        >>> from functools import partial
        >>> from torchrl_unilab.collectors import APPOCollector
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.modules import make_actor
        >>> make_env = partial(MujocoBatchEnv, "Hopper-v5", num_envs=8, num_threads=1)
        >>> collector = APPOCollector(
        ...     make_env, make_actor(11, 3), frames_per_batch=8 * 32, total_frames=2 * 8 * 32
        ... )
        >>> for rollout in collector:
        ...     print(rollout.shape)  # learn from it, then publish
        ...     collector.update_policy_weights_()
        torch.Size([8, 32])
        torch.Size([8, 32])
        >>> collector.shutdown()
    """

    _saved: ClassVar[tuple[str, ...]] = (*WorkerCollector._saved, "stale", "waiting", "version")

    def __init__(
        self,
        create_env_fn: CreateEnv | Sequence[CreateEnv],
        policy: TensorDictModuleBase | None = None,
        *,
        frames_per_batch: int,
        slots: int | None = None,
        overflow: Overflow = "block",
        max_policy_lag: int | None = None,
        use_buffers: bool = False,
        **workers: Unpack[RolloutSettings],
    ) -> None:
        super().__init__(create_env_fn, policy, **workers)
        if max_policy_lag is not None:
            remedy = "Use None for no bound."
            max_policy_lag = as_integer("max_policy_lag", max_policy_lag, remedy, least=0)
        if use_buffers and self.worker_idx is not None:
            raise ConfigError(
                "use_buffers: True in a collector of a distributed collector (expected False: a "
                "borrowed rollout would be sent with its whole ring). Leave it out."
            )
        lent = use_buffers and not self.lockstep
        default = 2 * self.num_workers if lent else self.num_workers
        self._slots = default if slots is None else as_integer("slots", slots, "Use 2.")
        if self.lockstep:
            remedy = "Leave it out, for one per worker."
            as_integer("slots in lock-step", self._slots, remedy, least=self.num_workers)
        as_choice("overflow", overflow, get_args(Overflow), "Leave it out to block.")
        self._overflow: Overflow = "block" if self.lockstep else overflow
        self.max_policy_lag, self.use_buffers = max_policy_lag, use_buffers
        self.stale = 0
        self._lease: RolloutLease | None = None  # of the rollout that was yielded without a copy
        self._waiting: list[RolloutLease] = []  # lock-step: this round's rollouts, not yet yielded
        self._restored: list[TensorDictBase] = []  # lock-step: a round's rollouts from a checkpoint
        self._launch(frames_per_batch)

    def _make_sink(self, env: EnvBase, num_steps: int) -> RingSink:
        example, writers = example_rollout(env, self.policy, num_steps), self.num_workers
        slots = -(-self._slots // writers)  # per writer
        ring = RolloutRingStorage(slots, example=example, writers=writers, overflow=self._overflow)
        return RingSink(ring)

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield rollouts until `total_frames`; what workers fill meanwhile stays in the ring.

        Raises:
            WorkerError: A worker failed.
            WaitTimeoutError: No rollout came within `timeout` seconds.
        """
        if not self.lockstep:
            self._open_team().run_ahead(True)
        while self._wants_more():
            self._release_lent()
            rollout = self._restored.pop(0) if self._restored else self._next()
            self._frames += rollout.numel()
            yield rollout.refine_names(..., "time")  # as TorchRL's do: transforms look for it
        self._release_lent()
        if not self.lockstep:
            self._open_team().run_ahead(False)

    def _next(self) -> TensorDictBase:
        """Return the next rollout, borrowed with `use_buffers` and copied without."""
        with span("sample"):
            lease = self._next_fresh()
        if self.use_buffers:
            self._lease = lease
            return lease.rollout
        rollout = lease.rollout.clone()
        self.storage.release(lease)
        return rollout

    def _next_fresh(self) -> RolloutLease:
        """Return the next rollout within `max_policy_lag`; release and count those that are not."""
        while True:
            lease = self._next_of_round() if self.lockstep else self._next_arrived()
            if self.max_policy_lag is None:
                return lease
            started = int(lease.rollout.get(POLICY_VERSION).reshape(-1)[0])
            if self.scheme.version - started <= self.max_policy_lag:
                return lease
            self.stale += 1
            self.storage.release(lease)

    def _next_arrived(self) -> RolloutLease:
        storage, team = self.storage, self._open_team()
        team.check()  # a lost worker shows also while the others collect
        if held := storage.leases:  # acquired, but an interrupt came before it was returned
            return held[0]
        while (lease := storage.acquire()) is None:
            with span("wait"):
                arrived = team.wait(storage.filenos(), self.timeout)
            if not arrived:
                raise WaitTimeoutError(
                    f"no rollout within {self.timeout:g} s (expected one). Raise the timeout, "
                    "or look at what the workers do."
                )
        return lease

    def _next_of_round(self) -> RolloutLease:
        """Return the next rollout of a round: all workers collect at once, one each.

        After an interrupt, rollouts of the round that have arrived are kept, and the rest awaited.
        """
        team = self._finish_tick()
        if not self._waiting:
            team.start_tick()
            self._finish_tick()
        return self._waiting.pop(0)

    def _finish_tick(self) -> WorkerTeam:
        team = super()._finish_tick()
        if self.lockstep:  # all rollouts but the one that is lent are of this round
            leases = self.storage.acquire_all()
            waiting = [lease for lease in leases if lease is not self._lease]
            self._waiting = sorted(waiting, key=attrgetter("writer"))
        return team

    def _release_lent(self) -> None:
        """Release the rollout that was lent out."""
        if self._lease is not None:
            if self._lease in self.storage.leases:  # an interrupt may have come after the release
                self.storage.release(self._lease)
            self._lease = None

    # Checkpoints

    def state_dict(self, *, workers: bool = True) -> OrderedDict[str, Any]:
        """Return what `WorkerCollector.state_dict` does, and unread rollouts of a lock-step round.

        Rollouts that workers have collected ahead into the ring are not included.
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
            ConfigError: The state is of another number of workers, or of other rollouts.
        """
        shape = self.storage.rollout_size
        if other := [size for size, _ in state_dict.get("waiting", ()) if tuple(size) != shape]:
            raise ConfigError(
                f"state with rollouts of {tuple(other[0])} (expected {shape}). Make the collector "
                "as it was when it was saved."
            )
        super().load_state_dict(state_dict)
        for lease in self._waiting:
            self.storage.release(lease)
        self._waiting = []
        self.stale = state_dict["stale"]
        waiting = state_dict["waiting"]
        self._restored = [TensorDict(entries, size).clone() for size, entries in waiting]
        for rollout in self._restored:
            # Keep the lag that it had: the loaded weights are published next, as one more version.
            rollout.get(POLICY_VERSION).add_(self.scheme.version + 1 - state_dict["version"])

    @property
    def storage(self) -> RolloutRingStorage:
        """The ring."""
        storage: RolloutRingStorage = self._open_sink().storage
        return storage

    @property
    def dropped(self) -> int:
        """Rollouts that were overwritten before they were read."""
        return sum(self.storage.dropped)

    def status(self) -> dict[str, float]:
        """Return how full the ring is, and how many rollouts were lost, and why."""
        storage = self.storage
        return {
            "ring_occupancy": len(storage) / storage.max_size,
            "dropped": self.dropped,
            "stale": self.stale,
            **super().status(),
        }

    def shutdown(self, timeout: float | None = None, close_env: bool = True, **_: Any) -> None:
        """End the workers and free the ring. Idempotent; see `WorkerCollector.shutdown`."""
        super().shutdown(timeout, close_env)
        self._lease, self._waiting, self._restored = None, [], []
