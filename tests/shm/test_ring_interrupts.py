"""An interrupt at any point of a call on the ring loses no slot and no count."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.interrupts import each_interrupt
from tests.support.rings import DEAD, attach, check_all_free, make_ring, read, slots_of, write
from torchrl_unilab.errors import UsageError
from torchrl_unilab.shm import ring, ring_writer, tokens
from torchrl_unilab.shm.ring import RolloutRing

MODULES = (ring, ring_writer, tokens)


class Parties:
    """A ring of two writers and a reader, each with its own end of it, as in processes."""

    def __init__(self, ring: RolloutRing) -> None:
        self.reader = ring
        self.writers = [attach(ring), attach(ring)]
        for number, end in enumerate(self.writers):
            end.become_writer(number)
        self.first = self.writers[0]

    def check_owners(self) -> None:
        """Each slot is in a pipe or in a hand, once."""
        found = [slot for end in self.writers for slot in slots_of(end._hand)]
        reader = self.reader
        for hand in (reader._held, reader._drained_free, reader._drained_ready):
            found += slots_of(hand)
        for pipe in (*self.reader._free, *self.reader._ready):
            tokens: list[bytes] = []
            pipe.drain(tokens)
            found += slots_of(tokens)
            while tokens:
                pipe.put(tokens)
        assert sorted(found) == [*range(self.reader.slots * self.reader.writers)]

    def close(self) -> None:
        for end in (*self.writers, self.reader):
            end.close()


def two_of_writer_0_and_one_of_writer_1(overflow: str = "overwrite") -> Parties:
    """Parties of a ring in which that many rollouts are unread."""
    parties = Parties(make_ring(elements=2, slots=2, writers=2, overflow=overflow))
    for end in (parties.first, parties.writers[1], parties.first):
        assert write(end)
    return parties


def interrupted(
    prepare: Callable[[Parties], Any],
    call: Callable[..., object],
    *,
    overflow: str = "overwrite",
    orphans: bool = False,
) -> Iterator[tuple[Parties, Any]]:
    """Yield parties of which `call` was interrupted, for each of its points, or came to its end.

    Before that each slot is accounted for, but for orphaned ones. When the test has made its own
    checks, all parties write and read, and all rollouts are accounted for.
    """
    for interrupt in each_interrupt(*MODULES):
        parties = two_of_writer_0_and_one_of_writer_1(overflow)
        prepared = prepare(parties)
        interrupt.during(partial(call, parties, prepared))
        orphans or parties.check_owners()
        yield parties, prepared
        read_all(parties.reader)
        for end in parties.writers:
            if end.writer is not None:
                assert write(end, timeout=0)
        read_all(parties.reader)
        check_all_free(parties.reader)
        parties.close()


def read_all(ring: RolloutRing) -> list[int]:
    """Read all rollouts; return the writer of each."""
    found = []
    while (stamp := read(ring)) is not None:
        found.append(stamp[0])
    return found


def nothing(_: Parties) -> None:
    """Prepare nothing."""


def claimed(p: Parties) -> None:
    """Writer 0 has claimed a free slot."""
    read(p.reader)
    p.first.claim(0.0)


def claims(p: Parties, _: object) -> int | None:
    """Writer 0 claims a slot."""
    return p.first.claim(0.0)


def test_an_interrupted_claim_drops_one_rollout():
    for p, _ in interrupted(nothing, claims):
        assert claims(p, None) is not None
        assert p.first.dropped == (1, 0)
        p.first.abandon()


def test_an_interrupted_wait_for_a_slot_leaves_all_as_it_was():
    for p, _ in interrupted(nothing, claims, overflow="block"):
        assert claims(p, None) is None
        assert p.reader.available() == 3


def test_an_interrupted_claim_of_a_free_slot_is_claimed_again():
    for p, _ in interrupted(lambda p: read(p.reader), claims):
        assert write(p.first, timeout=0.0)
        assert (p.first.written[0], p.first.dropped[0]) == (3, 0)


def test_a_slot_whose_claim_was_interrupted_is_committed_as_itself_or_not_at_all():
    for p, _ in interrupted(nothing, claims):
        with contextlib.suppress(UsageError):
            p.first.commit()
        p.check_owners()
        p.first.abandon()


def test_an_interrupted_commit_is_done_or_is_done_again():
    for p, _ in interrupted(claimed, lambda p, _: p.first.commit()):
        if p.first._hand:
            assert p.first.commit() == 3
        assert p.first.written[0] == 3
        assert p.reader.available() == 3


def test_a_rollout_whose_commit_was_interrupted_is_abandoned_uncounted():
    for p, _ in interrupted(claimed, lambda p, _: p.first.commit()):
        done = not p.first._hand
        p.first.abandon()
        assert p.first.written[0] == 2 + done
        assert p.reader.available() == 2 + done


def test_an_interrupted_abandon_is_done_or_is_done_again():
    for p, _ in interrupted(claimed, lambda p, _: p.first.abandon()):
        p.first.abandon()
        assert p.first.written[0] == 2


def test_what_an_interrupted_acquire_took_is_among_the_leases():
    for p, _ in interrupted(nothing, lambda p, _: p.reader.acquire()):
        lease = p.reader.leases[0] if p.reader.leases else p.reader.acquire()
        assert lease.writer == 0
        p.reader.release(lease)
        assert p.reader.read == (1, 0)


def test_what_an_interrupted_acquire_all_took_is_acquired_with_the_rest():
    for p, _ in interrupted(nothing, lambda p, _: p.reader.acquire_all()):
        leases = p.reader.acquire_all()
        assert sorted(lease.writer for lease in leases) == [0, 0, 1]
        for lease in leases:
            p.reader.release(lease)
        assert p.reader.read == (2, 1)


def test_an_interrupted_release_is_done_or_is_done_again():
    for p, lease in interrupted(
        lambda p: p.reader.acquire(), lambda p, lease: p.reader.release(lease)
    ):
        if p.reader.leases:
            p.reader.release(lease)
        assert p.reader.read == (1, 0)


def test_counters_that_are_replaced_after_an_interrupted_release_stay_as_they_were_set():
    for p, _ in interrupted(lambda p: p.reader.acquire(), lambda p, lease: p.reader.release(lease)):
        p.reader.resume_from({})
        assert p.reader.read == (0, 0)
        for lease in p.reader.leases:
            p.reader.release(lease)


def test_another_release_after_an_interrupted_one_counts_each_once():
    def two_leases(p: Parties) -> list:
        return [p.reader.acquire(), p.reader.acquire()]

    for p, leases in interrupted(two_leases, lambda p, two: p.reader.release(two[0])):
        p.reader.release(leases[1], read=False)
        for lease in p.reader.leases:
            p.reader.release(lease)
        assert (p.reader.read, p.reader.skipped) == ((1, 0), (0, 1))


def dies(p: Parties) -> None:
    """Writer 0 dies when it has counted its third rollout and not handed it over."""
    read(p.reader)
    p.first.claim(0.0)
    p.first._words[ring_writer.COMMITTED] = 3
    p.first._words[ring_writer.PROCESS] = DEAD
    p.writers[0] = p.first = attach(p.reader)


@pytest.mark.parametrize("leased", [False, True])
def test_an_interrupted_recovery_is_done_again(leased):
    def prepare(p: Parties) -> Any:
        dies(p)
        return p.reader.acquire() if leased else None

    for p, lease in interrupted(prepare, lambda p, _: p.reader.recover(0), orphans=True):
        p.reader.recover(0)
        assert p.reader.lost == (1, 0)
        assert p.reader.leases == [lease] * leased
        if leased:
            p.reader.release(lease)
        p.first.become_writer(0)
        assert write(p.first, timeout=0.0)
        assert read_all(p.reader) == ([0, 0] if leased else [1, 0, 0])


def test_a_reader_reads_on_after_an_interrupted_recovery():
    def prepare(p: Parties) -> None:
        dies(p)
        assert read(p.reader)[0] == 1  # what is left is the dead one's

    for p, _ in interrupted(prepare, lambda p, _: p.reader.recover(0), orphans=True):
        assert read_all(p.reader) == [0]
        p.reader.recover(0)


@pytest.mark.parametrize("again", [False, True])
def test_rollouts_of_a_dead_writer_keep_their_order_though_its_recovery_was_interrupted(again):
    for interrupt in each_interrupt(*MODULES):
        with make_ring(elements=2, slots=3) as ring, attach(ring) as end:
            assert all(write(end) for _ in range(3))
            end._words[ring_writer.PROCESS] = DEAD
            interrupt.during(partial(ring.recover, 0))
            if again:
                ring.recover(0)
            assert [read(ring) for _ in range(3)] == [(0, 1), (0, 2), (0, 3)]


def is_locked(ring: RolloutRing) -> bool:
    """Whether this or another process holds the lock of registration."""
    query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    answer = fcntl.fcntl(ring._segment._descriptor, fcntl.F_OFD_GETLK, query)
    return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who holds a lock")
def test_an_interrupted_registration_is_done_again():
    def two_resign(p: Parties) -> RolloutRing:
        for end in p.writers:
            end.close()
        p.writers = [attach(p.reader)]
        return p.writers[0]

    for p, end in interrupted(two_resign, lambda _, end: end.become_writer()):
        assert not is_locked(end)
        assert end.become_writer() == 0
        end.close()
        p.writers = [attach(p.reader)]
        assert p.writers[0].become_writer() == 0  # no writer is taken for ever
