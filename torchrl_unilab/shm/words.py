"""Shared 64-bit words, `fence`, and the one statement of the memory order we rely on.

The seqlock and the rows announce payloads by words and order both by `fence`; the ring keeps
counters, process identities and generations in words, and orders no payload by them.

**Words.** A word is an 8-byte aligned unsigned integer. CPython reads and writes an item of a
``memoryview`` of format ``"Q"`` with one 8-byte move, which x86-64 and AArch64 perform as a whole
when aligned: a reader sees the old or the new value, never a mix. Each word lies on its own 64-byte
line, so that processes that poll and write different words do not contend for a line. There is no
atomic read-modify-write: **every word has exactly one writer at a time**.

**Order in program.** Each access is a call into the interpreter or into a copy routine that the C
compiler cannot see through, so neither the compiler nor Python reorders or merges accesses.

**Order between processors.** A protocol states two kinds of order, and has a `fence` where it needs
one of them:

- between *stores*: what is stored before the fence is visible before what is stored after it (a
  payload before the word that announces it);
- between *loads*: what is loaded before the fence is loaded before what is loaded after it (a
  payload before the word that is checked again).

No protocol needs a store to be visible before a later load is performed. A load whose address
depends on what an earlier load returned follows it on every processor that PyTorch runs on.

On x86-64 the processor keeps both orders (TSO; wide stores and ``rep movsb`` finish before a later
store is visible, and the C library ends streaming copies with a store fence), and `fence` does
nothing. Elsewhere (AArch64, ...) stores, and loads, are seen out of order unless a fence stands
between them. Python offers no fence, but its locks are built from acquiring and releasing atomics:
accesses before a release stay before it, accesses after an acquire stay after it, and an acquire
stays after an earlier release of the same thread. `fence` therefore locks and unlocks twice: the
first unlock and the second lock stand between what comes before and what comes after. The copies of
several threads end at their barrier, so that the caller's fence orders all of them.

**Order through a pipe.** The ring needs no fence. Its slots change hands by a token in a pipe: the
giver's ``write(2)`` follows its stores, the taker's ``read(2)`` precedes its loads, and both hold
the pipe's lock in the kernel while the token passes. A lock that one processor releases and
another acquires orders memory on every processor, so the taker of a token sees all that its giver
did to the slot.

**Order through a lock, or a socket.** The same holds for what else processes take turns by. The
holder of a range of a file (`RangeLock`) sees all that earlier holders stored, those that died
included: a shard's head and notes, the writer of a snapshot cell. Who has received a message of a
worker's `Link` sees all that was stored before it was sent: a tick's rows, once it is answered.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

LINE = 64
"""Bytes of a cache line: the alignment of every word and of every payload."""


def is_weakly_ordered(machine: str | None = None) -> bool:
    """Return whether stores, and loads, need a fence on `machine` (this one if not given)."""
    return (machine or platform.machine()).lower() not in {"x86_64", "amd64", "i386", "i686"}


def _lock_twice() -> None:
    """Order memory by an unlock that is followed by a lock."""
    lock = threading.Lock()  # new in each call: never contended, and no fork copies it while held
    with lock:
        pass
    with lock:
        pass


fence: Callable[[], object] = _lock_twice if is_weakly_ordered() else bool
"""Order stores, and loads, before the call before those after it; `bool` does nothing, fast."""


def shared_words(buffer: npt.NDArray[np.uint8], count: int) -> memoryview:
    """Return the first `count` unsigned 64-bit words of shared memory, one per cache line.

    Args:
        buffer: Shared bytes, uint8, of at least `words_nbytes`.
        count: How many words.

    Returns:
        The words, of format ``"Q"``.

    Examples:
        >>> words = shared_words(np.zeros(128, np.uint8), count=2)
        >>> words[1] = 3
        >>> words[0], words[1]
        (0, 3)
    """
    return buffer.data[: words_nbytes(count)].cast("Q")[:: LINE // 8]


def words_nbytes(count: int) -> int:
    """Return the bytes that `count` words take."""
    return count * LINE
