"""Worlds of several ranks: processes that torchrun might have started, each with a deadline."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

from tests.support.bounds import DEADLINE
from tests.support.processes import receive, server_of_this_process, spawned, use_server


@dataclass
class World:
    """Ranks that run one target.

    Attributes:
        processes: Of each rank.
        pipes: To each rank.
    """

    processes: list[BaseProcess]
    pipes: list[Connection]

    def results(self) -> list[Any]:
        """What the target returned on each rank, or the exception that it raised there."""
        return [receive(pipe, 4 * DEADLINE) for pipe in self.pipes]  # it may do much


@contextlib.contextmanager
def world(target: Callable[..., Any], *args: Any, size: int = 2) -> Iterator[World]:
    """Run `target(pipe, *args)` on ranks of this machine, whose store is in this process.

    Args:
        target: Top-level function; what it returns is sent to `World.results`.
        *args: Its other arguments.
        size: How many ranks.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    server = server_of_this_process()
    with contextlib.ExitStack() as closing:
        started = []
        for rank in range(size):
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            one = spawned(_run, server, variables, target, args, daemon=False)
            started.append(closing.enter_context(one))
        for _, pipe in started:
            receive(pipe)
        for _, pipe in started:  # their time-outs begin when all are there
            pipe.send("go")
        yield World(*map(list, zip(*started, strict=True)))


def _run(
    pipe: Connection,
    server: dict[str, Any],
    variables: dict[str, str],
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    use_server(server)
    os.environ.update(variables)
    torch.set_num_threads(1)
    pipe.send("ready")
    pipe.recv()
    try:
        result = target(pipe, *args)
    except Exception as error:
        traceback.print_exc()  # beside the message, which the test looks at
        result = error
    pipe.send(result)
    pipe.poll(None)  # the end of the test: what others see is not this process's end
