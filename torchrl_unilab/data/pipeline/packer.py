"""What replay batches are sampled from, and a process that samples them for the learner.

An order says everything: the same order, of the same rows, gives the same batch in any process.
`DoubleBufferReplayPipeline` gives the orders; a collector's process serves them between two of
its own steps.
"""

from __future__ import annotations

import multiprocessing as mp
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, Protocol

from tensordict import TensorDictBase

from torchrl_unilab.errors import SegmentClosedError, WorkerError

__all__ = [
    "SLOTS",
    "PackOrder",
    "PackerLink",
    "ProcessPacker",
    "ReplaySnapshot",
    "ReplaySource",
    "Watch",
]

SLOTS = 2
"""Host batches: one that the learner uses, one that is packed."""

Watch = Callable[[Sequence[int], float | None], bool]
"""`WorkerGroup.wait`: raises what a worker died of."""

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
        """Make memory for a batch [count]: views of few blocks, which hold nothing else.

        Shared memory reaches a process that is spawned with the batch as an argument.
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
        snapshot: What to draw from.
    """

    slot: int
    count: int
    seed: int
    snapshot: ReplaySnapshot


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

    @property
    def closed(self) -> bool:
        """Whether `serve` has seen the end of the pipeline."""
        return self._connection.closed

    def serve(self, source: ReplaySource, timeout: float = 0.0) -> bool:
        """Pack if there is an order.

        What `source` raises is raised here; with it, or without this process, the learner's
        wait ends.

        Args:
            source: What to sample from.
            timeout: How long to wait for an order, s.

        Returns:
            Whether a batch was packed.
        """
        if self.closed:
            return False
        try:
            if not self._connection.poll(timeout):
                return False
            order: PackOrder = self._connection.recv()
        except (EOFError, OSError):
            self.close()
            return False
        out = self._batches[order.slot]
        source.sample(order.count, seed=order.seed, snapshot=order.snapshot, out=out)
        try:
            self._connection.send(None)
        except OSError:
            self.close()
        return not self.closed

    def close(self) -> None:
        """Close the pipe. In the process that spawned this one: call it after that."""
        self._connection.close()


class ProcessPacker:
    """Has another process pack, between its steps, into batches in shared memory.

    Make it with `pair`, before that process is spawned with the other end; call `started`
    once it has been.

    Args:
        connection: The pipe's end.
        batches: Shared batches.
    """

    def __init__(self, connection: Connection, batches: Sequence[TensorDictBase]) -> None:
        self.batches = batches
        self._connection = connection
        self._watch: Watch | None = None
        self._link: PackerLink | None = None
        self._failed: WorkerError | None = None
        self._grace = 0.0  # how long to wait for an explanation of the failure, s
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
        packer = cls(here, batches)
        packer._link = PackerLink(there, batches)
        return packer, packer._link

    def started(self, watch: Watch | None = None) -> None:
        """Close this process's copy of the link, so that the death of the other one shows.

        Args:
            watch: `WorkerGroup.wait` of its group, which knows what a worker died of.
        """
        assert self._link is not None
        self._link.close()
        self._watch = watch

    def pack(self, order: PackOrder, timeout: float) -> None:
        """Have a batch packed, and wait for it. One order at a time.

        A failure is final: a process that has not answered may still write to the batch.

        Raises:
            WorkerError: The process has died, or did not answer in time.
            SegmentClosedError: The packer was closed, before or meanwhile.
        """
        with self._packing:
            if self._failed is None and not self._connection.closed:
                self._failed = self._ask(order, timeout)
                if self._failed is None and not self._woken.poll():
                    return
            raise self._failed or SegmentClosedError(
                "replay batch: its pipeline was closed (expected to be open). Make a new pipeline."
            )

    def _ask(self, order: PackOrder, timeout: float) -> WorkerError | None:
        try:
            self._connection.send(order)
            ready = wait([self._connection, self._woken], timeout)
            if self._connection in ready:
                self._connection.recv()
        except (EOFError, OSError):
            self._grace = _DEATH_SECONDS
            return WorkerError(
                "replay batch: the process that packs has closed its pipe or died (expected a "
                "batch). Mend the cause and start again."
            )
        if ready:
            return None
        return WorkerError(
            f"replay batch: no answer of the process that packs within {timeout:g} s (expected a "
            "batch). See whether it is stopped, or does not serve its link."
        )

    def check(self) -> None:
        """Raise what the process died of, if its group knows. Called in the learner's thread."""
        if self._watch is not None:
            self._watch([], self._grace)

    def close(self) -> None:
        """End the wait for an answer, and show the other end that there will be no order."""
        self._waker.close()
        with self._packing:  # which ends now
            self._connection.close()
            self._woken.close()
