"""Shards of numbered rows in a segment: their words, their memory, their locks.

A row has four addresses:

- its *number*: the rows of a shard are numbered from 0, and no number is used twice;
- its *place*, ``number % shard_rows``: where it lies in its shard;
- its *id*, ``number * shards + shard``: its number among the rows of all shards;
- its *position*, ``id % (shards * shard_rows)``: the index that users of the replay see.

Rows with ``floor <= number < head`` are whole. A shard has one writer at a time, under a lock that
the kernel releases when its holder dies. `SharedRows` writes and reads.

A death needs a repair in two cases only, both recorded before they begin: rows that are rewritten
in place (`VERSION` is odd, and their places are noted), and all rows while they are replaced
(`LOADING` names the process). The next holder of the lock then replaces the noted rows by whole
ones, or clears all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from torchrl_unilab.errors import ContentionError
from torchrl_unilab.processes import process_id, this_process
from torchrl_unilab.shm.layout import BlockLayout, align
from torchrl_unilab.shm.lock import RangeLock
from torchrl_unilab.shm.row_layout import WORD
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.window import Lineage, Window
from torchrl_unilab.shm.words import fence, shared_words, words_nbytes

T = TypeVar("T")

LOADING, _FIRST = range(2)  # a word of all shards, and where those of the first shard begin
WRITER, FLOOR, HEAD, BASE, ORIGIN, VERSION, NOTED, COUNT, STEPS = range(9)
# Words of a shard: the process that writes; the first readable row, and one above the last; the
# first row since all were cleared, and its number across checkpoints; rewrites begun and ended;
# places noted for a rewrite; what `SharedRows.count` adds up; start and rows of the newest steps.
SHARD_WORDS = 9
STRIDE_BITS = 24
"""Bits of `STEPS` for the rows of a step; the other bits hold the number of the first such row."""
NOTES = 1024
"""Rows rewritten in place at a time: their places are noted while they are written."""
_CHUNK_BYTES = 1 << 24
"""Bytes that are copied at a time, unless one row has more."""

Parts = Sequence[torch.Tensor]
"""Rows by part, each int32 [n, width]."""


class Shards:
    """Words, rows and locks of all shards.

    Args:
        segment: At least `nbytes`, zero-filled when new.
        widths: 32-bit words of each part of a row; a part of all rows lies in one block.
        shards: How many shards.
        shard_rows: Rows of each.
        timeout: Seconds to wait for the lock of a shard.
    """

    def __init__(
        self,
        segment: SharedSegment,
        widths: Sequence[int],
        shards: int,
        shard_rows: int,
        timeout: float,
    ) -> None:
        self.segment, self.widths, self.timeout = segment, tuple(widths), timeout
        self.shards, self.shard_rows = shards, shard_rows
        self.chunk_rows = max(1, min(NOTES, _CHUNK_BYTES // (sum(widths) * WORD)))
        """Rows that are copied at a time."""
        self.detach: Callable[[Parts, torch.Tensor], object] = lambda parts, positions: None
        """Hook: called with (parts, positions) before rows are rewritten in place."""
        self._words = shared_words(segment.buffer, _FIRST + shards * SHARD_WORDS)
        firsts = range(_FIRST, len(self._words), SHARD_WORDS)
        self.words = [self._words[first : first + SHARD_WORDS] for first in firsts]
        """The words of each shard, which the holder of its lock stores."""
        self._lock = RangeLock(segment, timeout)
        layout = _layout(widths, shards, shard_rows)
        _, self._notes, *self.blocks = layout.views(torch.from_numpy(segment.buffer))
        self.parts = [[block[shard::shards] for block in self.blocks] for shard in range(shards)]
        """The rows of each shard by part, each int32 [shard_rows, width]."""
        # The same for `fill`: NumPy copies opaque items faster, and slices in half the time.
        self._items = [
            [part.numpy().view(f"V{part.shape[1] * WORD}") for part in parts]
            for parts in self.parts
        ]

    @staticmethod
    def nbytes(widths: Sequence[int], shards: int, shard_rows: int) -> int:
        """Return the bytes of shared memory."""
        return _layout(widths, shards, shard_rows).nbytes

    def load(self, word: int) -> tuple[int, ...]:
        """Return one word of each shard."""
        return tuple(self._words[_FIRST + word :: SHARD_WORDS])

    # What may be read

    def window(self) -> Window:
        """Return the rows that may be read now; call `settled` before reading them."""
        if self._words[LOADING]:
            return Window((0,) * self.shards, (0,) * self.shards)
        fence()  # or the heads could be older, of rows that have been replaced since
        heads = self.load(HEAD)
        fence()  # or the floors could be older than the heads, and the window too large
        floors = self.load(FLOOR)
        return Window(tuple(map(min, floors, heads)), heads)

    def readable(self) -> Window:
        """Return a window; if it is empty, first wait for writes that are under way.

        Raises:
            WaitTimeoutError: A writer did not finish in time; names it.
        """
        window = self.window()
        if not window.size:
            for shard in range(self.shards):
                self.wait(shard)
            window = self.window()
        return window

    def draw(self, count: int, window: Window, generator: torch.Generator | None) -> torch.Tensor:
        """Draw rows of a window uniformly, with replacement: ids, int64 [count].

        Raises:
            ContentionError: The window is empty.
        """
        if window.size < 1:
            raise ContentionError(
                "replay read: all rows of the snapshot are overwritten (expected some left). "
                "Sample sooner, or use a larger replay."
            )
        if self.shards == 1:
            (floor,), (head,) = window
            return torch.randint(floor, head, (count,), generator=generator, device="cpu")
        floors, heads = torch.tensor(window, device="cpu")
        ends = (heads - floors).cumsum(0)
        drawn = torch.randint(window.size, (count,), generator=generator, device="cpu")
        shard = torch.bucketize(drawn, ends, right=True)
        return drawn.sub_(ends[shard]).add_(heads[shard]).mul_(self.shards).add_(shard)

    def extent(self, window: Window) -> tuple[int, bool]:
        """Return how many positions are written, and whether one of them cannot be read now.

        Positions count from 0 up to the first that a shard has not written.
        """
        ends, hidden = [], False
        for shard, base in enumerate(self.load(BASE)):
            floor, head = window.floors[shard], window.heads[shard]
            ends.append(self.shards * min(head - base, self.shard_rows) + shard)
            hidden |= floor > max(base, head - self.shard_rows)
        return max(0, min(*ends, self.shards * self.shard_rows)), hidden

    def length(self) -> int:
        """Return how many positions are written if there is one shard: a fast `extent`."""
        words = self.words[0]
        written = min(words[HEAD] - words[BASE], self.shard_rows)
        return 0 if self._words[LOADING] else max(0, written)

    def lineage(self) -> Lineage:
        """Return a window, and what its numbers count from."""
        while True:
            bases = self.load(BASE)
            fence()  # or the window could be older
            window, origins = self.window(), self.load(ORIGIN)
            fence()  # before the bases are read again
            if self.load(BASE) == bases:
                return Lineage(bases, origins, window)

    def settled_lineage(self) -> Lineage:
        """Return a `lineage`, but wait for a process that replaces all rows. Raises as `locked`."""
        lineage = self.lineage()
        # Without heads all rows are being replaced, or no row was ever written.
        return lineage if any(lineage.window.heads) else self.locked(0, self.lineage)

    def steps(self) -> tuple[tuple[int, int], ...]:
        """Return (first row, rows per step) of each shard's newest steps of one size.

        A step has one row per environment. From the first row on, row ``i`` is followed by row
        ``i + rows per step`` of the same environment. Load the window before the call: then this
        holds for all of its rows from the first one on.
        """
        fence()  # or the window could be newer
        words = self.load(STEPS)
        return tuple((word >> STRIDE_BITS, max(1, word % (1 << STRIDE_BITS))) for word in words)

    def in_order(self, window: Window) -> bool:
        """Return whether rows lie in the order of time: one shard, one row after the other."""
        (first, stride), *others = self.steps()
        return not others and stride == 1 and first <= window.floors[0]

    def note_steps(self, shard: int, rows: int) -> None:
        """Record that the steps appended next have `rows` rows. The caller holds the lock."""
        words = self.words[shard]
        if rows != words[STEPS] % (1 << STRIDE_BITS):
            words[STEPS] = words[HEAD] << STRIDE_BITS | rows

    @property
    def rewritten(self) -> int:
        """A number that changes whenever a row that was already written changes."""
        return sum(self.load(VERSION))

    @property
    def revision(self) -> int:
        """A number that changes whenever rows do."""
        return (self.rewritten << 48) + sum(self.load(HEAD))

    def newest(self, positions: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        """Return the ids of the newest rows at positions, int64 [n]."""
        last = self.bounds(heads, positions) - self.shards
        return last - (last - positions).remainder_(self.shards * self.shard_rows)

    def positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the positions of rows, int64 [n]."""
        return ids.remainder(self.shards * self.shard_rows)

    def positions_in(self, window: Window) -> torch.Tensor:
        """Return the positions of all rows of a window, shard by shard, int64 [n]."""
        ids = [
            torch.arange(floor, head, device="cpu") * self.shards + shard
            for shard, (floor, head) in enumerate(zip(*window, strict=True))
        ]
        return self.positions(torch.cat(ids))

    def bounds(self, words: tuple[int, ...], rows: torch.Tensor) -> int | torch.Tensor:
        """Return, for each of n rows, a number of its shard as an id.

        Args:
            words: A number for each shard.
            rows: Ids or positions, int64 [n].
        """
        if self.shards == 1:
            return words[0]
        shard = rows.remainder(self.shards)
        return torch.tensor(words, device="cpu")[shard].mul_(self.shards).add_(shard)

    # Locks, and what a dead holder left

    def locked(self, shard: int, action: Callable[[], T]) -> T:
        """Run `action` under a shard's lock, once its rows are repaired. Not reentrant.

        Raises:
            WaitTimeoutError: Another process or thread held the lock for too long.
        """

        def run() -> tuple[T] | None:
            if self._words[LOADING]:  # the process died while it replaced rows: it held this lock
                return None
            if self.words[shard][VERSION] % 2:
                self._repair(shard)
            return (action(),)

        while (done := self._lock.run(shard, 1, run, partial(self._holder, [shard]))) is None:
            self.all_locked(_nothing)
        return done[0]

    def all_locked(self, action: Callable[[], T]) -> T:
        """Run `action` under the locks of all shards, as `locked` does."""

        def run() -> T:
            if self._words[LOADING]:
                self._clear()
                self._words[LOADING] = 0
            for shard, words in enumerate(self.words):
                if words[VERSION] % 2:
                    self._repair(shard)
            return action()

        return self._lock.run(0, self.shards, run, partial(self._holder, range(self.shards)))

    def wait(self, shard: int) -> None:
        """Wait until no process writes to a shard, or replaces rows. Raises as `locked`."""
        self.locked(shard, _nothing)

    def settled(self) -> tuple[int, ...]:
        """Return the versions of all shards once they are even: rows may be copied now.

        Raises as `locked`.
        """
        if self._words[LOADING]:
            self.wait(0)
        versions = self.load(VERSION)
        while any(version % 2 for version in versions):
            for shard, version in enumerate(versions):
                if version % 2:
                    self.wait(shard)
            versions = self.load(VERSION)
        fence()  # before the rows are copied
        return versions

    def clear(self) -> None:
        """Forget all rows; the next ones lie at position 0. Raises as `locked`."""
        self.all_locked(lambda: self._replace(_nothing))

    def continue_at(self, shard: int, place: int) -> None:
        """Write the next row of a full shard to a place, where its oldest row lies then.

        Rows that a dead writer has hidden are not shown: its newest whole row takes their place.
        If the process dies meanwhile, the oldest rows are hidden, too. Raises as `locked`.
        """

        def move() -> None:
            words, size = self.words[shard], self.shard_rows
            floor, end = words[FLOOR], words[HEAD]
            head = end + (place - end) % size
            # The oldest rows become the newest: those of them that may be torn.
            torn = torch.arange(end, min(floor + size, head), device="cpu").remainder_(size)
            whole = floor < end  # some row is
            if whole and len(torn):
                self._copy(shard, (end - 1) % size, torn)
            words[FLOOR] = max(floor, head - size) if whole else head
            if (stride := words[STEPS] % (1 << STRIDE_BITS)) > 1:  # a step is cut there
                words[STEPS] = head << STRIDE_BITS | stride
            fence()  # before more rows than there are could be shown
            words[HEAD] = head

        self.locked(shard, move)

    def _replace(self, fill: Callable[[], object]) -> None:
        """Replace all rows. If this fails, or the process dies, no rows are left."""
        self._words[LOADING] = this_process()
        fence()  # before a change is seen
        self._clear()
        fill()
        fence()  # after the last byte of the rows
        self._words[LOADING] = 0

    def _clear(self) -> None:
        for words in self.words:
            base = align(max(words[HEAD], words[FLOOR]), self.shard_rows)
            origin = words[ORIGIN] + base - words[BASE]
            words[FLOOR] = words[BASE] = base
            fence()  # before a head that would show older rows, or count from an older base
            words[HEAD], words[ORIGIN] = base, origin
            words[STEPS] = 0  # and whoever writes there goes on
            words[VERSION] += 2 - words[VERSION] % 2
        fence()  # before the first byte of new rows

    def _repair(self, shard: int) -> None:
        """Replace rows that a dead process left half rewritten by the shard's newest whole row."""
        words = self.words[shard]
        torn = self._notes[shard, : words[NOTED]]
        places = torch.arange(words[FLOOR], words[HEAD], device="cpu").remainder_(self.shard_rows)
        whole = places[~torch.isin(places, torn)]
        if len(whole):
            self._copy(shard, int(whole[-1]), torn)
        else:
            words[FLOOR] = words[HEAD]
        fence()  # after the last byte of the rows
        words[VERSION] += 1

    def _copy(self, shard: int, place: int, places: torch.Tensor) -> None:
        """Copy the row at a place to others, int64 [n], as rows that follow none."""
        rows = [part[place].expand(len(places), -1).clone() for part in self.parts[shard]]
        self.detach(rows, places * self.shards + shard)
        self.fill_at(shard, places, rows)

    def fill_at(self, shard: int, places: torch.Tensor, parts: Parts) -> None:
        """Copy rows to places of a shard, which the caller holds."""
        for target, part in zip(self.parts[shard], parts, strict=True):
            target.index_copy_(0, places, part)

    def _holder(self, shards: Iterable[int]) -> str:
        if loader := self._words[LOADING]:
            return f"replay rows, replaced by process {process_id(loader)}"
        names = [f"{shard} (process {process_id(self.words[shard][WRITER])})" for shard in shards]
        return f"replay writer {', '.join(names)}"


def _nothing() -> None:
    """Do nothing: the caller only waits for the lock."""


def _layout(widths: Sequence[int], shards: int, shard_rows: int) -> BlockLayout:
    """Return where words, notes and each part of the rows lie in the segment."""
    words = words_nbytes(_FIRST + shards * SHARD_WORDS)
    parts = [(f"{i}", (shards * shard_rows, width), torch.int32) for i, width in enumerate(widths)]
    notes = ("notes", (shards, NOTES), torch.int64)
    return BlockLayout.of_specs([("words", (words,), torch.uint8), notes, *parts])
