"""Tokens in pipes: how the slots of the ring change hands."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torchrl_unilab.errors import SegmentError
from torchrl_unilab.shm.segment import SharedSegment, named_directory

__all__ = ["LIFE_CHECK_SECONDS", "Token", "TokenPipe", "create_pipes", "pipe_paths", "waits"]

LIFE_CHECK_SECONDS = 0.2
"""How often a wait looks whether the other side lives."""
SPIN_SECONDS = 50e-6
"""How long a wait looks for a token before it sleeps: less than falling asleep and being
woken takes, and too short to matter to whoever else could use the core."""


class Token(NamedTuple):
    """What passes through a pipe: a slot, and what was last committed to it."""

    slot: int
    writer: int
    sequence: int
    generation: int


_TOKEN = struct.Struct("=IIQQ")
_NBYTES = _TOKEN.size
_pack, _unpack, _make = _TOKEN.pack, _TOKEN.unpack, Token._make


class TokenPipe:
    """A first-in first-out queue of tokens in the kernel, shared between processes.

    Writes of a token and reads of a token are atomic: a token is far below ``PIPE_BUF``, and
    all tokens have one size.

    Args:
        ends: Descriptors to read from and to write to, non-blocking.
    """

    def __init__(self, ends: tuple[int, int]) -> None:
        self.ends = ends

    @classmethod
    def create(cls) -> TokenPipe:
        """Make an anonymous pipe, which goes with the last process that holds it."""
        ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        return cls(ends)

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> TokenPipe:
        """Open a named pipe, or make it first."""
        if create:
            os.mkfifo(path, 0o600)
        # Both directions at once: opening waits for nobody, and no end is ever missing.
        end = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        return cls((end, end))

    def put(self, token: Token) -> None:
        """Append a token."""
        os.write(self.ends[1], _pack(*token))

    def take(self) -> Token | None:
        """Remove and return the oldest token, or None if there is none."""
        try:
            return _make(_unpack(os.read(self.ends[0], _NBYTES)))
        except BlockingIOError:
            return None

    def __len__(self) -> int:
        """Tokens in the pipe."""
        answer = fcntl.ioctl(self.ends[0], termios.FIONREAD, b"\0\0\0\0")
        return int(struct.unpack("i", answer)[0]) // _NBYTES

    def close(self) -> None:
        """Close this process's ends."""
        for end in set(self.ends):
            os.close(end)


def waits(pipes: Sequence[TokenPipe], timeout: float | None) -> Iterator[bool]:
    """Yield whenever a pipe may have a token, until `timeout`; once at least.

    Looks again at once for the first `SPIN_SECONDS`, then sleeps until a token comes, but
    no longer than `LIFE_CHECK_SECONDS`.

    Yields:
        Whether it slept: then it is time to look whether the other side lives.
    """
    started = time.monotonic()
    until = None if timeout is None else started + timeout
    spin = SPIN_SECONDS if timeout is None else min(SPIN_SECONDS, timeout)
    while time.monotonic() - started < spin:
        yield False
    poll = select.poll()
    for pipe in pipes:
        poll.register(pipe.ends[0], select.POLLIN)
    while True:
        left = LIFE_CHECK_SECONDS if until is None else until - time.monotonic()
        poll.poll(max(0.0, min(left, LIFE_CHECK_SECONDS)) * 1e3)
        yield True
        if until is not None and time.monotonic() >= until:
            return


def pipe_paths(name: str) -> tuple[Path, Path]:
    """Return where the two pipes of the named segment `name` lie."""
    directory = named_directory()
    return directory / f"{name}.free", directory / f"{name}.ready"


def create_pipes(segment: SharedSegment) -> tuple[TokenPipe, TokenPipe]:
    """Make the two pipes of a new segment, named as it is, or give all of it up.

    Raises:
        SegmentError: A pipe's name is taken.
    """
    if segment.name is None:
        return TokenPipe.create(), TokenPipe.create()
    paths = pipe_paths(segment.name)
    pipes: list[TokenPipe] = []
    try:
        for path in paths:
            pipes.append(TokenPipe.open(path, create=True))
    except OSError as error:
        segment.close()
        for pipe, path in zip(pipes, paths, strict=False):
            pipe.close()
            path.unlink()
        raise SegmentError(
            f"cannot create the pipes of ring {segment.name!r}: {error} (expected a new name). "
            "Choose another, or remove what an earlier process left behind."
        ) from error
    free, ready = pipes
    return free, ready
