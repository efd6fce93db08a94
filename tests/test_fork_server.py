from __future__ import annotations

import subprocess
import sys

import pytest


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
