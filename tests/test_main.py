"""The command line in a process of its own, whose end takes nothing apart."""

from __future__ import annotations

import subprocess
import sys

ASKED = """
import atexit
from torchrl_unilab import __main__

class Kept:
    def __del__(self):
        print("taken apart", flush=True)

kept = Kept()
__main__.main = lambda: 7
atexit.register(print, "called at the end")
print("written", end=" and ")
code = __main__.run()
print("returned", end=" and ")
raise SystemExit(code)
"""


def test_a_process_ends_with_all_written_and_called_and_nothing_taken_apart(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True)
    assert done.stdout == "written and returned and called at the end\n"
    assert (done.returncode, done.stderr) == (7, "")


def test_a_profiler_around_the_command_line_has_its_say():
    command = [sys.executable, "-m", "cProfile", "-m", "torchrl_unilab", "tasks"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "HalfCheetah-v5" in done.stdout
    assert "function calls" in done.stdout


def test_an_error_of_the_program_ends_it_as_usual():
    raises = ASKED.replace("lambda: 7", "lambda: 1 / 0")
    done = subprocess.run([sys.executable, "-c", raises], capture_output=True, text=True)
    assert "taken apart" in done.stdout
    assert (done.returncode, "ZeroDivisionError" in done.stderr) == (1, True)
