"""Waits with a bound: for descriptors, and for what announces nothing that a thread could sleep on.

`shm` waits for tokens by `watch`, `runtime` for workers: both look meanwhile whether the other side
lives.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Iterator, Mapping
from typing import SupportsFloat, TypeVar

from torchrl_unilab.errors import ConfigError

T = TypeVar("T")


def deadline(timeout: float | None) -> float:
    """Return the time of `time.monotonic` after so many seconds: never for None, now for NaN.

    Raises:
        ConfigError: They are no number, such as a text.
    """
    if not isinstance(timeout, SupportsFloat | None):
        raise ConfigError(f"timeout: {timeout!r} (expected seconds, or None). Use 10.0, or None.")
    # `max`, in this order, makes 0 of NaN, which would be no end.
    return math.inf if timeout is None else time.monotonic() + max(0.0, timeout)


def poll_while(call: Callable[[], T], timeout: float | None, pause: float) -> T:
    """Call again and again while the result is true; return the last one, true after `timeout`.

    Args:
        call: Returns something true as long as there is something to wait for.
        timeout: Seconds to wait at most; None for no end. It is called at least once.
        pause: Seconds between two calls.

    Examples:
        >>> left = [1, 2, 3]
        >>> poll_while(left.pop, 0.0, 0.1), left
        (3, [1, 2])
    """
    end = deadline(timeout)
    while (result := call()) and time.monotonic() < end:
        time.sleep(pause)
    return result


def watch(
    events: Mapping[int, int], timeout: float | None, period: float
) -> Iterator[tuple[int, ...]]:
    """Sleep until descriptors have events and yield these descriptors, again and again.

    Yields at least once, and at least every `period` seconds, then none: it is time to look whether
    the other side lives. Ends after `timeout`.

    Args:
        events: Descriptors, and for each what to wait for: `select.POLLIN`, `select.POLLOUT`.
        timeout: Seconds to wait at most; None for no end.
        period: Seconds.

    Examples:
        >>> import os
        >>> reads, writes = os.pipe()
        >>> [*watch({reads: select.POLLIN}, 0.0, 1.0)], os.write(writes, b"1")
        ([()], 1)
        >>> next(watch({reads: select.POLLIN}, None, 1.0)) == (reads,)
        True
        >>> os.close(reads), os.close(writes)
        (None, None)
    """
    end, poll = deadline(timeout), select.poll()
    for descriptor, event in events.items():
        poll.register(descriptor, event)
    while True:
        left = max(0.0, end - time.monotonic())
        yield tuple(descriptor for descriptor, _ in poll.poll(1e3 * min(left, period)))
        if time.monotonic() >= end:
            return
