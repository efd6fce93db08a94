"""Two computations at once: in this thread and one that sleeps when idle, or on two streams.

Torch's own threads share each operation and wait for each other by spinning, so that beside a
busy program two of them are several times slower than one. Threads that share whole
computations meet once, and sleep. `FusedOffPolicyUpdate` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from torchrl_unilab.objectives.fused.graphs import SideStream
from torchrl_unilab.runtime.worker_thread import Task, WorkerThread

SideExecutor = WorkerThread | SideStream | None
"""Runs work concurrently with the calling thread's; None: there is no such thread or stream."""
_T = TypeVar("_T")
_U = TypeVar("_U")


def run_both(thread: SideExecutor, main: Callable[[], _T], side: Callable[[], _U]) -> tuple[_T, _U]:
    """Run two functions in parallel; return both results, or raise once both have ended.

    Args:
        thread: Runs `side`, in inference mode. If it has not begun once `main` is done, as it has
            other work, or no processor, this thread takes it back. On a stream, `side` is launched
            before `main`; without a thread or stream, `side` runs after `main`.
        main: Runs in this thread.
        side: Writes nothing that `main` reads or writes, nor does `main` for `side`.

    Examples:
        >>> from torchrl_unilab.objectives.fused.threads import run_both
        >>> from torchrl_unilab.runtime.worker_thread import WorkerThread
        >>> thread = WorkerThread("side")
        >>> run_both(thread, lambda: 1, lambda: 2)
        (1, 2)
        >>> thread.close()
    """
    if thread is None:
        return main(), side()
    if isinstance(thread, SideStream):
        return thread.run_both(main, side)

    def infer() -> _U:
        with torch.inference_mode():  # each thread has a mode of its own
            return side()

    other = Task(infer)
    try:
        thread.start(other)
        return main(), side() if other.cancel() else other.result()
    finally:
        if not other.cancel():
            other.exception()  # waits
