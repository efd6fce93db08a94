"""Memory, cores and open files that this process may use, by machine and control groups.

Shared pages count like private ones. `SharedSegment` asks for memory before it allocates, the
budget of a run for both before it starts.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from torchrl_unilab.errors import ConfigError


def launcher_env(name: str, default: int) -> int:
    """Return what torchrun, or another launcher, has set an environment variable to.

    Raises:
        ConfigError: The value is no integer.
    """
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        raise ConfigError(
            f"ranks: {name} is {os.environ[name]!r} (expected an integer, from torchrun). Unset it."
        ) from None


def local_ranks() -> int:
    """Return how many ranks torchrun started on this machine, which they share; 1 without it."""
    return max(1, launcher_env("LOCAL_WORLD_SIZE", 1))


def available_memory() -> int:
    """Return the bytes that this process may still take, of the machine and its control groups."""
    free = int(psutil.virtual_memory().available)
    headroom = cgroup_headroom()
    return free if headroom is None else min(free, headroom)


def check_memory(what: str, nbytes: int, remedy: str) -> None:
    """Refuse what does not fit the memory that this process may still take.

    Raises:
        ConfigError: It does not fit.
    """
    if nbytes > (free := available_memory()):
        raise ConfigError(
            f"{what}: {nbytes} bytes (expected at most {free}, what is free). {remedy}"
        )


@contextlib.contextmanager
def files_to_open(what: str, needs: str, remedy: str) -> Iterator[None]:
    """Raise a ConfigError where the body may open no more files.

    Args:
        what: What the files are for.
        needs: How many they are.
        remedy: What to do besides raising the limit.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise ConfigError(
            f"{what}: too many open files (expected {needs}). Raise `ulimit -n`, or {remedy}."
        ) from error


def available_cores() -> int:
    """Return the cores that this process may keep busy: by affinity, control groups and ranks."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else psutil.cpu_count() or 1
    share = cgroup_cores()
    allowed = cores if share is None else min(cores, math.ceil(share))
    return max(1, allowed // local_ranks())


def cgroup_headroom(root: Path = Path("/")) -> int | None:
    """Return the bytes that control groups leave this process, or None if they do not say.

    The group itself and all above it count, of version 2 (``memory.max``) and of version 1
    (``memory.limit_in_bytes``). Pages of files that are not in use can be had back, so they
    do not count as taken.
    """
    rooms = []
    for version, group in _groups("memory", root):
        if version == 2:
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = (_words(group / name) for name in names[:2])
        if limit and used and limit != ["max"]:
            stat = _words(group / "memory.stat")
            reclaimable = int(dict(zip(stat[::2], stat[1::2], strict=True)).get(names[2], 0))
            rooms.append(max(0, int(limit[0]) - max(0, int(used[0]) - reclaimable)))
    return min(rooms, default=None)


def cgroup_cores(root: Path = Path("/")) -> float | None:
    """Return how many cores' time control groups leave this process, or None if all.

    The group itself and all above it count, of version 2 (``cpu.max``) and of version 1
    (``cpu.cfs_quota_us``); ``docker run --cpus`` sets it.
    """
    shares = []
    for version, group in _groups("cpu", root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        match [word for name in names for word in _words(group / name)]:
            case [quota, period] if quota not in ("max", "-1"):
                shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each control group of this process, the outermost first."""
    own = root / "proc/self/cgroup"
    mount = root / "sys/fs/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, first = 2, mount
        elif controller in controllers.split(","):
            version, first = 1, mount / controller
        else:
            continue
        # In a container the path may be that of the host, while the mount is the group itself:
        # groups on the way from the mount that do not exist there are skipped.
        names = Path(path.lstrip("/")).parts
        for depth in range(len(names) + 1):
            yield version, first.joinpath(*names[:depth])


def _words(file: Path) -> list[str]:
    """Return the words of a file; none if it is not there."""
    return file.read_text().split() if file.is_file() else []
