"""Tokens in pipes: how slots of the ring change hands between processes.

A token names a slot; the process that holds it owns the slot. A token is either in a pipe or in
a list of one process, its *hand*, and a single call into C moves it: CPython runs signal
handlers between bytecodes only, so an interrupt never finds a token in both or in neither.

`RolloutRing` moves tokens; nothing else does.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import starmap

from torchrl_unilab.limits import files_to_open
from torchrl_unilab.waits import watch

LIFE_CHECK_SECONDS = 0.2
"""How often a wait looks whether the other side lives."""

_TOKEN = struct.Struct(">QI")
pack_token = _TOKEN.pack
"""Return the token of (the generation last committed to a slot, the slot).

Tokens are big-endian bytes, so they sort by generation.
"""
unpack_token = _TOKEN.unpack
"""Return (generation, slot) of a token."""


class TokenPipe:
    """A first-in first-out queue of tokens in the kernel, shared between processes.

    Reads and writes of a token are atomic between processes: all tokens have one size, far
    below ``PIPE_BUF``. Neither blocks.

    Args:
        ends: Descriptors to read from and to write to; closed with the pipe.
    """

    def __init__(self, ends: tuple[int, int]) -> None:
        self.ends = ends
        self._writes = ends[1:]
        self._reads = ((ends[0], _TOKEN.size),)
        # One call into C, which no interrupt cuts short.
        self.close = weakref.finalize(self, deque, map(os.close, ends), 0)

    @classmethod
    def create(cls) -> TokenPipe:
        """Make a pipe; the kernel frees it with the last process that holds it.

        Raises:
            ConfigError: This process may open no more files.
        """
        with files_to_open("ring", "four for each writer", "make it for fewer writers"):
            ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        return cls(ends)

    def take(self, hand: list[bytes]) -> bool:
        """Move the oldest token to the end of `hand`; return whether there was one."""
        try:
            hand.extend(starmap(os.read, self._reads))  # one call: see the module
        except BlockingIOError:
            return False
        return True

    def put(self, hand: list[bytes], index: int = 0) -> None:
        """Move ``hand[index]`` into the pipe."""
        next(map(os.write, self._writes, map(hand.pop, (index,))))  # one call: see the module

    def drain(self, hand: list[bytes]) -> None:
        """Move all tokens to the end of `hand`, oldest first."""
        while self.take(hand):
            pass

    def __len__(self) -> int:
        """Tokens in the pipe."""
        answer = fcntl.ioctl(self.ends[0], termios.FIONREAD, b"\0\0\0\0")
        return int(struct.unpack("i", answer)[0]) // _TOKEN.size


def waits(pipes: Sequence[TokenPipe], timeout: float | None) -> Iterator[object]:
    """Sleep until a pipe may have a token and yield, again and again; end after `timeout`.

    Yields at least once, and at least every `LIFE_CHECK_SECONDS`: if there is no token then, it
    is time to look whether the other side lives.
    """
    return watch({pipe.ends[0]: select.POLLIN for pipe in pipes}, timeout, LIFE_CHECK_SECONDS)
