"""Identity and liveness of processes, and what is handed to a process at its start.

The kernel reuses process ids, so an id alone does not name a process: a word holds the id and
the start time. A word of a dead process never names a living one. 0 names no process.

The snapshot cell, the ring, the rows and the storages record `this_process` and ask
`process_is_alive`; error texts show `process_id`.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import psutil

from torchrl_unilab.errors import SegmentError
from torchrl_unilab.limits import process_status

_ID_BITS = 22  # the largest process id of 64-bit Linux is 2**22 - 1
_START_BITS = 41  # start time in 1/100 s; with the id, a word stays below 2**63
_STATE, _START = 0, 19  # fields of /proc/<pid>/stat after the name of the program


def this_process() -> int:
    """Return the word of the calling process, also in a forked child."""
    return _own_word(os.getpid())


def process_id(word: int) -> int:
    """Return the process id in a word; 0 if the word names no process."""
    return word & ((1 << _ID_BITS) - 1)


def process_is_alive(word: int) -> bool:
    """Return whether the process of a word runs or is stopped; a zombie is not alive."""
    return word != 0 and _word_of(process_id(word)) == word


def process_is_stopped(word: int) -> bool:
    """Return whether a signal has stopped the process of a word, so that it does not work now."""
    stopped = process_status(process_id(word)) == psutil.STATUS_STOPPED
    return stopped and process_is_alive(word)  # and it is still the process of that id


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


def _word_of(pid: int) -> int:
    """Return the word of the process that has `pid` now, or 0 if it has ended."""
    if sys.platform == "linux":  # exact, and not moved by changes of the clock
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        fields = stat[stat.rindex(b")") + 2 :].split()
        ended, start = fields[_STATE] in (b"Z", b"X"), int(fields[_START])
    else:
        try:
            process = psutil.Process(pid)
            ended = process.status() == psutil.STATUS_ZOMBIE
            start = round(100 * process.create_time())
        except psutil.NoSuchProcess:
            return 0
    return 0 if ended else (start & ((1 << _START_BITS) - 1)) << _ID_BITS | pid


_own_word = functools.lru_cache(maxsize=1)(_word_of)  # a process that lives keeps its word
