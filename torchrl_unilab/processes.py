"""Identity and liveness of processes: whether one that is known by a word lives, or is stopped.

The kernel reuses process ids, so an id alone does not name a process: a word holds the id and
the start time. A word of a dead process never names a living one. 0 names no process.

The snapshot cell, the ring, the rows and ranks record `this_process`; a parent takes its workers'
words (`process_word`). All ask `process_is_alive`; error texts show `process_id`.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import psutil

from torchrl_unilab.errors import ConfigError

_ID_BITS = 22  # the largest process id of 64-bit Linux is 2**22 - 1
_START_BITS = 41  # start time in 1/100 s; with the id, a word stays below 2**63
_STATE, _START = 0, 19  # fields of /proc/<pid>/stat after the name of the program


def working_directory() -> str:
    """Return this process's working directory.

    Raises:
        ConfigError: It was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "working directory: deleted (expected one that exists, as new processes start in it). "
            "Change to another, or to the new one of its name, by `cd`."
        ) from None


def this_process() -> int:
    """Return the word of the calling process, also in a forked child."""
    return _own_word(os.getpid())


def process_word(pid: int) -> int:
    """Return the word of the process that has `pid` now, or 0 if it has ended."""
    return _look_at(pid)[0]


def process_id(word: int) -> int:
    """Return the process id in a word; 0 if the word names no process."""
    return word & ((1 << _ID_BITS) - 1)


def process_is_alive(word: int) -> bool:
    """Return whether the process of a word runs or is stopped; a zombie is not alive."""
    return word != 0 and process_word(process_id(word)) == word


def process_is_stopped(word: int) -> bool:
    """Return whether a signal has stopped the process of a word, so that it does not work now."""
    return word != 0 and _look_at(process_id(word)) == (word, True)


def _look_at(pid: int) -> tuple[int, bool]:
    """Return the word of the process that has `pid` now, or 0, and whether it is stopped."""
    try:
        if sys.platform == "linux":  # exact, and not moved by changes of the clock
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            fields = stat[stat.rindex(b")") + 2 :].split()
            state, start = fields[_STATE], int(fields[_START])
            ended, stopped = state in (b"Z", b"X"), state == b"T"
        else:
            process = psutil.Process(pid)
            status, start = process.status(), round(100 * process.create_time())
            ended, stopped = status == psutil.STATUS_ZOMBIE, status == psutil.STATUS_STOPPED
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return 0, False
    return 0 if ended else (start & ((1 << _START_BITS) - 1)) << _ID_BITS | pid, stopped


_own_word = functools.lru_cache(maxsize=1)(process_word)  # a process that lives keeps its word
