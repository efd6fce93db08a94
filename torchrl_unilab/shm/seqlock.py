"""Versioned snapshots in shared memory: one writer, any number of readers, nobody waits.

`SeqLock` is the protocol over words and slots, `SnapshotCell` a segment that holds a
tensor layout under it. Version 0 is the initial content; each publish makes the next.

Versions take the slots in turn. The writer sets the next slot's word to ``2v - 1``, copies the
payload, sets the word to ``2v`` and then announces ``v`` and its slot in one word. A reader takes
the announced version, checks that the slot's word is ``2v``, copies the payload out, and
checks the word again. A changed word means that the writer has lapped it: it retries with
the newer version, a bounded number of times. The order of memory this needs is argued in
`torchrl_unilab.shm.words`.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrl_unilab.errors import ConfigError, ContentionError, SegmentError
from torchrl_unilab.shm.header import DIGEST, MAGIC, READY, attach_complete
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.liveness import process_id, process_is_alive, this_process
from torchrl_unilab.shm.segment import SegmentKind, SharedSegment
from torchrl_unilab.shm.words import LINE, SharedWords, is_weakly_ordered

__all__ = ["SeqLock", "SnapshotCell", "cell_nbytes"]

DEFAULT_SLOTS = 3
DEFAULT_RETRIES = 1000
_YIELD_AFTER = 8  # retries without giving the core to a writer that may need it


class SeqLock:
    """The protocol: an announced version and one sequence word and payload per slot.

    Args:
        buffer: Shared bytes, zero-filled when created, `nbytes` of them from `offset`.
        offset: First byte, a multiple of 64.
        payload_nbytes: Bytes of one snapshot, a multiple of 64.
        slots: How many snapshots rotate, at least 2.
        checksum: Guard each snapshot by a CRC-32, for weakly ordered machines.

    Raises:
        ConfigError: Fewer than two slots.
    """

    def __init__(
        self,
        buffer: npt.NDArray[np.uint8],
        offset: int,
        payload_nbytes: int,
        *,
        slots: int = DEFAULT_SLOTS,
        checksum: bool,
    ) -> None:
        if slots < 2:
            raise ConfigError(
                f"seqlock slots: {slots} (expected at least 2). "
                "With one slot a reader could find no whole version while it is written."
            )
        words = SharedWords.nbytes(1 + 2 * slots)
        self._slots = slots
        self._checksum = checksum
        self._announced = SharedWords(buffer, offset, 1)
        self._sequence = SharedWords(buffer, offset + LINE, slots)
        self._crc = SharedWords(buffer, offset + LINE * (1 + slots), slots)
        start = offset + words
        self.payloads: list[npt.NDArray[np.uint8]] = [
            buffer[start + i * payload_nbytes : start + (i + 1) * payload_nbytes]
            for i in range(slots)
        ]

    @staticmethod
    def nbytes(payload_nbytes: int, slots: int) -> int:
        """Return the bytes that the words and `slots` payloads take."""
        return SharedWords.nbytes(1 + 2 * slots) + slots * payload_nbytes

    @property
    def version(self) -> int:
        """The newest published version: one word."""
        return self._announced[0] // self._slots

    @property
    def is_writing(self) -> bool:
        """Whether the next version is open: being written, or left so by a dead writer."""
        return self._sequence[(self._announced[0] + 1) % self._slots] % 2 == 1

    def seal_initial(self, version: int = 0) -> None:
        """Declare slot 0's content to be `version`; call before any reader attaches."""
        if self._checksum:
            self._crc[0] = _crc(self.payloads[0], version)
        self._sequence[0] = 2 * version
        self._announced[0] = version * self._slots

    def begin(self, version: int = 0) -> int:
        """Open the next version for writing and return its slot.

        If the write fails, or its process dies, readers keep the previous version, and
        the next `begin` opens the same slot again.

        Args:
            version: The least its number may be; above the newest in any case.
        """
        newest, slot = divmod(self._announced[0], self._slots)
        self._opened = max(newest + 1, version)
        slot = (slot + 1) % self._slots
        self._sequence[slot] = 2 * self._opened - 1
        return slot

    def commit(self) -> int:
        """Announce the version that `begin` opened and return it."""
        version = self._opened
        slot = (self._announced[0] + 1) % self._slots
        if self._checksum:
            self._crc[slot] = _crc(self.payloads[slot], version)
        self._sequence[slot] = 2 * version
        self._announced[0] = version * self._slots + slot
        return version

    def try_read(self, out: npt.NDArray[np.uint8]) -> int | None:
        """Copy the newest version to `out` and return it, or None if overtaken."""
        version, slot = divmod(self._announced[0], self._slots)
        if self._sequence[slot] != 2 * version:
            return None
        np.copyto(out, self.payloads[slot])
        if self._checksum and _crc(out, version) != self._crc[slot]:
            return None
        return version if self._sequence[slot] == 2 * version else None

    def read(
        self, out: npt.NDArray[np.uint8], *, retries: int = DEFAULT_RETRIES
    ) -> tuple[int, int]:
        """Copy the newest version to `out`; return it and how many tries were overtaken.

        Raises:
            ContentionError: Overtaken on every try. `out` holds no whole version.
        """
        for attempt in range(retries + 1):
            version = self.try_read(out)
            if version is not None:
                return version, attempt
            if attempt >= _YIELD_AFTER:
                time.sleep(0)
        raise ContentionError(
            f"cannot read a snapshot: overtaken on {retries + 1} tries, last at version "
            f"{self.version} (expected one whole copy). Publish less often or add slots."
        )


def _crc(payload: npt.NDArray[np.uint8], version: int) -> int:
    return zlib.crc32(payload.data, version & 0xFFFFFFFF)


# Words ahead of the seqlock: what a process that attaches by name checks and reads.
_MAGIC = 0x554E494C_41420001
# Beside the words of every header.
_SLOTS, _READERS, _CHECKSUM, _WRITER = 2, 3, 4, 6
_HEADER_WORDS = 7
# Words of each reader: the version it applied plus one, its process, its overtaken tries.
_APPLIED, _PROCESS, _OVERTAKEN = range(3)
_READER_WORDS = 3


class SnapshotCell:
    """A shared segment that holds versioned snapshots of one set of tensors.

    One process publishes, from any of its threads, from its first publish until it closes the
    cell or ends; another is refused meanwhile. Processes that unpickle or `attach` the cell
    read. Each of `readers` readers has words of its own for the version that it applied.

    Args:
        initial: Dotted key to tensor: the layout, and the content of the first version.
        slots: How many snapshots rotate, at least 2.
        readers: How many readers report what they applied.
        name: Name to attach by from an unrelated process; anonymous if not given.
        kind: Kind of segment; the platform's default if not given.
        checksum: Guard each snapshot by a CRC-32; by default where the machine's memory
            order is weak.
        first_version: Number of the first version.

    Raises:
        SegmentSpaceError: It does not fit shared memory; nothing was allocated.

    Example:
        >>> cell = SnapshotCell({"w": torch.zeros(3)})
        >>> cell.publish({"w": torch.ones(3)})
        1
        >>> version, values = cell.read()
        >>> version, values["w"].tolist()
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
        kind: SegmentKind | None = None,
        checksum: bool | None = None,
        first_version: int = 0,
    ) -> None:
        if slots < 2:  # before any memory is taken
            raise ConfigError(f"seqlock slots: {slots} (expected at least 2). Use the default.")
        layout = BlockLayout.of(initial)
        checksum = is_weakly_ordered() if checksum is None else checksum
        nbytes = cell_nbytes(layout, slots, readers)
        self._open(SharedSegment(nbytes, name=name, kind=kind), layout, slots, readers, checksum)
        header = self._header
        header[MAGIC] = _MAGIC
        header[DIGEST] = layout.digest
        header[_SLOTS] = slots
        header[_READERS] = readers
        header[_CHECKSUM] = int(checksum)
        if initial:
            with torch.no_grad():
                torch._foreach_copy_(self._views[0], list(initial.values()))
        self._lock.seal_initial(first_version)
        header[READY] = 1

    @classmethod
    def attach(cls, name: str, layout: BlockLayout) -> SnapshotCell:
        """Attach the named cell of an unrelated process.

        Raises:
            SegmentError: There is no segment of that name.
            LayoutError: It is not a snapshot cell, or holds another layout.
        """
        segment = attach_complete(
            name,
            "snapshot cell",
            _MAGIC,
            layout.digest,
            _HEADER_WORDS,
            size=lambda header: cell_nbytes(layout, header[_SLOTS], header[_READERS]),
        )
        header = SharedWords(segment.buffer, 0, _HEADER_WORDS)
        cell = cls.__new__(cls)
        cell._open(segment, layout, header[_SLOTS], header[_READERS], bool(header[_CHECKSUM]))
        return cell

    def _open(
        self, segment: SharedSegment, layout: BlockLayout, slots: int, readers: int, checksum: bool
    ) -> None:
        self._segment = segment
        self.layout = layout
        self.slots = slots
        self.readers = readers
        self._checksum = checksum
        self._header = SharedWords(segment.buffer, 0, _HEADER_WORDS)
        offset = SharedWords.nbytes(_HEADER_WORDS)
        self._reader_words = SharedWords(segment.buffer, offset, _READER_WORDS * readers)
        self._lock = SeqLock(
            segment.buffer,
            offset + SharedWords.nbytes(_READER_WORDS * readers),
            layout.nbytes,
            slots=slots,
            checksum=checksum,
        )
        self._views = [layout.views(torch.from_numpy(p)) for p in self._lock.payloads]
        self._writer = 0  # this process, once it publishes
        # Threads of the one writing process, whichever attachment they publish through.
        self._publishing = _publishing.setdefault(segment.identity, threading.Lock())
        self._staging: npt.NDArray[np.uint8] | None = None
        self._staged_views: list[torch.Tensor] = []

    @property
    def name(self) -> str | None:
        """The name to attach by, or None for an anonymous cell."""
        return self._segment.name

    @property
    def version(self) -> int:
        """The newest published version; `first_version` is the initial content."""
        _ = self._segment.buffer  # a closed cell is refused
        return self._lock.version

    @property
    def closed(self) -> bool:
        """Whether this process has closed the cell."""
        return self._segment.closed

    def publish(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Publish a mapping (dotted key to tensor) and return its version.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; the published version is untouched.
            SegmentError: Another living process publishes here.
        """
        return self.publish_checked(self.layout.select(tensors))

    def publish_ordered(self, tensors: Sequence[torch.Tensor]) -> int:
        """Publish tensors given in the layout's order and return their version.

        Raises:
            LayoutError: Shapes or dtypes differ; the published version is untouched.
        """
        self.layout.check(tensors)
        return self.publish_checked(tensors)

    def publish_checked(self, tensors: Sequence[torch.Tensor], *, version: int = 0) -> int:
        """Publish tensors that the layout's ``check`` has passed.

        Args:
            tensors: In the layout's order.
            version: The least that the new version's number may be.
        """
        with self._publishing:
            slot = self._begin(version)
            if tensors:
                with torch.no_grad():
                    torch._foreach_copy_(self._views[slot], tensors)  # type: ignore[arg-type]
            return self._lock.commit()

    def publish_by(
        self, write: Callable[[npt.NDArray[np.uint8]], None], *, version: int = 0
    ) -> int:
        """Publish what `write` puts into the bytes of the slot it is given.

        If `write` raises, the published version stays as it was.
        """
        with self._publishing:
            write(self._lock.payloads[self._begin(version)])
            return self._lock.commit()

    def _begin(self, version: int) -> int:
        _ = self._segment.buffer  # a closed cell is refused
        if self._writer != this_process():  # of this process, also in a forked copy
            self._claim()
        return self._lock.begin(version)

    def _claim(self) -> None:
        """Become the one process that publishes."""
        with self._segment.exclusively():
            writer = self._header[_WRITER]
            if writer != this_process() and process_is_alive(writer):
                raise SegmentError(
                    f"cannot publish a snapshot: process {process_id(writer)} publishes here "
                    "(expected one writer). Publish from there, or close it there first."
                )
            self._header[_WRITER] = self._writer = this_process()

    def stage(self, *, retries: int = DEFAULT_RETRIES) -> tuple[int, list[torch.Tensor]]:
        """Copy the newest version into private memory of this cell.

        Returns:
            The version, and one tensor per field in the layout's order. They are reused
            by the next call and hold one whole version, or stale bytes after an error.

        Raises:
            ContentionError: Overtaken on every try.
        """
        _ = self._segment.buffer
        if self._staging is None:
            flat = torch.empty(self.layout.nbytes, dtype=torch.uint8)
            self._staging, self._staged_views = flat.numpy(), self.layout.views(flat)
        version, self.overtaken = self._lock.read(self._staging, retries=retries)
        return version, self._staged_views

    @property
    def publish_cut_off(self) -> bool:
        """Whether the writer died in the middle of a publish; readers keep the version before."""
        writer = self._header[_WRITER]
        return self._lock.is_writing and writer != 0 and not process_is_alive(writer)

    overtaken: int = 0
    """Tries of the last `stage` that the writer overtook."""

    @property
    def staging(self) -> npt.NDArray[np.uint8]:
        """The bytes behind the last `stage`."""
        assert self._staging is not None, "stage() comes first"
        return self._staging

    def read(self, *, retries: int = DEFAULT_RETRIES) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the newest version and its tensors, copied out, by dotted key."""
        version, views = self.stage(retries=retries)
        return version, {k: v.clone() for k, v in zip(self.layout.keys, views, strict=True)}

    def report_applied(self, reader: int, version: int | None) -> None:
        """Record that reader `reader`, this process, acts with `version`, or with none."""
        base = _READER_WORDS * reader
        words = self._reader_words
        words[base + _PROCESS] = this_process()
        if version is not None:  # a stage came before
            words[base + _OVERTAKEN] = words[base + _OVERTAKEN] + self.overtaken
        words[base + _APPLIED] = 0 if version is None else version + 1

    def applied(self, reader: int) -> int | None:
        """Return the version that a reader acts with, or None if with none."""
        value = self._reader_words[_READER_WORDS * reader + _APPLIED]
        return value - 1 if value else None

    def reader_pid(self, reader: int) -> int | None:
        """Return the process id of a reader, or None before it first applied a version."""
        return process_id(self._reader_words[_READER_WORDS * reader + _PROCESS]) or None

    def reader_is_alive(self, reader: int) -> bool:
        """Return whether the process that is a reader lives."""
        return process_is_alive(self._reader_words[_READER_WORDS * reader + _PROCESS])

    def reader_overtaken(self, reader: int) -> int:
        """Return how often a reader was overtaken and retried."""
        return self._reader_words[_READER_WORDS * reader + _OVERTAKEN]

    def close(self) -> None:
        """Close the cell; its creator frees it. Idempotent."""
        if not self.closed and self._writer and self._writer == this_process():
            self._header[_WRITER] = 0
            self._writer = 0
        self._segment.close()

    def __enter__(self) -> SnapshotCell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self._segment, self.layout, self.slots, self.readers, self._checksum)
        return _attach_pickled, args


# By segment, so that two attachments of one process do not publish at once.
_publishing: weakref.WeakValueDictionary[tuple[int, int], threading.Lock] = (
    weakref.WeakValueDictionary()
)


def _attach_pickled(*args: Any) -> SnapshotCell:
    cell = SnapshotCell.__new__(SnapshotCell)
    cell._open(*args)
    return cell


def cell_nbytes(layout: BlockLayout, slots: int, readers: int) -> int:
    """Return the bytes of shared memory that a `SnapshotCell` takes."""
    words = _HEADER_WORDS + _READER_WORDS * readers
    return SharedWords.nbytes(words) + SeqLock.nbytes(layout.nbytes, slots)
