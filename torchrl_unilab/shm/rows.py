"""Rows in shared memory: several processes write, any number reads, and no row is ever torn.

A writer raises its shard's `floor` before it overwrites rows, and `head` after it has filled
new ones. A reader loads the heads, then the floors, copies, and loads the floors again: a row
still at or above its floor is whole; rows below it are drawn again. `fence` orders these steps
on every processor. Rows rewritten in place make a version odd meanwhile, which readers compare.

A writer that dies while it appends leaves `floor` raised and `head` unchanged: its last rows are
not readable, and nothing has to be repaired. A reader takes no lock, except to wait for a row that
it needs and that is being written. `shards` has the words, the memory and the locks, and defines a
row's number, place, id and position; `torchrl_unilab.data.replay` keeps transitions in these rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrl_unilab.errors import ConfigError, ContentionError, PositionError
from torchrl_unilab.processes import process_id, process_is_alive, this_process
from torchrl_unilab.shm.shards import (
    BASE,
    COUNT,
    FLOOR,
    HEAD,
    NOTED,
    NOTES,
    ORIGIN,
    STEPS,
    STRIDE_BITS,
    VERSION,
    WRITER,
    Parts,
    Shards,
)
from torchrl_unilab.shm.window import Window
from torchrl_unilab.shm.words import fence

Gather = Callable[["torch.Tensor | None", torch.Tensor, tuple[int, ...]], None]
"""Called with (indices, positions, heads): copies the rows at `positions` to the rows `indices` of
a batch, or to all of it for None. `heads` are those of the window that the positions come from."""


class SharedRows(Shards):
    """The rows of one segment, as this process uses them. Threads may share it.

    A process writes to one shard, which it claims on its first write; more processes than
    shards share them, one append at a time. Args as `Shards`.

    Examples:
        >>> from torchrl_unilab.shm.segment import SharedSegment
        >>> with SharedSegment(SharedRows.nbytes([2], shards=1, shard_rows=4)) as segment:
        ...     rows = SharedRows(segment, [2], 1, 4, timeout=1.0)
        ...     first = rows.append([torch.ones(3, 2, dtype=torch.int32)])
        ...     rows.window(), rows.blocks[0][:, 0].tolist()
        (Window(floors=(0,), heads=(3,)), [1, 1, 1, 0])
    """

    _shard, _shard_pid = 0, 0

    # Writing

    @property
    def shard(self) -> int:
        """The shard that this process writes to; claims one if it has none."""
        return self._shard if self._shard_pid == os.getpid() else self.claim()

    def claim(self, shard: int | None = None) -> int:
        """Write to a shard from now on, and return it.

        Args:
            shard: Which; if not given, the first that no other living process writes to, or
                a shared one if there is none.

        Raises:
            ConfigError: Another living process writes to it.
        """
        for choice in range(self.shards) if shard is None else [shard]:
            if not self.other_writer(choice) and self.locked(choice, partial(self._claim, choice)):
                break
        else:
            if shard is not None:
                raise ConfigError(
                    f"replay writer {shard}: process {self.other_writer(shard)} is alive (expected "
                    "none, or a dead one). Choose another, or end it first."
                )
            choice = os.getpid() % self.shards
        self._shard, self._shard_pid = choice, os.getpid()
        return choice

    def _claim(self, shard: int) -> bool:
        free = not self.other_writer(shard)
        if free:
            self.words[shard][WRITER] = this_process()
        return free

    def other_writer(self, shard: int) -> int:
        """Return the id of the living process that has a shard, 0 if none or this one has it."""
        writer = self.words[shard][WRITER]
        if writer in (0, this_process()) or not process_is_alive(writer):
            return 0
        return process_id(writer)

    def leave(self) -> None:
        """Give up this process's shard, so that another process can claim it."""
        if self._shard_pid == os.getpid():
            words = self.words[self._shard]
            # Without the lock: whoever shares the shard stores the word again when it appends.
            if words[WRITER] == this_process():
                words[WRITER] = 0
            self._shard_pid = 0

    def close(self) -> None:
        """Give up this process's shard, and close the segment.

        Waits for a write of another thread: the segment's descriptor carries its lock.
        """

        def end() -> None:
            self.leave()
            self.segment.close()

        self._lock.close(end)

    def append(self, parts: Parts, prepare: Callable[[int, int], object] = lambda *_: None) -> int:
        """Append rows to this process's shard.

        Args:
            parts: The rows, for 1 <= n <= shard_rows.
            prepare: Called with the shard and the number of the first row before anything is
                changed, under the shard's lock; may still fill in `parts`, or raise.

        Returns:
            The number of the first row. Raises as `locked`.
        """
        shard = self.shard
        return self.locked(shard, partial(self._append, shard, parts, prepare))

    def _append(self, shard: int, parts: Parts, prepare: Callable[[int, int], object]) -> int:
        words, count = self.words[shard], parts[0].shape[0]
        head = words[HEAD]
        prepare(shard, head)
        words[WRITER] = this_process()
        floor = head + count - self.shard_rows
        if floor > words[FLOOR]:
            words[FLOOR] = floor
        fence()  # before the first byte of the new rows
        self.fill(shard, head, parts)
        fence()  # after the last one
        words[HEAD] = head + count
        return head

    def fill(self, shard: int, number: int, parts: Parts) -> None:
        """Copy rows to the places of numbers from `number` on. The caller holds the shard."""
        at, count = number % self.shard_rows, parts[0].shape[0]
        fit = min(count, self.shard_rows - at)
        for target, part in zip(self._items[shard], parts, strict=True):
            items = part.numpy().view(target.dtype)
            target[at : at + fit] = items[:fit]
            target[: count - fit] = items[fit:]

    def rewrite(self, positions: torch.Tensor, parts: Parts) -> None:
        """Write rows anew at positions that have been written, int64 [n]. Raises as `locked`."""
        self.detach(parts, positions)
        for shard in range(self.shards):
            mine = (positions.remainder(self.shards) == shard).nonzero().squeeze(1)
            # An empty tensor would split into one empty part, which is no reason to take the lock.
            for part in mine.split(NOTES) if len(mine) else ():
                places = positions[part].div(self.shards, rounding_mode="floor")
                rows = [words[part] for words in parts]
                self.locked(shard, partial(self._rewrite, shard, places, rows))

    def _rewrite(self, shard: int, places: torch.Tensor, parts: Parts) -> None:
        words = self.words[shard]
        words[WRITER] = this_process()
        self._notes[shard, : len(places)] = places
        words[NOTED] = len(places)
        words[VERSION] += 1
        fence()  # before the first byte of the rows
        self.fill_at(shard, places, parts)
        fence()  # after the last one
        words[VERSION] += 1

    def touch(self) -> None:
        """Change `revision`: rows have been changed through views."""
        self._add(0, VERSION, 2)

    def count(self, rows: int) -> None:
        """Add to `counted`: the replay counts rows that are not finite."""
        self._add(self.shard, COUNT, rows)

    def _add(self, shard: int, word: int, by: int) -> None:
        def add() -> None:
            self.words[shard][word] += by

        self.locked(shard, add)

    @property
    def counted(self) -> int:
        """The sum of all `count` calls, of all processes."""
        return sum(self.load(COUNT))

    def replace(
        self,
        window: Window,
        read: Callable[[int, int, int], Parts],
        saved: Sequence[tuple[int, int, int]],
    ) -> None:
        """Replace all rows. If this fails, or the process dies, no rows are left.

        Raises as `locked`.

        Args:
            window: The rows of each shard, numbered from the first ever written to it.
            read: Called with a shard, the number of a first row and how many rows; returns
                these.
            saved: For each shard, its origin (`lineage`) and its `steps` when it was saved.
        """

        def fill() -> None:
            for shard, (floor, head) in enumerate(zip(*window, strict=True)):
                words = self.words[shard]
                base = words[HEAD]
                for first in range(floor, head, self.chunk_rows):
                    parts = read(shard, first, min(self.chunk_rows, head - first))
                    self.fill(shard, base + first, parts)
                words[FLOOR] = base + floor
                words[ORIGIN], first, stride = saved[shard]
                words[STEPS] = base + first << STRIDE_BITS | stride
                fence()  # after the last byte of the rows, and what is said of them
                words[HEAD] = base + head

        self.all_locked(partial(self._replace, fill))

    # Reading

    def _checked(self, copy: Callable[..., object], *rows: Any) -> tuple[tuple[int, ...], bool]:
        """Call ``copy(*rows)``; return the floors loaded after it, and whether rows were rewritten.

        If no row was rewritten, copies of all rows at or above the floors are whole. Raises as
        `locked`.
        """
        versions = self.settled()
        copy(*rows)
        fence()  # before floors and versions are read again
        return self.load(FLOOR), self.load(VERSION) != versions

    def read(
        self,
        window: Window,
        ids: torch.Tensor,
        gather: Gather,
        redraw: Callable[[int], torch.Tensor],
    ) -> None:
        """Gather whole rows by id; those overwritten meanwhile are drawn again.

        Args:
            window: The rows lie in it.
            ids: The rows, int64 [n].
            gather: Copies rows.
            redraw: Draws the given number of other rows, as `draw` does.

        Raises:
            ContentionError: Rows are overwritten faster than they are read.
        """
        deadline = time.monotonic() + self.timeout
        heads, todo = window.heads, None
        while True:
            floors, changed = self._checked(gather, todo, self.positions(ids), heads)
            if not changed and floors == window.floors:
                return
            gone = ids < self.bounds(floors, ids)
            again = (torch.ones_like(gone) if changed else gone).nonzero().squeeze(1)
            if not len(again):
                return
            self._check_time(deadline, len(again))
            todo = again if todo is None else todo[again]
            ids, gone = ids[again], gone[again].nonzero().squeeze(1)
            if len(gone):
                ids[gone] = redraw(len(gone))
            heads = self.window().heads

    def read_at(self, positions: torch.Tensor, gather: Gather) -> None:
        """Gather whole rows by position; wait for those that are being written.

        In place of a row that a killed process left unfinished, the oldest row of its shard is
        read.

        Args:
            positions: int64 [n], not negative.
            gather: Copies rows.

        Raises:
            PositionError: A position has not been written, or rows were cleared meanwhile.
            ContentionError: Rows are overwritten faster than they are read.
            WaitTimeoutError: A writer did not finish in time; names it.
        """
        if not len(positions):
            return
        deadline = time.monotonic() + self.timeout
        at, todo = positions, None
        while True:
            window = self.window()
            length, hidden = self.extent(window)
            if int(at.max()) >= length:
                self._check_written(window, at, length)
            if hidden:
                window, at = self._uncover(window, at)
            floors, changed = self._checked(gather, todo, at, window.heads)
            if not changed and floors == window.floors:
                return
            if not changed:
                stale = self.hidden(at, Window(floors, window.heads)).nonzero().squeeze(1)
                if not len(stale):
                    return
                todo = stale if todo is None else todo[stale]
            at = positions if todo is None else positions[todo]
            self._check_time(deadline, len(at))

    def _check_written(self, window: Window, positions: torch.Tensor, length: int) -> None:
        """Refuse positions that have not been written; a shard may be ahead of the others."""
        missing = positions[self.hidden(positions, Window(self.load(BASE), window.heads))]
        if len(missing):
            at = int(missing[0])
            raise PositionError(
                f"no row {at}: {length} are written (expected at least {at + 1}). Write first, or "
                "sample again: another process may have emptied the replay."
            )

    def hidden(self, positions: torch.Tensor, window: Window) -> torch.Tensor:
        """Return which positions hold a row that is not in a window, bool [n]."""
        return self.newest(positions, window.heads) < self.bounds(window.floors, positions)

    def _uncover(self, window: Window, positions: torch.Tensor) -> tuple[Window, torch.Tensor]:
        """Wait for rows that are being written; replace the positions of unfinished ones."""
        found = [[*words] for words in window]
        for shard in positions[self.hidden(positions, window)].remainder(self.shards).unique():
            # Under the lock, or the next append could hide the row again.
            settled = self.locked(int(shard), self.window)
            for words, now in zip(found, settled, strict=True):
                words[shard] = now[shard]
        window = Window(*map(tuple, found))
        floors = self.bounds(window.floors, positions)
        oldest = self.newest(positions, window.heads).clamp(min=floors)
        if (oldest >= self.bounds(window.heads, positions)).any():
            raise ContentionError(
                f"replay read: no whole row in a shard, {window} (expected some); its writer was "
                "killed. Write to it again, or empty the replay."
            )
        return window, self.positions(oldest)

    def _check_time(self, deadline: float, rows: int) -> None:
        if time.monotonic() > deadline:
            raise ContentionError(
                f"replay read: {rows} rows were overwritten on each try for {self.timeout:g} s "
                "(expected a whole copy). Use a larger replay."
            )

    def copies(self, shard: int, window: Window) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        """Copy a shard while its writer continues: the newest rows first, until none is left.

        Yields:
            The number of a chunk's first row, and the chunk, [n, words], valid until the next one.

        Raises:
            ContentionError: Rows are rewritten faster than they are copied.
        """
        floor, end = window.floors[shard], window.heads[shard]
        chunk = np.empty((self.chunk_rows, sum(self.widths)), np.int32)
        columns = np.split(chunk, np.cumsum(self.widths)[:-1], 1)

        def copy(begin: int, end: int) -> None:
            # By NumPy: torch would share out each chunk to its threads, which wait for each other.
            for column, part in zip(columns, self.parts[shard], strict=True):
                column[: end - begin] = part[begin:end].numpy()

        deadline = time.monotonic() + self.timeout
        while end > floor:
            lap = (end - 1) // self.shard_rows * self.shard_rows
            first = max(floor, lap, end - self.chunk_rows)
            floors, changed = self._checked(copy, first - lap, end - lap)
            floor = max(floor, floors[shard])
            if changed:
                self._check_time(deadline, end - first)
                continue
            if (whole := max(first, floor)) < end:
                yield whole, chunk[whole - first : end - first]
            end, deadline = first, time.monotonic() + self.timeout
