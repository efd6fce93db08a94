"""Locks of ranges of a segment, between processes and between the threads of each.

The kernel keeps the locks (`fcntl.lockf`): those of a process end with the process, and a
forked child holds none. Releasing a lock that is not held does nothing, so an interrupt at any
line leaves no lock behind. `SharedRows` holds one per shard while it writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torchrl_unilab.errors import WaitTimeoutError
from torchrl_unilab.shm.segment import SharedSegment

__all__ = ["RangeLock", "thread_lock"]

T = TypeVar("T")

_FIRST_RETRY, _LAST_RETRY = 2e-5, 1e-3
_thread_locks: weakref.WeakValueDictionary[tuple[int, int, int], Any] = (
    weakref.WeakValueDictionary()
)
"""Of each process (a forked child inherits the table) and file: `lockf` ignores threads."""
_table = threading.RLock()
"""Of the table, whose `setdefault` threads can interleave."""


def thread_lock(segment: SharedSegment) -> Any:
    """Return the reentrant lock that this process's threads share for a segment's file.

    A forked child has its own: a thread that held its parent's is not there to release it.

    Raises:
        SegmentClosedError: The segment is closed.
    """
    status = os.fstat(segment.descriptor)
    key = (os.getpid(), status.st_dev, status.st_ino)
    try:
        _table.acquire()
        return _thread_locks.setdefault(key, threading.RLock())
    finally:  # also where an interrupt comes right after the lock was acquired
        with contextlib.suppress(RuntimeError):
            _table.release()


def _forked() -> None:
    """Replace the lock of the table, which another thread may have held at the fork."""
    global _table
    _table = threading.RLock()


os.register_at_fork(after_in_child=_forked)


class RangeLock:
    """Exclusive use of ranges of a segment.

    Args:
        segment: Its file carries the locks.
        timeout: Seconds to wait for a lock.
    """

    def __init__(self, segment: SharedSegment, timeout: float) -> None:
        self._segment, self._timeout = segment, timeout
        self._pid = 0
        self._threads: Any = threading.RLock()

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
        released = False
        try:
            try:
                self._acquire(first, count, holder)
                return action()
            finally:
                self._release(first, count)
                released = True
        finally:
            if not released:  # an interrupt has ended the first release
                self._release(first, count)

    def close(self, action: Callable[[], object]) -> None:
        """Run `action`, which closes the segment, once no other thread holds a range.

        Its descriptor carries the locks: closed earlier, it would end those of other threads.
        Runs it after the timeout in any case.
        """
        threads = self._threads if self._segment.closed else thread_lock(self._segment)
        acquired = threads.acquire(timeout=self._timeout)
        try:
            action()
        finally:
            if acquired:
                threads.release()

    def _acquire(self, first: int, count: int, holder: Callable[[], str]) -> None:
        descriptor = self._segment.descriptor
        if self._pid != os.getpid():
            self._threads = thread_lock(self._segment)
            self._pid = os.getpid()
        deadline = time.monotonic() + self._timeout
        delay = _FIRST_RETRY
        acquired = self._threads.acquire(timeout=self._timeout)
        while not (acquired and _try_lock(descriptor, first, count)):
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"{holder()}: lock not acquired within {self._timeout:g} s (expected "
                    "microseconds). Look for a stopped process."
                )
            time.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)

    def _release(self, first: int, count: int) -> None:
        if not self._threads.acquire(blocking=False):  # another thread holds the lock
            return
        if not self._segment.closed:
            fcntl.lockf(self._segment.descriptor, fcntl.LOCK_UN, count, first)
        try:
            while True:  # as often as this thread has acquired it
                self._threads.release()
        except RuntimeError:
            pass


def _try_lock(descriptor: int, first: int, count: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True
