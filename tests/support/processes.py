"""Spawned helpers with a deadline: no test waits for ever, none leaves a child behind."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

DEADLINE = 30.0
SPAWN = mp.get_context("spawn")


@contextlib.contextmanager
def spawned(target: Callable[..., Any], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run `target(pipe, *args)` in a spawned process, which is ended on the way out."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join(DEADLINE)
        process.close()
        here.close()


def live_children() -> list[psutil.Process]:
    """Child processes of this one, without Python's own resource tracker."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if not any("resource_tracker" in part for part in child.cmdline())
    ]


def receive(pipe: Connection, deadline: float = DEADLINE) -> Any:
    """Receive from a pipe, or fail once the deadline has passed."""
    assert pipe.poll(deadline), f"no answer within {deadline} s"
    return pipe.recv()
