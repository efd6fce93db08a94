"""A writer or the reader of a ring is killed at any step: no slot, and no count, is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.processes import DEADLINE, receive, spawned
from tests.support.rings import (
    hold_one,
    make_ring,
    stamp,
    stamped,
    stop_at,
    strike_at,
    write_and_die,
    write_until_told,
)
from torchrl_unilab.errors import RingTimeoutError
from torchrl_unilab.shm import ring as ring_module
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.ring_notes import (
    IDLE,
    MOVING,
    Note,
    following,
    nobodys,
    noted_slot,
    unsettled,
)

OVERFLOW = pytest.mark.parametrize("overflow", ["overwrite", "block"])
DEAD = 2**22 + 1  # beyond any process id of Linux
STEPS = 11  # of a rollout that drops another: claim and commit, all that others see


# Notes


def test_notes_have_the_numbers_they_have():
    assert following(0, IDLE) == 0x1_0000
    assert following(0x1_0000, MOVING) == 0x2_FFFF
    assert following(0x2_FFFF, 7 + 1) == 0x3_0008
    assert [noted_slot(note) for note in (0, 0x2_FFFF, 0x3_0008)] == [None, None, 7]


@given(st.lists(st.one_of(st.sampled_from([IDLE, MOVING]), st.integers(1, 2048)), max_size=50))
def test_no_two_notes_of_a_writer_are_equal_and_each_says_what_was_noted(states):
    notes = [0]
    for state in states:
        notes.append(following(notes[-1], state))
        expected = None if state in (IDLE, MOVING) else state - 1
        assert noted_slot(notes[-1]) == expected
    assert sorted(set(notes)) == notes
    assert notes[-1] < 2**64


@given(st.integers(1, 8), st.data())
def test_the_slots_of_nobody_are_those_that_were_given_to_the_dead(slots, data):
    owners = data.draw(st.lists(st.sampled_from(["taker", "1", "2", "dead"]), min_size=slots))
    owners = owners[:slots]
    of = {who: [slot for slot, owner in enumerate(owners) if owner == who] for who in set(owners)}
    # A living writer notes one slot; the others it would have are the taker's.
    notes, held = [Note(DEAD, following(0, MOVING))], list(of.get("taker", []))
    for writer in ("1", "2"):
        mine = of.get(writer, [])
        notes.append(Note(int(writer), following(0, mine[0] + 1 if mine else IDLE)))
        held += mine[1:]
    notes += [Note(DEAD, following(0, slot + 1)) for slot in of.get("dead", [])]
    assert nobodys(slots, held, notes, {1, 2}) == of.get("dead", [])


def test_who_changed_a_note_and_who_lives_and_moves_is_not_settled():
    idle, moving, fills = (following(0, state) for state in (IDLE, MOVING, 3))
    before = [Note(1, idle), Note(2, moving), Note(DEAD, moving), Note(3, fills), Note(0, moving)]
    assert unsettled(before, before, {1, 2, 3}) == [1]
    after = [Note(1, following(idle, IDLE)), *before[1:3], Note(4, fills), before[4]]
    assert unsettled(before, after, {1, 3, 4}) == [0, 3]


# Each step, one process


class KilledError(BaseException):
    """Stands for the end of a process."""


def kill_me() -> None:
    raise KilledError


@contextlib.contextmanager
def attached(ring: RolloutRing) -> Iterator[RolloutRing]:
    """The ring once more, as another process would have it."""
    assert ring.name is not None
    with RolloutRing.attach(ring.name, {"x": torch.zeros(2)}) as other:
        yield other


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["write", "kill"]), st.integers(0, 1), st.integers(1, 2 * STEPS)),
    st.tuples(st.sampled_from(["read", "hold", "release"]), st.just(0), st.just(0)),
)


@OVERFLOW
@settings(max_examples=80, deadline=None)
@given(st.integers(2, 4), st.lists(ACTIONS, max_size=30))
def test_whatever_is_killed_whenever_a_ring_does_what_one_does_that_loses_nobody(
    overflow, slots, actions
):
    """Writers die at a step of a write; the reader recovers; what is read is as it was written."""
    with (
        make_x(slots=slots, writers=2, overflow=overflow) as ring,
        contextlib.ExitStack() as stack,
    ):
        writers = [stack.enter_context(attached(ring)) for _ in range(2)]
        given_up = recovered = 0
        seen: list[list[float]] = [[], []]
        held: list = []

        def look(lease) -> None:
            writer, sequence = lease.token.writer, lease.token.sequence
            assert lease.views["x"].tolist() == [writer, sequence]
            seen[writer].append(sequence)

        for what, writer, step in actions:
            if what in ("write", "kill"):
                mine = writers[writer]
                mine.use_writer(writer)
                value = torch.tensor([float(writer), mine.written[writer] + 1.0])
                if what == "write":
                    mine.write({"x": value}, timeout=0)
                    continue
                strike_at(mine, step, kill_me)
                try:
                    while mine.write({"x": value}, timeout=0):
                        value[1] += 1
                except KilledError:
                    given_up += 1
                ring._writer_words[writer * (3 + ring.writers) + ring_module._PID] = DEAD
                recovered += ring.recover(writer)
                assert ring.recover() == 0
                writers[writer] = stack.enter_context(attached(ring))
            elif what == "read" and ring.available():
                lease = ring.acquire()
                look(lease)
                ring.release(lease)
            elif what == "hold" and ring.available() and len(held) < slots - 1:
                held.append(ring.acquire())
                look(held[-1])
            elif what == "release" and held:
                ring.release(held.pop(0))
        while (lease := ring.acquire()) is not None:
            look(lease)
            ring.release(lease)
        for lease in held:
            assert lease.views["x"].tolist() == [lease.token.writer, lease.token.sequence]
            ring.release(lease)
        for writer in (0, 1):
            assert seen[writer] == sorted(set(seen[writer]))
            gone = ring.written[writer] - len(seen[writer]) - ring.dropped[writer]
            assert 0 <= gone <= ring.lost
        assert ring.write_count == ring.read_count + sum(ring.dropped) + ring.lost
        assert ring.lost <= recovered <= given_up
        assert overflow == "overwrite" or ring.dropped == (0, 0)
        # All slots are there, each once.
        free = [ring._free.take() for _ in range(slots)]
        assert sorted(token.slot for token in free) == list(range(slots))
        assert ring._free.take() is ring._ready.take() is None


def make_x(**settings: object) -> RolloutRing:
    return RolloutRing({"x": torch.zeros(2)}, kind="named", **settings)


# Real processes


def _reap(process) -> None:
    process.join(DEADLINE)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("overflow", "full"), [("block", False), ("overwrite", False), ("overwrite", True)]
)
def test_a_writer_killed_at_each_step_leaves_its_slot_to_the_one_in_its_place(overflow, full):
    slots = 3
    with make_ring(slots=slots, overflow=overflow) as ring:
        for step in range(1, STEPS + 1):
            before, whole = ring.written[0], slots if full else 0
            with spawned(write_and_die, ring, 0, whole, step) as (process, pipe):
                assert receive(pipe) == before + whole
                _reap(process)
            ring.recover(0)
            assert ring.recover(0) == 0
            while (lease := ring.acquire()) is not None:
                writer, sequence = stamp(lease.views)
                assert (writer, before < sequence <= ring.written[0]) == (0, True)
                ring.release(lease)
            assert ring.write_count == ring.read_count + sum(ring.dropped) + ring.lost
            assert len(ring._free) == slots
        assert 0 < ring.lost < STEPS
        assert (sum(ring.dropped) > 0) == full


@OVERFLOW
def test_while_another_writes_on_a_killed_writer_is_replaced_again_and_again(overflow):
    slots, until = 4, time.monotonic() + 2 * DEADLINE
    with (
        make_ring(slots=slots, writers=2, overflow=overflow) as ring,
        spawned(write_until_told, ring, 1) as (_, told),
    ):
        seen: list[list[int]] = [[], []]

        def read() -> bool:
            assert time.monotonic() < until
            lease = ring.acquire()
            if lease is not None:
                writer, sequence = stamp(lease.views)
                seen[writer].append(sequence)
                ring.release(lease)
            return lease is not None

        for step in range(1, STEPS + 1):
            with spawned(write_and_die, ring, 0, 3, step) as (process, pipe):
                while process.exitcode is None:
                    read() or process.join(0.001)
                receive(pipe)
                _reap(process)
            ring.recover(0)
            enough = len(seen[1]) + 2
            while len(seen[1]) < enough:  # the other one is at work
                read() or ring.wait_for_data(0.1)
        told.send("end")
        while not told.poll(0.001):
            read()
        written = receive(told)
        while read():
            pass
        assert ring.written[1] == written
        assert ring.write_count == ring.read_count + sum(ring.dropped) + ring.lost
        for writer in (0, 1):
            assert seen[writer] == sorted(set(seen[writer]))
            gone = ring.written[writer] - len(seen[writer]) - ring.dropped[writer]
            assert 0 <= gone <= ring.lost
        assert len(ring._free) == slots


def test_a_reader_that_takes_a_killed_ones_place_frees_what_that_had_leased():
    with make_ring(slots=3, overflow="block") as ring:
        with spawned(hold_one, ring) as (process, pipe):
            ring.write(stamped(0, 1))
            assert receive(pipe) == 1
            with pytest.raises(RuntimeError, match=f"process {process.pid} is the reader"):
                ring.recover()
            ring.write(stamped(0, 2))
            os.kill(process.pid, signal.SIGKILL)
            _reap(process)
        assert ring.recover() == 1
        assert ring.recover() == 0
        assert stamp(ring.read()) == (0, 2)
        ring.advance_read()
        assert (ring.write_count, ring.read_count, ring.lost) == (2, 1, 1)
        assert len(ring._free) == 3


def test_leases_stay_valid_and_what_is_ready_stays_in_order_though_slots_are_recovered():
    with make_ring(slots=5, writers=2, overflow="block") as ring:
        ring.use_writer(1)
        for sequence in (1, 2, 3):
            ring.write(stamped(1, sequence))
        lease = ring.acquire()
        with spawned(write_and_die, ring, 0, 0, 5) as (process, pipe):
            receive(pipe)
            _reap(process)
        assert ring.recover(0) == 1
        ring.write(stamped(1, 4))
        assert stamp(lease.views) == (1, 1)
        ring.release(lease)
        for sequence in (2, 3, 4):
            assert stamp(ring.read()) == (1, sequence)
            ring.advance_read()
        assert ring.lost == 0
        assert not ring.wait_for_data(timeout=0)  # nobody is missed any more


@pytest.mark.parametrize("step", [2, 8])  # about to take a token, about to put one
def test_a_writer_that_is_stopped_while_it_moves_a_slot_is_named_and_nothing_is_taken(step):
    with make_ring(slots=3, writers=2, overflow="block") as ring:
        with spawned(write_and_die, ring, 0, 0, 5) as (process, pipe):
            receive(pipe)
            _reap(process)
        with spawned(stop_at, ring, 1, step) as (process, pipe):
            assert receive(pipe) == "begins"
            assert receive(pipe) == "stops"
            named = rf"writers \[1\], processes \[{process.pid}\]"
            with pytest.raises(RingTimeoutError, match=named):
                ring.recover(0, timeout=0.05)
            os.kill(process.pid, signal.SIGCONT)
            assert receive(pipe) == "written"
            assert ring.recover(0) == 1
        assert stamp(ring.read()) == (1, 1)
        ring.advance_read()
        assert len(ring._free) == 3
