"""Memory that this process may still take: the machine's, and what control groups leave of it.

Shared pages count like private ones. `SharedSegment` asks before it allocates, the budget of a
run before it starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["available_memory", "cgroup_headroom"]


def available_memory() -> int:
    """Return the bytes that this process may still take, of the machine and its control groups."""
    free = int(psutil.virtual_memory().available)
    headroom = cgroup_headroom()
    return free if headroom is None else min(free, headroom)


def cgroup_headroom(root: Path = Path("/")) -> int | None:
    """Return the bytes that control groups leave this process, or None if they do not say.

    The group itself and all above it count, of version 2 (``memory.max``) and of version 1
    (``memory.limit_in_bytes``). Pages of files that are not in use can be had back, so they
    do not count as taken.

    Args:
        root: Root of the file system, for tests.
    """
    rooms = [
        max(0, limit - max(0, used - reclaimable))
        for limit, used, reclaimable in _memory_groups(root)
    ]
    return min(rooms, default=None)


def _memory_groups(root: Path) -> Iterator[tuple[int, int, int]]:
    """Yield limit, use and reclaimable bytes of each group with a limit."""
    own = root / "proc/self/cgroup"
    mount = root / "sys/fs/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _limited(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limited(mount / "memory", path, *names)


def _limited(
    mount: Path, path: str, limit: str, used: str, reclaimable: str
) -> Iterator[tuple[int, int, int]]:
    # In a container the path may be that of the host, while the mount is the group itself: of
    # the groups on the way from the mount, those that are not there are passed over.
    names = Path(path.lstrip("/")).parts
    for depth in range(len(names) + 1):
        group = mount.joinpath(*names[:depth])
        if not ((group / limit).is_file() and (group / used).is_file()):
            continue
        most = (group / limit).read_text().strip()
        if most == "max":
            continue
        stat = group / "memory.stat"
        words = stat.read_text().split() if stat.is_file() else []
        found = dict(zip(words[::2], words[1::2], strict=True))
        yield int(most), int((group / used).read_text()), int(found.get(reclaimable, 0))
