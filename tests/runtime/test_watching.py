"""Which workers of a group a call watches, and what is said of one that ended."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import wait as wait_readable

import psutil
import pytest

from tests.support.bounds import DEADLINE
from tests.support.processes import has_ended
from tests.support.serving import LARGE, stop_process
from torchrl_unilab.errors import PeerGoneError, WorkerError
from torchrl_unilab.runtime import worker_process
from torchrl_unilab.runtime import workers as workers_module
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.workers import WorkerGroup


@pytest.fixture(autouse=True)
def _looks_always(monkeypatch):
    """Look for stopped workers each time that one may, and believe it at once."""
    monkeypatch.setattr(workers_module, "CHECK_SECONDS", 0.0)
    for module in (workers_module, worker_process):
        monkeypatch.setattr(module, "CONTINUE_SECONDS", 0.0)


def _end(group: WorkerGroup, index: int, number: int = signal.SIGKILL) -> None:
    """Signal a worker, and return when it is dead."""
    os.kill(group.pids[index], number)
    assert wait_readable([group._workers[index].process.sentinel], DEADLINE)


def test_a_worker_that_is_killed_ends_the_wait_for_another_ones_answer(pair):
    pair.send(0, "mumble")
    _end(pair, 1)
    with pytest.raises(WorkerError, match=r"server 1, .* was ended by SIGKILL"):
        pair.receive(0, DEADLINE)


def test_of_two_that_are_lost_one_is_replaced_before_the_other_is_named(pair):
    _end(pair, 0)
    _end(pair, 1)
    pair.restart(0)
    assert pair.ask(0, "double", 2) == 4
    with pytest.raises(WorkerError, match="server 1,"):
        pair.check()


def test_a_wait_of_no_time_names_a_stopped_worker(pair):
    stop_process(pair.pids[1])
    with pytest.raises(WorkerError, match=r"server 1, .* was stopped by a signal"):
        pair.wait([], 0.0)


def test_a_request_without_a_deadline_waits_for_room_in_the_pipe(pair, monkeypatch):
    monkeypatch.setattr(workers_module, "START_SECONDS", 0.0)
    assert pair.ask(0, "measure", bytes(LARGE), timeout=None) == LARGE


def test_the_last_words_of_a_worker_are_found_behind_unread_answers(pair):
    pair.send(0, "answer at length", 100_000)  # fits the pipe, and no one reading
    pair.send(0, "raise", "no such thing")
    assert wait_readable([pair._workers[0].process.sentinel], DEADLINE)
    with pytest.raises(WorkerError, match=r"server 0, .*failed:\n(.|\n)*no such thing"):
        pair.check()


def test_a_worker_that_hangs_up_and_lives_on_is_not_said_to_have_ended(pair, monkeypatch):
    monkeypatch.setattr(workers_module, "STOP_SECONDS", 0.0)
    with pytest.raises(WorkerError, match=r"server 0, .* closed its connection \(expected"):
        pair.ask(0, "hang up")
    pair.stop(0.0)  # as it does not see that it should end


def _lose_server(group: WorkerGroup) -> psutil.Process:
    """Make worker 1 what it is once its fork server was killed."""
    group._workers[1].process._popen.returncode = 255
    return psutil.Process(group.pids[1])


def test_a_worker_that_outlives_its_fork_server_is_dead_before_another_takes_its_place(pair):
    lost = _lose_server(pair)
    with pytest.raises(WorkerError, match=r"server 1, .* lost its fork server") as raised:
        pair.check()
    assert raised.value.worker == 1
    pair.restart(1)
    assert has_ended(lost)
    assert pair.ask(1, "double", 2) == 4


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_worker_that_outlives_its_fork_server_is_ended_with_its_group(pair, seconds):
    pair.send(1, "hang up")
    lost = _lose_server(pair)
    pair.stop(seconds)
    assert has_ended(lost)


def test_a_worker_that_ends_itself_with_exit_code_255_is_named_and_replaced(pair):
    pair.send(1, "exit", 255)
    with pytest.raises(WorkerError, match=r"server 1, .* ended by itself with exit code 255") as e:
        pair.receive(1, DEADLINE)
    pair.restart(e.value.worker)
    assert pair.ask(1, "double", 2) == 4


def _lose_a_peer(link: Link, kind: type[PeerGoneError]) -> None:
    link.ready()
    link.request(block=True)
    raise kind("a process of its own is gone")


@pytest.mark.parametrize("kind", [PeerGoneError, WorkerError])
def test_a_worker_that_loses_a_peer_other_than_its_parent_fails_with_its_words(kind):
    with (
        WorkerGroup(_lose_a_peer, [(kind,)], name="server") as group,
        pytest.raises(WorkerError, match=r"(?s)server 0, .*failed:\n.*process of its own is gone"),
    ):
        group.ask(0)
