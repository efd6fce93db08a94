"""A ring of shared slots: several writers fill them, one reader takes them in order.

A slot belongs to exactly one party at a time, and what says so is a token. Two pipes hold
the tokens of slots that nobody works on: ``free`` those to be filled, ``ready`` those that
are committed, oldest first. Whoever takes a token out of a pipe owns its slot, alone, until
it puts the token into a pipe again. The kernel hands each token to one taker, so claiming
needs no lock, no compare-and-swap and no retry, and a process that is stopped or killed
keeps the slots it owned and nothing else. Those of the dead are found by a census
(`torchrl_unilab.shm.ring_notes`) and free again, see `RolloutRing.recover`.

- *claim*: take a free token; if there is none, ``overflow="overwrite"`` takes the oldest
  ready one (its rollout is dropped and counted), ``overflow="block"`` waits for a free one.
- *commit*: make the slot's generation even and put its token, with that generation, into
  ``ready``.
- *acquire*: take the oldest ready token and compare the slot's generation with it.
- *release*: compare again and put the token into ``free``.

Waiting is ``poll`` on a pipe: it wakes when a token arrives and costs nothing until then.
That the bytes of a slot are seen by its next owner follows from the pipe, see
`torchrl_unilab.shm.words`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.util import Finalize
from typing import Any, Literal, NamedTuple

import torch

from torchrl_unilab.errors import (
    ConfigError,
    LayoutKeyError,
    PeerGoneError,
    RingTimeoutError,
    SegmentError,
    SegmentSpaceError,
)
from torchrl_unilab.shm.header import DIGEST, MAGIC, READY, attach_complete
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.liveness import process_id, process_is_alive, this_process
from torchrl_unilab.shm.ring_notes import (
    IDLE,
    MOVING,
    Note,
    following,
    nobodys,
    noted_slot,
    unsettled,
)
from torchrl_unilab.shm.segment import (
    SegmentKind,
    SharedSegment,
    default_kind,
    free_bytes,
)
from torchrl_unilab.shm.tokens import Token, TokenPipe, create_pipes, pipe_paths, waits
from torchrl_unilab.shm.words import SharedWords

__all__ = ["Lease", "Overflow", "RolloutBlock", "RolloutRing", "ring_nbytes"]

Overflow = Literal["overwrite", "block"]
OVERFLOWS: tuple[Overflow, ...] = ("overwrite", "block")
MAX_SLOTS = 2048  # tokens that surely fit a pipe of 64 KiB


class RolloutBlock(Mapping[str, torch.Tensor]):
    """A rollout in private memory that lies there as in a slot: one copy moves all of it.

    Args:
        layout: The layout of the ring's slots.

    Attributes:
        layout: The same.
        memory: The bytes, uint8 of shape [layout.nbytes].
    """

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._views = dict(zip(layout.keys, layout.views(self.memory), strict=True))

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._views[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class Lease(NamedTuple):
    """A committed slot that the reader owns until it releases it.

    Attributes:
        token: What was committed: slot, writer, the writer's count of rollouts.
        views: Dotted key to shared tensor. Borrowed: valid until the release.
    """

    token: Token
    views: Mapping[str, torch.Tensor]


_MAGIC = 0x554E494C_52494E47
# Beside the words of every header.
_SLOTS, _WRITERS, _OVERFLOW, _READER_PID, _READER_GONE, _READ, _LOST = 2, 3, 4, 6, 7, 8, 9
_HEADER_WORDS = 10
# Words of each writer: its process, the rollouts it committed, and its note; then how many
# rollouts of each writer it has dropped.
_PID, _COMMITTED, _NOTE = range(3)
_RETRY_SECONDS = 2e-5


class RolloutRing:
    """`slots` shared slots of one layout, for `writers` writers and one reader.

    Each process that unpickles or attaches the ring may act as one writer (`use_writer`),
    or as the reader; one thread of it at a time. Nothing is lost unless it is counted:
    ``write_count == read_count + sum(dropped) + lost`` once all slots are read.

    Args:
        initial: Dotted key to tensor: shapes and dtypes of a slot, not its content.
        slots: How many slots. With one per writer, one for the reader and one to spare,
            no writer ever finds all of them taken.
        writers: How many writers there may be.
        overflow: What a writer does when no slot is free: ``"overwrite"`` drops the oldest
            unread rollout, ``"block"`` waits.
        name: Name to attach by from an unrelated process; anonymous if not given.
        kind: Kind of segment; the platform's default if not given.

    Raises:
        ConfigError: A count or `overflow` is not one of the above.
        SegmentSpaceError: It does not fit shared memory; says how many slots would.

    Example:
        >>> ring = RolloutRing({"reward": torch.zeros(2, 3)}, slots=2)
        >>> ring.write({"reward": torch.ones(2, 3)})
        True
        >>> ring.read()["reward"].sum().item()
        6.0
        >>> ring.advance_read()
        >>> ring.close()
    """

    def __init__(
        self,
        initial: Mapping[str, torch.Tensor],
        *,
        slots: int = 4,
        writers: int = 1,
        overflow: Overflow = "overwrite",
        name: str | None = None,
        kind: SegmentKind | None = None,
    ) -> None:
        for setting, count, most in (("slots", slots, MAX_SLOTS), ("writers", writers, 1024)):
            if not 1 <= count <= most:
                raise ConfigError(
                    f"ring {setting}: {count} (expected 1 to {most}). Use for example 4."
                )
        if overflow not in OVERFLOWS:
            raise ConfigError(
                f"ring overflow: {overflow!r} (expected one of {OVERFLOWS}). "
                "Leave it out to drop the oldest unread rollout."
            )
        layout = BlockLayout.of(initial)
        kind = kind or (default_kind() if name is None else "named")
        _check_room(layout, slots, writers, kind)
        segment = SharedSegment(ring_nbytes(layout, slots, writers), name=name, kind=kind)
        free, ready = create_pipes(segment)
        self._open(segment, layout, slots, writers, overflow, free, ready)
        for slot in range(slots):
            free.put(Token(slot, 0, 0, 0))
        header = self._header
        header[MAGIC] = _MAGIC
        header[DIGEST] = layout.digest
        header[_SLOTS] = slots
        header[_WRITERS] = writers
        header[_OVERFLOW] = OVERFLOWS.index(overflow)
        header[READY] = 1
        if self.name is not None:
            self._end_with_process()

    @classmethod
    def attach(cls, name: str, initial: Mapping[str, torch.Tensor]) -> RolloutRing:
        """Attach the named ring of an unrelated process.

        Args:
            name: Its name.
            initial: Dotted key to tensor, as its creator gave it.

        Raises:
            SegmentError: There is no segment of that name.
            LayoutDigestError: It is not a ring, or its slots have another layout.
        """
        layout = BlockLayout.of(initial)
        segment = attach_complete(
            name,
            "rollout ring",
            _MAGIC,
            layout.digest,
            _HEADER_WORDS,
            size=lambda header: ring_nbytes(layout, header[_SLOTS], header[_WRITERS]),
        )
        return _attach_named(segment, layout)

    def _open(
        self,
        segment: SharedSegment,
        layout: BlockLayout,
        slots: int,
        writers: int,
        overflow: Overflow,
        free: TokenPipe,
        ready: TokenPipe,
    ) -> None:
        self._segment = segment
        self.layout = layout
        self.slots = slots
        self.writers = writers
        self.overflow = overflow
        self._free = free
        self._ready = ready
        buffer = segment.buffer
        self._header = SharedWords(buffer, 0, _HEADER_WORDS).view
        offset = SharedWords.nbytes(_HEADER_WORDS)
        self._writer_words = SharedWords(buffer, offset, writers * (3 + writers)).view
        offset += SharedWords.nbytes(len(self._writer_words))
        # Written by the slot's owner of the moment alone.
        self._generations = SharedWords(buffer, offset, slots).view
        offset += SharedWords.nbytes(slots)
        flat = torch.from_numpy(buffer)
        self._blocks = [
            flat[offset + i * layout.nbytes : offset + (i + 1) * layout.nbytes]
            for i in range(slots)
        ]
        self._tensors = [layout.views(block) for block in self._blocks]
        self._views = [dict(zip(layout.keys, views, strict=True)) for views in self._tensors]
        self._writer = 0
        self._own = 0  # where the words of the own writer begin
        self._note = 0  # the last one of the own writer
        self._claimed: int | None = None
        self._reads = False
        self._held: set[int] = set()  # slots taken and not released
        self._awaited: deque[Lease] = deque()  # taken while waiting, not yet given out
        self._at_end: Finalize | None = None
        self._at_end_pid = 0
        self._lease: Lease | None = None
        self._borrows = 0

    # Both sides

    @property
    def name(self) -> str | None:
        """The name to attach by, or None for an anonymous ring."""
        return self._segment.name

    @property
    def slot_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field of a slot, by dotted key."""
        return {field.key: field.shape for field in self.layout.fields}

    @property
    def closed(self) -> bool:
        """Whether this process has closed the ring."""
        return self._segment.closed

    @property
    def write_count(self) -> int:
        """Rollouts that all writers have committed."""
        self._check_open()
        return sum(self._of_writer(w, _COMMITTED) for w in range(self.writers))

    @property
    def written(self) -> tuple[int, ...]:
        """Rollouts that each writer has committed."""
        self._check_open()
        return tuple(self._of_writer(w, _COMMITTED) for w in range(self.writers))

    @property
    def read_count(self) -> int:
        """Rollouts that the reader has released."""
        self._check_open()
        return self._header[_READ]

    @property
    def dropped(self) -> tuple[int, ...]:
        """Rollouts of each writer that were dropped before they were read."""
        self._check_open()
        return tuple(
            sum(self._of_writer(by, 3 + of) for by in range(self.writers))
            for of in range(self.writers)
        )

    @property
    def lost(self) -> int:
        """Committed rollouts that nobody will read: they went with a process that died."""
        self._check_open()
        return self._header[_LOST]

    def _of_writer(self, writer: int, word: int) -> int:
        return self._writer_words[writer * (3 + self.writers) + word]

    def _set_own(self, word: int, value: int) -> None:
        self._writer_words[self._own + word] = value

    def _check_open(self) -> None:
        if not self._tensors:
            _ = self._segment.buffer  # a closed ring is refused

    # Writer

    def use_writer(self, writer: int) -> None:
        """Write as writer `writer` from now on, 0 by default. One process per writer.

        Raises:
            ConfigError: There is no such writer.
            RuntimeError: A slot is claimed.
        """
        self._check_open()
        if not 0 <= writer < self.writers:
            raise ConfigError(
                f"ring writer: {writer} (expected 0 to {self.writers - 1}). "
                "Make the ring for more writers."
            )
        if self._claimed is not None:
            raise RuntimeError(
                f"cannot become writer {writer}: slot {self._claimed} is being written "
                "(expected none). Commit it first."
            )
        self._writer = writer
        self._own = writer * (3 + self.writers)
        self._write_here(this_process())

    def _write_here(self, pid: int) -> None:
        self._note = self._of_writer(self._writer, _NOTE)
        self._tell(IDLE)
        self._set_own(_PID, pid)
        self._end_with_process()

    def _tell(self, state: int) -> None:
        """Note what this writer is at."""
        self._note = note = following(self._note, state)
        self._writer_words[self._own + _NOTE] = note

    def _end_with_process(self) -> None:
        """Say so when this process ends: who ended has not died.

        Multiprocessing's finalizers run at the end of its workers too, where atexit's may not.
        """
        if self._at_end_pid != os.getpid():
            self._at_end = Finalize(None, _end, (weakref.ref(self),), exitpriority=0)
            self._at_end_pid = os.getpid()

    def claim(self, timeout: float | None = None) -> int | None:
        """Own a slot to fill, until it is committed; return it.

        Args:
            timeout: Seconds to wait for a slot; without end if not given.

        Returns:
            The slot's index; the one already claimed if there is one; None after `timeout`.

        Raises:
            PeerGoneError: Every slot is taken and the reader has closed or died.
        """
        self._check_open()
        if self._claimed is not None:
            return self._claimed
        words, own = self._writer_words, self._own
        pid = this_process()
        if words[own + _PID] != pid:
            self._write_here(pid)
        token = self._take_to_fill()
        if token is None:
            token = self._wait_to_fill(timeout)
        if token is None:
            return None
        slot = token.slot
        self._tell(slot + 1)
        # Odd, and never a value it had: the last owner may have died with it odd.
        self._generations[slot] = (self._generations[slot] + 1) | 1
        self._claimed = slot
        return slot

    def _take_to_fill(self) -> Token | None:
        self._tell(MOVING)
        token = self._free.take()
        if token is None and self.overflow == "overwrite":
            token = self._ready.take()
            if token is not None:
                word = 3 + token.writer
                self._set_own(word, self._of_writer(self._writer, word) + 1)
        if token is None:
            self._tell(IDLE)
        return token

    def _wait_to_fill(self, timeout: float | None) -> Token | None:
        pipes = [self._free] if self.overflow == "block" else [self._free, self._ready]
        for slept in waits(pipes, timeout):
            token = self._take_to_fill()
            if token is not None:
                return token
            if not slept:
                continue
            reader = self._header[_READER_PID]
            if self._header[_READER_GONE] or (reader and not process_is_alive(reader)):
                raise PeerGoneError(
                    f"writer {self._writer} waits for a free slot: the reader, process "
                    f"{process_id(reader)}, is gone (expected it to read). Stop writing."
                )
        return None

    @property
    def write_slot(self) -> int:
        """The slot to fill, claimed if none is.

        Raises:
            PeerGoneError: As for `claim`.
        """
        slot = self.claim()
        assert slot is not None, "claim waits without end"
        return slot

    @property
    def write_buffer(self) -> dict[str, torch.Tensor]:
        """The tensors of the slot to fill, by dotted key."""
        return dict(self._views[self.write_slot])

    def signal_write_done(self) -> int:
        """Commit the claimed slot; return how many rollouts this writer has committed.

        Raises:
            RuntimeError: No slot is claimed.
        """
        self._check_open()
        slot = self._claimed
        if slot is None:
            raise RuntimeError(
                "cannot commit: no slot is claimed (expected one). Fill write_buffer first."
            )
        words, own = self._writer_words, self._own
        count = words[own + _COMMITTED] + 1
        generation = self._generations[slot] + 1
        self._generations[slot] = generation
        self._claimed = None
        self._tell(MOVING)
        words[own + _COMMITTED] = count  # first: whoever dies in between, it is missed
        self._ready.put(Token(slot, self._writer, count, generation))
        self._tell(IDLE)
        return count

    def abandon_write(self) -> None:
        """Give the claimed slot back without committing it; does nothing if none is."""
        self._check_open()
        if self._claimed is not None:
            slot, self._claimed = self._claimed, None
            self._tell(MOVING)
            self._free.put(Token(slot, self._writer, 0, self._generations[slot]))
            self._tell(IDLE)

    def blank(self) -> RolloutBlock:
        """Return a private rollout of zeros, which `write` and `copy_read_slot_to` copy at once."""
        return RolloutBlock(self.layout)

    def write(self, tensors: Mapping[str, torch.Tensor], timeout: float | None = None) -> bool:
        """Commit a copy of `tensors`, dotted key to tensor.

        In one copy if they are a `blank` of this ring, and one for each tensor otherwise.

        Returns:
            False if no slot was to be had within `timeout` seconds.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; no slot was touched.
            PeerGoneError: As for `claim`.
        """
        at_once = self._lies_as_a_slot(tensors)
        ordered = [] if at_once else self.layout.select(tensors)
        slot = self.claim(timeout)
        if slot is None:
            return False
        if at_once:
            self._blocks[slot].copy_(tensors.memory)  # type: ignore[attr-defined]
        else:
            with torch.no_grad():
                torch._foreach_copy_(self._tensors[slot], ordered)
        self.signal_write_done()
        return True

    def _lies_as_a_slot(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return type(tensors) is RolloutBlock and (
            tensors.layout is self.layout or tensors.layout == self.layout
        )

    def take_over(self, writer: int) -> bool:
        """Free the slot that a dead writer noted, before becoming it; return if there was one.

        One process at a time, and none that recovers meanwhile. What the dead one had in
        its hands between a pipe and its note, some microseconds in all, is left for `recover`.

        Raises:
            RuntimeError: The writer is alive.
        """
        self._check_open()
        self._refuse_living(writer)
        slot = self._forget(writer)
        if slot is not None:
            self._free.put(Token(slot, writer, 0, self._generations[slot]))
        return slot is not None

    def _refuse_living(self, writer: int) -> None:
        pid = self._of_writer(writer, _PID)
        if pid and process_is_alive(pid):
            raise RuntimeError(
                f"cannot recover the slot of writer {writer}: process {process_id(pid)} is alive "
                "(expected it dead). End it first."
            )

    def _forget(self, writer: int) -> int | None:
        """Let nobody be a writer whose process is dead; return the slot that it had noted."""
        word, own = self._of_writer(writer, _NOTE), writer * (3 + self.writers)
        self._writer_words[own + _NOTE] = following(word, IDLE)
        self._writer_words[own + _PID] = 0
        return noted_slot(word)

    # Reader

    def fileno(self) -> int:
        """A descriptor to wait on with others, readable when a rollout is ready.

        It says nothing of one that `wait_for_data` has already taken.
        """
        self._check_open()
        return self._ready.ends[0]

    def available(self) -> int:
        """How many committed rollouts wait to be read."""
        self._check_open()
        return len(self._ready) + len(self._awaited)

    def wait_for_data(self, timeout: float | None = 60.0) -> bool:
        """Wait until a rollout is ready; return whether one is.

        It is the reader's from then on, so no writer overwrites it; the next read or
        `acquire` gives it out.

        Args:
            timeout: Seconds; without end if None.

        Raises:
            PeerGoneError: Nothing is ready and a writer has died; names its process.
        """
        if self._take_ready():
            return True
        for slept in waits([self._ready], timeout):
            if self._take_ready():
                return True
            if not slept:
                continue
            for writer in range(self.writers):
                pid = self._of_writer(writer, _PID)
                if pid and not process_is_alive(pid):
                    if self._take_ready():  # the last it did
                        return True
                    raise PeerGoneError(
                        f"waiting for a rollout: writer {writer}, process {process_id(pid)}, has "
                        "died (expected it to write). See its own output for the cause."
                    )
        return False

    def _take_ready(self) -> bool:
        if not self._awaited and (lease := self._take_committed()) is not None:
            self._awaited.append(lease)
        return bool(self._awaited)

    def _read_here(self) -> None:
        self._reads = True
        pid = this_process()
        if self._header[_READER_PID] != pid or self._header[_READER_GONE]:
            self._header[_READER_PID] = pid
            self._header[_READER_GONE] = 0
            self._end_with_process()

    def acquire(self) -> Lease | None:
        """Own the oldest committed slot until `release`; None if there is none.

        Several may be held at once; each is one less for the writers.

        Raises:
            SegmentError: The slot is not what was committed: someone wrote to borrowed memory.
        """
        return self._awaited.popleft() if self._awaited else self._take_committed()

    def _take_committed(self) -> Lease | None:
        self._check_open()
        self._read_here()
        token = self._ready.take()
        if token is None:
            return None
        self._held.add(token.slot)
        self._check_whole(token)
        return Lease(token, self._views[token.slot])

    def release(self, lease: Lease) -> None:
        """Give a slot back to the writers.

        Raises:
            SegmentError: The slot was written while it was held.
        """
        self._check_whole(lease.token)
        self._header[_READ] = self._header[_READ] + 1
        self._held.discard(lease.token.slot)
        self._free.put(lease.token)

    def _check_whole(self, token: Token) -> None:
        self._check_open()  # it may have been closed while views were borrowed
        found = self._generations[token.slot]
        if found != token.generation:
            raise SegmentError(
                f"ring slot {token.slot}: generation {found} (expected {token.generation}, "
                f"as writer {token.writer} committed it). The slot was written without a claim."
            )

    @property
    def read_slot(self) -> int:
        """The slot being read, the oldest committed one if none is.

        Raises:
            RingTimeoutError: Nothing is ready.
        """
        return self._current().token.slot

    def _current(self) -> Lease:
        if self._lease is None:
            self._lease = self.acquire()
        self._check_open()
        if self._lease is None:
            raise RingTimeoutError(
                "cannot read: no rollout is ready (expected one). Call wait_for_data first."
            )
        return self._lease

    @contextlib.contextmanager
    def read_views(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Borrow the tensors of the slot being read, by dotted key.

        They are shared memory, valid inside the ``with`` block only; the slot stays the
        reader's until `advance_read`.

        Raises:
            RingTimeoutError: Nothing is ready.
            SegmentError: The slot was written meanwhile.
        """
        lease = self._current()
        self._borrows += 1
        try:
            yield lease.views
        finally:
            self._borrows -= 1
        self._check_whole(lease.token)

    def copy_read_slot_to(self, destination: Mapping[str, torch.Tensor]) -> None:
        """Copy the slot being read into `destination`, dotted key to tensor, on any device.

        Raises:
            LayoutKeyError: (a ``KeyError``) A field is missing from `destination`.
            LayoutShapeError: (a ``ValueError``) A tensor has another shape.
            LayoutDtypeError: (a ``TypeError``) A tensor has another dtype.
            RingTimeoutError: Nothing is ready.
        """
        if self._lies_as_a_slot(destination):
            lease = self._current()
            destination.memory.copy_(self._blocks[lease.token.slot])  # type: ignore[attr-defined]
            self._check_whole(lease.token)
            return
        missing = [key for key in self.layout.keys if key not in destination]
        if missing:
            raise LayoutKeyError(
                f"destination of a rollout: no {missing} (expected {list(self.layout.keys)}). "
                "Give a tensor for each field."
            )
        tensors = [destination[key] for key in self.layout.keys]
        self.layout.check(tensors)
        with self.read_views() as views, torch.no_grad():
            torch._foreach_copy_(tensors, list(views.values()))

    def read(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return a copy of the slot being read on `device`, by dotted key.

        Raises:
            RingTimeoutError: Nothing is ready.
        """
        with self.read_views():
            block = self._blocks[self.read_slot].to(device, copy=True)  # in one transfer
        return dict(zip(self.layout.keys, self.layout.views(block), strict=True))

    def advance_read(self) -> None:
        """Give the slot being read back to the writers; the next is the oldest ready one.

        Raises:
            RuntimeError: No slot is being read, or its views are borrowed.
        """
        if self._lease is None or self._borrows:
            self._check_open()
            state = "its views are borrowed" if self._borrows else "no slot is being read"
            raise RuntimeError(
                f"cannot advance: {state} (expected one that was read). "
                "Leave the block of read_views, or read first."
            )
        lease, self._lease = self._lease, None
        self.release(lease)

    # What the dead leave

    def recover(self, writer: int | None = None, timeout: float = 1.0) -> int:
        """Free the slots that dead processes held; return how many there were.

        For the reader, or whoever is to be it after one that has died. In whichever step a
        writer or a reader died, what it held is found; a rollout that was not committed is
        never read, one that was and went with it is counted in `lost`. Other writers may be
        at work. Rollouts that are ready become the reader's, as if waited for.

        Args:
            writer: One that must be dead; any may be if not given.
            timeout: Seconds to wait for living writers that claim or commit at this moment.

        Raises:
            RuntimeError: The writer is alive, or another living process is the reader.
            RingTimeoutError: A writer is stopped while it claims or commits. No slot is
                free but those that were.
        """
        self._check_open()
        if writer is not None:
            self._refuse_living(writer)
        self._refuse_living_reader()
        self._read_here()
        until = time.monotonic() + timeout
        free: list[Token] = []
        try:
            while True:
                before = self._notes()
                while (token := self._free.take()) is not None:
                    free.append(token)
                while (lease := self._take_committed()) is not None:
                    self._awaited.append(lease)
                missing = self._missing()
                notes = self._notes()
                living = {note.pid for note in notes if note.pid and process_is_alive(note.pid)}
                busy = unsettled(before, notes, living)
                if not busy:
                    break
                if time.monotonic() > until:
                    raise RingTimeoutError(
                        f"cannot recover slots: writers {busy}, processes "
                        f"{[process_id(notes[w].pid) for w in busy]}, are claiming or committing "
                        f"for {timeout:g} s (expected some microseconds). See whether one is "
                        "stopped, and recover again."
                    )
                time.sleep(_RETRY_SECONDS)
            held = self._held.union(token.slot for token in free)
            found = nobodys(self.slots, held, notes, living)
            for dead, note in enumerate(notes):
                if note.pid and note.pid not in living:
                    self._forget(dead)
            self._header[_LOST] = self._header[_LOST] + missing
            free += [Token(slot, 0, 0, self._generations[slot]) for slot in found]
            return len(found)
        finally:
            for token in free:
                self._free.put(token)

    def _refuse_living_reader(self) -> None:
        pid, here = self._header[_READER_PID], this_process()
        other = not self._reads if pid == here else pid and process_is_alive(pid)
        if other and not self._header[_READER_GONE]:
            raise RuntimeError(
                f"cannot recover slots: process {process_id(pid)} is the reader (expected this "
                "one). Recover where rollouts are read."
            )

    def _notes(self) -> list[Note]:
        return [
            Note(self._of_writer(w, _PID), self._of_writer(w, _NOTE)) for w in range(self.writers)
        ]

    def _missing(self) -> int:
        """Committed rollouts that are nowhere, when all that are ready are the reader's."""
        gone = self.read_count + sum(self.dropped) + self.lost
        return self.write_count - gone - len(self._held)

    # End

    _is_ending = staticmethod(sys.is_finalizing)  # the module's names may be gone then

    def close(self) -> None:
        """Give up the ring; its creator frees it. Idempotent."""
        if self._segment.closed or self._is_ending():  # then the kernel closes it
            return
        if self._at_end is not None:
            self._at_end.cancel()
        self._vacate()
        paths = pipe_paths(self.name) if self.name and self._segment.is_owner else ()
        # The memory goes with the last that looks at it: only what was borrowed may remain.
        del self._header, self._writer_words, self._generations
        self._tensors = []
        self._views = []
        self._blocks = []
        self._lease = None
        self._awaited.clear()
        self._segment.close()
        self._free.close()
        self._ready.close()
        for path in paths:
            path.unlink(missing_ok=True)

    def _vacate(self) -> None:
        """Be neither reader nor writer any more."""
        if self._header[_READER_PID] == this_process():
            self._header[_READER_GONE] = 1
        for writer in range(self.writers):
            if self._of_writer(writer, _PID) == this_process() and self._claimed is None:
                self._writer_words[writer * (3 + self.writers) + _PID] = 0

    cleanup = close

    def __enter__(self) -> RolloutRing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_borrows" in self.__dict__:  # absent if __init__ refused its arguments
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        if self.name is not None:
            return _attach_named, (self._segment, self.layout)
        ends = [reduction.DupFd(end) for end in (*self._free.ends, *self._ready.ends)]
        shape = (self.slots, self.writers, self.overflow)
        return _attach_pickled, (self._segment, self.layout, *shape, ends)


def _end(ring: weakref.ref[RolloutRing]) -> None:
    alive = ring()
    if alive is None or alive._segment.closed:
        return
    if alive.name is not None and alive._segment.is_owner:
        alive.close()  # and its name goes
    else:
        alive._vacate()  # threads may still use it; the kernel closes the rest


def _attach_named(segment: SharedSegment, layout: BlockLayout) -> RolloutRing:
    header = SharedWords(segment.buffer, 0, _HEADER_WORDS)
    assert segment.name is not None
    free, ready = (TokenPipe.open(path) for path in pipe_paths(segment.name))
    ring = RolloutRing.__new__(RolloutRing)
    overflow = OVERFLOWS[header[_OVERFLOW]]
    ring._open(segment, layout, header[_SLOTS], header[_WRITERS], overflow, free, ready)
    return ring


def _attach_pickled(
    segment: SharedSegment,
    layout: BlockLayout,
    slots: int,
    writers: int,
    overflow: Overflow,
    ends: Sequence[Any],
) -> RolloutRing:
    numbers = [end.detach() for end in ends]
    free, ready = TokenPipe((numbers[0], numbers[1])), TokenPipe((numbers[2], numbers[3]))
    ring = RolloutRing.__new__(RolloutRing)
    ring._open(segment, layout, slots, writers, overflow, free, ready)
    return ring


def _check_room(layout: BlockLayout, slots: int, writers: int, kind: SegmentKind) -> None:
    """Refuse a ring that does not fit, before anything is allocated."""
    needed, free = ring_nbytes(layout, slots, writers), free_bytes(kind)
    if needed <= free:
        return
    slot = ring_nbytes(layout, 1, 0) - ring_nbytes(layout, 0, 0)
    fit = max(0, (free - ring_nbytes(layout, 0, writers)) // slot)
    raise SegmentSpaceError(
        f"cannot create a ring of {slots} slots: {needed} bytes do not fit (expected at most "
        f"{free}, which holds {fit} slots of {layout.nbytes} bytes). Use fewer slots, smaller "
        "rollouts, or a larger shared-memory mount."
    )


def ring_nbytes(layout: BlockLayout, slots: int, writers: int) -> int:
    """Return the bytes of shared memory that a `RolloutRing` takes."""
    words = _HEADER_WORDS + writers * (3 + writers) + slots
    return SharedWords.nbytes(words) + slots * layout.nbytes
