"""A ring of shared rollout slots for several writers and one reader; a slot has one owner.

Each writer has home slots and two pipes of tokens: ``free``, slots to fill, and ``ready``,
committed slots, oldest first. A slot is in its writer's hand, in its writer's pipes, or leased
by the reader; it never reaches another writer. Hence what a dead writer held is what is in
neither of its pipes and not leased (`recover`). The process that takes a token sees what the last
owner of the slot wrote (`torchrl_unilab.shm.words`).

- *claim*: take a token from ``free``. If there is none, ``overflow="overwrite"`` takes the
  writer's own oldest from ``ready`` (the rollout is dropped and counted); ``"block"`` waits.
- *commit*: give the slot a new generation and put its token into ``ready``.
- *acquire*: take the oldest token of all ``ready`` pipes, by the generations that writers publish.
- *release*: put the token into the ``free`` pipe of the slot's writer.

An interrupt between any two lines leaves each token in a pipe or in a hand, and counts that
the next call completes. `ring_writer` maps what is shared, claims and commits; the reader's side
is here. `RolloutRingStorage` is the caller.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchrl_unilab.errors import PeerGoneError, SegmentError, UsageError
from torchrl_unilab.processes import process_id, process_is_alive, this_process
from torchrl_unilab.shm.ring_writer import (
    COMMITTED,
    LOST,
    PROCESS,
    READ,
    READER,
    RESIGNED,
    SKIPPED,
    WRITER_WORDS,
    RingWriter,
)
from torchrl_unilab.shm.tokens import pack_token, unpack_token, waits

COUNTERS = ("written", "dropped", "read", "skipped", "lost")


def _counter(name: str, doc: str) -> Any:
    word = COMMITTED + COUNTERS.index(name)
    return property(lambda ring: ring._of_writers(word), doc=doc)


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


class RolloutRing(RingWriter):
    """`slots` shared slots of one layout for each of `writers` writers, and one reader.

    Pickle the ring to spawned processes. Each may be one writer (`become_writer`); the first
    process that acquires is the reader. A process uses the ring in one thread at a time. For
    each writer, once all is read, ``written == read + skipped + dropped + lost``.

    The tokens of leased slots are in `_held`. Operations that an interrupt may cut short are
    recorded before they start (a release's count in `_releasing`, a recovery in `_recovering`), and
    the next call completes them.

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

    Examples:
        >>> from torchrl_unilab.shm import BlockLayout, RolloutRing
        >>> import torch
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

    # Reader

    def _start_process(self) -> None:
        self._is_reader = False
        self._held: list[bytes] = []  # leased slots
        self._taken = [0] * (self.slots * self.writers)  # generation last taken from each slot
        self._releasing: tuple[bytes, int, int] | None = None  # a token, a word and its value then
        self._recovering: int | None = None  # the writer whose pipes are drained, into:
        self._drained_free: list[bytes] = []
        self._drained_ready: list[bytes] = []
        super()._start_process()

    def filenos(self) -> list[int]:
        """Descriptors to wait on: one is readable while a rollout is ready."""
        self._check_open()
        return [pipe.ends[0] for pipe in self._ready]

    def available(self, writer: int | None = None) -> int:
        """Return the number of committed rollouts, of all writers or one, that are not leased."""
        self._check_open()
        pipes = self._ready if writer is None else [self._ready[writer]]
        return sum(len(pipe) for pipe in pipes)

    @property
    def leases(self) -> list[Lease]:
        """Leases of this process, including one that an interrupt has kept from the caller."""
        self._check_open()
        return [*map(self._lease, self._held)]

    def acquire(self, timeout: float | None = 0.0) -> Lease | None:
        """Own the oldest committed rollout until `release`.

        Several may be owned at once; each leaves its writer one slot less.

        Args:
            timeout: Seconds to wait for a rollout; None waits as long as all writers live, and 0
                does not check whether they do.

        Returns:
            The lease; None if no rollout came in time.

        Raises:
            PeerGoneError: No rollout came, and a writer has died (the error names its process), or
                all writers have resigned and there is no `timeout`.
            UsageError: Another process is the reader.
            SegmentError: The slot was written without a claim.
        """
        self._check_reader()
        lease = self._take_oldest()
        if lease is not None or timeout == 0.0:
            return lease
        for _ in waits(self._ready, timeout):
            if lease := self._take_oldest() or self._take_or_refuse_to_wait(timeout):
                return lease
        return None

    def acquire_all(self) -> list[Lease]:
        """Own all committed rollouts; return the leases of this process, as `leases` does.

        Raises:
            UsageError: Another process is the reader.
            SegmentError: A slot was written without a claim.
        """
        self._check_reader()
        while self._take_oldest() is not None:
            pass
        return [*map(self._lease, self._held)]

    def _check_reader(self) -> None:
        """Become the reader if no process is, and complete what an interrupt has cut short."""
        self._check_open()
        if not self._is_reader:
            self._register(self._take_reader, "become the reader")
            self._is_reader = True
        self._complete_interrupted()

    def _take_reader(self) -> None:
        reader, me = self._header[READER], this_process()
        if reader not in (0, me):
            raise UsageError(
                f"cannot read the ring: process {process_id(reader)} is its reader"
                f"{'' if process_is_alive(reader) else ', and has ended with what it held'} "
                "(expected this one). Read in one process, and make a new ring after its end."
            )
        self._header[READER] = me

    def _take_oldest(self) -> Lease | None:
        order = (0,) if self.writers == 1 else self._oldest_first()
        for writer in order:
            if self._ready[writer].take(self._held):
                lease = self._lease(self._held[-1])
                self._check(lease)
                self._taken[lease.slot] = lease.generation
                return lease
        return None

    def _oldest_first(self) -> Sequence[int]:
        """Return the writers in the order of their oldest rollouts that are not taken yet."""
        oldest = [sys.maxsize] * self.writers
        for slot, generation in enumerate(self._generations.tolist()):
            writer = slot // self.slots
            if 0 < generation < oldest[writer] and generation != self._taken[slot]:
                oldest[writer] = generation
        return sorted(range(self.writers), key=oldest.__getitem__)

    def _take_or_refuse_to_wait(self, timeout: float | None) -> Lease | None:
        """Take what dead or resigned writers committed last; raise if nothing can come any more.

        Returns None if it is worth waiting for a rollout.
        """
        processes = self._words[PROCESS::WRITER_WORDS].tolist()
        dead = [
            word for word in processes if word not in (0, RESIGNED) and not process_is_alive(word)
        ]
        all_resigned = timeout is None and set(processes) == {RESIGNED}
        if not dead and not all_resigned:
            return None
        if lease := self._take_oldest():
            return lease
        if dead:
            raise PeerGoneError(
                f"ring writer {processes.index(dead[0])}: process {process_id(dead[0])} has died "
                "(expected it to write). See its own output for the cause, and recover the writer."
            )
        raise PeerGoneError(
            f"ring: no rollout is ready and all {self.writers} writers have resigned (expected one "
            "to write). Read until `available()` is 0, or wait with a timeout."
        )

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
            UsageError: The slot is not leased.
            SegmentError: The slot was written while it was leased.
        """
        self._check_open()
        self._complete_interrupted()
        token = pack_token(lease.generation, lease.slot)
        if token not in self._held:
            raise UsageError(
                f"cannot release slot {lease.slot}: this process holds no lease on it (expected "
                "one from acquire). Release each lease exactly once."
            )
        self._check(lease)
        word = lease.writer * WRITER_WORDS + (READ if read else SKIPPED)
        count = self._words[word] + 1
        self._releasing = token, word, count
        self._free[lease.writer].put(self._held, self._held.index(token))
        self._complete_interrupted()

    def _complete_interrupted(self) -> None:
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
        stay so, leases stay valid, and other writers are not touched. Another process may
        become this writer afterwards.

        Raises:
            ConfigError: There is no such writer.
            UsageError: The writer is alive, or another process is the reader.
        """
        self._check_reader()
        writer = self._known_writer(writer)
        return self._register(partial(self._recover, writer), f"recover writer {writer}")

    def _recover(self, writer: int) -> int:
        """Recover a writer, which no process becomes meanwhile."""
        first = writer * WRITER_WORDS
        process = self._words[first + PROCESS]
        if process_is_alive(process):
            raise UsageError(
                f"cannot recover ring writer {writer}: process {process_id(process)} is alive "
                "(expected it dead). End it first."
            )
        self._recovering = writer
        self._free[writer].drain(self._drained_free)
        self._ready[writer].drain(self._drained_ready)
        home = range(writer * self.slots, (writer + 1) * self.slots)
        tokens = (*self._drained_free, *self._drained_ready, *self._held)
        accounted = {unpack_token(token)[1] for token in tokens}.intersection(home)
        orphaned = [slot for slot in home if slot not in accounted]
        unread_or_leased = len(accounted) - len(self._drained_free)
        # Each committed rollout is dropped, read, skipped, unread, leased, or lost.
        committed, *finished = self._words[first + COMMITTED : first + LOST]
        self._words[first + LOST] = committed - sum(finished) - unread_or_leased
        for slot in orphaned:
            self._generations[slot] = 0
            self._drained_free.append(pack_token(0, slot))
        self._put_back(writer)
        self._words[first + PROCESS] = 0
        return len(orphaned)

    def _put_back(self, writer: int) -> None:
        free, ready = self._drained_free, self._drained_ready
        self._ready[writer].drain(ready)  # what an interrupted call has put back already
        ready.sort()
        while ready:
            self._ready[writer].put(ready)
        while free:
            self._free[writer].put(free)
        self._recovering = None

    # Counters

    written = _counter("written", "Rollouts that each writer has committed.")
    dropped = _counter("dropped", "Rollouts of each writer that it has overwritten unread.")
    read = _counter("read", "Rollouts of each writer that were released as read.")
    skipped = _counter("skipped", "Rollouts of each writer that were released unread.")
    lost = _counter("lost", "Rollouts that each writer had committed when it died in handing over.")

    def _of_writers(self, word: int) -> tuple[int, ...]:
        self._check_open()
        self._complete_interrupted()
        return tuple(self._words[word::WRITER_WORDS])

    def resume_from(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Replace the counters by those of an earlier ring. Before any other process writes.

        Args:
            counts: Name of each counter to one number per writer; 0 if left out. Rollouts that
                are unread or leased now count as written in addition.
        """
        self._complete_interrupted()  # or the next call would count once more
        for writer in range(self.writers):
            first = writer * WRITER_WORDS
            finished = [counts[name][writer] if name in counts else 0 for name in COUNTERS[1:]]
            leased = sum(lease.writer == writer for lease in self.leases)
            written = self.available(writer) + leased + sum(finished)
            for word, count in enumerate((written, *finished), COMMITTED):
                self._words[first + word] = count
