"""Every order in which processors may see the steps of a writer and a reader.

The steps are recorded from the code itself, fences included, so a fence that the code lacks
fails here on every processor. Rows have two words, which say which row they are, and which version
of it. An address is a word's name or (place, word).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.orders import FENCE, Step, outcomes, without_fence
from tests.support.watching import WatchedWords
from torchrl_unilab.shm import rows as rows_module
from torchrl_unilab.shm import shards as shards_module
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.shards import BASE, FLOOR, HEAD, LOADING, ORIGIN, VERSION, Parts

CAPACITY, WIDTHS = 2, (1, 1)
WORDS = sum(WIDTHS)
WATCHED = {FLOOR: "floor", HEAD: "head", VERSION: "version"}


class Recorded(SharedRows):
    """Rows that note each of their steps."""

    steps: list[Step] | None = None

    def note(self, kind: str, address: object, value: int = 0) -> None:
        if self.steps is not None:
            self.steps.append((kind, address, value))

    def note_store(self, word: int, value: int) -> None:
        if word in WATCHED:
            self.note("store", WATCHED[word], value)

    def load(self, word: int) -> tuple[int, ...]:
        if word in WATCHED:
            self.note("load", WATCHED[word])
        return super().load(word)

    def fill(self, shard: int, number: int, parts: Parts) -> None:
        places = torch.arange(number, number + len(parts[0])) % CAPACITY
        self.fill_at(shard, places, parts)

    def fill_at(self, shard: int, places: torch.Tensor, parts: Parts) -> None:
        for place, row in zip(places.tolist(), torch.cat([*parts], 1).tolist(), strict=True):
            for word, value in enumerate(row):
                self.note("store", (place, word), value)
        super().fill_at(shard, places, parts)


@contextlib.contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, count: int = 2) -> Iterator[Recorded]:
    """Rows from 0 on, 0 and 1 if not said, whose fences are noted too."""
    with SharedSegment(Recorded.nbytes(WIDTHS, 1, CAPACITY)) as segment:
        rows = Recorded(segment, WIDTHS, 1, CAPACITY, timeout=1.0)
        rows.append(numbered(0, count))
        rows.steps, rows.words = [], [WatchedWords(rows.words[0], rows.note_store)]
        for module in (rows_module, shards_module):
            monkeypatch.setattr(module, "fence", lambda: rows.note("fence", ""))
        yield rows


def numbered(first: int, end: int) -> Parts:
    """Rows whose words are their numbers."""
    words = torch.arange(first, end, dtype=torch.int32).unsqueeze(1).repeat(1, WORDS)
    return words.split(WIDTHS, 1)


def append_one(rows: SharedRows) -> None:
    rows.append(numbered(2, 3))


def append_two(rows: SharedRows) -> None:
    rows.append(numbered(2, 4))


def append_twice(rows: SharedRows) -> None:
    rows.append(numbered(2, 3))
    rows.append(numbered(3, 4))


def rewrite(rows: SharedRows) -> None:
    rows.rewrite(torch.tensor([1]), numbered(101, 102))


def rewrite_and_append(rows: SharedRows) -> None:
    rows.rewrite(torch.tensor([1]), numbered(101, 102))
    rows.append(numbered(2, 3))


def clear_and_append(rows: SharedRows) -> None:
    rows.clear()
    rows.append(numbered(2, 3))


def replace(rows: SharedRows) -> None:
    rows.replace(rows_module.Window((0,), (2,)), lambda *_: numbered(2, 4), [(0, 0, 1)])


WRITERS = [
    append_one,
    append_two,
    append_twice,
    rewrite,
    rewrite_and_append,
    clear_and_append,
    replace,
]


def steps_of(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[SharedRows], object], made=recorded
) -> list[Step]:
    with made(monkeypatch) as rows:
        action(rows)
        assert rows.steps
        return rows.steps


def steps_of_reader(monkeypatch: pytest.MonkeyPatch, at: bool) -> list[Step]:
    """Steps of a read; the copy of a row is the load of a place that is filled in later."""
    with recorded(monkeypatch) as rows:

        def gather(todo: object, positions: torch.Tensor, heads: tuple[int, ...]) -> None:
            for word in range(WORDS):
                rows.note("load", ("row", word))

        if at:
            rows.read_at(torch.tensor([1]), gather)
        else:
            window = rows.window()
            rows.read(window, rows.draw(1, window, None), gather, torch.zeros)
        assert rows.steps
        return rows.steps


def loaded_by(
    writer: list[Step], reader: list[Step], row: int = 0, head: int = 2
) -> set[tuple[int, ...]]:
    """What a reader of `row` may load."""
    start = {"head": head} | dict.fromkeys(("floor", "version", "base", "origin", "loading"), 0)
    start |= {(place, word): place for place in range(CAPACITY) for word in range(WORDS)}
    places = {("row", word): (row % CAPACITY, word) for word in range(WORDS)}
    return outcomes(writer, reader, start, lambda address, _: places.get(address, address))


def violations(writer: list[Step], reader: list[Step]) -> list[tuple[int, ...]]:
    """Loads of a reader that lets a row pass which is not that row, or too large a window."""
    names = [address for kind, address, _ in reader if kind == "load"]
    bad = []
    for row in range(5):
        for loaded in loaded_by(writer, reader, row):
            named: dict[object, list[int]] = {}
            for name, value in zip(names, loaded, strict=True):
                named.setdefault(name, []).append(value)
            head, floors, versions = named["head"][0], named["floor"], named["version"]
            floor = min(floors[0], head)
            words = [value for name in (("row", 0), ("row", 1)) for value in named[name]]
            if head - floor > CAPACITY:
                bad.append(loaded)
            drawn = floor <= row < head
            whole = floors[-1] <= row and versions[-1] == versions[0] and versions[0] % 2 == 0
            if drawn and whole and words not in ([row, row], [100 + row, 100 + row]):
                bad.append(loaded)
    return bad


@pytest.mark.parametrize("at", [False, True], ids=["read", "read_at"])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_order_of_the_steps_lets_a_torn_row_pass(monkeypatch, writer, at):
    assert not violations(steps_of(monkeypatch, writer), steps_of_reader(monkeypatch, at))


@pytest.mark.parametrize(
    ("writer", "fence"), [(append_one, 0), (append_one, 1), (rewrite, 0), (rewrite, 1)]
)
def test_a_writer_that_lacks_a_fence_lets_a_torn_row_pass(monkeypatch, writer, fence):
    steps = steps_of(monkeypatch, writer)
    assert steps.count(FENCE) == 2

    assert violations(without_fence(steps, fence), steps_of_reader(monkeypatch, False))


@pytest.mark.parametrize("at", [False, True], ids=["read", "read_at"])
@pytest.mark.parametrize("fence", range(1, 4))  # the first is for lineages
def test_a_reader_that_lacks_a_fence_lets_a_torn_row_pass(monkeypatch, fence, at):
    steps = steps_of_reader(monkeypatch, at)
    assert steps.count(FENCE) == 4

    reader = without_fence(steps, fence)

    assert any(violations(steps_of(monkeypatch, writer), reader) for writer in WRITERS)


def test_a_reader_that_does_not_look_at_the_floor_again_lets_a_torn_row_pass(monkeypatch):
    steps = steps_of_reader(monkeypatch, False)
    last = max(i for i, step in enumerate(steps) if step[1] == "floor")
    unchecked = [step for i, step in enumerate(steps) if i != last]

    assert violations(steps_of(monkeypatch, append_one), unchecked)


# Lineages


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Row 0 of rows that note what a lineage is made of, too."""
    for word, name in ((BASE, "base"), (ORIGIN, "origin")):
        monkeypatch.setitem(WATCHED, word, name)
    with recorded(monkeypatch, 1) as rows:

        def note(kind: str) -> Callable[..., object]:
            return lambda at, value=0: at == LOADING and rows.note(kind, "loading", bool(value))

        rows._words = WatchedWords(rows._words, note("store"), note("load"))
        yield rows


def load_two(rows: SharedRows) -> None:
    rows.replace(rows_module.Window((0,), (2,)), lambda *_: numbered(2, 4), [(100, 0, 1)])


BEFORE, CLEARED, LOADED = (0, 1, 0), (2, 2, 2), (2, 4, 100)
"""Base, head and origin."""


def lineages(writer: list[Step], reader: list[Step]) -> set[tuple[int, ...]]:
    """What a lineage may be, unless it says that all rows are being replaced."""
    names, found = [address for kind, address, _ in reader if kind == "load"], set()
    for loaded in loaded_by(writer, reader, head=1):
        last = dict(zip(names, loaded, strict=True))
        if last["base"] == loaded[names.index("base")] and not last["loading"]:
            found.add((last["base"], last["head"], last["origin"]))
    return found


@pytest.mark.parametrize(
    ("writer", "times"), [(SharedRows.clear, {BEFORE, CLEARED}), (load_two, {BEFORE, LOADED})]
)
def test_no_order_of_the_steps_gives_a_lineage_of_two_times(monkeypatch, writer, times):
    reader = steps_of(monkeypatch, SharedRows.lineage, counted)
    assert lineages(steps_of(monkeypatch, writer, counted), reader) == times


@pytest.mark.parametrize(
    ("writer", "fence"), [(SharedRows.clear, 0), (SharedRows.clear, 1), (load_two, -1)]
)
def test_a_replacement_that_lacks_a_fence_gives_a_lineage_of_two_times(monkeypatch, writer, fence):
    steps = without_fence(steps_of(monkeypatch, writer, counted), fence)
    reader = steps_of(monkeypatch, SharedRows.lineage, counted)
    assert lineages(steps, reader) - {BEFORE, CLEARED, LOADED}


@pytest.mark.parametrize("fence", [0, 1, 3])
def test_a_lineage_that_lacks_a_fence_is_of_two_times(monkeypatch, fence):
    reader = steps_of(monkeypatch, SharedRows.lineage, counted)
    assert reader.count(FENCE) == 4
    writer = steps_of(monkeypatch, SharedRows.clear, counted)
    assert lineages(writer, without_fence(reader, fence)) - {BEFORE, CLEARED}
