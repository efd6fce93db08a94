from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_readable
from pathlib import Path

import psutil
import pytest

from tests.support.bounds import DEADLINE, PROMPT
from tests.support.interrupts import Bytecodes
from tests.support.processes import live_children, receive
from torchrl_unilab.errors import WorkerError
from torchrl_unilab.runtime import WorkerGroup
from torchrl_unilab.runtime import link as link_module
from torchrl_unilab.runtime import workers as workers_module
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.workers import LOOK_SECONDS


def _serve(link: Link, number: int) -> None:
    """Do what the parent asks for."""
    link.ready({"number": number, "pid": os.getpid()})
    while True:
        request = link.request(block=True)
        if request[0] == "double":
            link.answer(2 * request[1])
        elif request[0] == "raise":
            _raise(request[1])
        elif request[0] == "be deaf":
            link.answer()
            threading.Event().wait()
        elif request[0] == "leave":
            return
        elif request[0] == "answer at length":
            link.answer(bytes(request[1]))
        elif request[0] == "measure":
            link.answer(len(request[1]))


def _raise(message: str) -> None:
    raise LookupError(message)


def _fail_at_start(link: Link, number: int) -> None:
    """The last one fails; the first one never gets ready."""
    if number:
        raise LookupError(f"at {time.monotonic()}")
    threading.Event().wait()


def _group(count: int = 2) -> WorkerGroup:
    return WorkerGroup(_serve, [(i,) for i in range(count)], name="server")


def _gone(pids: list[int], within: float = DEADLINE) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return psutil.wait_procs(processes, timeout=within)[1] == []


def test_workers_say_that_they_are_ready_answer_and_end_when_told():
    group = _group()
    pids = group.pids
    assert len(group) == 2
    assert group.started == [{"number": i, "pid": pid} for i, pid in enumerate(pids)]
    assert group.ask(1, "double", 21) == 42
    group.send(0, "double", 1)
    assert group.ask(1, "double", 4) == 8
    group.check()
    assert group.wait([], 0.05) is False
    readable, writable = os.pipe()
    os.write(writable, b"x")
    assert group.wait([readable], None) is True
    os.close(readable)
    os.close(writable)
    began = time.monotonic()
    group.stop(timeout=DEADLINE)
    assert time.monotonic() - began < DEADLINE  # they ended by themselves
    group.stop()
    assert len(group) == 0
    assert _gone(pids, 0.0)


@pytest.fixture(scope="module")
def refusals() -> dict[str, object]:
    """One group whose worker 1 raises a long error while worker 0 goes on."""
    group = _group()
    pids = group.pids
    try:
        began = time.monotonic()
        group.send(1, "raise", "no such thing " + "x" * 1_000_000)
        with pytest.raises(WorkerError) as waited:
            group.wait([], DEADLINE)
        seconds = time.monotonic() - began
        with pytest.raises(WorkerError) as checked:
            group.check()
        with pytest.raises(WorkerError) as asked:
            group.ask(1, "double", 1)
    finally:
        group.stop()
    return {
        "pids": pids,
        "seconds": seconds,
        "error": waited.value,
        "later": [checked.value, asked.value],
    }


def test_what_a_worker_raises_surfaces_promptly_with_its_traceback(refusals):
    assert refusals["seconds"] < PROMPT
    message = str(refusals["error"])
    assert message.startswith(f"server 1, process {refusals['pids'][1]}, failed:\nTraceback")
    assert "in _raise" in message
    assert "LookupError: no such thing" in message
    assert len(message) < 30_000  # or the worker would wait for a reader of its pipe


def test_a_failure_stays_what_it_was(refusals):
    assert refusals["later"] == [refusals["error"]] * 2


def test_a_group_with_a_failure_leaves_no_process(refusals):
    assert _gone(refusals["pids"], 0.0)


def test_a_worker_that_raises_while_it_starts_surfaces_though_another_is_not_ready():
    with pytest.raises(WorkerError, match=r"server 1, process \d+, failed") as caught:
        WorkerGroup(_fail_at_start, [(0,), (1,)], name="server")
    failed = float(str(caught.value).partition("LookupError: at ")[2].split()[0])
    assert time.monotonic() - failed < PROMPT
    assert not live_children()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("SIGKILL", "out of memory"), ("SIGSEGV", "Native code crashed"), ("signal 40", "")],
)
def test_a_worker_that_is_killed_is_named_with_its_signal_and_a_hint(name, hint):
    group = _group(1)
    try:
        began = time.monotonic()
        os.kill(group.pids[0], 40 if name == "signal 40" else getattr(signal, name))
        with pytest.raises(WorkerError, match=rf"server 0, .* was ended by {name}.*{hint}"):
            group.ask(0, "double", 1)
        assert time.monotonic() - began < PROMPT
    finally:
        group.stop()


def test_an_answer_that_nobody_waited_for_is_not_taken_for_a_later_one():
    with _group(1) as group:
        group.send(0, "double", 1)
        group.send(0, "double", 2)
        assert group.ask(0, "double", 21) == 42
        group.send(0, "double", 3)
        assert group.receive(0, DEADLINE) == 6


def test_an_answer_that_an_interrupt_kept_from_its_caller_is_received_again():
    with _group(1) as group:
        for nth in itertools.count(1):
            group.send(0, "double", nth)
            wait_readable([group._workers[0].channel], DEADLINE)
            interrupt = Bytecodes(nth, [link_module, workers_module])
            if not interrupt.interrupts(lambda: group.receive(0)):
                break
            assert group.receive(0, DEADLINE) == 2 * nth
        assert nth > 50, "the call was not traced"


def test_a_worker_that_leaves_unasked_or_does_not_answer_is_an_error():
    group = _group()
    try:
        group.send(0, "mumble")
        with pytest.raises(WorkerError, match=r"no answer within 0\.05 s"):
            group.ask(0, "mumble", timeout=0.05)
        group.send(1, "leave")
        with pytest.raises(WorkerError, match="ended by itself with exit code 0"):
            group.wait([], DEADLINE)
    finally:
        group.stop()


def test_a_stopped_worker_is_named_wherever_it_is_waited_for():
    group = _group(3)
    try:
        assert group.wait([], 2 * LOOK_SECONDS) is False  # nobody is stopped
        os.kill(group.pids[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"server 1, .* was stopped by a signal") as waited:
            group.wait([], DEADLINE)
        assert time.monotonic() - began < PROMPT
        assert waited.value.worker == 1
        assert not waited.value.args[0].count("SIGKILL")
        with pytest.raises(WorkerError, match="was stopped by a signal"):
            group.check()
    finally:
        began = time.monotonic()
        group.stop(DEADLINE)  # and need not wait for it
        assert time.monotonic() - began < PROMPT
    group = _group(2)
    try:
        os.kill(group.pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"server 1, .* was stopped by a signal"):
            group.ask(1, "double", 2)
    finally:
        group.stop()


LARGE = 20_000_000
"""Bytes of a message that no pipe holds as a whole."""


def _stop(pid: int) -> None:
    """Stop a process, and return when it is."""
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)


def _raised(call: Callable[[], object], within: float) -> BaseException | None:
    """What `call` raises, in a thread: a call that does not return is an error."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within)
    assert not thread.is_alive(), f"no return within {within:g} s"
    return raised[0] if raised else None


def test_a_worker_that_is_stopped_while_it_answers_is_named():
    group = _group(1)
    try:
        group.send(0, "answer at length", LARGE)
        wait_readable([group._workers[0].channel], DEADLINE)
        _stop(group.pids[0])
        error = _raised(lambda: group.receive(0, DEADLINE), PROMPT)
        assert re.match(r"server 0, .* was stopped by a signal", str(error))
    finally:
        group.stop()


def test_a_large_request_to_a_stopped_worker_names_it():
    group = _group(1)
    try:
        _stop(group.pids[0])
        error = _raised(lambda: group.send(0, "measure", bytes(LARGE)), PROMPT)
        assert re.match(r"server 0, .* was stopped by a signal", str(error))
    finally:
        group.stop()


def test_a_large_request_to_a_worker_that_is_killed_meanwhile_names_it():
    group = _group(1)
    try:
        group.ask(0, "be deaf")
        threading.Timer(0.2, os.kill, (group.pids[0], signal.SIGKILL)).start()
        error = _raised(lambda: group.send(0, "measure", bytes(LARGE)), 0.2 + PROMPT)
        assert re.match(r"server 0, .* was ended by SIGKILL", str(error))
    finally:
        group.stop()


def test_a_large_request_to_a_worker_that_does_not_listen_is_bounded():
    group = _group(1)
    try:
        group.ask(0, "be deaf")
        error = _raised(lambda: group.ask(0, "measure", bytes(LARGE), timeout=0.1), PROMPT)
        assert re.match(r"server 0, .*: request not taken within 0\.1 s", str(error))
    finally:
        group.stop()


def test_a_large_request_and_a_large_answer_may_cross():
    group = _group(1)
    try:
        group.send(0, "answer at length", LARGE)
        assert _raised(lambda: group.send(0, "measure", bytes(LARGE)), DEADLINE) is None
        assert group.receive(0, DEADLINE) == LARGE
    finally:
        group.stop()


def test_a_worker_that_is_continued_at_once_is_no_failure(monkeypatch):
    group = _group(1)
    process = psutil.Process(group.pids[0])

    def continued(sentinels: object, timeout: float) -> list[object]:
        assert process.status() == psutil.STATUS_STOPPED
        process.resume()
        return []

    try:
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            pass
        with monkeypatch.context() as patch:
            patch.setattr("torchrl_unilab.runtime.workers.wait", continued)
            patch.setattr(group, "_next_look", 0.0)  # whenever it looked last
            group._look_for_stopped()
        assert group.ask(0, "double", 4) == 8
    finally:
        group.stop()


def test_a_worker_that_failed_is_replaced_while_the_others_go_on():
    group = _group(2)
    try:
        first = group.pids
        group.send(0, "double", 8)
        os.kill(first[1], signal.SIGKILL)
        with pytest.raises(WorkerError) as lost:
            group.wait([], DEADLINE)
        assert lost.value.worker == 1
        started = group.restart(1)
        assert started == group.started[1] == {"number": 1, "pid": group.pids[1]}
        assert group.pids[0] == first[0]
        assert group.pids[1] != first[1]
        assert group.receive(0) == 16
        assert group.ask(1, "double", 2) == 4
        group.check()
        os.kill(group.pids[0], signal.SIGSTOP)
        group.restart(0)  # which ends it first
        assert group.ask(0, "double", 3) == 6
        assert not psutil.pid_exists(first[0])
    finally:
        group.stop()
    assert not live_children()


def test_threads_stop_a_group_together_and_return_when_it_has_ended():
    group = _group(2)
    pids = group.pids
    gate = threading.Barrier(8)
    left: list[int] = []

    def stop() -> None:
        gate.wait(DEADLINE)
        group.stop()
        left.extend(pid for pid in pids if psutil.pid_exists(pid))

    threads = [threading.Thread(target=stop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert left == []


def test_a_forked_copy_that_stops_a_group_leaves_it_at_work():
    group = _group(1)
    try:
        child = os.fork()
        if not child:
            code = 1
            try:
                group.stop()
                code = len(group)
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert group.ask(0, "double", 2) == 4
    finally:
        group.stop()


def _leave_at_start(link: Link) -> None:
    os._exit(3)


def test_a_worker_that_ends_before_it_is_ready_reminds_of_the_main_guard():
    with pytest.raises(WorkerError, match=r"exit code 3 before .*`if __name__ == \"__main__\":`"):
        WorkerGroup(_leave_at_start, [()], name="server")


def test_stop_kills_in_time_those_that_do_not_listen():
    group = _group(3)
    pids = group.pids
    group.ask(0, "be deaf")
    os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()
    group.stop(timeout=0.5)
    assert 0.5 <= time.monotonic() - began < 0.5 + PROMPT  # for the deaf one alone
    assert _gone(pids, 0.0)


def _make_a_group(pipe: Connection) -> None:
    pipe.send(_group(1).pids)
    threading.Event().wait()


def test_workers_end_when_their_parent_is_killed():
    # Not daemonic, as it has children of its own.
    here, there = mp.Pipe()
    parent = mp.Process(target=_make_a_group, args=(there,))
    parent.start()
    there.close()
    try:
        workers = [psutil.Process(pid) for pid in receive(here)]
    finally:
        parent.kill()
        parent.join(DEADLINE)
        parent.close()
        here.close()
    assert psutil.wait_procs(workers, timeout=DEADLINE)[1] == []


_LEFT_OPEN = """
from tests.runtime.test_workers import _group

if __name__ == "__main__":
    group = _group(1)
    print(group.pids[0], flush=True)
"""


def test_an_interpreter_that_exits_with_workers_at_work_takes_them_along(tmp_path):
    script = tmp_path / "leaves_open.py"
    script.write_text(_LEFT_OPEN)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not psutil.pid_exists(int(done.stdout))
