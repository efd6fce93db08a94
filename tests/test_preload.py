from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.processes import DEADLINE, receive, spawned
from torchrl_unilab.cli import main

SCRIPT = """
import torchrl_unilab.preload

from functools import partial

from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.modules import make_actor

if __name__ == "__main__":
    make_env = partial(MujocoBatchEnv, "InvertedPendulum-v5", num_envs=2, num_threads=1)
    collector = APPOCollector(make_env, make_actor(4, 1), frames_per_batch=4, total_frames=4)
    {end}
    print("done")
"""
MANY = 100_000  # objects, of several times as many that torch and TorchRL make


def tell_what_is_frozen(pipe):
    pipe.send((gc.get_freeze_count(), gc.isenabled()))


def test_what_is_imported_is_left_alone_by_a_collector_that_is_on_here_and_in_workers():
    assert gc.get_freeze_count() > MANY  # the tests import it first
    assert gc.isenabled()
    with spawned(tell_what_is_frozen) as (_, pipe):
        frozen, enabled = receive(pipe)
    assert frozen > MANY
    assert enabled


@pytest.mark.parametrize(
    "command",
    [
        "train appo --env Hopper-v5 --frames 9 --run-dir /proc/none",
        "train appo --resume --run-dir /proc/none",
        "budget appo --env InvertedPendulum-v5",
        "eval --run-dir /proc/none",
        "play --run-dir /proc/none --video /proc/none.mp4",
    ],
)
def test_each_command_that_needs_torch_imports_it_so(command, monkeypatch, capsys):
    watched = Mock(wraps=importlib)
    monkeypatch.setattr("torchrl_unilab.cli.importlib", watched)
    monkeypatch.setattr("torchrl_unilab.fork_server.importlib", watched)
    main(command.split())
    watched.import_module.assert_called_once_with("torchrl_unilab.preload")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["collector.shutdown()", "pass"])
def test_a_script_that_imports_it_first_and_has_a_collector_ends_without_a_word(end, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    root = str(Path(__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == ("done\n", "")
