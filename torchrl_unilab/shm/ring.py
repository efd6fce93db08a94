"""A ring of shared rollout slots for several writers and one reader; a slot has one owner.

Each writer has home slots and two pipes of tokens: ``free``, slots to fill, and ``ready``,
committed slots, oldest first. A slot is in its writer's hands, in its writer's pipes, or leased
by the reader; it never reaches another writer. Hence what a dead writer held is what is in
neither of its pipes and not leased (`recover`). The kernel's lock in a pipe orders memory:
the process that takes a token sees what the last owner of the slot wrote.

- *claim*: take a token from ``free``. If there is none, ``overflow="overwrite"`` takes the
  writer's own oldest from ``ready`` (the rollout is dropped and counted); ``"block"`` waits.
- *commit*: give the slot a new generation and put its token into ``ready``.
- *acquire*: take the oldest token of all ``ready`` pipes, by the generations that writers publish.
- *release*: put the token into the ``free`` pipe of the slot's writer.

An interrupt between any two lines leaves each token in a pipe or in a hand, and counts that
the next call completes. `RolloutRingStorage` is the caller.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.util import Finalize
from typing import Any, Literal, NamedTuple

import torch

from torchrl_unilab.errors import ConfigError, PeerGoneError, SegmentError
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.liveness import process_id, process_is_alive, this_process
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.tokens import TokenPipe, pack_token, unpack_token, waits
from torchrl_unilab.shm.words import SharedWords

__all__ = ["Lease", "Overflow", "RolloutRing"]

Overflow = Literal["overwrite", "block"]
OVERFLOWS: tuple[Overflow, ...] = ("overwrite", "block")
MAX_SLOTS = 128  # of one writer: as many tokens fit two pages, the smallest pipe there is
MAX_WRITERS = 1024
_REGISTER_SECONDS = 10.0

COUNTERS = ("written", "dropped", "read", "skipped", "lost")
_CREATOR, _READER, _CLOSED = range(3)  # words of the ring
_HEADER_WORDS = 3
# Words of a writer: its process, and the counters; the reader stores the last three.
_PROCESS, _COMMITTED, _DROPPED, _READ, _SKIPPED, _LOST = range(6)
_WRITER_WORDS = 6


class Lease(NamedTuple):
    """A committed slot that the reader owns until `RolloutRing.release`.

    Attributes:
        writer: The writer of the rollout.
        slot: The slot: an index of `RolloutRing.views`.
        generation: When it was committed; orders the rollouts of all writers.
        views: Dotted key to shared tensor. Borrowed: valid until the release.
    """

    writer: int
    slot: int
    generation: int
    views: Mapping[str, torch.Tensor]


def _counter(name: str, doc: str) -> Any:
    word = _COMMITTED + COUNTERS.index(name)
    return property(lambda ring: ring._of_writers(word), doc=doc)


def check_ring(slots: int, writers: int, overflow: str) -> None:
    """Refuse settings of a ring that cannot work.

    Raises:
        ConfigError: A count or `overflow` is out of its range.
    """
    for name, count, most in (("slots", slots, MAX_SLOTS), ("writers", writers, MAX_WRITERS)):
        if not 1 <= count <= most:
            raise ConfigError(f"ring {name}: {count} (expected 1 to {most}). Use for example 2.")
    if overflow not in OVERFLOWS:
        raise ConfigError(
            f"ring overflow: {overflow!r} (expected one of {OVERFLOWS}). "
            "Leave it out to drop the oldest unread rollout."
        )


class RolloutRing:
    """`slots` shared slots of one layout for each of `writers` writers, and one reader.

    Pickle the ring to spawned processes. Each may be one writer (`become_writer`); the first
    process that acquires is the reader. A process uses the ring in one thread at a time. For
    each writer, once all is read,
    ``written == read + skipped + dropped + lost``.

    Args:
        layout: The layout of a slot.
        slots: Home slots of each writer. An overwriting writer never waits while the reader
            leases fewer of them.
        writers: Largest number of writing processes.
        overflow: What a writer does when it has no free slot: ``"overwrite"`` drops its oldest
            unread rollout, ``"block"`` waits.

    Raises:
        ConfigError: A count or `overflow` is not one of the above.
        SegmentSpaceError: The slots do not fit the memory that is free.

    Example:
        >>> layout = BlockLayout.of({"reward": torch.zeros(2, 3)})
        >>> with RolloutRing(layout, slots=2) as ring:
        ...     slot = ring.claim()
        ...     _ = ring.views[slot]["reward"].fill_(2.0)
        ...     count = ring.commit()
        ...     lease = ring.acquire()
        ...     print(count, lease.views["reward"].sum().item())
        ...     ring.release(lease)
        1 12.0
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        slots: int = 2,
        writers: int = 1,
        overflow: Overflow = "overwrite",
    ) -> None:
        check_ring(slots, writers, overflow)
        self.layout, self.slots, self.writers, self.overflow = layout, slots, writers, overflow
        self._segment = SharedSegment(self.nbytes(layout, slots, writers))
        self._start([TokenPipe.create() for _ in range(2 * writers)])
        self._header[_CREATOR] = this_process()
        for slot in range(slots * writers):
            self._free[slot // slots].put([pack_token(0, slot)])

    def _start(self, pipes: Sequence[TokenPipe]) -> None:
        """Map the memory, as a process that has neither written nor read."""
        writers, slots, layout = self.writers, self.slots * self.writers, self.layout
        self._free, self._ready = pipes[:writers], pipes[writers:]
        buffer, end = self._segment.buffer, 0
        words: list[memoryview] = []
        for count in (_HEADER_WORDS, writers * _WRITER_WORDS, slots):
            words.append(SharedWords(buffer, end, count).view)
            end += SharedWords.nbytes(count)
        self._header, self._words, self._generations = words
        blocks = torch.from_numpy(buffer)[end:].view(-1, layout.nbytes)
        self.views = [dict(zip(layout.keys, layout.views(block), strict=True)) for block in blocks]

        self.writer: int | None = None
        self._own = 0  # where the words of the own writer begin
        self._hand: list[bytes] = []  # the token of the claimed slot
        self._counts = (0, 0)  # rollouts committed and dropped, if the take succeeded
        self._claimed: int | None = None  # the slot, once the claim is complete

        self._is_reader = False
        self._held: list[bytes] = []  # leased slots
        self._taken = [0] * slots  # generation last taken from each slot
        self._releasing: tuple[bytes, int, int] | None = None  # a token, a word and its value then
        self._recovering: int | None = None  # the writer whose pipes are drained:
        self._spare: list[bytes] = []
        self._unread: list[bytes] = []

        self._at_end: Finalize | None = None

    @staticmethod
    def nbytes(layout: BlockLayout, slots: int, writers: int) -> int:
        """Return the bytes of shared memory that a ring takes."""
        words = _HEADER_WORDS + writers * (_WRITER_WORDS + slots)
        return SharedWords.nbytes(words) + slots * writers * layout.nbytes

    # Counters

    written = _counter("written", "Rollouts that each writer has committed.")
    dropped = _counter("dropped", "Rollouts of each writer that it has overwritten unread.")
    read = _counter("read", "Rollouts of each writer that were released as read.")
    skipped = _counter("skipped", "Rollouts of each writer that were released unread.")
    lost = _counter("lost", "Rollouts that each writer had committed when it died in handing over.")

    def _of_writers(self, word: int) -> tuple[int, ...]:
        self._check_open()
        self._settle()
        return tuple(self._words[word::_WRITER_WORDS])

    def resume_from(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Replace the counters by those of an earlier ring. Before any other process writes.

        Args:
            counts: Name of each counter to one number per writer; 0 if left out. Rollouts that
                are unread or leased now count as written in addition.
        """
        for writer in range(self.writers):
            first = writer * _WRITER_WORDS
            gone = [counts[name][writer] if name in counts else 0 for name in COUNTERS[1:]]
            there = self.available(writer) + sum(lease.writer == writer for lease in self.leases)
            for word, count in enumerate((there + sum(gone), *gone), _COMMITTED):
                self._words[first + word] = count

    # Writer

    def become_writer(self, writer: int | None = None) -> int:
        """Write as writer `writer`, or as the first one that no process is; return its number.

        Raises:
            ConfigError: There is no such writer, or another process is it. The writer of a dead
                process is free again after `recover`.
            SegmentError: Another process has been registering for seconds.
            RuntimeError: A slot is claimed.
        """
        self._check_open()
        choice = range(self.writers) if writer is None else range(writer, writer + 1)
        if writer is not None and not 0 <= writer < self.writers:
            raise ConfigError(
                f"ring writer: {writer} (expected 0 to {self.writers - 1}). "
                "Make the ring for more writers."
            )
        if self._hand:
            raise RuntimeError(
                f"cannot become writer {writer}: a slot is claimed (expected none). "
                "Commit or abandon it first."
            )
        me = this_process()
        with self._segment.exclusively(_REGISTER_SECONDS):
            owners = self._words[_PROCESS::_WRITER_WORDS].tolist()
            mine = [number for number in choice if owners[number] == me]
            free = mine or [number for number in choice if not owners[number]]
            if not free:
                taken = {number: process_id(owners[number]) for number in choice}
                raise ConfigError(
                    f"cannot become a ring writer: each is taken, by processes {taken} (expected "
                    "a free one). Make the ring for more writers, or recover those of the dead."
                )
            self.resign()
            self._own = free[0] * _WRITER_WORDS
            self._words[self._own + _PROCESS] = me
        self.writer = free[0]
        self._end_with_process()
        return self.writer

    def resign(self) -> None:
        """Stop being a writer, so that another process may be the same one."""
        if self.writer is not None and self._words[self._own + _PROCESS] == this_process():
            self.abandon()
            self._words[self._own + _PROCESS] = 0
        self.writer = None

    def claim(self, timeout: float | None = None) -> int | None:
        """Own a slot to fill, until `commit` or `abandon`.

        Args:
            timeout: Seconds to wait for a slot; None waits as long as the reader lives.

        Returns:
            The slot, an index of `views`: the one already claimed if there is one. None after
            `timeout`.

        Raises:
            PeerGoneError: No slot is free, and the reader has closed the ring or died.
        """
        self._check_open()
        if not (self._hand or self._take_to_fill() or self._wait_to_fill(timeout)):
            return None
        self._complete_claim()
        return self._claimed

    def spare(self) -> int:
        """Return the number of free slots of this writer."""
        self._check_open()
        return 0 if self.writer is None else len(self._free[self.writer])

    def _take_to_fill(self) -> bool:
        if self.writer is None:
            self.become_writer()
        writer: int = self.writer  # type: ignore[assignment]
        self._claimed = None
        # Counts are stored as what they become if the take succeeds: an interrupt repeats none.
        committed, dropped = self._words[self._own + _COMMITTED], self._words[self._own + _DROPPED]
        self._counts = committed, dropped
        if self._free[writer].take(self._hand):
            return True
        if self.overflow == "block":
            return False
        self._counts = committed, dropped + 1
        return self._ready[writer].take(self._hand)

    def _wait_to_fill(self, timeout: float | None) -> bool:
        pipes = [self._free[self.writer]]  # type: ignore[index]
        if self.overflow == "overwrite":
            pipes.append(self._ready[self.writer])  # type: ignore[index]
        for _ in waits(pipes, timeout):
            if self._take_to_fill():
                return True
            reader = self._header[_READER] or self._header[_CREATOR]
            if self._header[_CLOSED] or not process_is_alive(reader):
                raise PeerGoneError(
                    f"ring writer {self.writer}: no slot is free and the reader, process "
                    f"{process_id(reader)}, is gone (expected it to read). Stop writing."
                )
        return False

    def _complete_claim(self) -> None:
        """Store what is so while the slot in hand is claimed, also after an interrupted commit."""
        slot = unpack_token(self._hand[0])[1]
        self._generations[slot] = 0
        self._words[self._own + _COMMITTED], self._words[self._own + _DROPPED] = self._counts
        self._claimed = slot

    def commit(self) -> int:
        """Hand the claimed slot to the reader; return how many this writer has committed.

        Raises:
            RuntimeError: No slot is claimed.
        """
        self._check_open()
        slot = self._claimed
        if slot is None or not self._hand:
            raise RuntimeError("ring commit: no slot is claimed (expected one). Call claim first.")
        generation, count = time.monotonic_ns(), self._counts[0] + 1
        self._generations[slot] = generation
        self._hand[0] = pack_token(generation, slot)
        self._words[self._own + _COMMITTED] = count  # first: a rollout is lost, never invented
        self._ready[self.writer].put(self._hand)  # type: ignore[index]
        return count

    def abandon(self) -> None:
        """Give the claimed slot back uncommitted; does nothing if none is claimed."""
        self._check_open()
        if self._hand:
            self._complete_claim()
            self._free[self.writer].put(self._hand)  # type: ignore[index]

    # Reader

    def filenos(self) -> list[int]:
        """Descriptors to wait on: one is readable while a rollout is ready."""
        self._check_open()
        return [pipe.ends[0] for pipe in self._ready]

    def available(self, writer: int | None = None) -> int:
        """Return the number of committed rollouts, of all writers or one, that are not leased."""
        self._check_open()
        return sum(map(len, self._ready if writer is None else [self._ready[writer]]))

    @property
    def leases(self) -> list[Lease]:
        """Leases of this process, among them what an interrupt has kept from the caller."""
        self._check_open()
        return [self._lease(token) for token in self._held]

    def acquire(self, timeout: float | None = 0.0) -> Lease | None:
        """Own the oldest committed rollout until `release`.

        Several may be owned at once; each is one slot less for its writer.

        Args:
            timeout: Seconds to wait for a rollout; None waits as long as all writers live.

        Returns:
            The lease; None if no rollout came in time.

        Raises:
            PeerGoneError: No rollout came, and a writer has died; names its process.
            RuntimeError: Another process is the reader.
            SegmentError: The slot was written without a claim.
        """
        self._check_open()
        if not self._is_reader:
            self._become_reader()
        lease = self._take_oldest()
        if lease is not None or timeout == 0.0:
            return lease
        for _ in waits(self._ready, timeout):
            lease = self._take_oldest() or self._take_last_of_dead()
            if lease is not None:
                return lease
        return None

    def _become_reader(self) -> None:
        me, reader = this_process(), self._header[_READER]
        if reader not in (0, me):
            raise RuntimeError(
                f"cannot read the ring: process {process_id(reader)} is its reader (expected "
                "this one). Read in one process."
            )
        self._header[_READER] = me
        self._is_reader = True
        self._end_with_process()

    def _take_oldest(self) -> Lease | None:
        self._settle()
        for writer in self._oldest_first():
            if self._ready[writer].take(self._held):
                lease = self._lease(self._held[-1])
                self._check(lease)
                self._taken[lease.slot] = lease.generation
                return lease
        return None

    def _oldest_first(self) -> Sequence[int]:
        """Return the writers in the order of their oldest rollouts that are not taken yet."""
        if self.writers == 1:
            return (0,)
        oldest = [sys.maxsize] * self.writers
        for slot, generation in enumerate(self._generations.tolist()):
            writer = slot // self.slots
            if 0 < generation < oldest[writer] and generation != self._taken[slot]:
                oldest[writer] = generation
        return sorted(range(self.writers), key=oldest.__getitem__)

    def _take_last_of_dead(self) -> Lease | None:
        """Take what came before a writer died; raise if one has died and nothing came."""
        for writer, process in enumerate(self._of_writers(_PROCESS)):
            if process and not process_is_alive(process):
                lease = self._take_oldest()
                if lease is not None:
                    return lease
                raise PeerGoneError(
                    f"ring writer {writer}: process {process_id(process)} has died (expected it "
                    "to write). See its own output for the cause, and recover the writer."
                )
        return None

    def _lease(self, token: bytes) -> Lease:
        generation, slot = unpack_token(token)
        return Lease(slot // self.slots, slot, generation, self.views[slot])

    def _check(self, lease: Lease) -> None:
        found = self._generations[lease.slot]
        if found != lease.generation:
            raise SegmentError(
                f"ring slot {lease.slot}: generation {found} (expected {lease.generation}, as "
                f"writer {lease.writer} committed it). The slot was written without a claim."
            )

    def release(self, lease: Lease, *, read: bool = True) -> None:
        """Give a slot back to its writer.

        Args:
            lease: The lease, from `acquire`.
            read: Whether the rollout counts as read, or as skipped.

        Raises:
            RuntimeError: It is not leased.
            SegmentError: The slot was written while it was leased.
        """
        self._check_open()
        self._settle()
        token = pack_token(lease.generation, lease.slot)
        if token not in self._held:
            raise RuntimeError(
                f"cannot release slot {lease.slot}: this process holds no lease on it (expected "
                "one from acquire). Release each lease exactly once."
            )
        self._check(lease)
        word = lease.writer * _WRITER_WORDS + (_READ if read else _SKIPPED)
        self._releasing = token, word, self._words[word] + 1
        self._free[lease.writer].put(self._held, self._held.index(token))
        self._settle()

    def _settle(self) -> None:
        """Complete what an interrupt has cut short: a release's count, a recovery's tokens."""
        if self._releasing is not None:
            token, word, count = self._releasing
            if token not in self._held:
                self._words[word] = count
            self._releasing = None
        if self._recovering is not None:
            self._put_back(self._recovering)

    def recover(self, writer: int) -> int:
        """Free the orphaned slots of a dead writer; return how many there were. For the reader.

        Whichever step the writer died in, rollouts that it had not committed are never read, and
        one that it had counted but not handed over is counted in `lost`. Those that are ready
        stay so, leases stay valid, and no other writer is looked at. Another process may
        become this writer afterwards.

        Raises:
            ConfigError: There is no such writer.
            RuntimeError: The writer is alive, or another process is the reader.
        """
        self._check_open()
        self._become_reader()
        if not 0 <= writer < self.writers:
            raise ConfigError(f"ring writer: {writer} (expected 0 to {self.writers - 1}).")
        first = writer * _WRITER_WORDS
        process = self._words[first + _PROCESS]
        if process_is_alive(process):
            raise RuntimeError(
                f"cannot recover ring writer {writer}: process {process_id(process)} is alive "
                "(expected it dead). End it first."
            )
        self._settle()
        self._recovering = writer
        self._free[writer].drain(self._spare)
        self._ready[writer].drain(self._unread)
        home = range(writer * self.slots, (writer + 1) * self.slots)
        known = [unpack_token(t)[1] for t in (*self._spare, *self._unread, *self._held)]
        orphaned = [slot for slot in home if slot not in known]
        leased = sum(slot in home for slot in known) - len(self._spare) - len(self._unread)
        committed, *gone = self._words[first + _COMMITTED : first + _LOST]
        self._words[first + _LOST] = committed - sum(gone) - len(self._unread) - leased
        for slot in orphaned:
            self._generations[slot] = 0
            self._spare.append(pack_token(0, slot))
        self._put_back(writer)
        self._words[first + _PROCESS] = 0
        return len(orphaned)

    def _put_back(self, writer: int) -> None:
        self._ready[writer].drain(self._unread)  # what an interrupted call has put back already
        self._unread.sort()
        while self._unread:
            self._ready[writer].put(self._unread)
        while self._spare:
            self._free[writer].put(self._spare)
        self._recovering = None

    # End

    @property
    def closed(self) -> bool:
        """Whether this process has closed the ring."""
        return self._segment.closed

    def _check_open(self) -> None:
        if not self.views:
            _ = self._segment.buffer  # refuses a closed ring

    def _end_with_process(self) -> None:
        """Resign when this process ends: a process that ended in order has not died.

        Finalizers of multiprocessing run at the end of its workers too, where atexit's may not.
        """
        if self._at_end is None:
            self._at_end = Finalize(None, _leave, (weakref.ref(self),), exitpriority=0)

    def _leave(self) -> None:
        self.resign()
        if self._header[_READER] == this_process():
            self._header[_CLOSED] = 1

    def close(self) -> None:
        """Close the ring in this process, as writer and reader. Idempotent."""
        if self._segment.closed:
            return
        if self._at_end is not None:
            self._at_end.cancel()
        self._leave()
        del self._header, self._words, self._generations
        self.views = []
        self._segment.close()
        for pipe in (*self._free, *self._ready):
            pipe.close()

    def __enter__(self) -> RolloutRing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_at_end" in self.__dict__ and not sys.is_finalizing():  # the kernel closes it then
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        self._check_open()
        state = {name: getattr(self, name) for name in ("layout", "slots", "writers", "overflow")}
        ends = [[reduction.DupFd(end) for end in p.ends] for p in (*self._free, *self._ready)]
        return {**state, "_segment": self._segment, "ends": ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ends = state.pop("ends")
        self.__dict__.update(state)
        self._start([TokenPipe((reads.detach(), writes.detach())) for reads, writes in ends])


def _leave(ring: weakref.ref[RolloutRing]) -> None:
    alive = ring()
    if alive is not None and not alive.closed:
        alive._leave()  # threads may still use it; the kernel closes the rest
