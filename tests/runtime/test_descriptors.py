"""How many descriptors workers may share."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
from unittest.mock import Mock

import pytest

from tests.support.descriptors import may_open
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.workers import WorkerGroup


def _begin(link: Link, *ends: object) -> None:
    link.ready()


@pytest.mark.parametrize(
    ("number", "taken"),
    [
        (247, "forkserver"),
        (248, "spawn"),  # Linux refuses these
    ],
)
def test_workers_that_share_more_than_a_fork_server_passes_are_spawned(number, taken):
    with contextlib.ExitStack() as closing:
        ends = [closing.enter_context(mp.Pipe()[0]) for _ in range(number)]  # and two more
        with WorkerGroup(_begin, [ends]) as group:
            assert group._context.get_start_method() == taken


def test_workers_that_share_what_python_refuses_to_pass_are_spawned(monkeypatch):
    server = mp.get_context("forkserver")
    get_context = Mock(side_effect=[server, LookupError])
    monkeypatch.setattr(mp, "get_context", get_context)
    with contextlib.ExitStack() as closing:
        ends = [closing.enter_context(mp.Pipe()[0]) for _ in range(260)]
        with pytest.raises(LookupError):
            WorkerGroup(_begin, [ends])
    get_context.assert_called_with("spawn")


@pytest.mark.parametrize("left", [0, 2])
def test_more_workers_than_a_process_may_open_files_for_are_refused(left):
    message = r"^workers: too many open files .*`ulimit -n`"
    with may_open(left), pytest.raises(ConfigError, match=message):
        WorkerGroup(_begin, [()] * 4)
    assert not mp.active_children()


def test_a_worker_that_cannot_be_started_anew_for_want_of_files_is_refused():
    with WorkerGroup(_begin, [()]) as group:
        group.end(0)
        with may_open(1), pytest.raises(ConfigError, match=r"^workers: too many open files"):
            group.restart(0)
        group.restart(0)
