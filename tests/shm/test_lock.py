from __future__ import annotations

import fcntl
import math
import os
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.interrupts import each_interrupt
from tests.support.processes import receive, spawned
from tests.support.striking import exit_code_of, forked
from torchrl_unilab.errors import SegmentClosedError, WaitTimeoutError
from torchrl_unilab.shm import lock as lock_module
from torchrl_unilab.shm.lock import RangeLock
from torchrl_unilab.shm.segment import SharedSegment


def _holder() -> str:
    return "the test"


def _try(lock: RangeLock, first: int = 0, count: int = 1) -> bool:
    try:
        return lock.run(first, count, lambda: True, _holder)
    except WaitTimeoutError:
        return False


def _hold(pipe, segment: SharedSegment, first: int, count: int) -> None:
    def wait() -> None:
        pipe.send("held")
        pipe.recv()

    RangeLock(segment, 1.0).run(first, count, wait, _holder)
    pipe.send("released")


@pytest.mark.parametrize(
    ("first", "count", "free"), [(0, 1, True), (1, 1, False), (2, 2, False), (0, 4, False)]
)
def test_one_process_at_a_time_has_a_range(first, count, free):
    with SharedSegment(64) as segment, spawned(_hold, segment, 1, 2) as (_, pipe):
        assert receive(pipe) == "held"

        assert _try(RangeLock(segment, 0.02), first, count) == free

        pipe.send("release")
        assert receive(pipe) == "released"
        assert _try(RangeLock(segment, 0.02), first, count)


def test_the_lock_of_a_killed_process_is_free():
    with SharedSegment(64) as segment, spawned(_hold, segment, 0, 1) as (process, pipe):
        receive(pipe)
        os.kill(process.pid, signal.SIGKILL)
        process.join(30.0)

        assert _try(RangeLock(segment, 0.02))


@pytest.mark.parametrize("twice", [False, True], ids=["one lock", "two locks of one segment"])
def test_one_thread_at_a_time_has_a_range(twice):
    with SharedSegment(64) as segment:
        lock = RangeLock(segment, 0.02)
        other = RangeLock(segment, 0.02) if twice else lock
        free: list[bool] = []

        def attempt() -> None:
            thread = threading.Thread(target=lambda: free.append(_try(other)))
            thread.start()
            thread.join()

        def hold() -> int:
            attempt()
            return exit_code_of(refused)  # still, though a thread has given up

        def refused() -> None:
            assert not _try(lock)

        assert lock.run(0, 1, hold, _holder) == 0
        attempt()
        assert free == [False, True]


def test_a_forked_child_does_not_hold_the_lock_of_its_parent():
    with SharedSegment(64) as segment:
        lock = RangeLock(segment, 0.02)
        (here, there), (go, gone) = os.pipe(), os.pipe()

        def fork() -> int:
            child = os.fork()
            if child == 0:
                os.write(there, b"1" if _try(lock) else b"0")
                os.read(go, 1)
                os.write(there, b"1" if _try(lock) else b"0")
                os._exit(0)
            assert os.read(here, 1) == b"0"  # the parent has it
            return child

        child = lock.run(0, 1, fork, _holder)
        assert _try(lock)  # the child, which still lives, has not
        os.write(gone, b"1")
        assert os.read(here, 1) == b"1"
        os.waitpid(child, 0)
        for descriptor in (here, there, go, gone):
            os.close(descriptor)


def test_a_child_that_is_forked_while_a_thread_holds_a_lock_has_it_once_it_is_released():
    with SharedSegment(64) as segment:
        lock, held, go = RangeLock(segment, 0.5), threading.Event(), threading.Event()
        here, there = os.pipe()
        hold = (0, 1, lambda: held.set() or go.wait(30.0), _holder)
        holder = threading.Thread(target=lock.run, args=hold)
        holder.start()
        assert held.wait(30.0)

        def take() -> None:
            os.read(here, 1)
            assert _try(lock)

        with forked(take) as child:
            go.set()
            holder.join(30.0)
            os.write(there, b"1")
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(here)
        os.close(there)


def test_a_lock_is_had_as_soon_as_another_process_releases_it(monkeypatch):
    with SharedSegment(64) as segment, spawned(_hold, segment, 0, 1) as (_, pipe):
        receive(pipe)
        asked: list[str] = []

        def sleep(seconds: float) -> None:
            if not asked:  # the lock was tried, and not had
                asked.append("release")
                pipe.send("release")
            time.sleep(seconds)

        patched = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr("torchrl_unilab.shm.lock.time", patched)

        assert _try(RangeLock(segment, 30.0))
        assert asked


@pytest.mark.parametrize("refusal", [BlockingIOError, PermissionError])
def test_a_lock_is_asked_for_again_however_the_system_says_that_another_has_it(
    refusal, monkeypatch
):
    lockf, refusals = fcntl.lockf, [refusal] * 2

    def refuse_twice(descriptor: int, operation: int, *of: int) -> None:
        if operation != fcntl.LOCK_UN and refusals:
            raise refusals.pop()
        lockf(descriptor, operation, *of)

    with SharedSegment(64) as segment:
        monkeypatch.setattr(fcntl, "lockf", refuse_twice)
        assert _try(RangeLock(segment, 30.0))
    assert not refusals


def test_an_error_while_it_is_held_releases_it():
    with SharedSegment(64) as segment:
        lock = RangeLock(segment, 0.02)

        with pytest.raises(ZeroDivisionError):
            lock.run(0, 1, lambda: 1 // 0, _holder)

        with spawned(_hold, segment, 0, 1) as (_, pipe):
            assert receive(pipe) == "held"


def test_an_interrupt_at_any_point_leaves_it_free():
    with SharedSegment(64) as segment:
        run = partial(RangeLock(segment, 0.02).run, 0, 1, lambda: None, _holder)
        for interrupt in each_interrupt(lock_module):
            interrupt.during(run)

            assert exit_code_of(run) == 0


def test_a_lock_without_a_limit_of_time_is_taken_and_closed():
    with SharedSegment(64) as segment:
        lock = RangeLock(segment, math.inf)

        assert lock.run(0, 1, lambda: True, _holder)
        lock.close(segment.close)
        assert segment.closed


def test_the_error_names_the_holder_and_the_wait():
    with SharedSegment(64) as segment, spawned(_hold, segment, 0, 1) as (_, pipe):
        receive(pipe)

        with pytest.raises(WaitTimeoutError, match=r"the test: .* within 0\.05 s"):
            RangeLock(segment, 0.05).run(0, 1, lambda: None, _holder)


def test_after_the_segment_is_closed_the_lock_is_refused():
    segment = SharedSegment(64)
    lock = RangeLock(segment, 0.02)
    segment.close()

    with pytest.raises(SegmentClosedError):
        lock.run(0, 1, lambda: None, _holder)


def test_closing_waits_for_the_thread_that_holds_a_range():
    with SharedSegment(64) as segment:
        lock, held, go = RangeLock(segment, 30.0), threading.Event(), threading.Event()

        def hold() -> bool:
            held.set()
            go.wait(30.0)
            return segment.closed

        closed: list[bool] = []
        holder = threading.Thread(target=lambda: closed.append(lock.run(0, 1, hold, _holder)))
        closer = threading.Thread(target=lambda: lock.close(segment.close))
        holder.start()
        assert held.wait(30.0)
        closer.start()
        closer.join(0.05)
        assert not segment.closed
        go.set()
        holder.join(30.0)
        closer.join(30.0)
        assert closed == [False]
        assert segment.closed
