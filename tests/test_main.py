from __future__ import annotations

import pstats
import subprocess
import sys

import pytest

from tests.support.bounds import DEADLINE

RUNS = """
import atexit, ctypes, sys, threading
from torchrl_unilab.__main__ import run
sys.argv[1:] = ["tasks"]
atexit.register(print, "at exit")
def later():
    threading.main_thread().join()
    print("thread")
{starts}
ctypes.CDLL(None).printf(b"of C\\n")
print(run(), "goes on")
"""
WORDS = ("at exit", "thread", "0 goes on", "of C")


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ("", ["at exit", "of C"]),
        ("threading.Thread(target=later).start()", ["0 goes on", "thread", "at exit", "of C"]),
    ],
    ids=["alone", "with a thread"],
)
def test_a_command_ends_the_process_with_its_threads_exit_functions_and_output(
    starts, said, monkeypatch
):
    command = [sys.executable, "-c", RUNS.format(starts=starts)]
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    lines = ended.stdout.splitlines()
    assert any(line.startswith("Hopper-v5") for line in lines)
    assert [line for line in lines if line in WORDS] == said
    assert ended.stderr == ""


def test_a_profiler_that_runs_a_command_writes_what_it_measured(tmp_path):
    measured = tmp_path / "measured"
    profiler = ["cProfile", "-o", str(measured), "-m", "torchrl_unilab", "tasks"]
    command = [sys.executable, "-m", *profiler]
    subprocess.run(command, capture_output=True, timeout=DEADLINE, check=True)
    assert any(name == "main" for _, _, name in pstats.Stats(str(measured)).stats)
