"""Messages between a parent and its worker, over the two ends of a pipe that never blocks.

A message that has arrived in part does not count as arrived, and what the pipe does not take of
a message waits in this process: a peer that is stopped in the middle of either blocks no call.
`WorkerGroup` holds a `Channel` for each worker; a worker's `Link` holds the other end.

An interrupt loses no byte and repeats none: CPython runs signal handlers between bytecodes only,
and a single call into C reads bytes and keeps them, or writes some and counts them.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Literal

import torch

from torchrl_unilab.errors import ConfigError, PeerGoneError, UsageError

_LENGTH = struct.Struct("!Q")  # length of the pickle that follows
_RELAYED_CHARACTERS = 20_000  # of a traceback: they fit into a pipe that nobody reads
_READ_BYTES = 1 << 16  # larger ones take longer to allocate than to read
_CLOSED = "link: the other process has ended (expected it to keep running). Start it again."


class Channel:
    """One end of a duplex pipe, which sends and takes whole messages and never blocks.

    Args:
        connection: The pipe's end, used by this channel alone.

    Attributes:
        connection: The same; readable when there may be a message.

    Examples:
        >>> import multiprocessing as mp
        >>> here, there = (Channel(end) for end in mp.Pipe())
        >>> here.post(("collect", 3))
        >>> here.flush(), there.take(), there.take()
        (True, ('collect', 3), None)
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        os.set_blocking(connection.fileno(), False)
        # Bytes to send, and how many of them each write has sent.
        self._outgoing: tuple[bytes, list[int]] = b"", []
        # Whole messages, the bytes read after them, and how many the next message or length needs.
        self._incoming: tuple[deque[Any], list[bytes], int] = deque(), [], _LENGTH.size

    @property
    def messages(self) -> deque[Any]:
        """Whole messages that have arrived and were not taken."""
        return self._incoming[0]

    @property
    def unsent(self) -> bool:
        """Whether the pipe has yet to take a part of what was posted."""
        return bool(self._outgoing[0])

    def post(self, message: Any) -> None:
        """Append a message to what `flush` sends."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        unsent, taken = self._outgoing
        self._outgoing = unsent + _LENGTH.pack(len(data)) + data, taken

    def flush(self) -> bool:
        """Send what the pipe takes now; return whether that was all.

        Raises:
            PeerGoneError: The other end is closed.
        """
        data, taken = self._outgoing
        try:
            while (sent := sum(taken)) < len(data):
                rest = memoryview(data)[sent:]
                taken.extend(map(os.write, (self.connection.fileno(),), (rest,)))  # one call
        except BlockingIOError:
            return False
        except OSError:
            raise PeerGoneError(_CLOSED) from None
        self._outgoing = b"", []
        return True

    def take(self) -> Any:
        """Return the next message that has arrived as a whole, or None.

        Raises:
            PeerGoneError: No message is left, and the other end is closed.
        """
        if not self.messages:
            self.fill()
        return self.messages.popleft() if self.messages else None

    def fill(self) -> bool:
        """Read once, and append to `messages` those that are whole; return whether bytes came.

        Raises:
            PeerGoneError: None did, and the other end is closed.
            UsageError: A message could not be unpickled; it is dropped.
        """
        messages, parts, needed = self._incoming
        before = len(parts)
        try:
            parts.extend(map(os.read, (self.connection.fileno(),), (_READ_BYTES,)))  # one call
        except BlockingIOError:
            pass
        except OSError:  # closed, maybe with messages of ours unread
            parts.append(b"")
        if sum(map(len, parts)) >= needed:
            data, begin, found = b"".join(parts), 0, [*messages]
            while (end := _end_of_message(data, begin)) <= len(data):
                try:
                    found.append(pickle.loads(memoryview(data)[begin + _LENGTH.size : end]))
                except Exception as error:
                    self._incoming = deque(found), [data[end:]], _LENGTH.size
                    raise UsageError(
                        f"message that was sent here: {error!r} as it was unpickled (expected "
                        "no error). Send what does not depend on where it is."
                    ) from error
                begin = end
            self._incoming = deque(found), [data[begin:]], end - begin
        if parts[before:] == [b""]:
            raise PeerGoneError(_CLOSED)
        return len(parts) > before

    def close(self) -> None:
        """Close this end, which the other end sees. Idempotent."""
        self.connection.close()


def _end_of_message(data: bytes, begin: int) -> int:
    """Return where the message that begins there ends, or its length, until that has arrived."""
    body = begin + _LENGTH.size
    return body if len(data) < body else body + int(_LENGTH.unpack_from(data, begin)[0])


class Link:
    """A worker's end of its pipe to the parent: the parent asks, the worker answers.

    Requests have numbers and answers bear them: when Ctrl-C falls between a request and its
    answer, the parent does not take the answer for that to a later request.

    Args:
        connection: The pipe's end.
    """

    def __init__(self, connection: Connection) -> None:
        self._channel = Channel(connection)
        self._number = 0  # number of the request that is answered next

    def request(self, *, block: bool) -> tuple[Any, ...] | None:
        """Return the parent's next request, or None if none is complete and `block` is false.

        Raises:
            PeerGoneError: There is no parent any more.
        """
        while (message := self._channel.take()) is None:
            if not block:
                return None
            self._wait_for(select.POLLIN)
        request: tuple[Any, ...]
        self._number, request = message
        return request

    def answer(self, value: Any = None, *, kind: Literal["answer", "error"] = "answer") -> None:
        """Answer the parent's request; a parent that lives takes it sooner or later.

        Args:
            value: The answer, or the traceback of what the worker failed with.
            kind: Which of them it is.

        Raises:
            PeerGoneError: There is no parent any more.
        """
        self._channel.post((kind, self._number, value))
        while not self._channel.flush():
            self._wait_for(select.POLLOUT)

    ready = answer
    """Report that the worker has started, once."""

    def _wait_for(self, event: int) -> None:
        """Wait until the pipe has something or takes more, or has no other end."""
        poll = select.poll()
        poll.register(self._channel.connection, event)
        poll.poll()

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._channel.close()


class PickledArguments:
    """A worker's arguments, of any size, in a file without a name.

    A new process reads its pickle from a pipe. If it dies before that, for instance because a
    script lacks its main guard, the parent would wait for room in the pipe for ever.

    Args:
        content: Picklable as the argument of a process.
    """

    def __init__(self, content: tuple[Any, ...]) -> None:
        self.content = content
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (until the process has it)

    def __reduce__(self) -> tuple[Any, ...]:
        ForkingPickler(self._file).dump(self.content)
        self._file.flush()
        return _unpack, (DupFd(self._file.fileno()),)

    def close(self) -> None:
        """Close this process's end, once the worker is started."""
        self._file.close()


def _unpack(descriptor: Any) -> tuple[Any, ...]:
    with os.fdopen(descriptor.detach(), "rb") as file:
        file.seek(0)
        content: tuple[Any, ...] = pickle.load(file)
        return content


def serve(
    connection: Connection, target: Callable[..., None], args: tuple[Any, ...], num_threads: int
) -> None:
    """Run ``target(link, *args)`` in a worker; relay what it raises."""
    # Ctrl-C, and the end of a terminal, reach all in it; the parent decides about its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    gc.freeze()  # what was imported: at its end, a spawned worker would look through it for long
    link = Link(connection)
    try:
        torch.set_num_threads(num_threads)
        target(link, *args)
    except BaseException as error:
        # A ConfigError says all in its own words; anything else needs its traceback.
        plain = isinstance(error, ConfigError)
        text = f"{type(error).__name__}: {error}\n" if plain else traceback.format_exc()
        if len(text) > _RELAYED_CHARACTERS:
            half = _RELAYED_CHARACTERS // 2
            text = f"{text[:half]}\n[...]\n{text[-half:]}"
        try:
            link.answer(text, kind="error")
        except PeerGoneError:  # the parent has gone, which most often is the error itself
            if not isinstance(error, PeerGoneError):
                sys.stderr.write(text)
    finally:
        link.close()
        sys.stderr.flush()
