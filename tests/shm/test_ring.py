from __future__ import annotations

import fcntl
import multiprocessing as mp
import pickle
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from tests.support.descriptors import descriptors, may_open
from tests.support.interrupts import each_interrupt
from tests.support.processes import DEADLINE, receive, spawned
from tests.support.rings import (
    attach,
    make_ring,
    read,
    stamp,
    stamped,
    write,
    write_half,
    write_one,
)
from tests.support.striking import exit_code_of
from torchrl_unilab.errors import ConfigError, SegmentClosedError, SegmentError, SegmentSpaceError
from torchrl_unilab.processes import this_process
from torchrl_unilab.shm import ring as ring_module
from torchrl_unilab.shm import ring_writer, tokens
from torchrl_unilab.shm import segment as segment_module
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.ring import RolloutRing


@pytest.mark.parametrize("timeout", [0.01, -1.0, float("nan")])
def test_waiting_ends_at_its_timeout(timeout):
    with make_ring(slots=1, overflow="block") as ring:
        assert ring.acquire(timeout) is None
        write(ring)
        assert ring.claim(timeout) is None


def test_a_blocked_claim_ends_when_a_slot_is_released():
    with make_ring(slots=1, overflow="block") as ring, attach(ring) as end:
        write(end)
        with ThreadPoolExecutor(1) as pool:
            claimed = pool.submit(end.claim, DEADLINE)
            assert read(ring) == (0, 1)
            assert claimed.result(DEADLINE) == 0


@pytest.mark.parametrize("timeout", [DEADLINE, None])
def test_waiting_for_a_rollout_ends_when_one_is_committed(timeout):
    with make_ring(writers=2) as ring, attach(ring) as end, ThreadPoolExecutor(1) as pool:
        acquired = pool.submit(ring.acquire, timeout)
        end.become_writer(1)
        write(end)
        assert stamp(acquired.result(DEADLINE).views) == (1, 1)


def test_a_descriptor_is_readable_while_a_rollout_is_ready():
    with make_ring(writers=2) as ring:
        assert mp.connection.wait(ring.filenos(), timeout=0) == []
        ring.become_writer(1)
        write(ring)
        assert mp.connection.wait(ring.filenos(), timeout=DEADLINE) == [ring.filenos()[1]]


def test_a_lease_is_released_once():
    with make_ring() as ring:
        write(ring)
        lease = ring.acquire()
        ring.release(lease)
        with pytest.raises(RuntimeError, match="Release each lease exactly once"):
            ring.release(lease)
        assert ring.read == (1,)


REFUSED = [
    ({"slots": 0}, "slots: 0 .*expected an integer of 1 to 128"),
    ({"slots": 2.0}, "slots: 2.0 .*expected an integer"),
    ({"writers": True}, "writers: True .*expected an integer"),
    ({"slots": 1000}, "slots: 1000 .*expected an integer of 1 to 128"),
    ({"writers": 0}, "writers: 0 .*expected an integer of 1 to 1024"),
    ({"overflow": "wait"}, "overflow: 'wait' .*'overwrite' or 'block'"),
]


def test_settings_that_cannot_work_are_refused():
    before = descriptors()
    for settings_of_ring, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            make_ring(**settings_of_ring)
    assert descriptors() == before


def test_more_writers_than_a_process_has_descriptors_for_are_refused():
    message = r"too many open files .* `ulimit -n`"
    with may_open(64), pytest.raises(ConfigError, match=message):
        make_ring(writers=64)


def test_a_ring_made_in_inference_mode_is_written_outside_it():
    with torch.inference_mode():
        ring = make_ring()
    with ring:
        assert write(ring)
        assert read(ring) is not None


def test_as_many_slots_as_are_allowed_fit_the_smallest_pipe():
    with make_ring(elements=2, slots=ring_writer.MAX_SLOTS) as ring:
        if sys.platform == "linux":
            for pipe in (*ring._free, *ring._ready):
                fcntl.fcntl(pipe.ends[1], fcntl.F_SETPIPE_SZ, 2 * 4096)
        for lap in range(3):
            while ring.available() < ring.slots:
                assert write(ring, timeout=0)
            for _ in range(40 * lap):
                assert read(ring) is not None


def test_a_ring_larger_than_the_memory_is_refused_and_leaves_nothing(monkeypatch):
    layout = BlockLayout.of(stamped(0, 0))
    room = RolloutRing.nbytes(layout, 3, 2)
    monkeypatch.setattr(segment_module, "free_bytes", lambda _: room)
    before = descriptors()
    RolloutRing(layout, slots=3, writers=2).close()
    with pytest.raises(SegmentSpaceError, match=f"expected at most {room}"):
        RolloutRing(layout, slots=4, writers=2)
    assert descriptors() == before


# Writers


def test_a_slot_that_is_being_filled_again_brings_its_writer_before_no_other():
    with make_ring(elements=2, slots=2, writers=2) as ring, attach(ring) as other:
        ring.become_writer(0)
        other.become_writer(1)
        assert write(ring)
        assert read(ring) == (0, 1)
        assert write(other)
        assert write(ring)
        ring.claim()  # the slot that was read
        assert [read(ring), read(ring)] == [(1, 1), (0, 2)]


@pytest.mark.parametrize("writer", [-1, 2, 1.0, True])
def test_an_unknown_writer_is_refused(writer):
    with make_ring(writers=2) as ring:
        with pytest.raises(ConfigError, match=r"an integer of 0 to 1\).*Make the ring for more"):
            ring.become_writer(writer)
        with pytest.raises(ConfigError, match=r"an integer of 0 to 1\).*Make the ring for more"):
            ring.recover(writer)


def test_a_writer_is_not_changed_while_a_slot_is_claimed():
    with make_ring(writers=2) as ring:
        ring.claim()
        with pytest.raises(RuntimeError, match="a slot is claimed"):
            ring.become_writer(1)
        ring.abandon()
        ring.become_writer(1)
        write(ring)
        assert ring.written == (0, 1)


@pytest.mark.parametrize("writer", [None, 1])
def test_another_process_writes_as_the_writer_it_says_or_as_the_first_that_is_free(writer):
    with make_ring(slots=3, writers=2, overflow="block") as ring:
        ring.become_writer(0)
        with spawned(write_one, ring, writer) as (_, pipe):
            assert receive(pipe) == (1, 3, 2, "block")
            assert read(ring, DEADLINE) == (1, 1)
        # It has ended, but had closed the ring: it is not taken for a dead writer.
        assert ring.acquire(timeout=0.01) is None


def test_no_two_processes_are_one_writer():
    with make_ring(writers=2) as ring, spawned(write_half, ring, 1) as (process, pipe):
        receive(pipe)
        with pytest.raises(ConfigError, match=f"taken, by processes {{1: {process.pid}}}"):
            ring.become_writer(1)
        assert ring.become_writer() == 0


# End


def test_a_closed_ring_refuses_every_use_and_leaves_nothing():
    before = descriptors()
    ring = make_ring()
    write(ring)
    lease = ring.acquire()
    ring.close()
    ring.close()
    assert ring.closed
    assert stamp(lease.views) == (0, 1)  # borrowed memory stays readable
    for use in (
        ring.claim,
        ring.commit,
        ring.abandon,
        ring.become_writer,
        ring.acquire,
        partial(ring.release, lease),
        lambda: ring.recover(0),
        ring.available,
        ring.filenos,
        lambda: ring.leases,
        lambda: ring.written,
        lambda: ring.read,
        lambda: pickle.dumps(ring),
    ):
        with pytest.raises(SegmentClosedError):
            use()
    del lease, use
    assert descriptors() == before


def test_a_ring_that_is_forgotten_leaves_nothing():
    before = descriptors()
    make_ring()
    assert descriptors() == before


def test_a_writer_that_closes_gives_its_claimed_slot_back():
    with make_ring(slots=1, overflow="block") as ring:
        with attach(ring) as end:
            end.claim()
        assert ring.claim(timeout=0) == 0


def test_a_forked_child_that_closes_leaves_its_parents_ring_as_it_is():
    with make_ring(slots=2, overflow="block") as ring:
        write(ring)
        lease = ring.acquire()
        ring.claim()
        assert exit_code_of(ring.close) == 0
        assert ring._words[ring_writer.PROCESS] == this_process()  # no other can be its writer
        ring.commit()
        assert ring.claim(timeout=0) is None  # its reader is not taken for gone
        ring.release(lease)
        assert write(ring, timeout=0)


def test_an_interrupted_close_can_be_finished():
    before = descriptors()
    for interrupt in each_interrupt(ring_module, ring_writer, tokens, segment_module):
        ring = make_ring(slots=2)
        write(ring)
        interrupt.during(ring.close)
        ring.close()
        assert ring.closed
        assert descriptors() == before


def test_a_forked_writer_that_ends_in_order_is_not_taken_for_dead():
    with make_ring(slots=2) as ring:
        assert ring.acquire() is None  # as the reader, whose finaliser the child inherits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
            child = mp.get_context("fork").Process(target=write, args=(ring,))
            child.start()
        child.join(DEADLINE)
        assert child.exitcode == 0
        child.close()
        assert read(ring, DEADLINE) is not None
        assert ring.acquire(timeout=0.01) is None


def test_a_forked_child_has_no_token_of_its_parent():
    with make_ring(slots=2, overflow="block") as ring:
        write(ring)
        lease = ring.acquire()
        ring.claim()

        def refuse() -> None:
            for call in (ring.commit, lambda: ring.release(lease), ring.acquire):
                with pytest.raises(RuntimeError):
                    call()

        assert exit_code_of(refuse) == 0
        ring.commit()
        ring.release(lease)
        assert read(ring, DEADLINE) is not None
        assert ring.acquire() is None


# Slots that are written while the reader holds them


def _write_astray(ring: RolloutRing, slot: int) -> None:
    """Begin to fill a slot without its token."""
    ring._generations[slot] = 0
    ring.views[slot]["first"].fill_(9)


def test_a_slot_that_is_written_while_it_is_leased_is_noticed():
    with make_ring() as ring:
        write(ring)
        lease = ring.acquire()
        _write_astray(ring, lease.slot)
        with pytest.raises(SegmentError, match=rf"slot {lease.slot}: .*written without a claim"):
            ring.release(lease)


def test_a_slot_that_is_written_after_its_commit_is_noticed_before_it_is_read():
    with make_ring() as ring:
        slot = ring.claim()
        ring.commit()
        _write_astray(ring, slot)
        with pytest.raises(SegmentError, match=r"generation 0 .*as writer 0 committed"):
            ring.acquire()
