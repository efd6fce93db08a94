"""Waits with a bound, for what announces nothing that a thread could sleep on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def deadline(timeout: float | None) -> float:
    """Return the time of `time.monotonic` after so many seconds: never for None, now for NaN."""
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
