"""Rollouts that know where they come from, and processes that write or read them.

Every element of a rollout says which writer it is of and which of its rollouts it is, so a
rollout with two values is mixed.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.support.processes import DEADLINE
from torchrl_unilab.errors import PeerGoneError
from torchrl_unilab.shm.place import SharedPlace
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.tokens import Token, TokenPipe

ELEMENTS = 2048
_WRITER = 1_000_000


def stamped(writer: int, sequence: int, elements: int = ELEMENTS) -> dict[str, torch.Tensor]:
    """Rollout `sequence` of `writer`, in two dtypes."""
    mark = writer * _WRITER + sequence
    return {
        "first": torch.full((elements,), mark, dtype=torch.int64),
        "next.last": torch.full((elements // 2, 2), float(mark)),  # exact below 2**24
    }


def stamp(rollout: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Writer and sequence of a rollout, which must be one and the same in every element."""
    first, last = rollout["first"], rollout["next.last"]
    mark = int(first[0])
    assert bool((first == mark).all()), "a mixed rollout"
    assert bool((last == mark).all()), "a mixed rollout"
    return divmod(mark, _WRITER)


def make_ring(**settings: object) -> RolloutRing:
    """A ring of stamped rollouts."""
    return RolloutRing(stamped(0, 0), **settings)


class _StruckPipe:
    def __init__(self, pipe: TokenPipe, step: Callable[[], None]) -> None:
        self._pipe, self._step = pipe, step
        self.ends, self.close = pipe.ends, pipe.close

    def put(self, token: Token) -> None:
        self._step()
        self._pipe.put(token)

    def take(self) -> Token | None:
        self._step()
        return self._pipe.take()


class _StruckWords:
    def __init__(self, words: Any, step: Callable[[], None]) -> None:
        self._words, self._step = words, step

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._step()
        self._words[index] = value


def strike_at(ring: Any, step: int, strike: Callable[[], None]) -> None:
    """Have a process struck before it does the `step`-th thing to `ring` that others see.

    Those are puts and takes, and stores to words of writers and slots.
    """
    steps = itertools.count(1)

    def count() -> None:
        if next(steps) == step:
            strike()

    ring._free, ring._ready = _StruckPipe(ring._free, count), _StruckPipe(ring._ready, count)
    ring._writer_words = _StruckWords(ring._writer_words, count)
    ring._generations = _StruckWords(ring._generations, count)


def write_and_die(pipe: Connection, ring: RolloutRing, writer: int, whole: int, step: int) -> None:
    """Write so many rollouts as `writer`, and on; be killed at a step of those that follow."""
    torch.set_num_threads(1)
    ring.use_writer(writer)
    first = ring.written[writer] + 1
    for sequence in itertools.count(first):
        if sequence == first + whole:
            pipe.send(sequence - 1)
            strike_at(ring, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert ring.write(stamped(writer, sequence), DEADLINE)


def write_until_told(pipe: Connection, ring: RolloutRing, writer: int) -> None:
    """Write rollouts as `writer` until told to end; tell how many."""
    torch.set_num_threads(1)
    ring.use_writer(writer)
    while not pipe.poll():
        if ring.claim(0.05) is not None:
            rollout = stamped(writer, ring.written[writer] + 1)
            for key, tensor in ring.write_buffer.items():
                tensor.copy_(rollout[key])
            ring.signal_write_done()
    pipe.send(ring.written[writer])
    threading.Event().wait()


def stop_at(pipe: Connection, ring: RolloutRing, writer: int, step: int) -> None:
    """Be stopped at a step of a rollout; tell when it is written."""
    ring.use_writer(writer)
    pipe.send("begins")

    def stop() -> None:
        pipe.send("stops")
        os.kill(os.getpid(), signal.SIGSTOP)

    strike_at(ring, step, stop)
    assert ring.write(stamped(writer, 1), DEADLINE)
    pipe.send("written")
    pipe.recv()


def hold_place(pipe: Connection, place: SharedPlace) -> None:
    """Hold the lock of a place until told."""
    with place.lock:
        pipe.send("held")
        pipe.recv()


def write_to_order(pipe: Connection, rings: Mapping[str, RolloutRing], writer: int) -> None:
    """Write as many rollouts to the ring as the other end asks for, again and again.

    In turn from tensors of their own, in place field by field, and as a block.
    """
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        name, count = pipe.recv()
        ring = rings[name]
        ring.use_writer(writer)
        for sequence in range(1, count + 1):
            rollout = stamped(writer, sequence)
            if sequence % 3 == 0:
                block = ring.blank()
                for key, tensor in block.items():
                    tensor.copy_(rollout[key])
                assert ring.write(block, DEADLINE)
            elif sequence % 3 == 1:
                assert ring.write(rollout, DEADLINE)
            else:
                assert ring.claim(DEADLINE) is not None
                for key, tensor in ring.write_buffer.items():
                    tensor.copy_(rollout[key])
                assert ring.signal_write_done() == sequence
        pipe.send(count)


def write_half(pipe: Connection, ring: RolloutRing, writer: int) -> None:
    """Claim a slot, fill half of it, tell its index; when told, fill the rest and commit."""
    ring.use_writer(writer)
    views, rollout = ring.write_buffer, stamped(writer, 1)
    views["first"].copy_(rollout["first"])
    pipe.send(ring.write_slot)
    pipe.recv()
    views["next.last"].copy_(rollout["next.last"])
    pipe.send(ring.signal_write_done())
    pipe.recv()


def write_until_refused(pipe: Connection, ring: RolloutRing) -> None:
    """Fill the ring, say so, and wait for a slot; tell what came of it."""
    while ring.write(stamped(0, 1), timeout=0):
        pass
    pipe.send(ring.write_count)
    try:
        pipe.send(ring.write(stamped(0, 1), DEADLINE))
    except PeerGoneError as error:
        pipe.send(str(error))


def write_one_each(pipe: Connection, rings: Sequence[RolloutRing | str]) -> None:
    """Write one rollout as writer 1 to each ring, or ring of that name; tell how it looks."""
    for given in rings:
        ring = RolloutRing.attach(given, stamped(0, 0)) if isinstance(given, str) else given
        ring.use_writer(1)
        ring.write(stamped(1, 7))
        ring.close()
        pipe.send((ring.slots, ring.writers, ring.overflow, ring.name, ring.slot_shapes))
    pipe.recv()


def hold_one(pipe: Connection, ring: RolloutRing) -> None:
    """Take one rollout and tell its sequence; give it back when told, and say so."""
    assert ring.wait_for_data(DEADLINE)
    lease = ring.acquire()
    assert lease is not None
    pipe.send(lease.token.sequence)
    pipe.recv()
    assert stamp(lease.views) == (0, lease.token.sequence)
    ring.release(lease)
    pipe.send("released")
    threading.Event().wait()
