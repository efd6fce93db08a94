from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import sys
import time
from multiprocessing.connection import wait as wait_readable
from unittest.mock import Mock

import pytest

from tests.support.bounds import DEADLINE, PROMPT
from tests.support.interrupts import each_interrupt
from tests.support.processes import wait_for, within
from tests.support.serving import LARGE, gone, make_group, stop_process
from torchrl_unilab.errors import ConfigError, WorkerError
from torchrl_unilab.runtime import link as link_module
from torchrl_unilab.runtime import workers as workers_module
from torchrl_unilab.runtime.workers import WorkerGroup

pytestmark = pytest.mark.usefixtures("looks_often")


def test_workers_report_that_they_are_ready_and_answer(group):
    assert len(group) == 2
    group.send(0, "double", 1)
    assert group.ask(1, "double", 4) == 8
    assert group.receive(0, DEADLINE) == 2
    group.check()


def test_workers_start_under_a_debugger_that_clears_the_main_module(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__spec__")  # as python -m pdb does, in 3.11
    with make_group() as group:
        assert group.ask(0, "double", 4) == 8


def test_waiting_ends_with_a_readable_descriptor_or_at_its_timeout(group):
    readable, writable = os.pipe()
    os.write(writable, b"x")
    assert group.wait([readable], None) is True
    twice = 2 * workers_module.CHECK_SECONDS  # it has looked for stopped workers
    assert group.wait([], twice) is False
    os.close(readable)
    os.close(writable)


@pytest.mark.parametrize("index", [2, -1, None])
def test_a_worker_that_there_is_not_is_refused_by_its_index(group, index):
    with pytest.raises(ConfigError, match=r"index: .* \(expected an integer of 0 to 1\)"):
        group.ask(index, "any")


@pytest.fixture(scope="module")
def refusals() -> dict[str, object]:
    """One group whose worker 1 raises a long error while worker 0 goes on."""
    with make_group(2) as group:
        pids = group.pids
        group.send(1, "raise", "no such thing " + "x" * 1_000_000 + " at last")
        errors = [
            within(PROMPT, call)
            for call in (
                lambda: group.wait([], DEADLINE),
                group.check,
                lambda: group.ask(1, "double", 1),
            )
        ]
    return {"pids": pids, "errors": errors}


def test_what_a_worker_raises_surfaces_promptly_with_its_traceback(refusals):
    error = refusals["errors"][0]
    assert isinstance(error, WorkerError)
    message = str(error)
    assert message.startswith(f"server 1, process {refusals['pids'][1]}, failed:\nTraceback")
    assert "in _raise" in message
    assert "LookupError: no such thing" in message
    assert "x at last\n" in message
    assert len(message) < 30_000  # or the worker would wait for a reader of its pipe


def test_a_failure_stays_what_it_was(refusals):
    first, *later = map(str, refusals["errors"])
    assert later == [first] * 2


def test_a_group_with_a_failure_leaves_no_process(refusals):
    assert gone(refusals["pids"])


@pytest.mark.parametrize(
    ("number", "name", "hint"),
    [
        (signal.SIGKILL, "SIGKILL", "out of memory"),
        (signal.SIGSEGV, "SIGSEGV", "Native code crashed"),
        (signal.SIGBUS, "SIGBUS", "shared memory was full"),
        (signal.SIGABRT, "SIGABRT", "Native code gave up"),
        (40, "signal 40", ""),
    ],
)
def test_a_worker_that_is_killed_is_named_with_its_signal_and_a_hint(lone, number, name, hint):
    os.kill(lone.pids[0], number)
    error = within(PROMPT, lambda: lone.ask(0, "double", 1))
    assert re.match(rf"server 0, .* was ended by {name}.*{hint}", str(error))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_terminal_sends_to_all_in_it_leaves_workers_at_work(lone, number):
    assert lone.ask(0, "double", 1) == 2
    os.kill(lone.pids[0], number)
    assert lone.ask(0, "double", 2) == 4


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_killed_worker_whose_child_holds_its_pipes_is_named_wherever_one_looks(
    method, monkeypatch
):
    monkeypatch.setattr(mp, "get_start_method", lambda: method)
    with make_group() as group:
        child = group.ask(0, "fork")
        try:
            os.kill(group.pids[0], signal.SIGKILL)
            for call in (lambda: group.ask(0, "double", 1), group.check, lambda: group.poll(0)):
                assert "was ended by SIGKILL" in str(within(PROMPT, call))
            assert within(PROMPT, lambda: group.stop(DEADLINE)) is None
        finally:
            os.kill(child, signal.SIGKILL)


def test_of_several_workers_each_is_named_by_what_it_failed_with_itself():
    with make_group(2) as group:
        for number in (0, 1):
            os.kill(group.pids[number], signal.SIGKILL)
            with pytest.raises(WorkerError, match=rf"server {number}, .*SIGKILL") as raised:
                group.ask(number, "double", 1)
            assert raised.value.worker == number


def test_a_worker_that_continues_after_it_was_stopped_is_at_work_again(lone):
    os.kill(lone.pids[0], signal.SIGSTOP)
    assert "was stopped" in str(within(PROMPT, lambda: lone.ask(0, "double", 1)))
    os.kill(lone.pids[0], signal.SIGCONT)
    assert lone.ask(0, "double", 2) == 4
    lone.check()


def test_a_worker_whose_exit_code_has_been_read_is_dead_whatever_its_sentinel_says(lone):
    (worker,) = lone._workers
    worker.process.kill()
    worker.process.join()
    pipe = os.pipe()
    os.dup2(pipe[0], worker.process.sentinel)  # as while a fork server has not closed its end
    with pytest.raises(WorkerError, match="was ended by SIGKILL"):
        lone.check()
    for end in pipe:
        os.close(end)


def test_an_unread_answer_is_not_taken_for_that_of_a_later_request(group):
    group.send(0, "double", 1)
    group.send(0, "double", 2)
    assert group.ask(0, "double", 21) == 42


def test_a_poll_says_whether_the_newest_answer_has_come(group):
    assert group.ask(0, "double", 1) == 2
    group.send(0, "answer at length", 3_000_000)  # more than a pipe holds: it comes in pieces
    seen = {group.poll(0)}
    until = time.monotonic() + DEADLINE
    while not group.poll(0):
        assert time.monotonic() < until
        wait_readable([group._workers[0].channel.connection], DEADLINE)
    assert seen == {False}
    assert len(group.receive(0)) == 3_000_000


def _wait_for_a_word(group: WorkerGroup) -> None:
    """Wait until the first worker has answered, or has begun to; sending may have read it."""
    worker = group._workers[0]
    newest, pipe = worker.channel, worker.channel.connection
    wait_for(lambda: newest.messages[-1][1] == worker.requests or wait_readable([pipe], 0))


def test_a_poll_sees_that_the_worker_failed(lone):
    lone.send(0, "raise", "broken")
    _wait_for_a_word(lone)
    with pytest.raises(WorkerError, match="broken"):
        lone.poll(0)


def test_an_answer_that_an_interrupt_kept_from_its_caller_is_received_again(group):
    for interrupt in each_interrupt(link_module, workers_module, least=30):
        nth = interrupt.left
        group.send(0, "double", nth)
        _wait_for_a_word(group)
        if interrupt.during(lambda: group.receive(0)):
            assert group.receive(0, DEADLINE) == 2 * nth


def test_a_worker_that_does_not_answer_is_an_error(lone):
    with pytest.raises(WorkerError, match=r"no answer within 0\.05 s"):
        lone.ask(0, "mumble", timeout=0.05)


def test_a_worker_that_leaves_unasked_is_an_error(lone):
    lone.send(0, "leave")
    with pytest.raises(WorkerError, match=r"ended by itself with exit code 0 \(expected"):
        lone.wait([], DEADLINE)


STOPPED = r"server 0, .* was stopped by a signal"


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.wait([], DEADLINE),
        lambda group: group.ask(0, "double", 2),
        lambda group: group.send(0, "measure", bytes(LARGE)),
    ],
    ids=["wait", "ask", "send"],
)
def test_a_stopped_worker_is_named_wherever_it_is_waited_for(lone, call):
    stop_process(lone.pids[0])
    error = within(PROMPT, lambda: call(lone))
    assert re.match(STOPPED, str(error))
    assert error.worker == 0
    with pytest.raises(WorkerError, match=STOPPED):
        lone.check()
    # Nor is a stopped worker waited for when the group ends.
    assert within(PROMPT, lambda: lone.stop(DEADLINE)) is None


def test_a_worker_that_is_stopped_while_it_answers_is_named(lone):
    lone.send(0, "answer at length", LARGE)
    _wait_for_a_word(lone)
    stop_process(lone.pids[0])
    error = within(PROMPT, lambda: lone.receive(0, DEADLINE))
    assert re.match(STOPPED, str(error))


def test_a_worker_that_is_continued_at_once_is_no_failure(lone, monkeypatch):
    process = stop_process(lone.pids[0])

    with monkeypatch.context() as patch:
        clock = Mock(monotonic=time.monotonic, sleep=lambda _: process.resume())
        patch.setattr(workers_module, "time", clock)
        patch.setattr(lone, "_next_check", 0.0)  # whenever it checked last
        lone.check()
    assert lone.ask(0, "double", 4) == 8


def test_a_large_request_to_a_worker_that_is_killed_meanwhile_names_it(lone, monkeypatch):
    lone.ask(0, "be deaf")
    wait = lone._wait

    def kill_and_wait(*arguments: object) -> bool:
        os.kill(lone.pids[0], signal.SIGKILL)
        return wait(*arguments)

    monkeypatch.setattr(lone, "_wait", kill_and_wait)
    error = within(PROMPT, lambda: lone.send(0, "measure", bytes(LARGE)))
    assert re.match(r"server 0, .* was ended by SIGKILL", str(error))


def test_a_large_request_to_a_worker_that_does_not_listen_is_bounded(lone):
    lone.ask(0, "be deaf")
    error = within(PROMPT, lambda: lone.ask(0, "measure", bytes(LARGE), timeout=0.1))
    assert re.match(r"server 0, .*: request not taken within 0\.1 s", str(error))
    lone.stop(0.0)


def test_a_large_request_and_a_large_answer_may_cross(group):
    group.send(0, "answer at length", LARGE)
    assert within(DEADLINE, lambda: group.send(0, "measure", bytes(LARGE))) is None
    assert group.receive(0, DEADLINE) == LARGE


def test_a_worker_that_failed_is_replaced_while_the_others_continue():
    with make_group(2) as group:
        first = group.pids
        group.send(0, "double", 8)
        os.kill(first[1], signal.SIGKILL)
        with pytest.raises(WorkerError) as lost:
            group.wait([], DEADLINE)
        assert lost.value.worker == 1

        group.restart(1)

        assert group.pids[0] == first[0]
        assert group.pids[1] != first[1]
        assert (group.receive(0, DEADLINE), group.ask(1, "double", 2)) == (16, 4)
        group.check()


def test_a_stopped_worker_is_ended_before_it_is_replaced(lone):
    (first,) = lone.pids
    stop_process(first)
    lone.restart(0)
    assert lone.ask(0, "double", 3) == 6
    assert gone([first])
