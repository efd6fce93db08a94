"""How many files this process has open, and may open."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator

import psutil


def descriptors() -> int:
    """Return how many descriptors this process holds, without those of garbage."""
    gc.collect()
    return psutil.Process().num_fds()


@contextlib.contextmanager
def may_open(more: int) -> Iterator[None]:
    """Let this process open so many more files than it has; check that none of them is left."""
    before, (soft, hard) = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the lowest number that is free: the limit is one of numbers
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert descriptors() == before
