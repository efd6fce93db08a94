"""A segment of shared memory: created by one owner, attached by others.

A segment without a name is anonymous: its descriptor is passed to spawned processes, and the kernel
frees it with the last process that maps it, however that process ends. A segment that is given a
name is a file on the shared-memory mount, which unrelated processes attach and its creator unlinks.

The environment variable ``TORCHRL_UNILAB_SEGMENT=named`` gives each segment a generated name, and
``TORCHRL_UNILAB_SHM_DIR`` moves the named segments to another directory.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import starmap
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrl_unilab.checks import as_choice, as_integer
from torchrl_unilab.errors import ConfigError, SegmentError, SegmentSpaceError
from torchrl_unilab.limits import available_memory, files_to_open
from torchrl_unilab.owner import Owner, closed_error
from torchrl_unilab.shm.handover import check_spawning, handed_over

_LONGEST_NAME = 255  # bytes of a file's name on Linux and macOS


def named_by_default() -> bool:
    """Return whether the environment gives each segment a name."""
    name, remedy = "TORCHRL_UNILAB_SEGMENT", "Unset it for anonymous segments."
    kind = os.environ.get(name, "anonymous")
    return as_choice(name, kind, ("anonymous", "named"), remedy) == "named"


def named_directory() -> Path:
    """Return the directory of named segments: the shared-memory mount if it can be written."""
    if configured := os.environ.get("TORCHRL_UNILAB_SHM_DIR"):
        if not os.access(configured, os.W_OK) or not Path(configured).is_dir():
            raise ConfigError(
                f"TORCHRL_UNILAB_SHM_DIR: {configured!r} (expected a directory that may be written "
                "to). Make it, or unset the variable."
            )
        return Path(configured)
    mount = Path("/dev/shm")
    return mount if os.access(mount, os.W_OK) else Path(tempfile.gettempdir())


def free_bytes(named: bool | None = None) -> int:
    """Return how many bytes a new segment may take now.

    A named segment is bounded by its mount. An anonymous one lies on a mount of the
    kernel's own, which has no size limit but memory: the machine's and the control groups'.

    Args:
        named: Whether the segment has a name; `named_by_default` decides if not given.
    """
    if named or (named is None and named_by_default()):
        return shutil.disk_usage(named_directory()).free
    return available_memory()


class SharedSegment(Owner):
    """Zero-filled shared bytes, created by one process and attached by others.

    Pickling a segment to a spawned process (as an argument of the process) attaches it
    there. The creator unlinks the segment; other processes only close it. Memory
    stays mapped while arrays borrowed from `buffer` are alive, so a late access reads
    stale bytes and never crashes.

    Args:
        nbytes: Size in bytes, at least 1.
        name: Name to attach by from an unrelated process; anonymous if not given.

    Raises:
        ConfigError: `nbytes` is not positive, `name` is no plain file name, or this process may
            open no more files.
        SegmentSpaceError: The segment does not fit the memory that is free. Nothing was allocated.
        SegmentError: The name is taken.

    Examples:
        >>> from torchrl_unilab.shm import SharedSegment
        >>> with SharedSegment(128) as segment:
        ...     segment.buffer[:4] = 7
        ...     int(segment.buffer.sum())
        28
    """

    def __init__(self, nbytes: int, *, name: str | None = None) -> None:
        remedy = "Check the sizes it was computed from."
        nbytes = as_integer("bytes of a shared segment", nbytes, remedy)
        named = name is not None or named_by_default()
        if named and name is None:
            name = f"unilab-{os.getpid()}-{secrets.token_hex(6)}"
        self.name, path = name, None if name is None else _path(name)
        with _opened(path) as opened:
            free = free_bytes(named)
            if nbytes > free:
                raise SegmentSpaceError(_no_room(nbytes, free, named))
            _create(path, opened)
            _reserve(opened[0], nbytes, named)
            self._map(opened[0], nbytes, opened, path)

    @classmethod
    def attach(cls, name: str) -> SharedSegment:
        """Attach the named segment `name`, of this or an unrelated process.

        Raises:
            SegmentError: There is no such segment, it has no size yet, or it is not a file of
                this user.
            SegmentSpaceError: A limit of this process's memory leaves no room to map it.
        """
        known = _existing_mapping(name)
        segment = cls.__new__(cls)
        segment.name = name
        with _opened() as opened:
            if known is not None:
                segment._map(known.descriptors[0], len(known), opened, None)
            else:
                nbytes = _open_named(_path(name), opened)
                segment._map(opened[0], nbytes, opened, None)
        return segment

    def _map(self, descriptor: int, nbytes: int, opened: list[int], made: Path | None) -> None:
        """Map a file, whose mapping takes what was `opened`; unlink the name that was `made`."""
        self.nbytes = nbytes
        self._descriptor = descriptor
        # Also at the end of an interpreter, and of a forked worker, which runs no atexit.
        self._unlink = partial(_unlink, made, os.getpid(), os.fstat(descriptor))
        self._at_exit = Finalize(self, self._unlink, exitpriority=0)
        mapping = _map_file(descriptor, nbytes, opened)
        self._thread_locks = mapping.thread_locks
        # The array exports the mapping's buffer, so the mapping outlives every borrowed view.
        self._buffer: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The bytes, uint8 of shape [nbytes], shared and writable."""
        if self._buffer is None:
            raise closed_error("shared segment")
        return self._buffer

    @property
    def descriptor(self) -> int:
        """The descriptor of the segment's file, which can carry locks."""
        _ = self.buffer  # refuse a closed segment
        return self._descriptor

    def thread_lock(self) -> Any:
        """Return the reentrant lock that the threads of this process share for the file.

        A forked child has another one: the thread that held the parent's lock does not exist in the
        child.
        """
        return self._thread_locks.setdefault(os.getpid(), threading.RLock())  # one call: atomic

    @property
    def closed(self) -> bool:
        """Whether this process has closed the segment."""
        return self._buffer is None

    def close(self) -> None:
        """Give up the segment; its creator also unlinks its name. Idempotent."""
        self._buffer = None
        self._unlink()  # again, if an interrupt kept an earlier call from it
        self._at_exit.cancel()

    def __reduce__(self) -> tuple[Any, ...]:
        _ = self.buffer  # refuse a closed segment
        if self.name is not None:
            return SharedSegment.attach, (self.name,)
        check_spawning(self)
        return _attach_pickled, (handed_over(self._descriptor), self.nbytes)


class _Mapping(mmap.mmap):
    """The one mapping of a file in this process, which all its attachments share.

    POSIX releases all locks of a process on a file when the process closes *any* descriptor of it,
    the mapping's own included. So all descriptors of a file are closed together, with the mapping:
    closing one attachment releases no lock of another. The kernel's locks do not tell threads
    apart; these share a second lock, one per process, as a forked child inherits the mapping.
    """

    descriptors: list[int]  # closed by one call into C, which no interrupt cuts short
    thread_locks: dict[int, Any]


_mappings: weakref.WeakValueDictionary[tuple[int, int, int], _Mapping] = (
    weakref.WeakValueDictionary()
)
_mappings_lock = threading.Lock()
os.register_at_fork(
    before=_mappings_lock.acquire,
    after_in_parent=_mappings_lock.release,
    after_in_child=_mappings_lock.release,
)


@contextlib.contextmanager
def _opened(made: Path | None = None) -> Iterator[list[int]]:
    """Give a list for the descriptor of a file; close what is in it still at the end.

    One call into C puts the descriptor there, another one moves it to the file's mapping: no
    interrupt finds it in both or in neither. A file that was `made`, but not mapped, is unlinked.
    """
    opened: list[int] = []
    try:
        with files_to_open("shared segment", "two", "close others"):
            yield opened
    finally:
        for descriptor in opened:
            _unlink(made, os.getpid(), os.fstat(descriptor))
        deque(map(os.close, opened), 0)


def _map_file(descriptor: int, nbytes: int, opened: list[int]) -> _Mapping:
    """Map a file, or share its mapping; the mapping owns what was `opened` from now on."""
    status = os.fstat(descriptor)
    key = (status.st_dev, status.st_ino, nbytes)
    with _mappings_lock:
        mapping = _mappings.get(key)
        if mapping is None:
            try:
                mapping = _mappings[key] = _Mapping(descriptor, nbytes)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                raise SegmentSpaceError(_over_limit("map", nbytes, "ulimit -v")) from error
            mapping.descriptors, mapping.thread_locks = [], {}
            weakref.finalize(mapping, deque, map(os.close, mapping.descriptors), 0)
    mapping.descriptors.extend(starmap(opened.pop, [()] * len(opened)))  # one call: see `_opened`
    return mapping


def _existing_mapping(name: str) -> _Mapping | None:
    """Return this process's mapping of a named segment; None if it has not mapped it."""
    try:
        found = os.stat(_path(name), follow_symlinks=False)
    except OSError:  # opening the file will raise the explanation
        return None
    if found.st_uid != os.geteuid():
        return None
    with _mappings_lock:
        return _mappings.get((found.st_dev, found.st_ino, found.st_size))


def _attach_pickled(descriptor: Any, nbytes: int) -> SharedSegment:
    segment = SharedSegment.__new__(SharedSegment)
    segment.name = None
    with _opened() as opened:
        opened.extend(starmap(descriptor.detach, [()]))
        segment._map(opened[0], nbytes, opened, None)
    return segment


def _create(path: Path | None, opened: list[int]) -> None:
    anonymous = path is None
    if anonymous and sys.platform == "linux":
        opened.extend(map(os.memfd_create, ("unilab",)))
        return
    path = path or named_directory() / f"unilab-{secrets.token_hex(8)}"
    try:
        opened.extend(map(os.open, (path,), (os.O_RDWR | os.O_CREAT | os.O_EXCL,), (0o600,)))
    except FileExistsError:
        raise SegmentError(
            f"cannot create segment: name {path.name!r} is taken in {path.parent} "
            "(expected a new name). Choose another, attach it, or, if its creator was killed, "
            "remove the file."
        ) from None
    if anonymous:
        path.unlink()


def _open_named(path: Path, opened: list[int]) -> int:
    """Open a named segment that may be attached; return its size.

    Raises:
        SegmentError: There is no such segment, or it is not a file, not this user's, or empty.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        opened.extend(map(os.open, (path,), (flags,)))
    except FileNotFoundError:
        raise SegmentError(
            f"cannot attach segment: no segment {path.name!r} in {path.parent} "
            "(expected one its creator has not closed). Start the creator first."
        ) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise SegmentError(
            f"cannot attach segment: {path.name!r} is a symbolic link (expected a file that its "
            "creator made). Remove it."
        ) from None
    found, user = os.fstat(opened[0]), os.geteuid()
    if not stat.S_ISREG(found.st_mode):
        unfit = "not a regular file (expected one that its creator made). Remove it."
    elif found.st_uid != user:
        unfit = (
            f"owned by user {found.st_uid} (expected user {user}). Attach segments of this user "
            "only, or use another name."
        )
    elif found.st_size == 0:
        unfit = "empty (expected one its creator has sized). Wait for the creator."
    else:
        return found.st_size
    raise SegmentError(f"cannot attach segment: {path.name!r} is {unfit}")


def _unlink(path: Path | None, owner_pid: int, file: os.stat_result) -> None:
    """Unlink a file by its creator, unless the name is another file's by now."""
    if path is None or os.getpid() != owner_pid:
        return
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.lstat(), file):
            path.unlink()


def _path(name: str) -> Path:
    text = isinstance(name, str) and name not in ("", "..") and "\0" not in name
    if not text or Path(name).name != name or len(os.fsencode(name)) > _LONGEST_NAME:
        raise ConfigError(
            f"segment name: {name!r} (expected a plain file name of at most {_LONGEST_NAME} "
            "bytes, which its creator was given). Leave out separators."
        )
    return named_directory() / name


def _reserve(descriptor: int, nbytes: int, named: bool) -> None:
    """Size the file and take its pages now: a page that cannot be had later is a SIGBUS."""
    try:
        os.ftruncate(descriptor, nbytes)
        if sys.platform == "linux":
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise SegmentSpaceError(_no_room(nbytes, free_bytes(named), named)) from error
        if error.errno == errno.EFBIG:
            raise SegmentSpaceError(_over_limit("create", nbytes, "ulimit -f")) from error
        raise


def _over_limit(action: str, nbytes: int, limit: str) -> str:
    return (
        f"cannot {action} a shared segment: {nbytes} bytes (expected at most what `{limit}` "
        "leaves). Raise it."
    )


def _no_room(nbytes: int, free: int, named: bool) -> str:
    where = f"shared-memory mount {named_directory()}" if named else "memory"
    return (
        f"cannot create a shared segment: {nbytes} bytes do not fit "
        f"(expected at most {free} bytes, free in {where}). "
        "Lower the sizes it was computed from, or enlarge the mount."
    )
