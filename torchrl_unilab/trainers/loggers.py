"""How much of what was logged a trainer keeps."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Any

__all__ = ["newest_values"]

KEPT = 100


def newest_values() -> defaultdict[str, deque[Any]]:
    """Return what a trainer is to keep logged values in: the last 100 of each key.

    TorchRL's trainers keep all, for hooks that read the last, and so grow as long as they run.
    """
    return defaultdict(partial(deque, maxlen=KEPT))
