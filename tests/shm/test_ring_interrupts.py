"""An interrupt at any bytecode of a call on the ring loses no slot and no count."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.support.rings import DEAD, attach, check_all_free, make_ring, read, slots_of, write
from torchrl_unilab.shm import ring as ring_module
from torchrl_unilab.shm import segment as segment_module
from torchrl_unilab.shm import tokens as tokens_module
from torchrl_unilab.shm.ring import RolloutRing

FILES = {ring_module.__file__, tokens_module.__file__, segment_module.__file__}


class Bytecodes:
    """Raises KeyboardInterrupt before the `nth` bytecode that the ring's modules execute."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def interrupts(self, call: Callable[[], object]) -> bool:
        """Make the call; return whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


class Parties:
    """A ring of two writers and a reader, each with its own end of it, as in processes."""

    def __init__(self, ring: RolloutRing, overflow: str) -> None:
        self.reader = ring
        self.writers = [attach(ring), attach(ring)]
        for number, end in enumerate(self.writers):
            end.become_writer(number)
        self.first = self.writers[0]

    def check_owners(self) -> None:
        """Each slot is in a pipe or in a hand, once."""
        found = [slot for end in self.writers for slot in slots_of(end._hand)]
        for hand in (self.reader._held, self.reader._spare, self.reader._unread):
            found += slots_of(hand)
        for pipe in (*self.reader._free, *self.reader._ready):
            tokens: list[bytes] = []
            pipe.drain(tokens)
            found += slots_of(tokens)
            while tokens:
                pipe.put(tokens)
        assert sorted(found) == [*range(self.reader.slots * self.reader.writers)]

    def close(self) -> None:
        for end in self.writers:
            end.close()


@pytest.fixture(params=["overwrite", "block"])
def parties(request) -> Iterator[Callable[[], Parties]]:
    """Makes a ring in which writer 0 has committed two rollouts and writer 1 one."""
    made: list[Parties] = []

    def make() -> Parties:
        ring = make_ring(elements=2, slots=2, writers=2, overflow=request.param)
        made.append(Parties(ring, request.param))
        for end in (made[-1].first, made[-1].writers[1], made[-1].first):
            assert write(end)
        return made[-1]

    yield make
    for parties in made:
        parties.close()
        parties.reader.close()


def interrupted(
    make: Callable[[], Parties], prepare: Callable[[Parties], Any], call: Callable[..., object]
) -> Iterator[tuple[Parties, Any]]:
    """Yield parties of which `call` was interrupted: once for each bytecode of it."""
    for nth in range(1, 10_000):
        parties = make()
        prepared = prepare(parties)
        if not Bytecodes(nth).interrupts(lambda: call(parties, prepared)):  # noqa: B023
            assert nth > 20, "the call was not traced"
            return
        parties.check_owners()
        yield parties, prepared
        rest = [number for number, _ in iter(lambda: read(parties.reader), None)]  # noqa: B023
        assert rest == sorted(rest) or rest
        for end in parties.writers:
            if end.writer is not None:
                assert write(end, timeout=0)
        while read(parties.reader) is not None:
            pass
        check_all_free(parties.reader)
        parties.close()
        parties.reader.close()


def test_an_interrupted_claim_is_claimed_again(parties):
    def one_slot_is_unread(p: Parties) -> None:
        p.reader.release(p.reader.acquire())
        assert write(p.first)

    for p, _ in interrupted(parties, one_slot_is_unread, lambda p, _: p.first.claim(0.0)):
        before = p.first.dropped[0]
        slot = p.first.claim(0.0)
        assert (slot is None) == (p.reader.overflow == "block")
        assert p.first.dropped[0] == (p.reader.overflow == "overwrite")
        assert before <= p.first.dropped[0]
        p.first.abandon()


def test_an_interrupted_claim_of_a_free_slot_is_claimed_again(parties):
    for p, _ in interrupted(parties, lambda p: read(p.reader), lambda p, _: p.first.claim(0.0)):
        assert write(p.first, timeout=0.0)
        assert (p.first.written[0], p.first.dropped[0]) == (3, 0)


def test_an_interrupted_commit_is_done_or_is_done_again(parties):
    def claimed(p: Parties) -> None:
        read(p.reader)
        p.first.claim(0.0)

    for p, _ in interrupted(parties, claimed, lambda p, _: p.first.commit()):
        if p.first._hand:
            assert p.first.commit() == 3
        assert p.first.written[0] == 3
        assert p.reader.available() == 3


def test_a_rollout_whose_commit_was_interrupted_is_abandoned_uncounted(parties):
    def claimed(p: Parties) -> None:
        read(p.reader)
        p.first.claim(0.0)

    for p, _ in interrupted(parties, claimed, lambda p, _: p.first.commit()):
        done = not p.first._hand
        p.first.abandon()
        assert p.first.written[0] == 2 + done
        assert p.reader.available() == 2 + done


def test_an_interrupted_abandon_is_done_or_is_done_again(parties):
    def claimed(p: Parties) -> None:
        read(p.reader)
        p.first.claim(0.0)

    for p, _ in interrupted(parties, claimed, lambda p, _: p.first.abandon()):
        p.first.abandon()
        assert p.first.written[0] == 2


def test_what_an_interrupted_acquire_took_is_among_the_leases(parties):
    for p, _ in interrupted(parties, lambda p: None, lambda p, _: p.reader.acquire()):
        lease = p.reader.leases[0] if p.reader.leases else p.reader.acquire()
        assert lease.writer == 0
        p.reader.release(lease)
        assert p.reader.read == (1, 0)


def test_an_interrupted_release_is_done_or_is_done_again(parties):
    for p, lease in interrupted(
        parties, lambda p: p.reader.acquire(), lambda p, lease: p.reader.release(lease)
    ):
        if p.reader.leases:
            p.reader.release(lease)
        assert p.reader.read == (1, 0)


def test_another_release_after_an_interrupted_one_counts_each_once(parties):
    def two_leases(p: Parties) -> list:
        return [p.reader.acquire(), p.reader.acquire()]

    for p, leases in interrupted(parties, two_leases, lambda p, two: p.reader.release(two[0])):
        p.reader.release(leases[1], read=False)
        for lease in p.reader.leases:
            p.reader.release(lease)
        assert (p.reader.read, p.reader.skipped) == ((1, 0), (0, 1))


def dies(p: Parties) -> None:
    """Writer 0 dies when it has counted its third rollout and not handed it over."""
    read(p.reader)
    p.first.claim(0.0)
    p.first._words[ring_module._COMMITTED] = 3
    p.first._words[ring_module._PROCESS] = DEAD
    p.writers[0] = p.first = attach(p.reader)


@pytest.mark.parametrize("leased", [False, True])
def test_an_interrupted_recovery_is_done_again(parties, leased):
    def prepare(p: Parties) -> Any:
        dies(p)
        return p.reader.acquire() if leased else None

    def recover_all(p: Parties) -> None:
        p.reader.recover(0)

    make = parties
    for nth in range(1, 10_000):
        p = make()
        lease = prepare(p)
        if not Bytecodes(nth).interrupts(lambda: recover_all(p)):  # noqa: B023
            assert nth > 100
            break
        p.reader.recover(0)
        p.check_owners()
        assert p.reader.lost == (1, 0)
        assert p.reader.leases == ([] if lease is None else [lease])
        if lease is not None:
            p.reader.release(lease)
        p.first.become_writer(0)
        assert write(p.first, timeout=0.0)
        assert [writer for writer, _ in iter(lambda: read(p.reader), None)] == (  # noqa: B023
            [1, 0, 0] if not leased else [0, 0]
        )
        check_all_free(p.reader)
        p.close()
        p.reader.close()


def test_a_reader_reads_on_after_an_interrupted_recovery(parties):
    for nth in range(1, 10_000):
        p = parties()
        dies(p)
        if not Bytecodes(nth).interrupts(lambda: p.reader.recover(0)):  # noqa: B023
            assert nth > 100
            break
        assert [writer for writer, _ in iter(lambda: read(p.reader), None)] == [1, 0]  # noqa: B023
        p.reader.recover(0)
        check_all_free(p.reader)
        p.close()
        p.reader.close()


def test_an_interrupted_registration_is_done_again(parties):
    for nth in range(1, 10_000):
        p = parties()
        p.close()
        other = attach(p.reader)
        if not Bytecodes(nth).interrupts(lambda: other.become_writer()):  # noqa: B023
            assert nth > 100
            other.close()
            break
        assert other.become_writer() == 0
        other.close()
        last = attach(p.reader)
        assert last.become_writer() == 0  # no writer is taken for ever
        last.close()
        p.reader.close()
