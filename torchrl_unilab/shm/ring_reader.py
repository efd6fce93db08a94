"""The reader's side of a ring: acquire, release, recover.

The tokens of leased slots are in `_held`. What an interrupt cuts short is noted before (a
release's count in `_releasing`, a recovery in `_recovering`), and the next call completes it.
`RolloutRing` is the caller.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torchrl_unilab.errors import ConfigError, PeerGoneError, SegmentError
from torchrl_unilab.shm.liveness import process_id, process_is_alive, this_process
from torchrl_unilab.shm.ring_memory import (
    CLOSED,
    COMMITTED,
    LOST,
    PROCESS,
    READ,
    READER,
    RESIGNED,
    SKIPPED,
    WRITER_WORDS,
    RingMemory,
)
from torchrl_unilab.shm.tokens import pack_token, unpack_token, waits

__all__ = ["Lease", "RingReader"]


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


class RingReader(RingMemory):
    """A ring, as a process reads it."""

    def _start_process(self) -> None:
        self._is_reader = False
        self._held: list[bytes] = []  # leased slots
        self._taken = [0] * (self.slots * self.writers)  # generation last taken from each slot
        self._releasing: tuple[bytes, int, int] | None = None  # a token, a word and its value then
        self._recovering: int | None = None  # the writer whose pipes are drained:
        self._spare: list[bytes] = []
        self._unread: list[bytes] = []
        super()._start_process()

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
            PeerGoneError: No rollout came, and a writer has died, whose process it names; or all
                writers have resigned and there is no `timeout`.
            RuntimeError: Another process is the reader.
            SegmentError: The slot was written without a claim.
        """
        self._check_open()
        if not self._is_reader:
            self._become_reader()
        self._settle()
        lease = self._take_oldest()
        if lease is not None or timeout == 0.0:
            return lease
        for _ in waits(self._ready, timeout):
            lease = self._take_oldest() or self._take_last(timeout)
            if lease is not None:
                return lease
        return None

    def acquire_all(self) -> list[Lease]:
        """Own all committed rollouts; return the leases of this process, as `leases` does.

        Raises:
            RuntimeError: Another process is the reader.
            SegmentError: A slot was written without a claim.
        """
        self._check_open()
        if not self._is_reader:
            self._become_reader()
        self._settle()
        while self._take_oldest() is not None:
            pass
        return [self._lease(token) for token in self._held]

    def _become_reader(self) -> None:
        if not self._is_reader:
            self._register(self._take_reader, "the reader")
            self._is_reader = True

    def _take_reader(self) -> None:
        reader, me = self._header[READER], this_process()
        if reader not in (0, me):
            raise RuntimeError(
                f"cannot read the ring: process {process_id(reader)} is its reader (expected "
                "this one). Read in one process."
            )
        self._header[READER] = me

    def _take_oldest(self) -> Lease | None:
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

    def _take_last(self, timeout: float | None) -> Lease | None:
        """Take what came before a writer ended; raise if nothing came and it is in vain to wait."""
        processes = self._words[PROCESS::WRITER_WORDS].tolist()
        dead = [
            word for word in processes if word not in (0, RESIGNED) and not process_is_alive(word)
        ]
        all_resigned = timeout is None and set(processes) == {RESIGNED}
        if not dead and not all_resigned:
            return None
        lease = self._take_oldest()
        if lease is not None:
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
        word = lease.writer * WRITER_WORDS + (READ if read else SKIPPED)
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
        first = writer * WRITER_WORDS
        process = self._words[first + PROCESS]
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
        committed, *gone = self._words[first + COMMITTED : first + LOST]
        self._words[first + LOST] = committed - sum(gone) - len(self._unread) - leased
        for slot in orphaned:
            self._generations[slot] = 0
            self._spare.append(pack_token(0, slot))
        self._put_back(writer)
        self._words[first + PROCESS] = 0
        return len(orphaned)

    def _put_back(self, writer: int) -> None:
        self._ready[writer].drain(self._unread)  # what an interrupted call has put back already
        self._unread.sort()
        while self._unread:
            self._ready[writer].put(self._unread)
        while self._spare:
            self._free[writer].put(self._spare)
        self._recovering = None

    def _leave(self) -> None:
        if self._header[READER] == this_process():
            self._header[CLOSED] = 1
        super()._leave()
