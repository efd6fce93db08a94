"""Whole messages or none: what a channel sends and takes in parts."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import struct
import threading

import pytest

from tests.support.interrupts import each_interrupt
from torchrl_unilab.errors import PeerGoneError, UsageError
from torchrl_unilab.runtime import link as link_module
from torchrl_unilab.runtime.link import Channel, Link


@pytest.fixture
def ends():
    here, there = mp.Pipe()
    yield here, there
    here.close()
    there.close()


def _raw(message: object) -> bytes:
    data = pickle.dumps(message)
    return struct.pack("!Q", len(data)) + data


def test_a_message_in_part_has_not_arrived(ends):
    here, there = ends
    channel, data = Channel(here), _raw("a message")
    for byte in data[:-1]:
        os.write(there.fileno(), bytes([byte]))
        assert channel.take() is None
    os.write(there.fileno(), data[-1:])
    assert channel.take() == "a message"


def test_messages_that_arrive_together_are_taken_one_by_one(ends):
    here, there = ends
    channel = Channel(here)
    os.write(there.fileno(), _raw(1) + _raw(2) + _raw(3)[:4])
    assert [channel.take(), channel.take(), channel.take()] == [1, 2, None]


def _unreadable() -> None:
    raise LookupError("cannot be built here")


class Unreadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self):
        return _unreadable, ()


def test_a_message_that_cannot_be_unpickled_raises_once_and_the_next_ones_are_taken(ends):
    here, there = ends
    channel = Channel(here)
    os.write(there.fileno(), _raw("before") + _raw(Unreadable()) + _raw("next"))
    with pytest.raises(UsageError, match="cannot be built here"):
        channel.take()
    assert channel.take() == "before"
    os.write(there.fileno(), _raw("last"))
    assert [channel.take(), channel.take()] == ["next", "last"]


class Elsewhere:
    """Is unpickled where something is that is not here."""

    def __init__(self, *call: object) -> None:
        self._call = call

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize(
    ("call", "error"),
    [((open, ("/nonexistent",)), FileNotFoundError), ((pickle.loads, (b"",)), EOFError)],
)
def test_a_message_that_needs_a_file_is_not_taken_for_the_end_of_the_pipe(ends, call, error):
    here, there = ends
    channel = Channel(here)
    os.write(there.fileno(), _raw(Elsewhere(*call)) + _raw("next"))
    with pytest.raises(UsageError, match=rf"{error.__name__}\(.* as it was unpickled") as raised:
        channel.take()
    assert isinstance(raised.value.__cause__, error)
    assert channel.take() == "next"


def test_a_message_larger_than_the_pipe_is_sent_as_it_is_read(ends):
    sender, reader = map(Channel, ends)
    sender.post(bytes(5_000_000))
    sender.post("after it")
    taken = []
    while len(taken) < 2:
        sender.flush()
        message = reader.take()
        taken += [] if message is None else [message]
    assert taken == [bytes(5_000_000), "after it"]
    assert sender._outgoing == (b"", []), "what was sent is kept"


def test_what_was_sent_before_the_end_was_closed_is_taken_first(ends):
    here, there = ends
    channel = Channel(here)
    os.write(there.fileno(), _raw(1) + _raw(2) + _raw(3)[:-1])
    there.close()
    assert [channel.take(), channel.take()] == [1, 2]
    with pytest.raises(PeerGoneError):
        channel.take()


def test_a_closed_end_refuses_messages(ends):
    here, there = ends
    channel = Channel(here)
    there.close()
    channel.post(1)
    with pytest.raises(PeerGoneError):
        channel.flush()


def test_a_worker_does_not_wait_for_the_rest_of_a_request(ends):
    here, there = ends
    link = Link(here)
    os.write(there.fileno(), _raw((1, ("collect",)))[:-1])
    assert link.request(block=False) is None


def test_a_worker_that_answers_at_length_ends_with_its_parent(ends):
    here, there = ends
    link = Link(here)
    closing = threading.Timer(0.1, there.close)
    closing.start()
    with pytest.raises(PeerGoneError):
        link.answer(bytes(5_000_000))
    closing.join()  # the fixture closes it, too, and two threads at once are one too many


@pytest.mark.parametrize("call", ["flush", "fill"])
def test_an_interrupt_neither_loses_nor_repeats_a_byte(call, ends):
    sender, reader = map(Channel, ends)
    for interrupt in each_interrupt(link_module):
        nth = interrupt.left
        sender.post(nth)
        sender.post("a message")
        if call == "fill":
            sender.flush()
        interrupt.during(reader.fill if call == "fill" else sender.flush)
        sender.post("another")
        sender.flush()
        assert [reader.take() for _ in range(4)] == [nth, "a message", "another", None]
