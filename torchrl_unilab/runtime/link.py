"""Messages between a parent and its worker, over the two ends of a pipe that never blocks.

A message that has arrived in part does not count as arrived, and what the pipe does not take of
a message waits in this process: a peer that is stopped in the middle of either blocks no call.
`WorkerGroup` holds a `Channel` for each worker; a worker's `Link` holds the other end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

__all__ = ["Channel", "Link", "ParentGoneError"]

_LENGTH = struct.Struct("!Q")  # of the pickle that follows
_READ_BYTES = 1 << 20


class ParentGoneError(Exception):
    """The parent closed its end of the link or died: the worker ends."""


class Channel:
    """One end of a duplex pipe, which sends and takes whole messages and never blocks.

    Args:
        connection: The pipe's end, used by this channel alone.

    Attributes:
        messages: Whole messages that have arrived and were not taken.

    Example:
        >>> import multiprocessing as mp
        >>> here, there = (Channel(end) for end in mp.Pipe())
        >>> here.post(("collect", 3))
        >>> here.flush(), there.take(), there.take()
        (True, ('collect', 3), None)
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        os.set_blocking(connection.fileno(), False)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.messages: deque[Any] = deque()

    def fileno(self) -> int:
        """File descriptor; readable when there may be a message."""
        return self._connection.fileno()

    def post(self, message: Any) -> None:
        """Append a message to what `flush` sends."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outgoing += _LENGTH.pack(len(data)) + data

    def flush(self) -> bool:
        """Send what the pipe takes now; return whether that was all.

        Raises:
            OSError: The other end is closed.
        """
        with _deferred_interrupt():
            while self._outgoing:
                try:
                    sent = os.write(self.fileno(), self._outgoing)
                except BlockingIOError:
                    return False
                del self._outgoing[:sent]
            return True

    def take(self) -> Any:
        """Return the next message that has arrived as a whole, or None.

        Raises:
            EOFError: No message is left, and the other end is closed.
        """
        if not self.messages:
            self.fill()
        return self.messages.popleft() if self.messages else None

    def fill(self) -> None:
        """Append to `messages` what has arrived.

        Raises:
            EOFError: Nothing has, and the other end is closed.
        """
        with _deferred_interrupt():
            before = len(self._incoming)
            while data := self._read():
                self._incoming += data
            if data is not None and len(self._incoming) == before:
                raise EOFError("the other end is closed")
            while (message := self._next_whole()) is not None:
                self.messages.append(pickle.loads(message))

    def _read(self) -> bytes | None:
        """Return some of what has arrived; None if nothing has, b"" if nothing will."""
        try:
            return os.read(self.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # closed with messages of ours unread
            return b""

    def _next_whole(self) -> bytearray | None:
        """Remove the next whole pickle from the bytes that have arrived, if there is one."""
        begin = _LENGTH.size
        if len(self._incoming) < begin:
            return None
        end = begin + _LENGTH.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        message = self._incoming[begin:end]
        del self._incoming[:end]
        return message

    def wait(self, *, to_send: bool = False, timeout: float | None = None) -> None:
        """Wait until something has arrived or, with `to_send`, the pipe takes more.

        Args:
            to_send: Also read what has arrived: a peer that sends meanwhile takes nothing
                until then.
            timeout: Seconds to wait at most; without end if not given.

        Raises:
            EOFError: With `to_send`: the other end is closed.
        """
        poll = select.poll()
        poll.register(self, select.POLLIN | (select.POLLOUT if to_send else 0))
        poll.poll(None if timeout is None else 1e3 * timeout)
        if to_send:
            self.fill()

    def close(self) -> None:
        """Close this end, which the other end sees. Idempotent."""
        self._connection.close()


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Have Ctrl-C wait for the end of the block: no byte is sent twice or lost."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers in the main thread only
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: arrived.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived and callable(handler):
            handler(*arrived[0])


class Link:
    """A worker's end of its pipe to the parent: the parent asks, the worker answers.

    Requests have numbers and answers bear them: when Ctrl-C falls between a request and its
    answer, the parent does not take the answer for that to a later request.

    Args:
        connection: The pipe's end.
    """

    def __init__(self, connection: Connection) -> None:
        self._channel = Channel(connection)
        self._number = 0  # of the request that the next answer is to

    def request(self, *, block: bool) -> tuple[Any, ...] | None:
        """Return the parent's next request, or None if none is complete and `block` is false.

        Raises:
            ParentGoneError: There is no parent any more.
        """
        try:
            while (message := self._channel.take()) is None:
                if not block:
                    return None
                self._channel.wait()
        except (EOFError, OSError):
            raise ParentGoneError from None
        request: tuple[Any, ...]
        self._number, request = message
        return request

    def answer(self, value: Any = None) -> None:
        """Answer the parent's request."""
        self._send("answer", value)

    ready = answer
    """Report that the worker has started, once, with what the parent wants to know."""

    def fail(self, traceback: str) -> None:
        """Report what the worker failed with."""
        self._send("error", traceback)

    def _send(self, kind: str, value: Any) -> None:
        """Send a message; a parent that lives takes it sooner or later.

        Raises:
            ParentGoneError: There is no parent any more.
        """
        self._channel.post((kind, self._number, value))
        try:
            while not self._channel.flush():
                self._channel.wait(to_send=True)
        except (EOFError, OSError):
            raise ParentGoneError from None

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._channel.close()
