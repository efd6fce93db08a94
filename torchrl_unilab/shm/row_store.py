"""Where the parts of shared rows lie in their segment: sizes, offsets, views. No protocol."""

from __future__ import annotations

import torch

from torchrl_unilab.errors import SegmentSpaceError
from torchrl_unilab.shm.layout import align
from torchrl_unilab.shm.place import SharedPlace
from torchrl_unilab.shm.row_layout import WORD, RowLayout
from torchrl_unilab.shm.segment import SharedSegment, free_bytes
from torchrl_unilab.shm.words import LINE, SharedWords

__all__ = ["REWRITE_ROWS", "RowStore"]

HEADER_WORDS = 8
READY, HEAD, FLOOR, VERSION, FREED, TAKEN, REWRITING, META = range(HEADER_WORDS)
WRITER_WORDS = 4
REWRITE_ROWS = 1024
"""Rows rewritten in place at a time: how many are noted, and lost if the process dies."""


class RowStore:
    """The parts of shared rows.

    Args:
        layout: A row.
        capacity: Rows.
        writers: Processes that may write.
        side_slots: Slots of the side table.
        meta: Bytes of the description that is kept with the rows.
    """

    def __init__(
        self, layout: RowLayout, capacity: int, writers: int, side_slots: int, meta: int
    ) -> None:
        self.layout = layout
        self.capacity = capacity
        self.writers = writers
        self.side_slots = side_slots
        side_words = layout.linked_words if side_slots else 0
        sizes = {
            "header": SharedWords.nbytes(HEADER_WORDS),
            "writers": SharedWords.nbytes(writers * WRITER_WORDS),
            "meta": meta,
            "rewritten": REWRITE_ROWS * 8,
            "free": side_slots * WORD,
            "owners": side_slots * WORD,
            "side": side_slots * side_words * WORD,
            "rows": capacity * layout.words * WORD,
        }
        self.spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes.items():
            self.spans[name] = (end, end + size)
            end = align(end + size, LINE)
        self.nbytes = end
        self._side_words = side_words

    def build(self, place: SharedPlace, meta: bytes) -> SharedSegment:
        """Make the memory, under the place's lock.

        Raises:
            SegmentSpaceError: It does not fit; says how many rows would. Nothing was allocated.
        """
        free = free_bytes(place.kind)
        if self.nbytes > free:
            row = self.nbytes / self.capacity
            raise SegmentSpaceError(
                f"cannot create {self.capacity} shared rows: {self.nbytes} bytes do not fit "
                f"(expected at most {free}, free for {place.kind} segments). About "
                f"{max(0, int(free / row) - 1)} rows would."
            )
        segment = place.find()
        if segment is None or segment.nbytes != self.nbytes:
            segment = place.build(self.nbytes)
        first, last = self.spans["meta"]
        segment.buffer[first:last] = torch.frombuffer(bytearray(meta), dtype=torch.uint8).numpy()
        free_slots = torch.from_numpy(segment.buffer)[slice(*self.spans["free"])]
        free_slots.view(torch.int32).copy_(torch.arange(self.side_slots))
        header, _ = self.words(segment)
        header[META] = len(meta)
        header[FREED] = self.side_slots
        header[READY] = 1
        return segment

    def words(self, segment: SharedSegment) -> tuple[SharedWords, SharedWords]:
        """The words of the header, and those of the writers."""
        header = SharedWords(segment.buffer, 0, HEADER_WORDS)
        return header, SharedWords(
            segment.buffer, self.spans["writers"][0], self.writers * WRITER_WORDS
        )

    @staticmethod
    def read_meta(segment: SharedSegment, writers: int) -> bytes | None:
        """Return what describes the rows of a segment, or None if it is not complete."""
        header = SharedWords(segment.buffer, 0, HEADER_WORDS)
        if not header[READY]:
            return None
        start = SharedWords.nbytes(HEADER_WORDS + writers * WRITER_WORDS)
        return segment.buffer[start : start + header[META]].tobytes()

    def tensor(self, segment: SharedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A part as one flat tensor."""
        return torch.from_numpy(segment.buffer)[slice(*self.spans[name])].view(dtype)
