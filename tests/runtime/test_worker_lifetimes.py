"""How workers start, and how they end."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tests.support.bounds import DEADLINE, PROMPT
from tests.support.processes import (
    live_children,
    receive,
    server_of_this_process,
    use_server,
    wait_for,
    within,
)
from tests.support.serving import LARGE, gone, make_group, serve, stop_process
from tests.support.striking import exit_code_of
from torchrl_unilab.errors import ConfigError, PeerGoneError, UsageError, WorkerError
from torchrl_unilab.runtime import worker_process
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.workers import WorkerGroup


def _fail_at_start(link: Link, number: int) -> None:
    """The last one fails; the first one never gets ready."""
    if number:
        raise LookupError("no such thing")
    threading.Event().wait()


def _refuse_at_start(link: Link) -> None:
    raise ConfigError("no such setting")


def _count_objects(link: Link) -> None:
    link.ready()
    link.request(block=True)
    link.answer(len(gc.get_objects()))


def _leave_at_start(link: Link) -> None:
    os._exit(3)


def test_a_worker_that_raises_while_it_starts_surfaces_though_another_is_not_ready():
    before = set(live_children())
    error = within(PROMPT, lambda: WorkerGroup(_fail_at_start, [(0,), (1,)], name="server"))
    assert re.match(r"server 1, process \d+, failed:(.|\n)*LookupError: no such thing", str(error))
    assert set(live_children()) <= before


def test_the_garbage_collector_skips_what_a_worker_imported_which_would_take_seconds_at_its_end():
    with WorkerGroup(_count_objects, [()], name="server") as group:
        assert group.ask(0) < 1000


def test_a_setting_that_a_worker_refuses_is_reported_in_its_own_words_alone():
    message = r"server 0, process \d+, failed:\nConfigError: no such setting\n\(expected it"
    with pytest.raises(WorkerError, match=message):
        WorkerGroup(_refuse_at_start, [()], name="server")


def test_a_daemonic_process_which_may_have_no_children_starts_none(monkeypatch):
    monkeypatch.setitem(mp.current_process()._config, "daemon", True)
    with pytest.raises(ConfigError, match=r"cannot start servers: .*daemonic.*daemon=False"):
        WorkerGroup(_leave_at_start, [()], name="server")


def test_a_worker_that_ends_before_it_is_ready_reminds_of_the_main_guard():
    with pytest.raises(WorkerError, match=r"exit code 3 before .*`if __name__ == \"__main__\":`"):
        WorkerGroup(_leave_at_start, [()], name="server")


def test_the_error_for_a_script_that_is_no_file_says_that_workers_import_it(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/gone/script.py", raising=False)
    with pytest.raises(WorkerError, match=r"no file /gone/script\.py: write it to a file"):
        WorkerGroup(_leave_at_start, [()], name="server")


def test_the_error_for_a_script_without_main_guard_says_so_whatever_the_payload(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from torchrl_unilab.runtime import WorkerGroup\n"
        "from torchrl_unilab.runtime.link import Link\n"
        f"WorkerGroup(Link.ready, [(bytes({LARGE}),)])\n"
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1
    assert "before it was ready" in done.stderr
    assert "for each worker imports the script" in done.stderr


def test_no_threads_at_all_fail_with_what_torch_says_of_them():
    with pytest.raises(WorkerError, match=r"(?s)server 0, process \d+, failed:.*positive"):
        WorkerGroup(serve, [()], name="server", num_threads=0)


# The end


def test_workers_that_are_asked_to_end_do_so_by_themselves(monkeypatch):
    group = make_group(2)
    pids = group.pids
    monkeypatch.setattr(mp.process.BaseProcess, "kill", pytest.fail)

    group.stop(timeout=DEADLINE)
    group.stop()

    assert len(group) == 0
    assert gone(pids)


@pytest.mark.parametrize("dead", [False, True])
def test_a_worker_of_which_only_the_system_knows_that_it_is_dead_is_not_killed(
    dead, lone, monkeypatch
):
    worker = lone._workers[0]
    os.kill(lone.pids[0], signal.SIGKILL if dead else 0)
    wait_for(lambda: worker.alive is not dead)
    unaware = Mock(wraps=worker.process, is_alive=lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "process", unaware)
        worker.kill()
    assert unaware.kill.called is not dead
    assert unaware.join.called


def test_threads_stop_a_group_together_and_return_when_it_has_ended(lone):
    pids = lone.pids
    gate = threading.Barrier(8)
    left: list[int] = []

    def stop() -> None:
        gate.wait(DEADLINE)
        lone.stop()
        left.extend(pid for pid in pids if psutil.pid_exists(pid))

    threads = [threading.Thread(target=stop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert left == []


def test_a_forked_copy_that_stops_a_group_leaves_it_at_work(group):
    assert exit_code_of(lambda: (group.stop(), os._exit(len(group)))) == 0
    assert group.ask(0, "double", 2) == 4


def test_a_stopped_group_refuses_to_be_asked(lone):
    lone.stop()
    asked = [lone.ask, lone.send, lone.receive, lone.poll, lone.end, lone.restart]
    for ask in asked:
        with pytest.raises(UsageError, match=r"servers: stopped \(expected running ones\)"):
            ask(0)


def test_stop_kills_in_time_those_that_do_not_listen():
    group = make_group(2)
    pids = group.pids
    group.ask(0, "be deaf")
    stop_process(pids[1])
    assert within(PROMPT, lambda: group.stop(timeout=0.1)) is None
    assert gone(pids)


def _start_a_group(pipe: Connection, server: dict[str, Any]) -> None:
    """Start a group, and leave when told, as an interpreter does that exits."""
    use_server(server)
    group = make_group()
    pipe.send(group.pids)
    pipe.recv()


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_workers_end_with_their_parent(end):
    # Not daemonic, as it has children of its own.
    here, there = mp.Pipe()
    parent = mp.Process(target=_start_a_group, args=(there, server_of_this_process()))
    parent.start()
    there.close()
    workers = [psutil.Process(pid) for pid in receive(here)]
    parent.kill() if end == "killed" else here.send("leave")
    parent.join(DEADLINE)
    parent.close()
    here.close()
    assert psutil.wait_procs(workers, timeout=DEADLINE)[1] == []


def _never_looks(link: Link) -> None:
    link.ready()
    while True:
        time.sleep(1.0)


def test_a_stop_that_is_interrupted_leaves_no_worker(monkeypatch):
    group = WorkerGroup(_never_looks, [(), ()])
    pids = group.pids
    monkeypatch.setattr(worker_process, "wait", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        group.stop()
    monkeypatch.undo()
    for worker in group._workers:  # before they are asked again
        assert wait_readable([worker.process.sentinel], DEADLINE)
    group.stop()
    assert group.pids == []
    assert not any(map(psutil.pid_exists, pids))


def _leave_with(link: Link, words: str, said: Path) -> None:
    """Wait for the end of the group, and fail with words, if there are any."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    link.ready()
    try:
        link.request(block=True)
    except PeerGoneError:
        if words:
            raise LookupError(words) from None
        raise


def test_a_worker_that_fails_while_it_ends_is_reported(tmp_path):
    said = tmp_path / "stderr"
    said.touch()
    WorkerGroup(_leave_with, [("", said), ("no such thing", said)]).stop(DEADLINE)
    assert said.read_text().count("Traceback") == 1
    assert said.read_text().endswith("LookupError: no such thing\n")


def test_no_worker_is_started_in_a_working_directory_that_was_deleted(deleted_directory):
    with pytest.raises(ConfigError, match="working directory: deleted"):
        make_group()
