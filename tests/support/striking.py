"""Strikes at exact steps of a protocol: a signal to the process that takes it."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support.watching import WatchedWords
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.shards import Parts


@contextlib.contextmanager
def forked(action: Callable[[], object]) -> Iterator[int]:
    """Run `action` in a forked child, which is ended on the way out; give its process id."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def exit_code_of(action: Callable[[], object]) -> int:
    """Run `action` to its end in a forked child; return its exit code, or minus its signal."""
    with forked(action) as child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def strike_at(rows: SharedRows, nth: int, strike: Callable[[], None]) -> Callable[[], int]:
    """Have this process struck before the `nth` step that others see: a store, half of a copy.

    Returns:
        What counts the steps so far.
    """
    taken = 0

    def step(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken == nth:
            strike()

    changed: Any = rows
    fill, fill_at = rows.fill, rows.fill_at

    def half(parts: Parts) -> Parts:
        """Rows of which all but the first word of each part is garbage."""
        first = [words[:, :1] for words in parts]
        rest = [torch.full_like(words[:, 1:], -7) for words in parts]
        return [torch.cat(pair, 1) for pair in zip(first, rest, strict=True)]

    def fill_rows(shard: int, number: int, parts: Parts) -> None:
        fill(shard, number, half(parts))
        step()
        fill(shard, number, parts)

    def fill_places(shard: int, places: torch.Tensor, parts: Parts) -> None:
        fill_at(shard, places, half(parts))
        step()
        fill_at(shard, places, parts)

    changed.fill, changed.fill_at = fill_rows, fill_places
    changed._words = WatchedWords(rows._words, step)
    changed.words = [WatchedWords(words, step) for words in rows.words]
    return lambda: taken


def kill_self() -> None:
    """End this process as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self() -> None:
    """Stop this process until it is continued."""
    os.kill(os.getpid(), signal.SIGSTOP)
