from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver

import pytest

from torchrl_unilab.fork_server import start_fork_server


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are spawned")
@pytest.mark.parametrize(("chosen", "used"), [(None, "forkserver"), ("spawn", "spawn")])
def test_training_forks_its_workers_from_a_server_unless_another_method_was_chosen(chosen, used):
    asked = (
        "import multiprocessing\n"
        "from multiprocessing.forkserver import _forkserver as server\n"
        "from torchrl_unilab.fork_server import start_fork_server\n"
        f"chosen = {chosen!r}\n"
        "if chosen:\n"
        "    multiprocessing.set_start_method(chosen)\n"
        "start_fork_server()\n"
        "running = server._forkserver_pid is not None\n"
        "print(multiprocessing.get_start_method(), running, *server._preload_modules)\n"
    )
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    served = used == "forkserver"
    imported = "torchrl_unilab.preload" if served else "__main__"
    assert done.stdout.split() == [used, str(served), imported]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are spawned")
def test_signals_and_the_path_are_as_before_where_the_server_cannot_start(monkeypatch):
    def refuse() -> None:
        raise OSError("no room for a process")

    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: None)
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda method: None)
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(forkserver, "ensure_running", refuse)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP)]
    with pytest.raises(OSError, match="no room"):
        start_fork_server()
    after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP)]
    for each, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(each, handler)
    assert after == before
    assert not os.environ.get("PYTHONSAFEPATH")
