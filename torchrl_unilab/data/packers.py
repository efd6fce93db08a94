"""Who packs a replay batch, and where: in this process, or in one that has the rows at hand.

A `ReplayPacker` owns the host batches and fills one of them when it is ordered to. What it
was ordered to do says all: the same order, of the same rows, gives the same batch wherever it
is carried out.
"""

from __future__ import annotations

import multiprocessing as mp
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, Protocol

from tensordict import TensorDictBase

from torchrl_unilab.errors import SegmentClosedError, WorkerError, WorkersBehindError

__all__ = [
    "SLOTS",
    "PackOrder",
    "PackerLink",
    "ProcessPacker",
    "ReplayPacker",
    "ReplaySnapshot",
    "ReplaySource",
    "SourcePacker",
    "Watch",
]

SLOTS = 2
"""Host batches: one that the learner uses, one that is packed."""

Watch = Callable[[Sequence[int], float | None], bool]
"""What `WorkerGroup.wait` is."""

_POLL_SECONDS = 0.0005
"""How often the rows are counted by whoever waits for them and is not told."""
_DEATH_SECONDS = 10.0
"""How long a process whose pipe has ended may take to end itself, and so to be explained."""


class ReplaySnapshot(NamedTuple):
    """What there is to sample from.

    Attributes:
        ptr: Rows ever written, since the storage was last emptied.
        size: Rows that can be sampled, the last ones of these.
    """

    ptr: int
    size: int


class ReplaySource(Protocol):
    """Rows to sample from, as `PackedReplayStorage` has them."""

    def snapshot(self) -> ReplaySnapshot:
        """Return what there is to sample from now."""

    def empty_batch(
        self, count: int, *, pin_memory: bool = False, shared: bool = False
    ) -> TensorDictBase:
        """Make memory for a batch [count], whose tensors are views of few contiguous blocks.

        Shared memory starts on a page of its own and reaches a process that is spawned with
        the batch as an argument.
        """

    def sample(
        self,
        count: int,
        *,
        seed: int,
        snapshot: ReplaySnapshot | None = None,
        out: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Return whole rows, [count], in `out` if given; the same for the same arguments."""


@dataclass(frozen=True)
class PackOrder:
    """A batch to pack.

    Attributes:
        slot: Into which host batch, 0 or 1.
        count: How many rows.
        seed: Seed of the draw.
        min_ptr: How many rows must have been written before.
        timeout: How long to wait for that, and for who packs, s.
    """

    slot: int
    count: int
    seed: int
    min_ptr: int
    timeout: float


class ReplayPacker(Protocol):
    """Fills host batches."""

    @property
    def name(self) -> str:
        """For the transfer manifest."""

    @property
    def background(self) -> bool:
        """Whether a thread of the pipeline waits for it, and not the learner."""

    def host_batches(self, count: int, *, pin_memory: bool) -> Sequence[TensorDictBase]:
        """Return `SLOTS` batches [count], which are filled from now on."""

    def pack(self, order: PackOrder) -> ReplaySnapshot:
        """Fill a batch and return what it was drawn from. One order at a time.

        Raises:
            WorkersBehindError: The rows it was to wait for have not come in time.
            WorkerError: The process that packs has failed, or did not answer in time.
            SegmentClosedError: The packer was closed, before or meanwhile.
        """

    def check(self) -> None:
        """Raise what ended the packer's process, if something did, as who started it knows it.

        Called in the learner's thread.
        """

    def close(self) -> None:
        """End what `pack` waits for, in any thread. Idempotent."""


def _behind(order: PackOrder, ptr: int) -> WorkersBehindError:
    return WorkersBehindError(
        f"replay batch: {ptr} rows written within {order.timeout:g} s (expected {order.min_ptr}). "
        "See whether the collectors run, or ask for fewer."
    )


def _closed() -> SegmentClosedError:
    return SegmentClosedError(
        "replay batch: its pipeline was closed (expected to be open). Make a new pipeline."
    )


class SourcePacker:
    """Packs in this process.

    Args:
        source: What to sample from.
        background: Whether to pack in a thread of the pipeline, or in the learner's own
            when it starts to prepare a batch.
    """

    def __init__(self, source: ReplaySource, *, background: bool) -> None:
        self._source = source
        self._closing = threading.Event()
        self._batches: Sequence[TensorDictBase] = ()
        self.background = background
        self.name = "thread" if background else "inline"

    def host_batches(self, count: int, *, pin_memory: bool) -> Sequence[TensorDictBase]:
        """Return new batches [count]."""
        self._batches = [
            self._source.empty_batch(count, pin_memory=pin_memory) for _ in range(SLOTS)
        ]
        return self._batches

    def pack(self, order: PackOrder) -> ReplaySnapshot:
        """Wait for the rows and sample them."""
        until = time.monotonic() + order.timeout
        while (snapshot := self._source.snapshot()).ptr < order.min_ptr:
            if time.monotonic() >= until:
                raise _behind(order, snapshot.ptr)
            if self._closing.wait(_POLL_SECONDS):
                break
        if self._closing.is_set():
            raise _closed()
        out = self._batches[order.slot]
        self._source.sample(order.count, seed=order.seed, snapshot=snapshot, out=out)
        return snapshot

    def check(self) -> None:
        """Do nothing: what fails in this process is raised as it is."""

    def close(self) -> None:
        """End the wait for rows."""
        self._closing.set()


class PackerLink:
    """The end of a `ProcessPacker` in the process that packs, which it is spawned with.

    Between two steps of its own work that process calls `serve`, which takes no time to
    speak of unless the learner has ordered a batch.

    Args:
        connection: The pipe's end.
        batches: Shared batches to fill.
    """

    def __init__(self, connection: Connection, batches: Sequence[TensorDictBase]) -> None:
        self._connection = connection
        self._batches = batches
        self._order: PackOrder | None = None

    @property
    def closed(self) -> bool:
        """Whether there is no pipeline any more at the other end, as far as `serve` knows."""
        return self._connection.closed

    def serve(self, source: ReplaySource, timeout: float = 0.0) -> bool:
        """Pack if there is an order and the rows it asks for.

        What `source` raises is raised here; with it, or without this process, the learner's
        wait ends.

        Args:
            source: What to sample from.
            timeout: How long to wait for an order or its rows, s.

        Returns:
            Whether a batch was packed.
        """
        if not self._receive(timeout if self._order is None else 0.0):
            return False
        order = self._order
        assert order is not None
        until = time.monotonic() + timeout
        while (snapshot := source.snapshot()).ptr < order.min_ptr:
            if time.monotonic() >= until or not self._receive(_POLL_SECONDS):
                return False
        out = self._batches[order.slot]
        source.sample(order.count, seed=order.seed, snapshot=snapshot, out=out)
        self._order = None
        try:
            self._connection.send(snapshot)
        except OSError:
            self.close()
        return not self.closed

    def _receive(self, timeout: float) -> bool:
        """Return whether there is an order; with one at hand, only notice the pipe's end."""
        if self.closed:
            return False
        try:
            if self._connection.poll(timeout):
                self._order = self._connection.recv()
        except (EOFError, OSError):
            self.close()
            return False
        return self._order is not None

    def close(self) -> None:
        """Let go of the pipe. In the process that spawned this one: call it after that."""
        self._connection.close()


class ProcessPacker:
    """Has another process pack, between its steps, into batches in shared memory.

    Make it with `pair`, before that process is spawned with the other end; say `started`
    once it has been.

    Args:
        connection: The pipe's end.
        batches: Shared batches.
        source: Where this process sees how many rows there are.
    """

    name = "process"
    background = True

    def __init__(
        self, connection: Connection, batches: Sequence[TensorDictBase], source: ReplaySource
    ) -> None:
        self._connection = connection
        self._batches = batches
        self._source = source
        self._watch: Watch | None = None
        self._link: PackerLink | None = None
        self._failed: WorkerError | WorkersBehindError | None = None
        self._ended = False  # the process, as its pipe shows
        self._packing = threading.Lock()
        self._woken, self._waker = mp.Pipe(duplex=False)

    @classmethod
    def pair(cls, source: ReplaySource, count: int) -> tuple[ProcessPacker, PackerLink]:
        """Make both ends, and the shared batches between them.

        Args:
            source: What will be sampled from, by a copy of it in the other process.
            count: Rows of a batch.

        Returns:
            The packer, for the pipeline, and the link, an argument of the process to spawn.
        """
        batches = [source.empty_batch(count, shared=True) for _ in range(SLOTS)]
        here, there = mp.Pipe()
        packer = cls(here, batches, source)
        packer._link = PackerLink(there, batches)
        return packer, packer._link

    def started(self, watch: Watch | None = None) -> None:
        """Say that the process has been spawned, whose death shows from now on.

        Args:
            watch: `WorkerGroup.wait` of its group, which knows what a worker died of.
        """
        assert self._link is not None
        self._link.close()
        self._watch = watch

    def host_batches(self, count: int, *, pin_memory: bool) -> Sequence[TensorDictBase]:
        """Return the shared batches, which are not page-locked."""
        return self._batches

    def pack(self, order: PackOrder) -> ReplaySnapshot:
        """Have a batch packed, and wait for it.

        A failure is final: who has not answered may still write to the batch.
        """
        with self._packing:
            if self._failed is not None:
                raise self._failed
            if self._connection.closed:
                raise _closed()
            try:
                self._connection.send(order)
                ready = wait([self._connection, self._woken], order.timeout)
                if self._connection in ready:
                    snapshot: ReplaySnapshot = self._connection.recv()
                    return snapshot
            except (EOFError, OSError):
                self._ended = True
                self._failed = WorkerError(
                    "replay batch: the process that packs has closed its pipe or died (expected "
                    "a batch). Mend the cause and start again."
                )
                raise self._failed from None
            if ready:
                raise _closed()
            self._failed = self._overdue(order)
            raise self._failed

    def _overdue(self, order: PackOrder) -> WorkerError | WorkersBehindError:
        ptr = self._source.snapshot().ptr
        if ptr < order.min_ptr:
            return _behind(order, ptr)
        return WorkerError(
            f"replay batch: no answer of the process that packs within {order.timeout:g} s "
            "(expected a batch). See whether it is stopped, or does not serve its link."
        )

    def check(self) -> None:
        """Raise what the process failed with, its traceback or its signal, if it is dead."""
        if self._watch is not None:
            self._watch([], _DEATH_SECONDS if self._ended else 0.0)

    def close(self) -> None:
        """End the wait for an answer, and show the other end that there will be no order."""
        self._waker.close()
        with self._packing:  # which ends now
            self._connection.close()
            self._woken.close()
