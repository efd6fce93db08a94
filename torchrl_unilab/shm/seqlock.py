"""Versioned snapshots of tensors in shared memory: one writer, any number of readers, no waiting.

Versions take the slots in turn. The writer sets the next slot's word to the odd ``2v - 1``, copies
the payload, sets the word to ``2v``, and then announces ``v`` and its slot in one word. A reader
takes the announced version, checks that the slot's word is ``2v``, copies the payload out, and
checks the word again: a changed word means that the writer has reused the slot, and the reader
retries with the newer version, a bounded number of times. `fence` orders these steps
(`torchrl_unilab.shm.words`) but two: the copy needs none before it, as its address follows from the
announced word, and a version that is seen before its even word is retried.

`torchrl_unilab.weight_update` publishes weights and statistics in cells, collectors their metrics.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrl_unilab.checks import as_integer
from torchrl_unilab.errors import ContentionError, LayoutError, SegmentError
from torchrl_unilab.owner import Closed, Owner
from torchrl_unilab.processes import process_id, process_is_alive, this_process
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.lock import RangeLock
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.words import fence, shared_words, words_nbytes

DEFAULT_SLOTS = 3
DEFAULT_RETRIES = 1000
_YIELD_AFTER = 8  # retries without giving the core to a writer that may need it

_DIGEST, _SLOTS, _READERS, _WRITER, _ANNOUNCED = range(5)  # words of a cell
_CELL_WORDS = 5
_APPLIED, _PROCESS, _OVERTAKEN = range(3)  # words of a reader; the version it applied plus one
_READER_WORDS = 3


class Snapshot:
    """Private memory that a reader copies snapshots into.

    Args:
        layout: What a snapshot holds.

    Attributes:
        bytes: The whole block, uint8 [layout.nbytes].
        tensors: Dotted key to its tensor, a view into `bytes`.
    """

    def __init__(self, layout: BlockLayout) -> None:
        block = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
        self.bytes = block.numpy()
        self.tensors = layout.named_views(block)


class ReaderState(NamedTuple):
    """What a reader last reported.

    Attributes:
        applied: The version that it acts with, or None.
        process: The word of its process, 0 before its first report.
        overtaken: How many of its tries the writer overtook.
    """

    applied: int | None
    process: int
    overtaken: int


class SnapshotCell(Owner):
    """A shared segment that holds versioned snapshots of one set of tensors.

    One process publishes, in any of its threads. It is the publisher from its first publish until
    it closes the cell or ends; other processes are refused in that time. Processes that unpickle or
    `attach` the cell read. Each of `readers` readers reports the version that it applied.

    Args:
        initial: Dotted key to tensor: the layout, and the content of the first version.
        slots: How many snapshots rotate, at least 2.
        readers: How many readers report what they applied.
        name: Name to attach by from an unrelated process; anonymous if not given.
        first_version: Number of the first version.

    Attributes:
        layout: What a snapshot holds.
        publishes: How many snapshots were published through this attachment.
        overtaken: How many tries of its reads were overtaken by the writer.

    Raises:
        ConfigError: Fewer than two slots (a reader could find no whole version during a write), or
            a number of readers or a version below 0.
        SegmentSpaceError: The cell does not fit shared memory; nothing was allocated.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.shm import SnapshotCell
        >>> from torchrl_unilab.shm.seqlock import Snapshot
        >>> cell = SnapshotCell({"w": torch.zeros(3)})
        >>> cell.publish([torch.ones(3)])
        1
        >>> snapshot = Snapshot(cell.layout)
        >>> cell.read(snapshot), snapshot.tensors["w"].tolist()
        (1, [1.0, 1.0, 1.0])
        >>> cell.close()
    """

    def __init__(
        self,
        initial: Mapping[str, torch.Tensor],
        *,
        slots: int = DEFAULT_SLOTS,
        readers: int = 0,
        name: str | None = None,
        first_version: int = 0,
    ) -> None:
        # Before any memory is taken.
        slots = as_integer("seqlock slots", slots, "Use the default.", least=2)
        readers = as_integer("seqlock readers", readers, "Use 0 for none.", least=0)
        most = (1 << 62) // slots  # with its slot, a version fits a word, and so do those after it
        first_version = as_integer("first_version", first_version, "Use 0.", least=0, most=most)
        layout = BlockLayout.of(initial)
        segment = SharedSegment(self.nbytes(layout, slots, readers), name=name)
        self._open(segment, layout, slots, readers)
        words = self._words
        words[_SLOTS], words[_READERS] = slots, readers
        if initial:
            with torch.no_grad():
                torch._foreach_copy_(self._views[0], list(initial.values()))
        self._sequence[0] = 2 * first_version
        words[_ANNOUNCED] = first_version * slots
        fence()
        words[_DIGEST] = layout.digest  # last: without it nothing is attached

    @staticmethod
    def nbytes(layout: BlockLayout, slots: int = DEFAULT_SLOTS, readers: int = 0) -> int:
        """Return the bytes of shared memory that a cell takes."""
        words = _CELL_WORDS + slots + _READER_WORDS * readers
        return words_nbytes(words) + slots * layout.nbytes

    @classmethod
    def attach(cls, name: str, layout: BlockLayout) -> SnapshotCell:
        """Attach the named cell of an unrelated process.

        Raises:
            SegmentError: There is no segment of that name.
            LayoutError: The segment is not a whole snapshot cell, or holds another layout.
        """
        segment = SharedSegment.attach(name)
        try:
            slots, readers = cls._checked_header(segment, layout)
        except LayoutError:
            segment.close()
            raise
        cell = cls.__new__(cls)
        cell._open(segment, layout, slots, readers)
        return cell

    @classmethod
    def _checked_header(cls, segment: SharedSegment, layout: BlockLayout) -> tuple[int, int]:
        """Return slots and readers of a complete cell of `layout`."""
        large_enough = segment.nbytes >= words_nbytes(_CELL_WORDS)
        words = shared_words(segment.buffer, _CELL_WORDS) if large_enough else None
        if words is None or words[_DIGEST] != layout.digest:
            raise LayoutError(
                f"cannot attach {segment.name!r}: not a complete snapshot cell of this layout "
                f"(expected digest {layout.digest:#x}). Check the name, that its creator has "
                "started, and that both sides name the same keys, shapes and dtypes."
            )
        fence()
        slots, readers = words[_SLOTS], words[_READERS]
        if segment.nbytes != (expected := cls.nbytes(layout, slots, readers)):
            raise LayoutError(
                f"cannot attach {segment.name!r}: {segment.nbytes} bytes (expected {expected}). "
                "It was cut or written by something else: start its creator again."
            )
        return slots, readers

    def _open(self, segment: SharedSegment, layout: BlockLayout, slots: int, readers: int) -> None:
        self._segment, self.layout = segment, layout
        self.slots, self.readers = slots, readers
        count = _CELL_WORDS + slots + _READER_WORDS * readers
        words = shared_words(segment.buffer, count)
        self._words: memoryview | Closed = words[:_CELL_WORDS]
        self._sequence: memoryview | Closed = words[_CELL_WORDS : _CELL_WORDS + slots]
        self._reports: memoryview | Closed = words[_CELL_WORDS + slots :]
        payloads = segment.buffer[words_nbytes(count) :]
        self._payloads: Any = payloads.reshape(slots, layout.nbytes)
        with torch.inference_mode(False):  # or they could be written in that mode only
            blocks = [torch.from_numpy(payload) for payload in self._payloads]
            self._views: Any = [layout.views(block) for block in blocks]
        self._registration = RangeLock(segment)
        self._writer_pid = self._writer = 0  # this process, once it publishes
        self.publishes = self.overtaken = 0

    @property
    def name(self) -> str | None:
        """The name to attach by, or None for an anonymous cell."""
        return self._segment.name

    @property
    def version(self) -> int:
        """The newest published version; `first_version` is the initial content."""
        return self._words[_ANNOUNCED] // self.slots

    @property
    def closed(self) -> bool:
        """Whether this process has closed the cell."""
        return self._segment.closed

    # Writer

    def publish(self, tensors: Sequence[torch.Tensor], *, version: int = 0) -> int:
        """Publish tensors of the host, in the layout's order, and return their version.

        If the copy fails, or its process dies, readers keep the previous version, and the next
        publish takes the same slot.

        Args:
            tensors: One per field of `layout`.
            version: Lower bound of the new version, which is above the newest in any case.

        Raises:
            LayoutError: Shapes or dtypes differ; the published version is untouched.
            SegmentError: Another living process publishes here, or the cell is closed.
            WaitTimeoutError: Another process has been registering for seconds.
        """
        self.layout.check(tensors)
        while True:
            # Also in a forked copy, and after another attachment of this process has been closed.
            if self._writer_pid != os.getpid() or self._words[_WRITER] != self._writer:
                self._registration.run(
                    0, 1, self._become_writer, lambda: "writer of a snapshot cell"
                )
            with self._publishing:
                words, sequence = self._words, self._sequence
                if words[_WRITER] != self._writer:  # closed just now
                    continue
                newest, slot = divmod(words[_ANNOUNCED], self.slots)
                version = max(newest + 1, version)
                slot = (slot + 1) % self.slots
                sequence[slot] = 2 * version - 1
                fence()
                if tensors:
                    with torch.no_grad():
                        torch._foreach_copy_(self._views[slot], tensors)  # type: ignore[arg-type]
                fence()
                sequence[slot] = 2 * version
                words[_ANNOUNCED] = version * self.slots + slot
                self.publishes += 1
                return version

    def _become_writer(self) -> None:
        writer = self._words[_WRITER]
        if writer != this_process() and process_is_alive(writer):
            raise SegmentError(
                f"cannot publish a snapshot: process {process_id(writer)} publishes here "
                "(expected one writer). Publish from there, or close it there first."
            )
        # Of the threads of this process, whichever attachment they publish through.
        self._publishing = self._segment.thread_lock()
        self._writer, self._writer_pid = this_process(), os.getpid()
        self._words[_WRITER] = self._writer  # last: `close` gives up what it knows of

    # Readers

    def read(self, out: Snapshot, *, retries: int = DEFAULT_RETRIES) -> int:
        """Copy the newest version to `out` and return it.

        Args:
            out: Holds one whole version afterwards, or a mix after an error.
            retries: Tries after the first.

        Raises:
            ContentionError: Overtaken on every try.
        """
        words, sequence = self._words, self._sequence
        for attempt in range(retries + 1):
            version, slot = divmod(words[_ANNOUNCED], self.slots)
            if sequence[slot] == 2 * version:
                np.copyto(out.bytes, self._payloads[slot])
                fence()
                if sequence[slot] == 2 * version:
                    return version
            self.overtaken += 1
            if attempt >= _YIELD_AFTER:
                time.sleep(0)
        raise ContentionError(
            f"cannot read a snapshot: overtaken on {retries + 1} tries, last at version "
            f"{version} (expected one whole copy). Publish less often or add slots."
        )

    def newest(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the newest version, and a copy of it by dotted key. Raises as `read`."""
        snapshot = Snapshot(self.layout)
        return self.read(snapshot), snapshot.tensors

    def become_reader(self, reader: int, version: int | None = None) -> None:
        """Record that this process is reader `reader`, and acts with `version`, or with none."""
        self._reports[_READER_WORDS * reader + _PROCESS] = this_process()
        self.report_applied(reader, version)

    def report_applied(self, reader: int, version: int | None) -> None:
        """Record that reader `reader`, this process, acts with `version`, or with none."""
        base = _READER_WORDS * reader
        self._reports[base + _OVERTAKEN] = self.overtaken
        self._reports[base + _APPLIED] = 0 if version is None else version + 1

    def reader(self, reader: int) -> ReaderState:
        """Return what a reader last reported."""
        base = _READER_WORDS * reader
        applied, process, overtaken = self._reports[base : base + _READER_WORDS]
        return ReaderState(applied - 1 if applied else None, process, overtaken)

    # Lifetime

    def close(self) -> None:
        """Close the cell; its creator frees it. Idempotent."""
        with self._segment.thread_lock():  # another thread's publish ends before
            if self.closed:
                return
            if isinstance(self._words, memoryview):  # else an interrupt cut `close` short
                own = self._writer_pid == os.getpid() and self._words[_WRITER] == self._writer
                if own:  # another process may write from now on
                    self._words[_WRITER] = 0
            # All that holds the mapping, which would outlive the cell's end.
            self._words = self._sequence = self._reports = Closed("snapshot cell")
            self._payloads = self._views = self._words
            self._segment.close()

    def __getstate__(self) -> tuple[Any, ...]:
        return self._segment, self.layout, self.slots, self.readers

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._open(*state)
