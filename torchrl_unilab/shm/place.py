"""A segment that exists before its size is known, with a lock between its processes."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
import threading
import time
import weakref
from multiprocessing import reduction
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

from torchrl_unilab.errors import (
    SegmentClosedError,
    SegmentSpaceError,
    WaitTimeoutError,
)
from torchrl_unilab.shm.segment import (
    SegmentKind,
    SharedSegment,
    default_kind,
    free_bytes,
    named_directory,
)

__all__ = ["ProcessLock", "SharedPlace"]

_RETRY_SECONDS = 2e-5


class ProcessLock:
    """A lock between threads and between processes, which a process that dies lets go of.

    Each process opens the file for itself: the kernel ties the lock to that opening and ends
    both together. Not reentrant.

    Args:
        path: The file to lock. It need hold nothing.
        timeout: Seconds to wait for the lock.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._threads = threading.Lock()
        self._descriptor, self._pid = -1, 0
        self._closed = False

    def __enter__(self) -> None:
        until = time.monotonic() + self._timeout
        if not (self._threads.acquire(False) or self._threads.acquire(timeout=self._timeout)):
            raise self._contended()
        try:
            if self._closed:
                raise SegmentClosedError(
                    "lock of shared memory: used after it was closed (expected an open one). "
                    "End what uses it before the process ends."
                )
            if self._pid != os.getpid():  # a forked child must not share its parent's opening
                self._descriptor, self._pid = os.open(self._path, os.O_RDWR), os.getpid()
            while not self._try():
                if time.monotonic() > until:
                    raise self._contended()
                time.sleep(_RETRY_SECONDS)
        except BaseException:
            self._threads.release()
            raise

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _contended(self) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"lock of shared memory: held by another process or thread for {self._timeout:g} s "
            "(expected some microseconds). See whether a process is stopped."
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        """Close this process's opening, for good."""
        self._closed = True
        if self._pid == os.getpid():
            os.close(self._descriptor)
        self._descriptor, self._pid = -1, 0


class SharedPlace:
    """Shared memory that any process it was passed to may size and fill first.

    Anonymous memory goes with the last process that holds it; a named file's creator
    unlinks it.

    Args:
        kind: Kind of segment; the platform's default if not given. Without memory files
            (elsewhere than on Linux) it is always named.
        timeout: Seconds to wait for its lock.

    Example:
        >>> place = SharedPlace()
        >>> place.find() is None
        True
        >>> with place.lock, place.build(64) as segment:
        ...     segment.nbytes
        64
        >>> place.close()
    """

    def __init__(self, kind: SegmentKind | None = None, timeout: float = 10.0) -> None:
        if sys.platform == "linux" and (kind or default_kind()) == "anonymous":
            self._open(os.memfd_create("unilab-rows"), None, timeout, creator=False)
        else:
            descriptor, path = tempfile.mkstemp(prefix="unilab-rows-", dir=named_directory())
            self._open(descriptor, Path(path).name, timeout, creator=True)

    def _open(self, descriptor: int, name: str | None, timeout: float, *, creator: bool) -> None:
        self._descriptor = descriptor
        self._timeout = timeout
        self.name = name
        path = f"/proc/self/fd/{descriptor}" if name is None else str(named_directory() / name)
        self.lock = ProcessLock(path, timeout)
        self.close = weakref.finalize(
            self, _leave, self.lock, descriptor, path if creator else None, os.getpid()
        )
        if creator:  # at the end of a worker from a fork server, where atexit's do not run
            Finalize(self, self.close, exitpriority=0)

    @property
    def kind(self) -> SegmentKind:
        """What the memory is."""
        return "anonymous" if self.name is None else "named"

    def find(self) -> SharedSegment | None:
        """Return the memory, attached, if it has been sized."""
        nbytes = os.fstat(self._descriptor).st_size
        if not nbytes:
            return None
        if self.name is not None:
            return SharedSegment.attach(self.name)
        return SharedSegment._attach_descriptor(os.dup(self._descriptor), nbytes, None)

    def build(self, nbytes: int) -> SharedSegment:
        """Size the memory and attach it; under the lock, where nobody has.

        Args:
            nbytes: Its size.

        Raises:
            SegmentSpaceError: It does not fit. Nothing was allocated.
        """
        if nbytes > free_bytes(self.kind):
            raise self._no_room(nbytes)
        try:
            os.ftruncate(self._descriptor, nbytes)
            if sys.platform == "linux":
                os.posix_fallocate(self._descriptor, 0, nbytes)  # a later lack is a SIGBUS
        except OSError as error:
            os.ftruncate(self._descriptor, 0)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise self._no_room(nbytes) from error
            raise
        segment = self.find()
        assert segment is not None
        return segment

    def _no_room(self, nbytes: int) -> SegmentSpaceError:
        return SegmentSpaceError(
            f"cannot create shared memory: {nbytes} bytes do not fit (expected at most "
            f"{free_bytes(self.kind)}, free for {self.kind} segments). Lower the sizes it was "
            "computed from."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name is not None:
            return _join_named, (self.name, self._timeout)
        return _join, (reduction.DupFd(self._descriptor), self._timeout)


def _join(descriptor: Any, timeout: float) -> SharedPlace:
    place = SharedPlace.__new__(SharedPlace)
    place._open(descriptor.detach(), None, timeout, creator=False)
    return place


def _join_named(name: str, timeout: float) -> SharedPlace:
    place = SharedPlace.__new__(SharedPlace)
    descriptor = os.open(named_directory() / name, os.O_RDWR | os.O_CLOEXEC)
    place._open(descriptor, name, timeout, creator=False)
    return place


def _leave(lock: ProcessLock, descriptor: int, path: str | None, creator: int) -> None:
    lock.close()
    os.close(descriptor)
    if path is not None and os.getpid() == creator:
        os.unlink(path)
