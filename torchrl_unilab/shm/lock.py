"""Locks of ranges of a segment, between processes and between the threads of each.

The kernel keeps the locks (`fcntl.lockf`): those of a process end with the process, and a
forked child holds none. Releasing a lock that is not held does nothing, so an interrupt at any
line leaves no lock behind. Rows take one per shard to write, rings and cells one to register.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torchrl_unilab.errors import WaitTimeoutError
from torchrl_unilab.shm.segment import SharedSegment

T = TypeVar("T")

_FIRST_RETRY, _LAST_RETRY = 2e-5, 1e-3


class RangeLock:
    """Exclusive use of ranges of a segment.

    Args:
        segment: Its file carries the locks.
        timeout: Seconds to wait for a lock.
    """

    def __init__(self, segment: SharedSegment, timeout: float = 10.0) -> None:
        self._segment, self._timeout = segment, timeout

    def run(self, first: int, count: int, action: Callable[[], T], holder: Callable[[], str]) -> T:
        """Run `action` alone in the range. Not reentrant.

        Args:
            first: First byte of the range.
            count: Bytes.
            action: What to run; acquires no other range.
            holder: Names the holder for the error.

        Raises:
            WaitTimeoutError: Another process or thread holds the lock for too long.
            SegmentClosedError: The segment is closed.
        """
        threads, released = self._segment.thread_lock(), False
        try:
            try:
                self._acquire(threads, first, count, holder)
                return action()
            finally:
                self._release(threads, first, count)
                released = True
        finally:
            if not released:  # an interrupt has ended the first release
                self._release(threads, first, count)

    def close(self, action: Callable[[], object]) -> None:
        """Run `action`, which closes the segment, once no other thread holds a range.

        Its descriptor carries the locks: closed earlier, it would end those of other threads.
        Runs it after the timeout in any case.
        """
        threads = self._segment.thread_lock()
        acquired = threads.acquire(timeout=min(self._timeout, threading.TIMEOUT_MAX))
        try:
            action()
        finally:
            if acquired:
                threads.release()

    def _acquire(self, threads: Any, first: int, count: int, holder: Callable[[], str]) -> None:
        descriptor = self._segment.descriptor
        deadline = time.monotonic() + self._timeout
        delay = _FIRST_RETRY
        acquired = threads.acquire(timeout=min(self._timeout, threading.TIMEOUT_MAX))
        while not (acquired and _try_lock(descriptor, first, count)):
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"{holder()}: lock not acquired within {self._timeout:g} s (expected "
                    "microseconds). Look for a stopped process that holds it."
                )
            time.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)

    def _release(self, threads: Any, first: int, count: int) -> None:
        if not threads.acquire(blocking=False):  # another thread holds the lock
            return
        if not self._segment.closed:
            fcntl.lockf(self._segment.descriptor, fcntl.LOCK_UN, count, first)
        try:
            while True:  # release as often as this thread has acquired it
                threads.release()
        except RuntimeError:
            pass


def _try_lock(descriptor: int, first: int, count: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
    except (BlockingIOError, PermissionError):  # which one depends on the system
        return False
    return True
