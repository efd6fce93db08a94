"""What a thread of tasks runs, and its end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tests.support.bounds import DEADLINE
from tests.support.interrupts import each_interrupt
from tests.support.striking import exit_code_of
from torchrl_unilab.errors import SegmentClosedError
from torchrl_unilab.runtime import worker_thread
from torchrl_unilab.runtime.worker_thread import Task, WorkerThread


def test_tasks_are_run_in_the_thread_in_their_order():
    thread, ran = WorkerThread("runner"), []
    tasks = [Task(lambda i=i: ran.append((i, threading.current_thread().name))) for i in range(9)]
    for task in tasks:
        thread.start(task)
    thread.close()  # after the last
    assert ran == [(i, "runner") for i in range(9)]
    assert all(task.done() for task in tasks)


def test_what_a_task_raises_is_raised_by_each_call_for_its_result_and_the_thread_goes_on():
    thread, failing, next_one = WorkerThread("runner"), Task(lambda: 1 / 0), Task(lambda: 3)
    for task in (failing, next_one):
        thread.start(task)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.result()
    assert isinstance(failing.exception(), ZeroDivisionError)
    assert (next_one.result(), next_one.exception()) == (3, None)
    thread.close()


def test_a_cancelled_task_is_not_run_and_one_that_has_begun_is_not_cancelled():
    begun, over, ran = threading.Event(), threading.Event(), []
    thread = WorkerThread("runner")
    running = Task(lambda: (begun.set(), over.wait(DEADLINE)))
    waiting = Task(lambda: ran.append(True))
    for task in (running, waiting):
        thread.start(task)
    assert begun.wait(DEADLINE)
    assert not running.cancel()
    assert [waiting.cancel(), waiting.cancel()] == [True, True]
    assert not running.done()
    over.set()
    thread.close()
    assert running.done()
    assert not ran
    assert not running.cancel()


def test_a_closed_thread_refuses_tasks_and_runs_none():
    thread, ran = WorkerThread("runner"), []
    thread.close()
    thread.close()
    with pytest.raises(SegmentClosedError, match="thread 'runner' is closed"):
        thread.start(Task(lambda: ran.append(True)))
    assert not ran


def test_an_interrupted_close_can_be_made_again():
    for interrupt in each_interrupt(worker_thread, threading):
        thread, ran = WorkerThread("runner"), []
        thread.start(Task(lambda ran=ran: ran.append(True)))
        interrupt.during(thread.close)
        thread.close()
        assert ran
        assert not thread._thread.is_alive()


def test_a_thread_ends_with_its_owner():
    owner = WorkerThread("runner")
    thread = owner._thread
    del owner
    thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks():
    thread = WorkerThread("runner")
    assert exit_code_of(thread.close) == 0
    thread.close()


def test_a_process_ends_after_the_tasks_of_a_thread_that_is_not_closed():
    script = (
        "import time\n"
        "from torchrl_unilab.runtime.worker_thread import Task, WorkerThread\n"
        "thread = WorkerThread('runner')\n"
        "thread.start(Task(lambda: (time.sleep(0.2), print('done'))))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], timeout=DEADLINE, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
