"""Two computations at once: the caller takes back what its thread has not begun."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.bounds import DEADLINE
from torchrl_unilab.objectives.fused.threads import run_both


@pytest.fixture
def busy_thread():
    """A thread that has other work until the test has ended."""
    begun, over = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: (begun.set(), over.wait(DEADLINE)))
        assert begun.wait(DEADLINE)
        yield thread
        over.set()


def test_the_caller_takes_back_what_a_busy_thread_has_not_begun(busy_thread):
    ran_by = run_both(busy_thread, threading.current_thread, threading.current_thread)
    assert ran_by == (threading.main_thread(),) * 2


@pytest.mark.parametrize("failing", ["main", "side"])
def test_after_an_error_a_busy_thread_has_nothing_left_to_run(busy_thread, failing):
    ran = []
    parts = {"main": lambda: ran.append("main"), "side": lambda: ran.append("side")}
    parts[failing] = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run_both(busy_thread, parts["main"], parts["side"])
    later = busy_thread.submit(ran.append, "later")
    assert later.cancel()  # not begun either
    assert ran == ([] if failing == "main" else ["main"])
