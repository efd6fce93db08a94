"""Whether another process still lives."""

from __future__ import annotations

import psutil

__all__ = ["process_is_alive"]


def process_is_alive(pid: int) -> bool:
    """Return whether a process of this machine runs, or could: zombies do not count."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
