"""Rows in shared memory: several processes append, any number read, nobody sees half a row.

Rows are numbered as they come, for ever; row ``i`` lies at position ``i % capacity``. Three
numbers say what may be read:

- *head*: the next row's number. A writer **reserves** ``n`` rows, alone under a lock between
  processes: it notes the range in words of its own (*in flight*), then the new floor, then
  the new head. It fills the rows without the lock and **publishes** by clearing its word.
- *end*: rows below it are complete: the head, read first, or the lowest range in flight, read
  after it. A range reserved before the head was read is still noted, or it is complete.
- *floor*: rows below it may be overwritten at any time. It is stored before the first byte of
  the rows that take their place. So a reader gathers first and reads the floor afterwards: a
  gathered row at or above it holds no byte of a newer one. The others are read again.

Rows that are rewritten in place, at any position, are written under the lock, and *version*
is odd meanwhile; a reader that finds it odd or changed gathers all again.

Every word has one writer at a time, and nothing is relied on but the order of stores and of
loads (`torchrl_unilab.shm.words`). Where processors do not keep it (`is_weakly_ordered`),
readers and writers take and leave a lock of their own twice between the steps above: leaving
it orders all that came before, taking it again all that follows.

The lock is the kernel's and goes with the process that holds it. A writer that dies leaves
its range noted; whoever meets it copies complete rows over the range (`SharedRows.recover`).

**Links.** With links, each row has one word that says where the row is that follows it (same
environment, next step), or in which slot of the *side table* its own next observation is. A
successor is newer than its row, and rows are overwritten oldest first: the floor passes a row
before its successor is touched, so a row that may be read has a successor that may be read.
A slot belongs to one row: its *owner* word, the row's position, changes before the slot is
rewritten, and a reader compares it after gathering. A slot is free again when its row is
overwritten or the successor has come. If too few are free, the oldest rows are given up (the
floor rises) until there are enough. Slots that a killed process took and that no row refers to
are free again once its rows are recovered and no others are in flight.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrl_unilab.errors import ConfigError, ContentionError, SegmentSpaceError, WaitTimeoutError
from torchrl_unilab.shm.liveness import process_id, process_is_alive, this_process
from torchrl_unilab.shm.place import SharedPlace
from torchrl_unilab.shm.row_layout import WORD
from torchrl_unilab.shm.row_store import (
    FLOOR,
    FREED,
    HEAD,
    REWRITE_ROWS,
    REWRITING,
    TAKEN,
    VERSION,
    WRITER_WORDS,
    RowStore,
)
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.words import is_weakly_ordered

__all__ = ["Gather", "Reservation", "SharedRows", "Window"]

_PID, _START, _COUNT, _NON_FINITE = range(WRITER_WORDS)
_WAIT_SECONDS = 2e-5
_LIFE_CHECK_SECONDS = 0.05
_NOBODY = -1


Gather = Callable[["torch.Tensor | None", torch.Tensor], "torch.Tensor | None"]
"""Gathers rows at positions into places of a batch, see `SharedRows.read_rows`."""


class Window(NamedTuple):
    """Which rows may be read: ``floor <= row < end``; the next one reserved is `head`."""

    floor: int
    end: int
    head: int


class Reservation(NamedTuple):
    """Rows to fill: the number of the first one, and slots of the side table."""

    start: int
    slots: torch.Tensor


class SharedRows:
    """The rows of a segment, as one process uses them.

    One thread at a time writes; others may read meanwhile.

    Args:
        store: What lies where.
        place: Holds the lock.
        segment: The memory.
        timeout: Seconds to wait for another writer's rows.
        writer: Which writer to become on writing; the first that nobody is if not given.
    """

    def __init__(
        self,
        store: RowStore,
        place: SharedPlace,
        segment: SharedSegment,
        timeout: float,
        writer: int | None = None,
    ) -> None:
        self.layout, self.capacity, self.writers = store.layout, store.capacity, store.writers
        self.side_slots = store.side_slots
        self.store = store
        self.timeout = timeout
        self.segment = segment
        self._place = place  # goes last, with its lock
        self._lock = place.lock
        self._weak = is_weakly_ordered()
        self._barrier = threading.Lock()
        self._header, self._words = store.words(segment)
        self._free = store.tensor(segment, "free", torch.int32)
        self._rewritten = store.tensor(segment, "rewritten", torch.int64)
        self.owners = store.tensor(segment, "owners", torch.int32)
        self.block = store.tensor(segment, "rows", torch.int32).view(self.capacity, -1)
        side = store.tensor(segment, "side", torch.int32)
        self.side = side.view(self.side_slots, -1) if self.side_slots else side.view(0, 0)
        self._no_slots = torch.empty(0, dtype=torch.int64)
        self._writer, self._writer_pid = 0, 0
        self._wanted = writer
        self._look_again = 0.0

    # What may be read

    def window(self) -> Window:
        """Return which rows may be read now."""
        head = end = self._header[HEAD]
        self.fence()
        words = self._words
        for start in range(_START, len(words), WRITER_WORDS):
            first = words[start]
            if first and first <= end:
                end = first - 1
        return Window(self._header[FLOOR], end, head)

    @property
    def head(self) -> int:
        """The number of the next row to be reserved."""
        return self._header[HEAD]

    def look(self) -> Window:
        """Return the window; now and then, mend what dead writers left in it first."""
        seen = self.window()
        if seen.end < seen.head and (now := time.monotonic()) > self._look_again:
            self._look_again = now + _LIFE_CHECK_SECONDS
            for writer in range(self.writers):
                pid = self._words[writer * WRITER_WORDS + _PID]
                if self._in_flight(writer) and pid and not process_is_alive(pid):
                    self._mend(writer)
            return self.window()
        return seen

    @property
    def version(self) -> int:
        """Changes when rows are rewritten in place, loaded or emptied; odd meanwhile."""
        return self._header[VERSION]

    @property
    def non_finite(self) -> int:
        """Rows counted by `count_non_finite`, of all writers."""
        return sum(self._words[w + _NON_FINITE] for w in range(0, len(self._words), WRITER_WORDS))

    def rows_at(self, positions: torch.Tensor, head: int) -> torch.Tensor:
        """Return the numbers of the newest rows at `positions`, int64 of the same shape."""
        return head - 1 - (head - 1 - positions).remainder(self.capacity)

    def read_rows(
        self,
        rows: torch.Tensor,
        floor: int,
        gather: Gather,
        redraw: Callable[[int], torch.Tensor],
    ) -> None:
        """Gather rows, whole, by their numbers.

        Args:
            rows: int64 of shape [n], of a window; changed in place where rows are gone.
            floor: No row is below it.
            gather: Called with the places of the batch (None for all of them) and positions
                to gather into them; returns the places whose slot of the side table changed
                hands meanwhile, if any.
            redraw: Draws so many other rows.

        Raises:
            ContentionError: Rows are being rewritten, or overwritten faster than they are
                read, and not done in time.
        """
        until = time.monotonic() + self.timeout
        todo: torch.Tensor | None = None
        while True:
            chosen = rows if todo is None else rows[todo]
            version = self._settled_version(until)
            self.fence()
            bad = gather(todo, chosen.remainder(self.capacity))
            self.fence()
            now = self._header[FLOOR]
            if self._header[VERSION] != version:  # of those that are not gone, all
                gone = (chosen < now) | (chosen >= self.window().end)
                bad = torch.arange(len(chosen))
            elif now > floor:
                gone = chosen < now
                bad = gone.nonzero().squeeze(1) if bad is None else _union(gone, bad)
            elif bad is None:
                return
            else:
                gone = torch.zeros(len(chosen), dtype=torch.bool)
            if not len(bad):
                return
            if gone.any():
                chosen[gone] = redraw(int(gone.sum()))
                if todo is None:
                    rows.copy_(chosen)
                else:
                    rows[todo] = chosen
            todo = bad if todo is None else todo[bad]
            if time.monotonic() > until:
                raise ContentionError(
                    f"cannot read rows: {len(todo)} were overwritten on each try for "
                    f"{self.timeout:g} s (expected time to gather them). Make room for more rows."
                )

    def read_at(self, positions: torch.Tensor, gather: Gather) -> None:
        """Gather the rows, whole, that lie at positions, int64 of shape [n], when they do.

        Args:
            positions: Positions that have been written.
            gather: As for `read_rows`.

        Raises:
            WaitTimeoutError: A row was not complete in time; names the writer.
            IndexError: A row was given up, since the side table was full.
        """
        until = time.monotonic() + self.timeout
        todo: torch.Tensor | None = None
        while True:
            chosen = positions if todo is None else positions[todo]
            version, seen = self._settled_version(until), self.window()
            if not self._readable(chosen, seen, until):
                continue
            bad = gather(todo, chosen)
            self.fence()
            floor = self._header[FLOOR]
            if self._header[VERSION] != version:
                bad = torch.arange(len(chosen))
            elif floor > seen.floor:
                gone = self.rows_at(chosen, seen.head) < floor
                bad = gone.nonzero().squeeze(1) if bad is None else _union(gone, bad)
            if bad is None or not len(bad):
                return
            todo = bad if todo is None else todo[bad]
            if time.monotonic() > until:
                raise ContentionError(
                    f"cannot read rows: {len(todo)} were overwritten on each try for "
                    f"{self.timeout:g} s (expected time to gather them). Make room for more rows."
                )

    def _readable(self, positions: torch.Tensor, seen: Window, until: float) -> bool:
        """Whether all rows at `positions` are complete; if not, wait a little or raise."""
        if seen.end == seen.head and seen.floor == max(0, seen.head - self.capacity):
            return True
        rows = self.rows_at(positions, seen.head)
        for writer in range(self.writers):
            own = writer * WRITER_WORDS
            first, count = self._words[own + _START], self._words[own + _COUNT]
            if first and ((rows >= first - 1) & (rows < first - 1 + count)).any():
                self._wait_for(writer, until)
                return False
        if seen.floor > max(0, seen.head - self.capacity) and (rows < seen.floor).any():
            with self._lock:  # the floor is stored before the head
                given_up = self._header[FLOOR] > max(0, self._header[HEAD] - self.capacity)
            if given_up and (rows < self.window().floor).any():
                raise IndexError(
                    f"cannot read rows {rows[rows < seen.floor][:4].tolist()}: given up, the "
                    f"table of {self.side_slots} final observations was full (expected rows from "
                    f"{seen.floor} on). Make it larger, or draw rows with a RandomSampler."
                )
            return False
        return True

    def _settled_version(self, until: float) -> int:
        """Return the version once it is even."""
        while (version := self._header[VERSION]) % 2:
            if time.monotonic() > until:
                raise WaitTimeoutError(
                    f"cannot read rows: they are being rewritten for {self.timeout:g} s (expected "
                    "some microseconds). See whether a process is stopped."
                )
            with self._lock:  # whoever rewrites holds it until done, or has died
                self._settle()
        return version

    def wait_readable(self) -> Window:
        """Return a window that is not empty, once the rows in flight are complete.

        Raises:
            WaitTimeoutError: They were not in time; names the writer.
        """
        until = time.monotonic() + self.timeout
        while True:
            seen = self.look()
            if seen.floor < seen.end or not seen.head:
                return seen
            first = [w for w in range(self.writers) if self._in_flight(w)]
            if first:
                self._wait_for(min(first, key=lambda w: self._in_flight(w) or 1 << 62), until)
            elif self.window().floor >= self.window().end:
                return self.window()

    def _in_flight(self, writer: int) -> int:
        return self._words[writer * WRITER_WORDS + _START]

    def _wait_for(self, writer: int, until: float) -> None:
        """Wait a little for a writer's rows; recover them if it is dead.

        Raises:
            ContentionError: It is past `until`.
        """
        pid = self._words[writer * WRITER_WORDS + _PID]
        now = time.monotonic()
        overdue = now > until
        if overdue or int(now / _LIFE_CHECK_SECONDS) != int((now - 1e-3) / _LIFE_CHECK_SECONDS):
            if pid and not process_is_alive(pid):
                self._mend(writer)
                return
            if overdue:
                raise WaitTimeoutError(
                    f"rows of writer {writer} (process {process_id(pid)}): not complete for "
                    f"{self.timeout:g} s (expected some microseconds). See whether it is stopped."
                )
        time.sleep(_WAIT_SECONDS)

    def fence(self) -> None:
        """Let all before it be seen before all after it, where the processor does not."""
        if self._weak:
            for _ in range(2):
                with self._barrier:
                    pass

    # Writers

    @property
    def writer(self) -> int | None:
        """Which writer this process is, if it is one."""
        return self._writer if self._writer_pid == os.getpid() else None

    def use_writer(self, writer: int | None) -> None:
        """Become a writer: `writer`, or the first that no living process is.

        Raises:
            ConfigError: There is no such writer, or another process is it.
        """
        if writer is not None and not 0 <= writer < self.writers:
            raise ConfigError(
                f"row writer: {writer} (expected 0 to {self.writers - 1}). "
                "Make the storage for more writers."
            )
        own = this_process()
        choice = range(self.writers) if writer is None else [writer]
        with self._lock:
            self._settle()
            for w in choice:
                pid = self._words[w * WRITER_WORDS + _PID]
                if pid in (0, own) or not process_is_alive(pid):
                    break
            else:
                pids = [process_id(self._words[w * WRITER_WORDS + _PID]) for w in choice]
                raise ConfigError(
                    f"cannot write as writer {list(choice)}: taken by processes {pids} (expected "
                    f"a free one). Make the storage for more than {self.writers} writers."
                )
            self._recover(w)
            self.leave()
            self._words[w * WRITER_WORDS + _PID] = own
        self._writer, self._writer_pid = w, os.getpid()

    def _need_writer(self) -> None:
        if self._writer_pid != os.getpid():
            self.use_writer(self._wanted)

    def leave(self) -> None:
        """Let another process be the writer that this one was."""
        if self._writer_pid == os.getpid():
            self._words[self._writer * WRITER_WORDS + _PID] = 0
            self._writer_pid = 0

    def count_non_finite(self, rows: int) -> None:
        """Count rows of this writer that hold a value that is not finite."""
        self._need_writer()
        word = self._writer * WRITER_WORDS + _NON_FINITE
        self._words[word] = self._words[word] + rows

    @contextmanager
    def reserve(self, count: int, slots: int = 0, at: int | None = None) -> Iterator[Reservation]:
        """Reserve rows to fill; they are published on leaving, or recovered on an error.

        Args:
            count: How many, at least 1. Of more than `capacity`, only the last ones need be
                filled.
            slots: How many slots of the side table.
            at: Position that the first row must have.

        Raises:
            ConfigError: There are not as many slots in all.
            ContentionError: Rows of another writer, not complete, lie where these would.
            RuntimeError: The next row has another position than `at`.
        """
        if slots > self.side_slots:
            raise ConfigError(
                f"cannot write {count} rows: {slots} end or do not go on yet (expected at most "
                f"{self.side_slots}). Make the table of final observations larger."
            )
        self._need_writer()
        reservation = self._reserve(count, slots, at)
        self.fence()
        try:
            yield reservation
        except BaseException:
            with self._lock:
                self._recover(self._writer)
            raise
        self.fence()
        self._words[self._writer * WRITER_WORDS + _START] = 0

    def _reserve(self, count: int, slots: int, at: int | None) -> Reservation:
        until = time.monotonic() + self.timeout
        header, words, own = self._header.view, self._words.view, self._writer * WRITER_WORDS
        while True:
            with self._lock:
                if header[VERSION] % 2:
                    self._settle()
                if words[own + _START]:
                    self._recover(self._writer)  # interrupted just after it had reserved
                head = header[HEAD]
                for start in range(_START, len(words), WRITER_WORDS):
                    if words[start] > head:  # it died before the head said so
                        words[start] = 0
                if at is not None and head % self.capacity != at:
                    raise RuntimeError(
                        f"cannot append rows at position {at}: the next one is "
                        f"{head % self.capacity} (expected that). Another writer came in between."
                    )
                floor = head + count - self.capacity
                in_way = self._first_in_flight(below=floor)
                if in_way is None:
                    if floor > header[FLOOR]:
                        self._raise_floor(min(floor, head))
                    # Before: publishing needs no lock, so by afterwards they may be complete.
                    in_way = self._first_in_flight(below=head) if slots else None
                    taken = self._take_slots(slots)
                    if taken is not None:
                        words[own + _COUNT] = count
                        words[own + _START] = head + 1
                        if floor > header[FLOOR]:
                            header[FLOOR] = floor
                        header[HEAD] = head + count
                        return Reservation(head, taken)
                    if in_way is None:
                        raise SegmentSpaceError(
                            f"cannot write {count} rows: {self._slots_free()} slots of the table "
                            f"of final observations are left (expected {slots}); killed writers "
                            "had the others. Recover them, or empty the storage."
                        )
            self._wait_for(in_way, until)

    def _first_in_flight(self, below: int) -> int | None:
        """The writer of the oldest rows that are being written, if those are below a row."""
        first, found, words = below, None, self._words.view
        for writer in range(self.writers):
            start = words[writer * WRITER_WORDS + _START]
            if start and start - 1 < first:
                first, found = start - 1, writer
        return found

    def write(self, start: int, words: torch.Tensor) -> None:
        """Fill reserved rows, int32 of shape [n, words] for n <= capacity, from row `start`."""
        at = start % self.capacity
        fit = min(len(words), self.capacity - at)
        self.block[at : at + fit].copy_(words[:fit])
        if fit < len(words):
            self.block[: len(words) - fit].copy_(words[fit:])

    def write_side(self, slots: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """Fill slots taken for rows with their next observations, int32 [n, linked words]."""
        self.owners.index_copy_(0, slots, rows.remainder(self.capacity).int())
        self.fence()
        self.side.index_copy_(0, slots, words)

    # Links and slots

    def row_code(self, rows: torch.Tensor) -> torch.Tensor:
        """The link to successors, int64 of the shape of their numbers; 0 is none."""
        return rows.remainder(self.capacity) + 1

    def slot_code(self, slots: torch.Tensor) -> torch.Tensor:
        """The link to slots of the side table, int64 of the same shape."""
        return slots.long() + (self.capacity + 1)

    def relink(
        self, rows: torch.Tensor, successors: torch.Tensor, slots: torch.Tensor, version: int
    ) -> None:
        """Let complete rows refer to their successors, complete too, and free their slots.

        Args:
            rows: Numbers of the rows in ascending order, int64 of shape [n].
            successors: Numbers of the rows that follow them.
            slots: Their slots; empty without a side table.
            version: The version when the rows were written; of another one, there is nothing
                to do.
        """
        link = self.layout.link
        assert link is not None, "rows without links are not linked"
        with self._lock:
            self._settle()
            if version != self._header[VERSION]:
                return
            floor = self._header[FLOOR]
            if len(rows) and int(rows[0]) < floor:  # in order: the first is the oldest
                alive = rows >= floor
                rows, successors = rows[alive], successors[alive]
                slots = slots[alive] if len(slots) else slots
            column, at = self.block[:, link], rows.remainder(self.capacity)
            flags = column[at].bitwise_and_(2**self.layout.flag_bits - 1)
            codes = self.row_code(successors).int()
            column[at] = codes.bitwise_left_shift_(self.layout.flag_bits).bitwise_or_(flags)
            self._give_back(slots)

    def _slots_free(self) -> int:
        return self._header[FREED] - self._header[TAKEN]

    def _take_slots(self, count: int) -> torch.Tensor | None:
        """Take free slots, int64 [count]; give up the oldest rows if too few are free."""
        if not count:
            return self._no_slots
        while (lacking := count - self._slots_free()) > 0:
            floor, head = self._header[FLOOR], self._header[HEAD]
            writer = self._first_in_flight(below=head)
            limit = head if writer is None else self._in_flight(writer) - 1
            if floor >= limit:
                return None
            self._raise_floor(min(limit, floor + lacking))
        taken = self._header[TAKEN]
        slots = self._free[_ring(taken, count, self.side_slots)].long()
        self._header[TAKEN] = taken + count
        return slots

    def _give_back(self, slots: torch.Tensor) -> None:
        if not len(slots):
            return
        freed = self._header[FREED]
        self._free[_ring(freed, len(slots), self.side_slots)] = slots.int()
        self._header[FREED] = freed + len(slots)

    def _raise_floor(self, floor: int) -> None:
        """Give up complete rows below `floor`, and free their slots."""
        old = self._header[FLOOR]
        if floor <= old:
            return
        self._header[FLOOR] = floor
        if self.side_slots:
            link = self.layout.link
            assert link is not None
            codes = self.block[:, link][_ring(old, floor - old, self.capacity)]
            slots = codes.bitwise_right_shift(self.layout.flag_bits) - (self.capacity + 1)
            self._give_back(slots[slots >= 0])

    # Rows rewritten in place, and all of them at once

    def rewrite(self, positions: torch.Tensor, words: torch.Tensor) -> None:
        """Write complete rows anew, where they lie; not for rows with a side table.

        Args:
            positions: int64 of shape [n], of rows that have been written.
            words: int32 of shape [n, words]. Links stay as they are.

        Raises:
            WaitTimeoutError: A row was not complete in time; names the writer.
        """
        until = time.monotonic() + self.timeout
        columns = self.layout.words if self.layout.link is None else self.layout.link
        for first in range(0, len(positions), REWRITE_ROWS):
            at = positions[first : first + REWRITE_ROWS]
            while True:
                with self._lock:
                    self._settle()
                    in_way = self._first_in_flight(below=self._header[HEAD])
                    if in_way is None:
                        self._rewritten[: len(at)] = at
                        self._header[REWRITING] = len(at)
                        self._header[VERSION] += 1
                        self.block[:, :columns][at] = words[first : first + len(at), :columns]
                        self._header[VERSION] += 1
                        break
                self._wait_for(in_way, until)

    @contextmanager
    def frozen(self, *, clear: bool = False) -> Iterator[None]:
        """Have no rows in flight and none reserved.

        Args:
            clear: Start without rows; should this process die meanwhile, there are none.

        Raises:
            WaitTimeoutError: Rows were not complete in time; names the writer.
        """
        until = time.monotonic() + self.timeout
        while True:
            with self._lock:
                self._settle()
                in_way = self._first_in_flight(below=1 << 63)
                if in_way is None:
                    if not clear:
                        yield
                        return
                    self._header[REWRITING] = 0
                    self._header[VERSION] += 1
                    self._clear()
                    yield
                    self._header[VERSION] += 1
                    return
            self._wait_for(in_way, until)

    def _clear(self) -> None:
        self._header[HEAD] = self._header[FLOOR] = self._header[TAKEN] = 0
        self._free.copy_(torch.arange(self.side_slots))
        self._header[FREED] = self.side_slots

    def cursors(self) -> dict[str, int]:
        """The state beside the rows; while they are frozen."""
        words = {"head": HEAD, "floor": FLOOR, "taken": TAKEN, "freed": FREED}
        return {name: self._header[word] for name, word in words.items()}

    def set_cursors(self, saved: dict[str, int]) -> None:
        """Set what `cursors` returned; while the rows are frozen."""
        self._header[TAKEN], self._header[FREED] = saved["taken"], saved["freed"]
        self._header[FLOOR] = saved["floor"]
        self._header[HEAD] = saved["head"]

    def parts(self, head: int) -> list[np.ndarray[Any, Any]]:
        """The bytes of all rows up to `head` and of their tables, as they lie; while frozen."""
        spans = [self.store.spans[name] for name in ("free", "owners", "side")]
        start, _ = self.store.spans["rows"]
        spans.append((start, start + min(head, self.capacity) * self.layout.words * WORD))
        return [self.segment.buffer[first:last] for first, last in spans if last > first]

    # Rows that a dead writer left

    def recover(self, writer: int) -> bool:
        """Copy complete rows over those that a dead writer left; return if there were any.

        Raises:
            RuntimeError: The writer is alive.
        """
        pid, found = self._mend(writer)
        if pid:
            raise RuntimeError(
                f"cannot recover the rows of writer {writer}: process {process_id(pid)} is alive "
                "(expected it dead). End it first."
            )
        return found

    def _mend(self, writer: int) -> tuple[int, bool]:
        """Recover a writer's rows unless it is alive; return its process if so, and if any."""
        with self._lock:
            self._settle()
            pid = self._words[writer * WRITER_WORDS + _PID]
            if pid and process_is_alive(pid):
                return pid, False
            found = self._recover(writer)
            self._words[writer * WRITER_WORDS + _PID] = 0
            return 0, found

    def _recover(self, writer: int) -> bool:
        own = writer * WRITER_WORDS
        first, count = self._words[own + _START] - 1, self._words[own + _COUNT]
        head = self._header[HEAD]
        if first >= 0 and first + count <= head:  # else it died before it had them
            whole = self.window()
            rows = torch.arange(max(first, first + count - self.capacity), first + count)
            complete = torch.arange(max(whole.floor, whole.end - len(rows)), whole.end)
            if not self._refill(rows.remainder(self.capacity), complete.remainder(self.capacity)):
                self._header[FLOOR] = max(self._header[FLOOR], first + count)
        self._words[own + _START] = 0
        if self._first_in_flight(below=1 << 63) is None:
            self._free_unused()
        return first >= 0

    def _free_unused(self) -> None:
        """Free all slots that no row refers to. Under the lock, with no rows in flight."""
        link, floor, taken = self.layout.link, self._header[FLOOR], self._header[TAKEN]
        if not self.side_slots or link is None:
            return
        codes = self.block[:, link][_ring(floor, self._header[HEAD] - floor, self.capacity)]
        slots = codes.bitwise_right_shift(self.layout.flag_bits).long() - (self.capacity + 1)
        used = torch.zeros(self.side_slots, dtype=torch.bool)
        used[slots[slots >= 0]] = True
        free = (~used).nonzero().squeeze(1)
        # Those that were free are among them: whoever dies in between, so are the first ones.
        self._free[_ring(taken, len(free), self.side_slots)] = free.int()
        self._header[FREED] = taken + len(free)

    def _settle(self) -> None:
        """Finish what a process that died did to rows in place. Under the lock."""
        if self._header[VERSION] % 2 == 0:
            return
        count, head = self._header[REWRITING], self._header[HEAD]
        if not count:
            self._clear()
        else:
            at = self._rewritten[:count].clone()
            whole = torch.arange(self._header[FLOOR], head).remainder(self.capacity)
            if not self._refill(at, whole[~torch.isin(whole, at)][-count:]):
                self._header[FLOOR] = head
        self._header[VERSION] += 1

    def _refill(self, positions: torch.Tensor, sources: torch.Tensor) -> bool:
        """Copy the rows at `sources`, over and over, to `positions`; return if there are any."""
        if not len(sources):
            return False
        sources = sources[torch.arange(len(positions)).remainder(len(sources))]
        words = self.block[sources]
        link = self.layout.link
        if link is not None:
            codes = words[:, link].bitwise_right_shift(self.layout.flag_bits).long()
            flags = words[:, link].bitwise_and(2**self.layout.flag_bits - 1)
            fresh = torch.zeros_like(codes)  # no successor
            if self.side_slots:
                following = self.block[(codes - 1).clamp(0, self.capacity - 1)]
                following = following[:, : self.layout.linked_words].contiguous()
                own = codes > self.capacity
                following[own] = self.side[codes[own] - (self.capacity + 1)]
                slots = None
                if len(positions) <= self.side_slots:
                    slots = self._take_slots(len(positions))
                if slots is None:
                    return False
                self.write_side(slots, positions, following)
                fresh = self.slot_code(slots)
            words[:, link] = fresh.int().bitwise_left_shift(self.layout.flag_bits).bitwise_or(flags)
        self.block[positions] = words
        return True


def _ring(first: int, count: int, size: int) -> slice | torch.Tensor:
    """Places of `count` items in a ring, from the `first` one on."""
    at = first % max(1, size)
    if at + count <= size:
        return slice(at, at + count)
    return torch.arange(at, at + count).remainder_(max(1, size))


def _union(mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return mask.index_fill(0, places, True).nonzero().squeeze(1)
