"""Two computations at once: in this thread and one that sleeps when idle, or on two streams.

Torch's own threads share each operation and wait for each other by spinning, so that beside a
busy program two of them are several times slower than one. Threads that share whole
computations meet once, and sleep. `FusedOffPolicyUpdate` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from torchrl_unilab.objectives.fused.graphs import SideStream

SideExecutor = ThreadPoolExecutor | SideStream | None
"""Runs work concurrently with the calling thread's; None: there is no such thread or stream."""
_T = TypeVar("_T")
_U = TypeVar("_U")


def at_once(thread: SideExecutor, here: Callable[[], _T], there: Callable[[], _U]) -> tuple[_T, _U]:
    """Return what both functions return; raise once both have ended.

    Args:
        thread: Runs `there`, in inference mode; a stream has it launched before `here`. Without
            one it runs after `here`.
        here: Runs in this thread.
        there: Writes nothing that `here` reads or writes, and the other way round.

    Examples:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from torchrl_unilab.objectives.fused.threads import at_once
        >>> with ThreadPoolExecutor(1) as thread:
        ...     at_once(thread, lambda: 1, lambda: 2)
        (1, 2)
    """
    if thread is None:
        return here(), there()
    if isinstance(thread, SideStream):
        try:
            with thread.fork():
                beside = there()
            return here(), beside
        finally:
            thread.join()

    def infer() -> _U:
        with torch.inference_mode():  # of each thread
            return there()

    other = thread.submit(infer)
    try:
        return here(), other.result()
    finally:
        other.exception()  # waits
