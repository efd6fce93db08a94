"""Shared 64-bit words, and the one statement of the memory order we rely on.

**Words.** A word is an 8-byte aligned unsigned integer. CPython reads and writes an
item of a ``memoryview`` of format ``"Q"`` with one 8-byte move, which x86-64 and AArch64
perform as a whole when aligned: a reader sees the old or the new value, never a mix.
Each word lies on its own 64-byte line, so that two processes polling and writing
different words do not fight for a line. There is no atomic read-modify-write: **every
word has exactly one writer**.

**Order in program.** Each access below is a call into the interpreter or into a copy
routine (torch's, or ``_rows.c``'s, of ordinary stores) that the C compiler
cannot see through, so neither the compiler nor Python reorders or merges them.

**Order between processors, x86-64 (TSO).** Stores become visible in program order;
loads are performed in program order; a load is not performed after a later store.
Wide vector stores and ``rep movsb`` finish before any later ordinary store is visible,
and the C library ends a copy that uses streaming stores with a store fence. A copy that
several threads share ends at their barrier, so all its parts are ordered before the
caller's next store. Hence:

- *publish*: the payload is written before the word that announces it, and whoever
  reads the announcing word and then the payload reads at least that payload;
- *seqlock*: the writer's ``odd``, payload, ``even`` become visible in this order, and
  the reader's ``before``, payload, ``after`` are performed in this order. If ``before``
  and ``after`` are the same even value, no store of another version can have been seen:
  such a store follows an odd value that ``after`` would have shown, and each value of
  the word carries its version, so it never returns.

**Order between processors, elsewhere (AArch64, ...).** Stores, and loads, may be seen
out of order, and Python offers no fence. There `is_weakly_ordered` is true and each
snapshot carries a CRC-32 over its version and its bytes, written with it and checked by
every reader after copying: a copy that mixes versions, or runs ahead of its words, fails
the check (up to one chance in 2**32) and is retried like any torn one. The check needs no
order at all. The setting ``checksum=True`` turns it on anywhere, so that it is tested on
x86-64 too.

**Order through a pipe, everywhere.** The ring relies on none of the above. Its slots change
hands by a token in a pipe: the giver's ``write(2)`` comes after its stores, the taker's
``read(2)`` before its loads, and both hold the pipe's lock in the kernel while the token
passes. Releasing and taking a lock orders memory on every processor, so who takes a token
sees all that its giver had done to the slot. Its counters are words like the others: one
writer each, and statistics to everyone else.
"""

from __future__ import annotations

import platform

import numpy as np
import numpy.typing as npt

__all__ = ["LINE", "SharedWords", "is_weakly_ordered"]

LINE = 64
"""Bytes of a cache line: the alignment of every word and of every payload."""

_WORDS_PER_LINE = LINE // 8


def is_weakly_ordered(machine: str | None = None) -> bool:
    """Return whether snapshots need a checksum on `machine` (this one if not given)."""
    return (machine or platform.machine()).lower() not in {"x86_64", "amd64", "i386", "i686"}


class SharedWords:
    """`count` unsigned 64-bit words in shared memory, one per cache line.

    Args:
        buffer: Shared bytes, uint8.
        offset: Where the first word lies, a multiple of 64.
        count: How many words.

    Raises:
        ValueError: `offset` is not aligned, or the words lie outside `buffer`.

    Example:
        >>> words = SharedWords(np.zeros(128, np.uint8), offset=0, count=2)
        >>> words[1] = 3
        >>> words[0], words[1]
        (0, 3)
    """

    __slots__ = ("view",)

    view: memoryview
    """The words themselves, format ``"Q"``, for whoever cannot afford the call."""

    def __init__(self, buffer: npt.NDArray[np.uint8], offset: int, count: int) -> None:
        if offset % LINE or offset + self.nbytes(count) > buffer.nbytes:
            raise ValueError(
                f"cannot place words: {count} at byte {offset} of {buffer.nbytes} "
                f"(expected a multiple of {LINE} with room). Check the layout."
            )
        lines = buffer.data[offset : offset + self.nbytes(count)].cast("Q")
        self.view = lines[::_WORDS_PER_LINE]

    @staticmethod
    def nbytes(count: int) -> int:
        """Return the bytes that `count` words take."""
        return count * LINE

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> int:
        return self.view[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.view[index] = value
