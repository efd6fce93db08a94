"""How many descriptors workers may share."""

from __future__ import annotations

import contextlib
import multiprocessing as mp

import pytest

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.workers import WorkerGroup


def _begin(link: Link, *ends: object) -> None:
    link.ready()


@pytest.mark.parametrize(("method", "number"), [("forkserver", 247), ("spawn", 260)])
def test_as_many_descriptors_as_the_start_method_passes_are_shared(method, number, monkeypatch):
    monkeypatch.setattr(mp, "get_start_method", lambda: method)
    with contextlib.ExitStack() as closing:
        ends = [closing.enter_context(mp.Pipe()[0]) for _ in range(number)]  # and two more
        with WorkerGroup(_begin, [ends]):
            pass


def test_workers_that_share_more_descriptors_than_a_fork_server_passes_are_refused(monkeypatch):
    monkeypatch.setattr(mp, "get_start_method", lambda: "forkserver")
    with contextlib.ExitStack() as closing:
        ends = [closing.enter_context(mp.Pipe()[0]) for _ in range(250)]
        with pytest.raises(ConfigError, match=r"2 servers: .* fork server passes \(expected at m"):
            WorkerGroup(_begin, [ends, ends], name="server")
