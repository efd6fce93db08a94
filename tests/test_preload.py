from __future__ import annotations

import gc
import importlib
from unittest.mock import Mock

import pytest

from tests.support.processes import receive, spawned
from torchrl_unilab.cli import main

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
    main(command.split())
    watched.import_module.assert_called_once_with("torchrl_unilab.preload")
