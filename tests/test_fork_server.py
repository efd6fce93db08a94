from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.support.bounds import DEADLINE
from torchrl_unilab.fork_server import start_fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are spawned")
SERVED = "print(multiprocessing.get_start_method(), server._forkserver_pid is not None)"


def said_by(program: str, preload: str = "json", *, script: Path | None = None) -> list[str]:
    """Run a program, from a file if one is given, to its end, and to that of all it starts."""
    imports = (
        "import multiprocessing, signal, sys, threading\n"
        "from multiprocessing.forkserver import _forkserver as server\n"
        "from torchrl_unilab import fork_server\n"
        "from torchrl_unilab.fork_server import start_fork_server\n"
        f"fork_server._PRELOAD = {preload!r}\n"  # torch takes seconds
    )
    command = [sys.executable, "-c", imports + program]
    if script is not None:
        script.write_text(imports + program)
        command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE)
    assert done.stderr == ""
    return done.stdout.split()


def test_the_command_line_forks_its_server(tmp_path):
    train = f"train appo --env missing:Task --frames 512 --run-dir {tmp_path / 'run'}"
    program = (
        "from torchrl_unilab.cli import main\n"
        "sys.stderr = sys.stdout\n"  # for the refusal of the task, which comes after
        f"main({train.split()})\n"
        "own, servers = (open(f'/proc/{pid}/cmdline').read() for pid in "
        "('self', server._forkserver_pid))\n"
        "print(own == servers)\n"  # Python's own server has a command of its own
    )
    assert said_by(program)[-1] == "True"


def test_training_forks_its_workers_from_a_server_that_has_imported_all_of_the_package():
    assert said_by(f"start_fork_server()\n{SERVED}", preload="torchrl_unilab.preload") == [
        "forkserver",
        "True",
    ]


def test_training_starts_its_workers_by_another_method_that_was_chosen():
    chooses = "multiprocessing.set_start_method('spawn')\n"
    assert said_by(f"{chooses}start_fork_server()\n{SERVED}") == ["spawn", "False"]


@pytest.mark.parametrize(
    "has",
    [
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "sys.modules['torch'] = sys",  # it may have threads
    ],
)
def test_a_process_with_threads_is_not_forked(has):
    assert said_by(f"{has}\nstart_fork_server()\n{SERVED}") == ["forkserver", "False"]


def test_workers_share_what_was_imported_ignore_ctrl_c_and_can_start_processes():
    works = (
        "import multiprocessing, signal, sys\n"
        "print(sys.shared, *(int(signal.getsignal(number)) for number in (1, 2, 15)), flush=True)\n"
        "child = multiprocessing.Process(target=print, args=('child',))\n"
        "child.start()\n"
        "child.join()\n"
    )
    said = said_by(
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "sys.shared = 'shared'\n"
        "start_fork_server()\n"
        f"worker = multiprocessing.Process(target=exec, args=({works!r}, {{}}))\n"
        "worker.start()\n"
        "worker.join()\n"
        "print(worker.exitcode)\n"
    )
    hang_up, interrupt, end = map(str, map(int, (signal.SIG_IGN, signal.SIG_IGN, signal.SIG_DFL)))
    assert said == ["shared", hang_up, interrupt, end, "child", "0"]


def test_workers_have_what_a_script_defines_after_it_was_forked(tmp_path):
    said = said_by(
        "if __name__ == '__main__':\n"
        "    start_fork_server()\n"
        "class Later:\n"
        "    def __call__(self):\n"
        "        print(type(self).__name__, type(self).__module__)\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.Process(target=Later())\n"
        "    worker.start()\n"
        "    worker.join()\n",
        script=tmp_path / "script.py",
    )
    assert said == ["Later", "__mp_main__"]  # as a spawned worker


def test_errors_of_workers_show_nothing_of_the_server():
    told = "import sys; print(sys.exc_info()[0])"  # would be shown as the context of each error
    works = f"worker = multiprocessing.Process(target=exec, args=({told!r}, {{}}))\n"
    assert said_by(f"start_fork_server()\n{works}worker.start()\nworker.join()\n") == ["None"]


def test_workers_do_not_repeat_what_was_printed_before(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    works = "worker = multiprocessing.Process(target=print, args=('worker',))\n"
    program = f"print('before')\nstart_fork_server()\n{works}worker.start()\nworker.join()\n"
    assert said_by(program) == ["before", "worker"]


def test_signals_are_as_before_where_the_server_cannot_start(monkeypatch):
    def refuse() -> None:
        raise OSError("no room for a process")

    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: None)
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda method: None)
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(forkserver, "ensure_running", refuse)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.delitem(sys.modules, "torch")
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP)]
    with pytest.raises(OSError, match="no room"):
        start_fork_server()
    after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP)]
    for each, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(each, handler)
    assert after == before
