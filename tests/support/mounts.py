"""Small file systems of a process's own, that are really full, and runs in such a process."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing as mp
import os
import sys
from pathlib import Path

_NEW_NAMESPACE = 0x20000
_RECURSIVE_PRIVATE = 0x4000 | 0x40000


def mount_small(path: Path, size: str) -> bool:
    """Mount an empty file system of `size` ("2m"), seen by this process and those it starts.

    Call it before the process has threads.

    Returns:
        Whether this system lets the process do so.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NAMESPACE):
        return False
    if libc.mount(b"none", b"/", None, _RECURSIVE_PRIVATE, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, f"size={size}".encode())


def fill(directory: Path, but: int = 0) -> None:
    """Fill the file system of a directory, but for some bytes."""
    disk = os.statvfs(directory)
    wanted = disk.f_bavail * disk.f_frsize - but
    with (directory / "filler").open("ab") as file:
        try:
            file.write(bytes(max(0, wanted)))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def start_from_here() -> None:
    """Let workers start from a copy of this process: in its namespace, and quickly."""
    from tests.support.faults import start_a_server

    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    tell = os.open(os.devnull, os.O_WRONLY)
    start_a_server(tell, lambda: None)
