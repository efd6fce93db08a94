"""The seqlock's protocol, in every order of its steps that a processor allows.

The steps are recorded from the code itself, fences included, so a fence that the code lacks fails
here on every processor. A payload has two words, which say which version they are of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support.orders import FENCE, Step, outcomes, strongly_ordered, without_fence
from tests.support.watching import WatchedWords
from torchrl_unilab.shm import SnapshotCell, seqlock
from torchrl_unilab.shm.seqlock import Snapshot

PAYLOAD = 2  # words of a payload: two are enough to mix


def steps_of(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[SnapshotCell], object], slots: int = 2
) -> list[Step]:
    """Steps of what is done to a cell of version 0; the slots of loads are found later."""
    steps: list[Step] = []

    def note(kind: str, address: object, value: int = 0) -> None:
        steps.append((kind, address, value))

    def copy_in(views: Any, tensors: Sequence[torch.Tensor]) -> None:
        slot = next(i for i in range(slots) if views is cell._views[i])
        for word, value in enumerate(tensors[0].tolist()):
            note("store", ("payload", slot, word), value)

    def copy_out(*_: object) -> None:
        for word in range(PAYLOAD):
            note("load", ("payload", word))

    with SnapshotCell({"w": torch.zeros(PAYLOAD, dtype=torch.int64)}, slots=slots) as cell:
        announced = seqlock._ANNOUNCED
        cell._words = WatchedWords(
            cell._words,
            lambda word, value: word == announced and note("store", "announced", value),
            lambda word: word == announced and note("load", "announced"),
        )
        cell._sequence = WatchedWords(
            cell._sequence,
            lambda slot, value: note("store", ("sequence", slot), value),
            lambda _: note("load", ("sequence",)),
        )
        with monkeypatch.context() as patched:
            patched.setattr(seqlock, "fence", lambda: steps.append(FENCE))
            patched.setattr(seqlock.torch, "_foreach_copy_", copy_in)
            patched.setattr(seqlock.np, "copyto", copy_out)
            action(cell)
    return steps


def writer(
    monkeypatch: pytest.MonkeyPatch, versions: int = 4, slots: int = 2, stride: int = 1
) -> list[Step]:
    """Steps of a writer of some versions, whose own loads matter to nobody."""

    def publish(cell: SnapshotCell) -> None:
        for version in range(stride, versions * stride + 1, stride):
            cell.publish([torch.full((PAYLOAD,), version)], version=version)

    steps = steps_of(monkeypatch, publish, slots)
    return [step for step in steps if step[0] != "load"]


def reader(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Steps of a read."""
    return steps_of(monkeypatch, lambda cell: cell.read(Snapshot(cell.layout)))


def accepted(
    written: list[Step], read: list[Step], slots: int = 2, *, before: Sequence[Step] = ()
) -> set[tuple[int, ...]]:
    """The version and the words of each read that its checks let pass, after the steps before."""
    start = {"announced": 0} | {("sequence", slot): 0 for slot in range(slots)}
    start |= {("payload", slot, word): 0 for slot in range(slots) for word in range(PAYLOAD)}
    start |= {address: value for kind, address, value in before if kind == "store"}

    def find(address: Any, loaded: tuple[Any, ...]) -> Any:
        if address == "announced":
            return address
        name, *word = address
        return None if loaded[0] is None else (name, loaded[0] % slots, *word)

    names = [address for kind, address, _ in read if kind == "load"]
    assert names[0] == "announced"
    passed = set()
    for loaded in outcomes(written, read, start, find):
        version = loaded[0] // slots
        values = [*zip(names, loaded, strict=True)]
        if all(value == 2 * version for name, value in values if name == ("sequence",)):
            words = (value for name, value in values if name[0] == "payload")
            passed.add((version, *words))
    return passed


def is_torn(written: list[Step], read: list[Step]) -> bool:
    return any(len({*found}) > 1 for found in accepted(written, read))


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("versions", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_no_order_of_the_steps_yields_a_torn_read(monkeypatch, slots, versions, stride):
    written = writer(monkeypatch, versions, slots, stride)

    found = accepted(written, reader(monkeypatch), slots)

    published = range(0, versions * stride + 1, stride)
    assert found == {(version,) * (1 + PAYLOAD) for version in published}


def test_wherever_a_writer_ends_it_leaves_one_whole_version(monkeypatch):
    steps, read = writer(monkeypatch), reader(monkeypatch)

    for end in range(len(steps) + 1):
        (found,) = accepted([], read, before=steps[:end])
        assert len({*found}) == 1


@pytest.mark.parametrize("nth", [0, 1])
def test_without_a_fence_of_the_writer_a_weakly_ordered_machine_tears(monkeypatch, nth):
    steps = without_fence(writer(monkeypatch), *range(nth, 8, 2))

    assert is_torn(steps, reader(monkeypatch))


def test_without_the_fence_of_the_reader_a_weakly_ordered_machine_tears(monkeypatch):
    assert is_torn(writer(monkeypatch), without_fence(reader(monkeypatch), 0))


def test_without_the_second_check_a_read_is_torn(monkeypatch):
    unchecked = reader(monkeypatch)[:-1]

    assert is_torn(strongly_ordered(writer(monkeypatch)), strongly_ordered(unchecked))


def test_without_the_odd_word_a_read_is_torn(monkeypatch):
    unmarked = [s for s in writer(monkeypatch) if s[1][:1] != ("sequence",) or not s[2] % 2]

    assert is_torn(strongly_ordered(unmarked), strongly_ordered(reader(monkeypatch)))
