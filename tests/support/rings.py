"""Rollouts that know where they come from, and processes that write or read them.

Every element of a rollout says which writer it is of and which of its rollouts it is, so a
rollout with two values is mixed.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.support.processes import DEADLINE
from tests.support.watching import WatchedPipe, WatchedWords
from torchrl_unilab.errors import PeerGoneError
from torchrl_unilab.shm import segment as segment_module
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.tokens import unpack_token

ELEMENTS = 2048
_WRITER = 1_000_000
DEAD = 2**23 - 1  # the word of no living process: the highest id, started in the first tick


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


def make_ring(elements: int = ELEMENTS, **settings: Any) -> RolloutRing:
    """A ring of stamped rollouts."""
    return RolloutRing(BlockLayout.of(stamped(0, 0, elements)), **settings)


class _Descriptor:
    """One of a message to this process, as a spawned process gets it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def detach(self) -> int:
        return os.dup(self._descriptor)


def attached(segment: SharedSegment) -> SharedSegment:
    """The segment once more, as another process has it."""
    if segment.name is not None:
        return SharedSegment.attach(segment.name)
    return segment_module._attach_pickled(_Descriptor(segment.descriptor), segment.nbytes)


def attach(ring: RolloutRing) -> RolloutRing:
    """The ring once more, as another process has it."""
    state = {name: getattr(ring, name) for name in ("layout", "slots", "writers", "overflow")}
    state["_segment"] = attached(ring._segment)
    pipes = (*ring._free, *ring._ready)
    state["ends"] = [tuple(map(_Descriptor, pipe.ends)) for pipe in pipes]
    other = RolloutRing.__new__(RolloutRing)
    other.__setstate__(state)
    return other


def write(ring: RolloutRing, sequence: int | None = None, timeout: float | None = DEADLINE) -> bool:
    """Write a rollout as the ring's writer, the next one if not given; False if none was free."""
    slot = ring.claim(timeout)
    if slot is None:
        return False
    assert ring.writer is not None
    elements = len(ring.views[slot]["first"])
    number = ring.written[ring.writer] + 1 if sequence is None else sequence
    for key, tensor in stamped(ring.writer, number, elements).items():
        ring.views[slot][key].copy_(tensor)
    ring.commit()
    return True


def read(ring: RolloutRing, timeout: float = 0.0) -> tuple[int, int] | None:
    """Read the oldest rollout and release it; return its stamp, or None."""
    lease = ring.acquire(timeout)
    if lease is None:
        return None
    found = stamp(lease.views)
    assert found[0] == lease.writer
    ring.release(lease)
    return found


def slots_of(tokens: list[bytes]) -> list[int]:
    """The slots of tokens."""
    return [unpack_token(token)[1] for token in tokens]


def check_all_free(ring: RolloutRing) -> None:
    """All rollouts are accounted for, and each slot is in its writer's free pipe, once."""
    fates = (ring.read, ring.skipped, ring.dropped, ring.lost)
    assert ring.written == tuple(map(sum, zip(*fates, strict=True)))
    assert ring.available() == 0
    assert ring.leases == []
    for writer, pipe in enumerate(ring._free):
        tokens: list[bytes] = []
        pipe.drain(tokens)
        home = range(writer * ring.slots, (writer + 1) * ring.slots)
        assert sorted(slots_of(tokens)) == [*home]
        while tokens:
            pipe.put(tokens)


STEPS = 8
"""Steps of a rollout that drops another: its takes and puts, and its stores to shared words."""


def strike_at(ring: Any, step: int, strike: Callable[[], None]) -> None:
    """Strike a writer before the `step`-th thing that it does to `ring` and that others see."""
    steps = itertools.count(1)

    def count(*_: object) -> None:
        if next(steps) == step:
            strike()

    ring._free = [WatchedPipe(pipe, count) for pipe in ring._free]
    ring._ready = [WatchedPipe(pipe, count) for pipe in ring._ready]
    ring._words = WatchedWords(ring._words, count)
    ring._generations = WatchedWords(ring._generations, count)


def _signal_me(number: int) -> None:
    os.kill(os.getpid(), number)


# Targets of spawned processes


def write_and_be_struck(
    pipe: Connection, ring: RolloutRing, writer: int, whole: int, step: int, number: int
) -> None:
    """Write so many rollouts as `writer`, then one that a signal strikes at a step, or thereafter.

    Tell how many are whole, and when the next is written.
    """
    torch.set_num_threads(1)
    ring.become_writer(writer)
    for _ in range(whole):
        assert write(ring)
    pipe.send(ring.written[writer])
    strike_at(ring, step, lambda: _signal_me(number))
    assert write(ring)
    pipe.send("written")
    if number == signal.SIGKILL:
        _signal_me(number)
    threading.Event().wait()


def write_until_told(pipe: Connection, ring: RolloutRing, writer: int) -> None:
    """Write rollouts as `writer` until told to end; tell how many."""
    torch.set_num_threads(1)
    ring.become_writer(writer)
    while not pipe.poll():
        write(ring, timeout=0.05)
    pipe.send(ring.written[writer])
    threading.Event().wait()


def write_half(pipe: Connection, ring: RolloutRing, writer: int) -> None:
    """Claim a slot, fill half of it, tell its index; when told, fill the rest and commit."""
    ring.become_writer(writer)
    slot = ring.claim()
    assert slot is not None
    rollout = stamped(writer, 1)
    ring.views[slot]["first"].copy_(rollout["first"])
    pipe.send(slot)
    pipe.recv()
    ring.views[slot]["next.last"].copy_(rollout["next.last"])
    pipe.send(ring.commit())
    pipe.recv()


def write_until_refused(pipe: Connection, ring: RolloutRing) -> None:
    """Fill the ring, say so, and wait for a slot; tell what came of it."""
    while write(ring, timeout=0):
        pass
    pipe.send(sum(ring.written))
    try:
        pipe.send(write(ring))
    except PeerGoneError as error:
        pipe.send(str(error))


def write_one(pipe: Connection, ring: RolloutRing, writer: int | None) -> None:
    """Write one rollout, close the ring, and tell what it looks like."""
    number = ring.become_writer(writer)
    write(ring)
    ring.close()
    pipe.send((number, ring.slots, ring.writers, ring.overflow))
    pipe.recv()


def hold_one(pipe: Connection, ring: RolloutRing) -> None:
    """Lease one rollout and tell its stamp; release it when told, and say so."""
    lease = ring.acquire(DEADLINE)
    assert lease is not None
    pipe.send(stamp(lease.views))
    pipe.recv()
    stamp(lease.views)
    ring.release(lease)
    pipe.send("released")
    threading.Event().wait()
