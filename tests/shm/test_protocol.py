"""The seqlock's protocol, checked in every order of its accesses that a processor allows.

A program is a list of accesses and fences. On a strongly ordered machine (x86-64) stores become
visible, and loads are performed, in program order. On a weakly ordered one (AArch64) an access
follows only those before a fence, those of the same place, and the load that its address depends
on. `explore` follows every order of a writer of several versions and a reader that reads once. That
the code has the model's accesses and fences is a separate test.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.support.watching import WatchedWords
from torchrl_unilab.shm import SnapshotCell, seqlock
from torchrl_unilab.shm.seqlock import Snapshot

PAYLOAD = 2  # words of a payload: two are enough to mix
FENCE = "fence"
Place = tuple[str, int]


class Store(NamedTuple):
    """A store of the writer."""

    place: Place
    value: int


def writer(versions: int, slots: int, stride: int = 1) -> list[Store | str]:
    """The writer's stores and fences in program order; with a `stride`, versions skip numbers."""
    program: list[Store | str] = []
    for count in range(1, versions + 1):
        version, slot = count * stride, count % slots
        program += [
            Store(("sequence", slot), 2 * version - 1),
            FENCE,
            *(Store(("payload", slot * PAYLOAD + i), version) for i in range(PAYLOAD)),
            FENCE,
            Store(("sequence", slot), 2 * version),
            Store(("announced", 0), version * slots + slot),
        ]
    return program


READER = ["announced", "sequence", *["payload"] * PAYLOAD, FENCE, "sequence"]


def before(places: list[object], *, weak: bool) -> list[set[int]]:
    """For each access of a program, the accesses that precede it on the machine."""
    accesses: list[object] = []
    predecessors: list[set[int]] = []
    fenced = 0
    for place in places:
        if place == FENCE:
            fenced = len(accesses)
            continue
        earlier = range(len(accesses))
        predecessors.append({i for i in earlier if not weak or i < fenced or accesses[i] == place})
        accesses.append(place)
    return predecessors


def explore(
    program: list[Store | str], slots: int, *, weak: bool, reader: list[str] = READER
) -> tuple[bool, int, int]:
    """Follow every order: (some accepted read was torn, reads accepted, states seen)."""
    stores = [step for step in program if isinstance(step, Store)]
    stores_before = before([s if s == FENCE else s.place for s in program], weak=weak)
    loads = [place for place in reader if place != FENCE]
    loads_before = before([*reader], weak=weak)
    for i in range(1, len(loads)):
        loads_before[i].add(0)  # the slot, so the address, is what the first load returns

    def memory(visible: frozenset[int]) -> dict[Place, int]:
        return {stores[i].place: stores[i].value for i in sorted(visible)}

    def address(load: int, seen: dict[int, int]) -> Place:
        if load == 0:
            return "announced", 0
        slot = seen[0] % slots
        if loads[load] == "sequence":
            return "sequence", slot
        return "payload", slot * PAYLOAD + loads[:load].count("payload")

    start: tuple[frozenset[int], frozenset[tuple[int, int]]] = (frozenset(), frozenset())
    pending, visited = [start], {start}
    torn = accepted = 0
    while pending:
        visible, performed = pending.pop()
        seen = dict(performed)
        if len(seen) == len(loads):
            version = seen[0] // slots
            checks = [seen[i] for i, place in enumerate(loads) if place == "sequence"]
            words = [seen[i] for i, place in enumerate(loads) if place == "payload"]
            if all(check == 2 * version for check in checks):
                accepted += 1
                torn += any(word != version for word in words)
            continue
        following = [
            (visible | {i}, performed)
            for i in range(len(stores))
            if i not in visible and stores_before[i] <= visible
        ]
        following += [
            (visible, performed | {(i, memory(visible).get(address(i, seen), 0))})
            for i in range(len(loads))
            if i not in seen and loads_before[i] <= seen.keys()
        ]
        for state in following:
            if state not in visited:
                visited.add(state)
                pending.append(state)
    return torn > 0, accepted, len(visited)


def without_fence(program: list, nth: int) -> list:
    """A program whose fences lack each nth of every two (the writer's), or the nth."""
    kept, count = [], -1
    for step in program:
        count += step == FENCE
        if step == FENCE and count % 2 == nth:
            continue
        kept.append(step)
    return kept


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("versions", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_no_order_of_accesses_yields_a_torn_read(weak, slots, versions, stride):
    torn, accepted, states = explore(writer(versions, slots, stride), slots, weak=weak)

    assert not torn
    assert accepted > 0
    assert states > 20


@pytest.mark.parametrize("nth", [0, 1])
def test_without_a_fence_of_the_writer_a_weakly_ordered_machine_tears(nth):
    assert explore(without_fence(writer(4, 2), nth), 2, weak=True)[0]


def test_without_the_fence_of_the_reader_a_weakly_ordered_machine_tears():
    assert explore(writer(4, 2), 2, weak=True, reader=without_fence(READER, 0))[0]


def test_without_the_second_check_a_read_is_torn():
    assert explore(writer(4, 2), 2, weak=False, reader=READER[:-2])[0]


def test_without_the_odd_word_a_read_is_torn():
    unmarked = [s for s in writer(4, 2) if not (isinstance(s, Store) and _is_odd(s))]

    assert explore(unmarked, 2, weak=False)[0]


def _is_odd(store: Store) -> bool:
    return store.place[0] == "sequence" and store.value % 2 == 1


@pytest.fixture
def traced(monkeypatch) -> tuple[SnapshotCell, list]:
    """A cell of two slots that has published once, and the trace of what follows."""
    cell, trace = SnapshotCell({"w": torch.zeros(3)}, slots=2), []
    cell.publish([torch.ones(3)])

    def loaded(name: str) -> None:
        trace.append(("load", name))

    def announce(index: int, value: int) -> None:
        if index == seqlock._ANNOUNCED:
            trace.append(Store(("announced", 0), value))

    cell._words = WatchedWords(
        cell._words, announce, lambda i: i == seqlock._ANNOUNCED and loaded("announced")
    )
    cell._sequence = WatchedWords(
        cell._sequence,
        lambda slot, value: trace.append(Store(("sequence", slot), value)),
        lambda _: loaded("sequence"),
    )

    def copy_in(views, tensors):
        slot = next(i for i in range(2) if views is cell._views[i])
        trace.extend(Store(("payload", slot * PAYLOAD + i), 0) for i in range(PAYLOAD))

    def copy_out(out, payload):
        trace.extend([("load", "payload")] * PAYLOAD)

    monkeypatch.setattr(seqlock, "fence", lambda: trace.append(FENCE))
    monkeypatch.setattr(seqlock.torch, "_foreach_copy_", copy_in)
    monkeypatch.setattr(seqlock.np, "copyto", copy_out)
    return cell, trace


def test_the_writer_has_the_models_stores_and_fences(traced):
    cell, trace = traced

    for _ in range(3):
        cell.publish([torch.ones(3)])

    stores = [step for step in trace if step == FENCE or isinstance(step, Store)]
    model = writer(4, 2)[len(writer(1, 2)) :]
    assert [_without_payload(step) for step in stores] == [_without_payload(s) for s in model]


def _without_payload(step: Store | str) -> Store | str:
    return Store(step.place, 0) if step != FENCE and step.place[0] == "payload" else step


def test_the_reader_has_the_models_loads_and_fence(traced):
    cell, trace = traced

    cell.read(Snapshot(cell.layout))

    assert [step if step == FENCE else step[1] for step in trace] == READER
