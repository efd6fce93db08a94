"""Rollouts in a shared ring: their schema, their slots, their counters; claim, commit, lease.

Writers and the reader use the slots in place here, as our collectors and trainers do.
`RolloutRingStorage` adds the copies in and out that TorchRL's buffers, samplers and writers
use. A slot has one owner: see `torchrl_unilab.shm.ring`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_unilab.checks import as_instance, as_seconds
from torchrl_unilab.data.schema import TensorSchema
from torchrl_unilab.data.shared_storage import SharedStorage
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.ring import Lease, RolloutRing
from torchrl_unilab.shm.ring_writer import Overflow, check_ring
from torchrl_unilab.waits import deadline


@dataclass(frozen=True, eq=False)
class RolloutLease:
    """A committed rollout that the reader owns until it releases it.

    A context manager that yields the rollout and releases the lease.

    Attributes:
        rollout: TensorDict of shared views, batch size of the schema. Borrowed: valid until
            the release.
    """

    rollout: TensorDict
    _lease: Lease = field(repr=False)
    _storage: SharedRollouts = field(repr=False)

    @property
    def writer(self) -> int:
        """The writer of the rollout."""
        return self._lease.writer

    def __enter__(self) -> TensorDict:
        return self.rollout

    def __exit__(self, *_: object) -> None:
        self._storage.release(self)


def _counter(name: str, doc: str) -> Any:
    return property(lambda storage: storage._count(name), doc=doc)


class SharedRollouts(SharedStorage):
    """The slots of a `RolloutRingStorage`; its docstring has the arguments."""

    _process_local = ("_lent", "_drawn", "_rollouts")

    def __init__(
        self,
        slots: int = 4,
        *,
        example: TensorDictBase | None = None,
        writers: int = 1,
        overflow: Overflow = "overwrite",
        timeout: float | None = 60.0,
    ) -> None:
        check_ring(slots, writers, overflow)
        if timeout is not None:
            timeout = as_seconds("ring timeout", timeout, zero=True)
        super().__init__(slots * writers, writers)
        self.slots, self.timeout = slots, timeout
        self.overflow: Overflow = overflow
        self._ring: RolloutRing | None = None
        self._schema: TensorSchema | None = None
        self._start_process()
        if example is not None:
            self._build(TensorSchema.of(example))

    def _start_process(self) -> None:
        self._lent: dict[int, RolloutLease] = {}  # the last lease of each slot, released or not
        self._drawn: torch.Tensor | None = None  # the index that `draw` returned, until it is used
        self._rollouts: dict[int, TensorDict] = {}  # views of each slot

    def _build(self, schema: TensorSchema) -> TensorSchema:
        layout = BlockLayout.of_specs((f.name, f.shape, f.dtype) for f in schema.fields)
        self._ring = RolloutRing(
            layout, slots=self.slots, writers=self.writers, overflow=self.overflow
        )
        self._schema = schema
        return schema

    @property
    def initialized(self) -> bool:
        """Whether the schema is known and the slots exist."""
        return self._ring is not None

    @property
    def ring(self) -> RolloutRing:
        """The ring itself.

        Raises:
            UsageError: The schema is not known yet.
            SegmentClosedError: The storage is closed.
        """
        if self._ring is None or self.closed:
            self._check_open()
            raise self._schema_unknown("use")
        return self._ring

    @property
    def rollout_size(self) -> tuple[int, ...]:
        """Batch size of a rollout, [*batch].

        Raises:
            UsageError: The schema is not known yet.
        """
        return tuple(self._rollout(0).batch_size)

    def _rollout(self, slot: int) -> TensorDict:
        if slot not in self._rollouts:
            views = list(self.ring.views[slot].values())
            assert self._schema is not None
            self._rollouts[slot] = self._schema.tensordict(views).lock_()
        return self._rollouts[slot]

    # Counters

    def _count(self, name: str) -> tuple[int, ...]:
        self._check_open()
        counts: tuple[int, ...] = (0,) * self.writers
        return counts if self._ring is None else getattr(self._ring, name)

    written = _counter("written", "Rollouts that each writer has committed.")
    dropped = _counter("dropped", "Rollouts of each writer that it overwrote unread.")
    skipped = _counter(
        "skipped", "Rollouts of each writer that were given up unread by the reader."
    )
    lost = _counter("lost", "Rollouts that each writer was committing when it died.")

    @property
    def write_count(self) -> int:
        """Rollouts that all writers have committed."""
        return sum(self.written)

    @property
    def read_count(self) -> int:
        """Rollouts that were sampled, or acquired and released."""
        return sum(self._count("read"))

    # Writer

    def use_writer(self, writer: int) -> None:
        """Write as writer `writer` from now on. One process per writer.

        Without it a process becomes the first free writer when it first writes.

        Raises:
            ConfigError: There is no such writer, or another process has it. That of a dead process
                is free again after `recover`.
            UsageError: A slot is claimed, or the schema is not known yet.
        """
        self.ring.become_writer(writer)

    def claim(self, timeout: float | None = None) -> TensorDict | None:
        """Own a slot to fill, until `commit` or `abandon`.

        Args:
            timeout: Seconds to wait for a slot; the storage's if not given.

        Returns:
            TensorDict of shared views, locked, with what the slot last held; the one already
            claimed if there is one; None after `timeout`.

        Raises:
            PeerGoneError: No slot is free, and the reader has closed the storage or died.
            UsageError: The schema is not known yet.
        """
        slot = self._claim(timeout)
        return None if slot is None else self._rollout(slot)

    def _claim(self, timeout: float | None) -> int | None:
        ring = self.ring
        if ring.writer is None:
            ring.become_writer()
        if self.overflow == "overwrite" and not ring.spare():
            unread = [lease for lease in self._unread() if lease.writer == ring.writer]
            if unread:
                self._skip(unread[0])
        with span("claim"):
            return ring.claim(self.timeout if timeout is None else timeout)

    def commit(self) -> int:
        """Hand the claimed slot to the reader; return how many this writer has committed.

        Raises:
            UsageError: No slot is claimed.
        """
        with span("commit"):
            return self.ring.commit()

    def abandon(self) -> None:
        """Give the claimed slot back unused; does nothing if none is."""
        self.ring.abandon()

    # Reader

    def filenos(self) -> list[int]:
        """Descriptors to poll with others: one is readable while a rollout waits in the ring.

        Rollouts that the reader holds have left the ring; `wait` knows of them too.
        """
        return self.ring.filenos()

    def wait(self, timeout: float | None = 60.0) -> bool:
        """Wait until there is an unread rollout, and hold it; return whether there is.

        Args:
            timeout: Seconds; without end if None.

        Raises:
            PeerGoneError: There is no rollout and a writer has died, which it names; or all have
                resigned, and there is no timeout.
            UsageError: The schema is not known yet.
        """
        return bool(self._hold(1, timeout))

    def acquire(self, timeout: float | None = 0.0) -> RolloutLease | None:
        """Own the oldest unread rollout until `release`; None if none comes in time.

        Several may be held at once; each is one slot less for its writer.

        Args:
            timeout: Seconds to wait for a rollout; None waits as long as all writers live.

        Raises:
            PeerGoneError: None came and a writer has died, which it names; or all have
                resigned, and there is no timeout.
            SegmentError: The slot was written without a claim.
        """
        unread = self._hold(1, timeout)
        return self._lend(unread[0]) if unread else None

    def acquire_all(self) -> list[RolloutLease]:
        """Own all unread rollouts; return all leases, in the order in which they were acquired."""
        return [self._acquired(lease) or self._lend(lease) for lease in self.ring.acquire_all()]

    def _lend(self, lease: Lease) -> RolloutLease:
        self._drawn = None
        lent = self._lent[lease.slot] = RolloutLease(self._rollout(lease.slot), lease, self)
        return lent

    @property
    def leases(self) -> list[RolloutLease]:
        """The leases not yet released, including those that an interrupt kept from the caller."""
        held = [] if self._ring is None else self._ring.leases
        return [lent for lease in held if (lent := self._acquired(lease))]

    def _acquired(self, lease: Lease) -> RolloutLease | None:
        """Return the lease that was given out for a held slot; None while it is unread."""
        lent = self._lent.get(lease.slot)
        return lent if lent and lent._lease.generation == lease.generation else None

    def release(self, lease: RolloutLease) -> None:
        """Give a slot back to its writer.

        Raises:
            ConfigError: It is no lease: `acquire` returns None if no rollout came.
            UsageError: The lease was released.
            SegmentError: The slot was written while it was held.
        """
        as_instance("lease to release", lease, RolloutLease, "Pass what acquire() returned.")
        self.ring.release(lease._lease)

    def recover(self, writer: int) -> int:
        """Free the slots that a dead writer held; return how many there were.

        For the process that reads. In whichever step of a claim or a commit the writer died,
        its slots are free again: what it had not committed is never read. Unread rollouts
        stay so, in their order, and leases stay valid. The process that takes the writer's
        place calls `use_writer`.

        Raises:
            ConfigError: There is no such writer.
            UsageError: The writer is alive, or another process reads.
        """
        return self.ring.recover(writer)

    def _unread(self) -> list[Lease]:
        """Rollouts that this process holds unread, oldest first."""
        return [lease for lease in self.ring.leases if not self._acquired(lease)]

    def _hold(self, count: int, timeout: float | None = 0.0) -> list[Lease]:
        """Hold `count` unread rollouts, or as many as come in time; return all that are held."""
        unread, end = self._unread(), deadline(timeout)
        while len(unread) < count:
            left = max(0.0, end - time.monotonic()) if timeout else timeout
            lease = self.ring.acquire(left)
            if lease is None:
                break
            unread.append(lease)
        return unread

    def _skip(self, lease: Lease) -> None:
        self._drawn = None
        self.ring.release(lease, read=False)

    def __len__(self) -> int:
        """Unread rollouts: those in the ring and those the reader holds unread."""
        self._check_open()
        return 0 if self._ring is None else self._ring.available() + len(self._unread())

    def _leave(self) -> None:
        self._start_process()
        if self._ring is not None:
            self._ring.close()
