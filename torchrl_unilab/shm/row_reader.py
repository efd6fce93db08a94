"""Whole rows out of shards that others write to: drawn, or at positions, or all of a window.

A reader loads heads and floors, copies rows, and loads the floors again. A row still at or above
its floor is whole; a row below it is drawn again, or read again where it is asked for by its
position. A reader holds no lock; it waits for one where a row that it must have is being written.
`SharedRows` adds writing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from torchrl_unilab.errors import ContentionError
from torchrl_unilab.shm.shards import BASE, FLOOR, NOTES, VERSION, Parts, Shards, Window
from torchrl_unilab.shm.words import fence

__all__ = ["Gather", "RowReader"]

Gather = Callable[["torch.Tensor | None", torch.Tensor, tuple[int, ...]], None]
"""Copies rows: to which places of a batch (None for all), from which positions, seen at which
heads."""


class RowReader(Shards):
    """Reads the rows of shards. Args as `Shards`."""

    def readable(self) -> Window:
        """Return a window; while there are rows and all are being written, wait for them.

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
            return torch.randint(window.floors[0], window.heads[0], (count,), generator=generator)
        floors, heads = torch.tensor(window)
        ends = (heads - floors).cumsum(0)
        drawn = torch.randint(window.size, (count,), generator=generator)
        shard = torch.bucketize(drawn, ends, right=True)
        return drawn.sub_(ends[shard]).add_(heads[shard]).mul_(self.shards).add_(shard)

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
            redraw: Draws so many other rows, as `draw` does.

        Raises:
            ContentionError: Rows are overwritten faster than they are read.
        """
        deadline = time.monotonic() + self.timeout
        heads, todo = window.heads, None
        while True:
            versions = self.settled()
            gather(todo, self.positions(ids), heads)
            fence()  # before the floors are read again
            floors, changed = self.load(FLOOR), self.load(VERSION) != versions
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
        """Gather whole rows by position; those being written are waited for.

        In place of a row that a killed process left unfinished, the oldest row of its shard is
        read.

        Args:
            positions: int64 [n], not negative.
            gather: Copies rows.

        Raises:
            IndexError: A position has not been written.
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
            versions = self.settled()
            gather(todo, at, window.heads)
            fence()  # before the floors are read again
            floors, changed = self.load(FLOOR), self.load(VERSION) != versions
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
            raise IndexError(
                f"no row {int(missing[0])}: {length} are written (expected 0 to {length - 1}). "
                "Write first."
            )

    def hidden(self, positions: torch.Tensor, window: Window) -> torch.Tensor:
        """Return which of the rows at positions a window does not show, bool [n]."""
        return self.newest(positions, window.heads) < self.bounds(window.floors, positions)

    def _uncover(self, window: Window, positions: torch.Tensor) -> tuple[Window, torch.Tensor]:
        """Wait for rows that are being written; put others in the place of unfinished ones."""
        found = [[*words] for words in window]
        for shard in positions[self.hidden(positions, window)].remainder(self.shards).unique():
            alone = self.alone(int(shard), self.window)  # or the next append could hide it again
            for words, now in zip(found, alone, strict=True):
                words[shard] = now[shard]
        window = Window(*map(tuple, found))
        floors = self.bounds(window.floors, positions)
        oldest = torch.maximum(self.newest(positions, window.heads), torch.as_tensor(floors))
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

    def copies(self, shard: int, window: Window) -> Iterator[tuple[int, Parts]]:
        """Copy the rows of a shard beside its writer: the newest first, as long as they last.

        Yields:
            The number of a first row, and rows from it on, valid until the next ones.

        Raises:
            ContentionError: Rows are rewritten faster than they are copied.
        """
        floor, end = window.floors[shard], window.heads[shard]
        own = self.own(shard)
        buffers = [torch.empty(NOTES, width, dtype=torch.int32) for width in self.widths]
        deadline = time.monotonic() + self.timeout
        while end > floor:
            lap = (end - 1) // self.shard_rows * self.shard_rows
            first = max(floor, lap, end - NOTES)
            versions = self.settled()
            for words, buffer in zip(own, buffers, strict=True):
                buffer[: end - first].copy_(words[first - lap : end - lap])
            fence()  # before the floor is read again
            floor = max(floor, self.get(shard, FLOOR))
            if self.load(VERSION) != versions:
                self._check_time(deadline, end - first)
                continue
            if (whole := max(first, floor)) < end:
                yield whole, [buffer[whole - first : end - first] for buffer in buffers]
            end, deadline = first, time.monotonic() + self.timeout
