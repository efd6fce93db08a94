"""Times calls that take turns, so that load from elsewhere falls on each alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def finish(device: str) -> None:
    """Wait until a device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def race(
    calls: Mapping[str, Callable[[], object]], rounds: int, times: int, device: str = "cpu"
) -> dict[str, float]:
    """Return the median seconds of a call, by contender.

    Args:
        calls: The contenders.
        rounds: Turns of each; they begin with another one in each round. One more warms up.
        times: Calls of a turn, whose mean counts.
        device: A turn ends when this has done all of it.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds + 1):
        for name in names:
            call = calls[name]
            started = time.perf_counter()
            for _ in range(times):
                call()
            finish(device)
            if turn:
                taken[name].append((time.perf_counter() - started) / times)
        names = [*names[1:], names[0]]
    return {name: statistics.median(values) for name, values in taken.items()}
