"""Rows in shared memory: their layout, their cursors, and what writers and readers may do."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_unilab.errors import ConfigError, SegmentSpaceError, WaitTimeoutError
from torchrl_unilab.shm import segment as segment_module
from torchrl_unilab.shm.place import SharedPlace
from torchrl_unilab.shm.row_layout import RowLayout
from torchrl_unilab.shm.row_store import FREED, TAKEN, RowStore
from torchrl_unilab.shm.rows import SharedRows

DEAD = 2**22 + 1  # beyond any process id of Linux
DTYPES = [torch.bool, torch.uint8, torch.float16, torch.float32, torch.int64, torch.float64]
PLAIN = RowLayout.of([], [("x", (2,), torch.int32)])


def make_rows(
    layout: RowLayout = PLAIN,
    capacity: int = 8,
    *,
    writers: int = 2,
    side_slots: int = 0,
    timeout: float = 0.2,
) -> SharedRows:
    place = SharedPlace(timeout=timeout)
    store = RowStore(layout, capacity, writers, side_slots, 2)
    with place.lock:
        segment = store.build(place, b"{}")
    return SharedRows(store, place, segment, timeout)


def numbered(first: int, count: int, words: int = 2) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32).unsqueeze(1).expand(count, words)


def put(rows: SharedRows, count: int, layout_words: int = 2) -> int:
    with rows.reserve(count) as (start, _):
        first = max(start, start + count - rows.capacity)
        rows.write(first, numbered(first, start + count - first, layout_words))
    return start


def read_positions(rows: SharedRows, positions: list[int]) -> list[int]:
    at = torch.tensor(positions)
    out = torch.empty(len(at), rows.layout.words, dtype=torch.int32)

    def gather(places: torch.Tensor | None, where: torch.Tensor) -> None:
        found = rows.block.index_select(0, where)
        out.copy_(found) if places is None else out.index_copy_(0, places, found)

    rows.read_at(at, gather)
    assert (out[:, :1] == out).all()
    return out[:, 0].tolist()


# Layout

fields = st.lists(
    st.tuples(st.lists(st.integers(1, 4), max_size=2).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=6,
)


@given(fields, fields, st.booleans(), st.sampled_from([0, 1000]))
@settings(max_examples=60, deadline=None)
def test_fields_of_a_row_do_not_overlap_and_hold_what_is_written(linked, rest, repeat, codes):
    first = [(f"a{i}", shape, dtype) for i, (shape, dtype) in enumerate(linked)]
    again = [(f"n{i}", shape, dtype) for i, (shape, dtype) in enumerate(linked)] if repeat else []
    other = [(f"b{i}", shape, dtype) for i, (shape, dtype) in enumerate(rest)]
    layout = RowLayout.of(first, other, repeated=again, link_codes=codes)
    block = torch.zeros(3, layout.words, dtype=torch.int32)
    views = layout.views(block)
    values = {key: torch.randint(0, 2, view.shape).to(view.dtype) for key, view in views.items()}
    for key, view in views.items():
        view.copy_(values[key])
    if codes:
        block[:, layout.link] = 999
    assert set(views) == {key for key, _, _ in (*first, *again, *other)}
    for key, view in views.items():
        assert torch.equal(view, values[key]), key


@given(fields)
@settings(max_examples=30, deadline=None)
def test_equal_observations_and_next_observations_are_equal_words(linked):
    first = [(f"a{i}", shape, dtype) for i, (shape, dtype) in enumerate(linked)]
    again = [(f"n{i}", shape, dtype) for i, (shape, dtype) in enumerate(linked)]
    layout = RowLayout.of(first, [("b", (1,), torch.bool)], repeated=again, link_codes=5)
    block = torch.zeros(2, layout.words, dtype=torch.int32)
    views = layout.views(block)
    for (key, _, _), (follower, _, _) in zip(first, again, strict=True):
        views[key].copy_(torch.randint(0, 2, views[key].shape).to(views[key].dtype))
        views[follower].copy_(views[key])
    n = layout.linked_words
    assert torch.equal(block[:, :n], block[:, n : 2 * n])


def test_a_row_of_170_bytes_takes_172():
    floats = [("o", (17,)), ("a", (6,)), ("r", (1,)), ("n", (17,))]
    layout = RowLayout.of(
        [],
        [(key, shape, torch.float32) for key, shape in floats]
        + [(f"f{i}", (1,), torch.bool) for i in range(6)],
    )
    assert layout.words * 4 == 172


def test_flags_are_bits_beside_the_link():
    bools = [(f"f{i}", (2,), torch.bool) for i in range(3)]
    layout = RowLayout.of([("o", (2,), torch.float32)], bools, link_codes=1 << 20, pack_flags=True)
    assert (layout.words, layout.flag_bits, layout.link) == (3, 6, 2)
    flags = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]).bool()
    links = torch.tensor([1_000_000, 3])
    words = layout.pack(links, flags)
    assert words.tolist() == [64_000_000 + 25, 3 * 64 + 32]
    back, unpacked = layout.unpack(words)
    assert torch.equal(back.long(), links)
    assert torch.equal(unpacked, flags)
    assert layout.flag_views(flags)["f1"].tolist() == [[False, True], [False, False]]


def test_flags_that_do_not_fit_beside_the_link_stay_bytes():
    layout = RowLayout.of(
        [("o", (1,), torch.float32)],
        [("f", (10,), torch.bool)],
        link_codes=1 << 25,
        pack_flags=True,
    )
    assert (layout.flag_bits, layout.words) == (0, 1 + 3 + 1)


def test_more_links_than_a_word_holds_are_refused():
    with pytest.raises(ConfigError, match="links"):
        RowLayout.of([("o", (1,), torch.float32)], [], link_codes=(1 << 31) + 1)


# Cursors


@given(
    st.integers(1, 9),
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_rows_lie_as_a_serial_ring_has_them(capacity, counts):
    rows, serial, written = make_rows(capacity=capacity), {}, 0
    for count in counts:
        assert put(rows, count) == written
        for row in range(written, written + count):
            serial[row % capacity] = row
        written += count
        assert rows.window() == (max(0, written - capacity), written, written)
    positions = sorted(serial)
    assert read_positions(rows, positions) == [serial[at] for at in positions]
    rows.segment.close()


def test_rows_being_written_are_not_in_the_window_and_neither_are_those_below_them():
    rows = make_rows()
    put(rows, 6)
    with rows.reserve(4) as (start, _):
        assert start == 6
        assert rows.window() == (2, 6, 10)
        rows.write(start, numbered(6, 4))
        assert rows.window() == (2, 6, 10)
    assert rows.window() == (2, 10, 10)


def test_a_row_overwritten_while_it_is_gathered_is_gathered_again():
    rows = make_rows()
    put(rows, 8)
    gathered = []

    def gather(places, at):
        found = rows.block.index_select(0, at)
        gathered.append(at.tolist())
        if places is None:
            out.copy_(found)
            put(rows, 3)  # rows 8, 9, 10 take the place of 0, 1, 2
        else:
            out.index_copy_(0, places, found)

    out = torch.empty(3, 2, dtype=torch.int32)
    rows.read_at(torch.tensor([1, 6, 2]), gather)
    assert out[:, 0].tolist() == [9, 6, 10]
    assert gathered == [[1, 6, 2], [1, 2]]


def test_rows_that_are_gone_are_drawn_again_and_no_others():
    rows = make_rows()
    put(rows, 8)

    def gather(places, at):
        found = rows.block.index_select(0, at)
        if places is None:
            out.copy_(found)
            put(rows, 3)
        else:
            out.index_copy_(0, places, found)

    out = torch.empty(3, 2, dtype=torch.int32)
    numbers = torch.tensor([1, 6, 2])
    drawn = iter([torch.tensor([5, 7])])
    rows.read_rows(numbers, 0, gather, lambda count: next(drawn))
    assert numbers.tolist() == out[:, 0].tolist() == [5, 6, 7]


def test_a_version_that_changes_makes_a_reader_gather_all_again():
    rows = make_rows()
    put(rows, 8)
    seen = []

    def gather(places, at):
        seen.append(at.tolist())
        if len(seen) == 1:
            rows.rewrite(torch.tensor([6]), numbered(66, 1))

    rows.read_at(torch.tensor([1, 6]), gather)
    assert seen == [[1, 6], [1, 6]]


def test_a_reservation_waits_for_rows_of_another_writer_in_its_way_and_names_it():
    first = make_rows(writers=2)
    second = SharedRows(first.store, first._place, first.segment, 0.05)
    first.use_writer(0)
    put(first, 6)
    with first.reserve(2) as (start, _):
        second._writer, second._writer_pid = 1, os.getpid()
        put(second, 6)  # up to the rows in flight, not over them
        with pytest.raises(WaitTimeoutError, match=rf"writer 0 \(process {os.getpid()}\)"):
            put(second, 1)
        first.write(start, numbered(start, 2))
    assert put(second, 1) == 14


def test_explicit_reading_of_a_row_in_flight_waits_and_then_names_the_writer():
    rows = make_rows(timeout=0.05)
    put(rows, 8)
    with rows.reserve(2):
        assert read_positions(rows, [2, 7]) == [2, 7]
        with pytest.raises(WaitTimeoutError, match="writer 0"):
            read_positions(rows, [1])


def test_an_error_while_rows_are_written_leaves_complete_ones():
    rows = make_rows()
    put(rows, 8)
    with pytest.raises(ZeroDivisionError), rows.reserve(3) as (start, _):
        _fail(rows.write(start, torch.full((1, 2), -7, dtype=torch.int32)))
    assert rows.window() == (3, 11, 11)
    assert read_positions(rows, list(range(8))) == [5, 6, 7, 3, 4, 5, 6, 7]


def _fail(_: object) -> None:
    raise ZeroDivisionError


def test_an_error_in_the_first_rows_leaves_none():
    rows = make_rows()
    with pytest.raises(ZeroDivisionError), rows.reserve(3):
        _fail(None)
    assert rows.window() == (3, 3, 3)


def test_rows_noted_by_a_writer_that_died_before_the_head_moved_are_the_next_ones():
    rows = make_rows(writers=2)
    put(rows, 6)
    # Its process, the number of its first row plus one, and how many: the head comes last.
    rows._words[4], rows._words[6], rows._words[5] = DEAD, 2, 6 + 1
    assert rows.window() == (0, 6, 6)
    with rows.reserve(2) as (start, _):
        assert start == 6
        rows.write(start, numbered(start, 2))
    assert rows.window() == (0, 8, 8)
    assert not rows.recover(1)
    assert read_positions(rows, list(range(8))) == list(range(8))


def test_rows_can_be_cleared_and_counted_from_zero_again():
    rows = make_rows()
    put(rows, 13)
    version = rows.version
    with rows.frozen(clear=True):
        pass
    assert rows.window() == (0, 0, 0)
    assert rows.version == version + 2
    assert put(rows, 2) == 0


# Slots of the side table

LINKED = RowLayout.of([("o", (1,), torch.float32)], [], link_codes=8 + 1 + 3)


def put_with_slots(rows: SharedRows, count: int, slots: int) -> list[int]:
    """Rows of which the last `slots` have a slot; returns these."""
    with rows.reserve(count, slots) as (start, taken):
        codes = torch.zeros(count, dtype=torch.int64)
        codes[count - slots :] = rows.slot_code(taken)
        words = torch.zeros(count, 2, dtype=torch.int32)
        words[:, 1] = rows.layout.pack(codes, None)
        numbers = torch.arange(start + count - slots, start + count)
        rows.write_side(taken, numbers, numbered(start, slots, 1))
        rows.write(start, words)
    return taken.tolist()


def test_slots_are_free_again_when_their_rows_are_overwritten():
    rows = make_rows(LINKED, side_slots=3)
    assert put_with_slots(rows, 4, 2) == [0, 1]
    assert put_with_slots(rows, 4, 1) == [2]
    assert rows.window().floor == 0
    assert put_with_slots(rows, 4, 2) == [0, 1]  # in the place of rows 0 to 3
    assert rows.window().floor == 4


def test_the_oldest_rows_are_given_up_for_slots_and_no_more_than_needed():
    rows = make_rows(LINKED, side_slots=3)
    put_with_slots(rows, 2, 1)  # slot of row 1
    put_with_slots(rows, 2, 2)  # slots of rows 2, 3
    assert put_with_slots(rows, 1, 1) == [0]
    assert rows.window() == (2, 5, 5)
    with pytest.raises(IndexError, match="given up"):
        rows.read_at(torch.tensor([1]), lambda places, at: None)
    rows.read_at(torch.tensor([2]), lambda places, at: None)


def test_more_slots_than_there_are_in_all_are_refused_before_anything_is_reserved():
    rows = make_rows(LINKED, side_slots=3)
    with pytest.raises(ConfigError, match="expected at most 3"), rows.reserve(4, 4):
        pass
    assert rows.window() == (0, 0, 0)


def test_a_linked_row_gives_its_slot_back_unless_it_is_gone():
    rows = make_rows(LINKED, side_slots=3)
    slots = put_with_slots(rows, 2, 2)
    put_with_slots(rows, 2, 0)
    numbers, successors_ = torch.tensor([0, 1]), torch.tensor([2, 3])
    rows.relink(numbers, successors_, torch.tensor(slots), rows.version)
    links, _ = rows.layout.unpack(rows.block[:2, 1])
    assert links.tolist() == [3, 4]
    assert put_with_slots(rows, 3, 3) == [2, 0, 1]
    before = rows.block.clone()
    put(rows, 8)
    now = rows.block.clone()
    rows.relink(numbers, successors_, torch.tensor(slots), rows.version)  # overwritten meanwhile
    assert torch.equal(rows.block, now)
    assert not torch.equal(before, now)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_no_slot_is_ever_lost_or_given_twice(writes):
    rows = make_rows(LINKED, side_slots=3)
    for count, slots in writes:
        slots = min(slots, count)
        put_with_slots(rows, count, slots)
        floor, end, _ = rows.window()
        live = torch.arange(floor, end).remainder(8)
        links, _ = rows.layout.unpack(rows.block[live, 1])
        used = (links[links > 8] - 9).tolist()
        assert len(used) == len(set(used))
        assert rows._slots_free() == 3 - len(used)
        assert all(rows.owners[s] == live[links == s + 9].item() for s in used)
    rows.segment.close()


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.booleans()), min_size=1),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_slots_that_the_dead_took_for_no_row_are_free_again(writes, data):
    rows = make_rows(LINKED, side_slots=3)
    for count, slots, dies in writes:
        slots = min(slots, count)
        if not dies:
            put_with_slots(rows, count, slots)
            continue
        with rows._lock:
            rows._take_slots(data.draw(st.integers(0, max(0, rows._slots_free()))))
        rows._words[4] = DEAD
        assert not rows.recover(1)
        floor, end, _ = rows.window()
        live = torch.arange(floor, end).remainder(8)
        links, _ = rows.layout.unpack(rows.block[live, 1])
        used = (links[links > 8] - 9).tolist()
        first = rows._header[TAKEN]
        free = [int(rows._free[i % 3]) for i in range(first, rows._header[FREED])]
        assert sorted(used + free) == [0, 1, 2]
    rows.segment.close()


# Memory


def test_capacity_that_does_not_fit_is_refused_with_what_would(monkeypatch):
    monkeypatch.setattr("torchrl_unilab.shm.row_store.free_bytes", lambda kind: 100_000)
    place = SharedPlace()
    store = RowStore(PLAIN, 1_000_000, 1, 0, 2)
    with pytest.raises(SegmentSpaceError, match="rows would") as caught:
        store.build(place, b"{}")
    assert place.find() is None
    fits = int(str(caught.value).split("About ")[1].split()[0])
    assert 10_000 < fits <= 100_000 // 8


def test_a_place_has_no_memory_until_it_is_built_and_then_for_all_who_hold_it():
    place = SharedPlace()
    assert place.find() is None
    with place.lock:
        place.build(128).buffer[:] = 3
    found = place.find()
    assert found is not None
    assert int(found.buffer.sum()) == 384
    place.close()


def test_a_named_place_goes_with_its_creator(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_UNILAB_SHM_DIR", str(tmp_path))
    place = SharedPlace("named")
    with place.lock:
        place.build(64)
    assert math.prod(path.stat().st_size for path in tmp_path.iterdir()) == 64
    place.close()
    assert not list(tmp_path.iterdir())
    assert segment_module.named_directory() == tmp_path


def test_the_lock_is_of_one_holder_and_says_so_after_its_timeout():
    place = SharedPlace(timeout=0.05)
    with place.lock, pytest.raises(WaitTimeoutError, match="held"), place.lock:
        pass
    with place.lock:
        pass
    place.close()
