"""The seqlock's protocol, checked in every interleaving of a small model.

The model has a writer that publishes a few versions and a reader that reads once with
retries; each is a list of single loads and stores. `explore` follows every order in which
these can happen. That the code takes the same steps as the model is a test of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from torchrl_unilab.shm import seqlock
from torchrl_unilab.shm.seqlock import SeqLock

PAYLOAD = 2  # words of a payload: two are enough to mix
Memory = dict[tuple[str, int], int]


def writer_stores(
    versions: int, slots: int, *, odd: bool = True, stride: int = 1
) -> list[tuple[str, int, int]]:
    """The writer's stores in program order, as (array, index, value).

    With a `stride`, versions skip numbers.
    """
    stores = []
    for count in range(1, versions + 1):
        version, slot = count * stride, count % slots
        if odd:
            stores.append(("sequence", slot, 2 * version - 1))
        stores += [("payload", slot * PAYLOAD + i, version) for i in range(PAYLOAD)]
        stores.append(("sequence", slot, 2 * version))
        stores.append(("announced", 0, version * slots + slot))
    return stores


@dataclass(frozen=True)
class Reader:
    """Where a reader is: its step, what it has loaded, and its tries left."""

    step: int = 0
    version: int = 0
    slot: int = 0
    loaded: tuple[int, ...] = ()
    tries: int = 3
    done: bool = False
    torn: bool = False

    def next(self, memory: Memory, slots: int, *, after: bool) -> Reader:
        """Take the next load of `SeqLock.try_read`; without `after`, skip the last check."""
        retry = replace(self, step=0, loaded=(), tries=self.tries - 1, done=self.tries == 1)
        slot = self.slot
        if self.step == 0:
            version, slot = divmod(memory["announced", 0], slots)
            return replace(self, step=1, version=version, slot=slot)
        if self.step == 1:
            if memory["sequence", slot] != 2 * self.version:
                return retry
            return replace(self, step=2)
        if self.step < 2 + PAYLOAD:
            word = memory["payload", slot * PAYLOAD + self.step - 2]
            return replace(self, step=self.step + 1, loaded=(*self.loaded, word))
        if after and memory["sequence", slot] != 2 * self.version:
            return retry
        torn = any(word != self.version for word in self.loaded)
        return replace(self, done=True, torn=torn)


def explore(
    stores: list[tuple[str, int, int]], slots: int, *, after: bool = True
) -> tuple[bool, int, int]:
    """Follow every interleaving: (some read was torn, reads accepted, states seen)."""
    empty: Memory = {("announced", 0): 0}
    empty |= {("sequence", i): 0 for i in range(slots)}
    empty |= {("payload", i): 0 for i in range(slots * PAYLOAD)}
    memories = [empty]
    for array, index, value in stores:
        memories.append(memories[-1] | {(array, index): value})
    pending = [(0, Reader())]
    seen = set(pending)
    torn = accepted = 0
    while pending:
        written, reader = pending.pop()
        following = []
        if written < len(stores):
            following.append((written + 1, reader))
        if not reader.done:
            following.append((written, reader.next(memories[written], slots, after=after)))
        for state in following:
            if state not in seen:
                seen.add(state)
                pending.append(state)
                torn += state[1].torn
                accepted += state[1].done and state[1].tries > 0
    return torn > 0, accepted, len(seen)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("versions", [1, 2, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_no_interleaving_yields_a_torn_read(slots, versions, stride):
    torn, accepted, states = explore(writer_stores(versions, slots, stride=stride), slots)
    assert not torn
    assert accepted > 0
    assert states > 20


def test_the_search_finds_the_tear_if_the_second_look_is_left_out():
    assert explore(writer_stores(5, 2), 2, after=False)[0]


def test_the_search_finds_the_tear_if_the_writer_does_not_mark_its_slot():
    assert explore(writer_stores(5, 2, odd=False), 2)[0]


def test_the_search_finds_the_tear_if_stores_become_visible_out_of_order():
    # As a weakly ordered machine may: the even value overtakes the last payload word. This
    # is what the checksum is for.
    stores = writer_stores(5, 2)
    even = [i for i, (array, _, value) in enumerate(stores) if array == "sequence" and value == 10]
    stores[even[0]], stores[even[0] - 1] = stores[even[0] - 1], stores[even[0]]
    announced = stores.pop()
    stores.insert(even[0], announced)
    assert explore(stores, 2)[0]


class _Recorded:
    """Shared words that note each load and store."""

    def __init__(self, name: str, words, trace: list) -> None:
        self._name, self._words, self._trace = name, words, trace

    def __getitem__(self, index: int) -> int:
        self._trace.append(("load", self._name, index))
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._trace.append(("store", self._name, index, value))
        self._words[index] = value


@pytest.fixture
def traced(monkeypatch) -> tuple[SeqLock, list]:
    trace: list = []
    lock = SeqLock(np.zeros(4096, np.uint8), 0, 64, slots=2, checksum=False)
    for name in ("_announced", "_sequence"):
        setattr(lock, name, _Recorded(name[1:], getattr(lock, name), trace))

    def copyto(out, payload):
        trace.append(("load", "payload"))
        out[...] = payload

    monkeypatch.setattr(seqlock.np, "copyto", copyto)
    return lock, trace


def test_the_writer_takes_the_models_steps(traced):
    lock, trace = traced
    for _ in range(3):
        slot = lock.begin()
        trace.append(("store", "payload", slot))
        lock.commit()
    stores = [step[1:] for step in trace if step[0] == "store"]
    expected = []
    for array, index, value in writer_stores(3, 2):
        if array != "payload":
            expected.append((array, index, value))
        elif index % PAYLOAD == 0:  # one copy stands for the words of a payload
            expected.append((array, index // PAYLOAD))
    assert stores == expected


def test_the_reader_takes_the_models_steps(traced):
    lock, trace = traced
    lock.begin()
    lock.commit()
    trace.clear()
    assert lock.try_read(np.empty(64, np.uint8)) == 1
    assert trace == [
        ("load", "announced", 0),
        ("load", "sequence", 1),
        ("load", "payload"),
        ("load", "sequence", 1),
    ]
