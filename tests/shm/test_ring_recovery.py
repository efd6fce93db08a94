"""Processes of a ring are killed or stopped at any step: no slot and no count is lost."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.processes import DEADLINE, receive, spawned, wait_for
from tests.support.rings import (
    DEAD,
    STEPS,
    attach,
    check_all_free,
    hold_one,
    make_ring,
    read,
    stamp,
    write,
    write_and_be_struck,
    write_half,
    write_until_refused,
    write_until_told,
)
from torchrl_unilab.errors import PeerGoneError, UsageError, WaitTimeoutError
from torchrl_unilab.processes import process_is_alive, this_process
from torchrl_unilab.shm import ring as ring_module
from torchrl_unilab.shm import ring_writer
from torchrl_unilab.shm.ring import RolloutRing

OVERFLOW = pytest.mark.parametrize("overflow", ["overwrite", "block"])


def _reap(process) -> None:
    process.join(DEADLINE)
    assert process.exitcode == -signal.SIGKILL


@OVERFLOW
def test_a_writer_is_killed_and_replaced_again_and_again_while_another_writes_on(overflow):
    until = time.monotonic() + 4 * DEADLINE
    with (
        make_ring(slots=3, writers=2, overflow=overflow) as ring,
        spawned(write_until_told, ring, 1) as (_, told),
    ):
        seen: list[list[int]] = [[], []]

        def read_one(timeout: float = 0.0) -> bool:
            assert time.monotonic() < until
            found = read(ring, timeout)
            if found is not None:
                seen[found[0]].append(found[1])
            return found is not None

        for step in range(1, STEPS + 1):
            struck = (ring, 0, 3, step, signal.SIGKILL)
            with spawned(write_and_be_struck, *struck) as (process, _):
                while process.exitcode is None:
                    read_one() or process.join(0.001)
            ring.recover(0)
            enough = len(seen[1]) + 2
            while len(seen[1]) < enough:  # the other one is at work
                read_one(0.1)
        told.send("end")
        while not told.poll(0.001):
            read_one()
        assert receive(told) == ring.written[1]
        while read_one():
            pass
        check_all_free(ring)
        assert ring.lost[1] == 0
        for writer in (0, 1):
            assert seen[writer] == sorted(set(seen[writer]))
            assert len(seen[writer]) == ring.read[writer]


@OVERFLOW
def test_a_writer_stopped_at_each_step_holds_up_neither_reader_nor_writer(overflow):
    with make_ring(slots=2, writers=2, overflow=overflow) as ring:
        ring.become_writer(1)
        for step in range(1, STEPS + 1):
            struck = (ring, 0, 1, step, signal.SIGSTOP)
            with spawned(write_and_be_struck, *struck) as (process, pipe):
                receive(pipe)
                wait_for(lambda: pipe.poll() or _is_stopped(process.pid))
                for _ in range(5):
                    assert write(ring, timeout=0)
                    while ring.available():
                        assert read(ring) is not None
                with pytest.raises(RuntimeError, match=f"process {process.pid} is alive"):
                    ring.recover(0)
                os.kill(process.pid, signal.SIGCONT)
                assert receive(pipe) == "written"
                process.kill()
                _reap(process)
            assert ring.recover(0) == 0  # it held none
            while read(ring) is not None:
                pass
            check_all_free(ring)
        assert ring.lost == (0, 0)


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


def _kill(process) -> None:
    process.kill()
    _reap(process)


def test_a_reader_that_waits_names_a_writer_that_died_until_it_is_recovered():
    with make_ring(slots=2, writers=2, overflow="block") as ring:
        with spawned(write_half, ring, 1) as (process, pipe):
            receive(pipe)
            died = process.pid
            _kill(process)
        assert ring.acquire() is None  # without a look at who lives
        with pytest.raises(PeerGoneError, match=f"writer 1: process {died} has died"):
            ring.acquire(timeout=DEADLINE)
        assert ring.recover(1) == 1
        assert ring.acquire(timeout=0.01) is None


@pytest.mark.parametrize("end", [RolloutRing.resign, RolloutRing.close])
def test_a_reader_that_waits_without_end_learns_that_all_writers_have_resigned(end):
    with make_ring(slots=2, writers=2) as ring, attach(ring) as first, attach(ring) as second:
        for number, writer in enumerate((first, second)):
            writer.become_writer(number)
            write(writer)
            end(writer)
        assert [ring.acquire(None).writer, ring.acquire(None).writer] == [0, 1]
        with pytest.raises(PeerGoneError, match="all 2 writers have resigned"):
            ring.acquire(None)
        assert ring.acquire(0.01) is None


def test_a_writer_that_has_resigned_is_a_writer_again_once_it_claims():
    with make_ring(slots=2) as ring, attach(ring) as end:
        write(end)
        end.resign()
        assert ring._words[ring_writer.PROCESS] == ring_writer.RESIGNED
        write(end)
        assert ring._words[ring_writer.PROCESS] == this_process()


def test_a_reader_waits_without_end_for_a_writer_that_is_yet_to_come():
    with make_ring(slots=2, writers=2) as ring, attach(ring) as end, ThreadPoolExecutor(1) as pool:
        end.become_writer(0)
        end.resign()
        acquired = pool.submit(ring.acquire, None)
        end.become_writer(1)
        write(end)
        assert acquired.result(DEADLINE).writer == 1


def test_a_reader_waits_without_end_for_a_writer_whose_process_has_become_another(monkeypatch):
    with make_ring(slots=2, writers=2) as ring, attach(ring) as end:
        end.become_writer(0)
        end.become_writer(1)
        end.resign()

        def comes_late(*_: object) -> Iterator[None]:
            yield  # the reader looks who is left
            end.become_writer(0)
            write(end)
            yield

        monkeypatch.setattr(ring_module, "waits", comes_late)
        assert ring.acquire(None).writer == 0


def test_what_a_writer_commits_in_its_last_moment_is_not_missed(monkeypatch):
    with make_ring() as ring:
        ring.become_writer(0)

        def dies_once_it_has_committed(word: int) -> bool:
            write(ring)
            return False

        monkeypatch.setattr(ring_module, "process_is_alive", dies_once_it_has_committed)
        assert stamp(ring.acquire(timeout=0.01).views) == (0, 1)


def test_leases_and_unread_rollouts_stay_as_they_are_though_their_writer_is_recovered():
    with make_ring(slots=4) as ring:
        with spawned(write_and_be_struck, ring, 0, 3, 4, signal.SIGKILL) as (process, pipe):
            assert receive(pipe) == 3
            _reap(process)
        lease = ring.acquire()
        assert ring.recover(0) == 1
        assert stamp(lease.views) == (0, 1)
        ring.release(lease)
        assert [read(ring) for _ in range(3)] == [(0, 2), (0, 3), None]
        check_all_free(ring)


def test_a_recovered_slot_does_not_pass_for_an_old_rollout():
    with make_ring(elements=2, slots=2, writers=2) as ring, attach(ring) as end:
        end.become_writer(0)
        end._generations[end.claim()] = 1  # it dies before it hands the slot over
        ring._words[ring_writer.PROCESS] = DEAD
        ring.recover(0)
        for writer in (1, 0):
            ring.become_writer(writer)
            write(ring)

        assert [read(ring)[0] for _ in range(2)] == [1, 0]


def test_a_process_that_comes_to_write_during_a_recovery_keeps_its_slot(monkeypatch):
    with make_ring(slots=2) as ring, contextlib.ExitStack() as closing:
        assert write(ring)
        ring.resign()
        come: list = []

        def alive(word: int) -> bool:
            if not come:
                come.extend(closing.enter_context(spawned(write_half, ring, 0)))
                come[1].poll(0.5)  # until it has claimed a slot, which a recovery holds up
            return process_is_alive(word)

        with monkeypatch.context() as patch:
            patch.setattr(ring_module, "process_is_alive", alive)
            assert ring.recover(0) == 0
        process, pipe = come
        receive(pipe)
        with pytest.raises(UsageError, match=f"process {process.pid} is alive"):
            ring.recover(0)
        pipe.send("commit")
        receive(pipe)
        assert [read(ring), read(ring), read(ring)] == [(0, 1), (0, 1), None]
        check_all_free(ring)


@pytest.mark.parametrize("how", ["killed", "closed", "closed before it has read"])
def test_a_writer_that_waits_learns_that_the_reader_is_gone(how):
    with make_ring(slots=2, overflow="block") as ring:
        if how != "killed":
            if how == "closed":
                ring.acquire()  # this process is the reader
            with spawned(write_until_refused, ring) as (_, pipe):
                assert receive(pipe) == 2
                ring.close()
                assert f"the reader, process {os.getpid()}, is gone" in receive(pipe)
            return
        with spawned(hold_one, ring) as (process, pipe), ThreadPoolExecutor(1) as pool:
            write(ring)
            assert receive(pipe) == (0, 1)
            write(ring)
            claimed = pool.submit(ring.claim, DEADLINE)
            _kill(process)
            with pytest.raises(PeerGoneError, match=f"the reader, process {process.pid}, is gone"):
                claimed.result(DEADLINE)


def test_a_ring_whose_creator_has_closed_it_continues_once_another_process_reads():
    with (
        make_ring(slots=1, overflow="block") as ring,
        spawned(write_until_refused, ring) as (_, one),
    ):
        assert receive(one) == 1
        with spawned(hold_one, ring) as (_, other):
            assert receive(other) == (0, 1)
            ring.close()
            assert not one.poll(0.5)  # it waits for the slot
            other.send("release")
            assert receive(one) is True


def test_a_creator_that_ends_in_order_leaves_no_writer_waiting_for_it():
    with spawned(end_while_one_writes, daemon=False) as (process, pipe):
        assert receive(pipe) == 1
        pipe.send("end")
        assert "the reader, process" in receive(pipe)
        process.join(DEADLINE)
        assert process.exitcode == 0


def end_while_one_writes(pipe) -> None:
    """Make a ring that another process fills, and end when told; this waits for that process."""
    end_while_one_writes.ring = make_ring(slots=1, overflow="block")  # it is not deleted before
    mp.Process(target=write_until_refused, args=(pipe, end_while_one_writes.ring)).start()
    pipe.recv()


def test_a_second_reader_is_refused():
    with make_ring() as ring, spawned(hold_one, ring) as (process, pipe):
        write(ring)
        receive(pipe)
        for use in (ring.acquire, lambda: ring.recover(0)):
            with pytest.raises(UsageError, match=rf"{process.pid} is its reader \(expected this"):
                use()
        _kill(process)
        with pytest.raises(UsageError, match="is its reader, and has ended with what it held"):
            ring.acquire()


def test_registration_waits_a_bounded_time_for_a_stopped_process():
    with make_ring() as ring, spawned(hold_registration, ring) as (_, pipe):
        receive(pipe)
        ring._registration._timeout = 0.05
        with pytest.raises(WaitTimeoutError, match="cannot become a writer: lock not acquired"):
            ring.become_writer(0)


def hold_registration(pipe, ring: RolloutRing) -> None:
    """Hold the lock under which processes become writers, until told."""
    ring._register(lambda: pipe.send("held") or pipe.recv(), "a writer")
