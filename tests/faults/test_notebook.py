"""Runs that no script starts: in a notebook, from standard input, from the command line."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.processes import DEADLINE

ROOT = Path(__file__).parents[2]
SETTINGS = """
import torch
from torchrl_unilab.trainers import APPOConfig, train_appo

torch.set_num_threads(1)
config = APPOConfig(num_envs=4, num_steps=8, epochs=1, hidden=(8,), physics_threads=1)
options = dict(config=config, progress_bar=False, eval_episodes=1)
"""
TRAIN = """
print(train_appo("InvertedPendulum-v5", frames=64, run_dir="run", **options)["frames"])
"""
TRAIN_ON = """
import os
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints

save = RunCheckpoints.save

def save_and_tell(*args, **kwargs):
    path = save(*args, **kwargs)
    with open("told", "w") as told:
        print(os.getpid(), file=told)
    return path

RunCheckpoints.save = save_and_tell
summary = train_appo(
    "InvertedPendulum-v5", frames=10**8, run_dir="long", checkpoint_interval=256, **options
)
RunCheckpoints.save = save
print(summary["interrupted"])
"""
LEFT = """
import gc
import psutil

gc.collect()
names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
print([name for name in names if "resource_tracker" not in name and "forkserver" not in name])
print(os.listdir(os.environ["TORCHRL_UNILAB_SHM_DIR"]))
"""


def _text(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.slow
def test_a_run_in_a_notebook_ends_and_an_interrupt_ends_one_and_leaves_nothing(
    tmp_path, monkeypatch
):
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(shm))
    monkeypatch.setenv("TORCHRL_UNILAB_SEGMENT", "named")  # so that it is seen what is left
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [nbformat.v4.new_code_cell(text) for text in (SETTINGS, TRAIN, TRAIN_ON, LEFT)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(
        notebook, timeout=3 * DEADLINE, resources={"metadata": {"path": str(tmp_path)}}
    )
    os.mkfifo(tmp_path / "told")
    told = os.open(tmp_path / "told", os.O_RDONLY | os.O_NONBLOCK)
    running = threading.Thread(target=lambda: asyncio.run(client.async_execute()))
    running.start()
    try:
        poll = select.poll()
        poll.register(told, select.POLLIN)
        assert poll.poll(3 * DEADLINE * 1e3), "the second run has not got far"
        os.kill(int(os.read(told, 64).split()[0]), signal.SIGINT)  # what a kernel's interrupt is
        running.join(3 * DEADLINE)
        assert not running.is_alive()
    finally:
        os.close(told)
    assert _text(cells[1]) == "64\n"
    assert _text(cells[2]).endswith("True\n")
    assert _text(cells[3]) == "[]\n[]\n"


def _run(script: str, way: str, directory: Path) -> subprocess.CompletedProcess[str]:
    arguments = {"command": ["-c", script], "input": ["-"], "interactive": ["-i", "-q"]}[way]
    return subprocess.run(
        [sys.executable, *arguments],
        input=None if way == "command" else script,
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=directory,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["command", "interactive"])
def test_a_run_on_the_command_line_or_in_an_interactive_interpreter_ends(way, tmp_path):
    done = _run(SETTINGS + TRAIN, way, tmp_path)
    assert done.returncode == 0
    assert done.stdout.endswith("64\n")
    assert "Error" not in done.stderr


@pytest.mark.slow
def test_a_run_from_standard_input_leaves_nothing_and_says_to_use_a_file(tmp_path):
    done = _run(SETTINGS + TRAIN, "input", tmp_path)
    assert done.returncode == 1
    assert not (tmp_path / "run").exists()
    last = done.stderr.rpartition("Traceback (most recent call last)")[2].partition("Error: ")[2]
    assert "<stdin>" in last
    assert "to a file" in last
