"""Python's collector, off while a call is looked at step by step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Finalise nothing that other tests left: it would add calls, or swallow an interrupt."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
