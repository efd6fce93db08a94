"""How many descriptors workers may share."""

from __future__ import annotations

import contextlib
import multiprocessing as mp

import pytest

from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.workers import WorkerGroup


def _begin(link: Link, *ends: object) -> None:
    link.ready()


@pytest.mark.parametrize(
    ("method", "number", "taken"),
    [
        ("forkserver", 247, "forkserver"),
        ("forkserver", 248, "spawn"),  # Linux refuses these
        ("forkserver", 260, "spawn"),  # Python does
        ("spawn", 260, "spawn"),
    ],
)
def test_workers_that_share_more_than_a_fork_server_passes_are_spawned(
    method, number, taken, monkeypatch
):
    monkeypatch.setattr(mp, "get_start_method", lambda: method)
    with contextlib.ExitStack() as closing:
        ends = [closing.enter_context(mp.Pipe()[0]) for _ in range(number)]  # and two more
        with WorkerGroup(_begin, [ends]) as group:
            assert group._context.get_start_method() == taken
