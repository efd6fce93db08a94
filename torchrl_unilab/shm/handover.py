"""What is handed to a process at its start: the descriptors of anonymous shared memory.

Segments, storages and the ring's pipes call it as they are pickled.
"""

from __future__ import annotations

import os
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

from torchrl_unilab.errors import SegmentError


def check_spawning(what: object) -> None:
    """Refuse to copy or pickle anonymous shared memory, except for a process being spawned.

    Its descriptors travel with that process's arguments; any other copy would have no owner.

    Raises:
        SegmentError: No process is being spawned.
    """
    if get_spawning_popen() is None:
        raise SegmentError(
            f"cannot copy or pickle {type(what).__name__}: no process is being spawned with it "
            "(expected it among the arguments of one). Save what it holds with dumps() or "
            "state_dict(), and load that."
        )


def handed_over(descriptor: int, *, separate: bool = False) -> Any:
    """Return the picklable form of a descriptor, for the process that is being spawned.

    There its ``detach()`` returns the descriptor. An object may be pickled twice for one process,
    by two closures that share it for instance, but CPython sends each descriptor only once.

    Args:
        descriptor: An open descriptor, which stays open.
        separate: Whether each pickle becomes a separate descriptor there, which its owner closes.
    """
    popen = get_spawning_popen()
    handed = _handed.setdefault(popen, {})
    if descriptor not in handed:
        handed[descriptor] = DupFd(descriptor)
    elif separate:
        copy = os.dup(descriptor)
        weakref.finalize(popen, os.close, copy)  # not before the process has it
        return DupFd(copy)
    return handed[descriptor]


_handed: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
