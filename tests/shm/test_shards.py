"""What the words of shards say: which rows are readable, in which order, and since when."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support import shared_rows
from tests.support.shared_rows import put
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.shards import BASE, FLOOR, HEAD, NOTED, ORIGIN, VERSION, WRITER, Shards
from torchrl_unilab.shm.window import Lineage, Window

make_rows = partial(shared_rows.make_rows, 4, widths=[1])


def test_rows_are_drawn_from_the_window_of_each_shard_and_from_nowhere_else():
    with SharedSegment(Shards.nbytes([1], 2, 4)) as segment:
        shards, window = Shards(segment, [1], 2, 4, timeout=1.0), Window((0, 1), (1, 2))
        ids = shards.draw(64, window, torch.Generator().manual_seed(0))
    assert {*ids.tolist()} == {0, 3}


def test_no_row_is_above_floors_that_are_beyond_the_heads():
    assert Window((0, 0), (3, 3)).above((9, 1)) == Window((3, 1), (3, 3))


def test_an_empty_window_waits_for_the_writes_of_all_shards(monkeypatch):
    with make_rows(shards=3) as rows:
        monkeypatch.setattr(rows, "wait", lambda shard: put(rows, 2, shard))
        assert rows.readable() == Window((0, 0, 0), (2, 2, 2))


def test_rows_are_in_order_once_none_of_larger_steps_is_left():
    with make_rows() as rows, make_rows(shards=2) as several:
        assert rows.in_order(rows.window())
        put(rows, 2, step=2)
        assert not rows.in_order(rows.window())
        for readable in ((0, 3), (0, 4), (1, 5), (2, 6)):
            put(rows, 1, step=1)
            window = rows.window()
            assert window == Window(readable[:1], readable[1:])
            assert rows.in_order(window) == (readable[0] == 2)
        put(several, 1)
        assert not several.in_order(several.window())


def test_numbers_continue_across_clears_and_from_a_checkpoints_origin():
    with make_rows() as rows:
        for shard_rows in (4, 8):
            put(rows, 3)
            rows.clear()
            empty = Window((shard_rows,), (shard_rows,))
            assert rows.lineage() == Lineage((shard_rows,), (shard_rows,), empty)
        words = torch.zeros(2, 1, dtype=torch.int32)
        rows.replace(Window((1,), (3,)), lambda *_: [words], [(100, 1, 2)])
        base = rows.lineage().bases[0]
        assert rows.lineage() == Lineage((base,), (100,), Window((base + 1,), (base + 3,)))
        assert rows.steps() == ((base + 1, 2),)
        rows.clear()
        assert rows.lineage().origins[0] - rows.lineage().bases[0] == 100 - base
        assert rows.steps() == ((0, 1),)


def test_a_lineage_is_of_one_time_though_rows_are_cleared_meanwhile(monkeypatch):
    with make_rows() as rows:
        put(rows, 3)
        window, clears = rows.window, iter([rows.clear])
        monkeypatch.setattr(rows, "window", lambda: (next(clears, int)(), window())[1])
        assert rows.lineage() == Lineage((4,), (4,), Window((4,), (4,)))


def test_the_origins_of_a_lineage_are_not_older_than_its_window(monkeypatch):
    with make_rows() as rows:
        window = rows.window

        def complete() -> Window:
            rows.words[0][ORIGIN] = 5
            return window()

        monkeypatch.setattr(rows, "window", complete)
        assert rows.lineage().origins == (5,)


def test_while_all_rows_are_replaced_none_is_written():
    with make_rows() as rows:
        put(rows, 3)
        rows.words[0][BASE] = 4  # and the head is not there yet
        window = rows.window()
        assert (rows.length(), rows.extent(window)[0], rows.lineage().written) == (0, 0, 0)


def test_rows_that_are_passed_over_begin_new_steps():
    with make_rows() as rows:
        for _ in range(2):
            put(rows, 2, step=2)
        assert rows.steps() == ((0, 2),)
        rows.continue_at(0, 2)
        assert rows.steps() == ((6, 2),)
        put(rows, 2, step=2)
        assert rows.steps() == ((6, 2),)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_rewrite_changes_the_number_and_leaves_other_shards_alone(shard):
    with make_rows(shards=2) as rows:
        put(rows, 4, shard)
        rows.words[1 - shard][WRITER] = 123
        rows.rewrite(torch.tensor([shard]), [torch.zeros(1, 1, dtype=torch.int32)])
        assert rows.rewritten == 2
        assert rows.words[shard][VERSION] == 2
        assert rows.words[1 - shard][WRITER] == 123
        rows.rewrite(torch.empty(0, dtype=torch.int64), [torch.empty(0, 1, dtype=torch.int32)])
        assert rows.rewritten == 2


def test_rows_of_all_shards_are_replaced_at_once_and_each_has_its_own_origin_and_steps():
    with make_rows(shards=2) as rows:
        lengths = []

        def read(*_: int) -> list[torch.Tensor]:
            lengths.append(rows.length())
            return [torch.zeros(3, 1, dtype=torch.int32)]

        rows.replace(Window((0, 0), (3, 3)), read, [(100, 0, 1), (200, 1, 2)])
        assert (lengths, rows.length()) == ([0, 0], 3)
        assert rows.lineage().origins == (100, 200)
        assert rows.steps() == ((0, 1), (1, 2))


def test_torn_rows_become_the_newest_whole_one_and_their_positions_are_passed_on():
    with make_rows(shards=2) as rows:
        put(rows, 4, 1)
        told = []
        rows.detach = lambda parts, positions: told.append(
            (parts[0].flatten().tolist(), positions.tolist())
        )
        rows._notes[1, :3] = torch.tensor([1, 3, 0])  # the last is of a rewrite before
        rows.words[1][NOTED], rows.words[1][VERSION] = 2, 1
        rows.wait(1)
        assert told == [([2, 2], [3, 7])]
        assert rows.parts[1][0].flatten().tolist() == [0, 2, 2, 2]
        rows._notes[1] = torch.arange(1024)
        rows.words[1][NOTED], rows.words[1][VERSION] = 4, 3
        rows.wait(1)
        assert rows.window() == Window((0, 4), (0, 4))


def test_a_copy_leaves_out_what_is_overwritten_meanwhile():
    with shared_rows.make_rows(8, widths=[1]) as rows:
        rows.chunk_rows = 3
        put(rows, 8)
        found, copies = [], rows.copies(0, rows.window())
        for first, words in copies:
            found.append((first, words.flatten().tolist()))
            if len(found) == 1:
                put(rows, 3)
        assert found == [(5, [5, 6, 7]), (3, [3, 4])]


def test_rows_that_are_drawn_again_come_with_the_heads_of_then():
    with make_rows() as rows:
        put(rows, 4)
        heads = []

        def gather(_: object, positions: torch.Tensor, given: tuple[int, ...]) -> None:
            heads.append(given)
            if len(heads) == 1:
                put(rows, 2)

        rows.read(rows.window(), torch.tensor([0, 3]), gather, lambda _: torch.tensor([5]))
        assert heads == [(4,), (6,)]


def test_who_leaves_a_shard_takes_it_from_no_other_and_claims_anew():
    with make_rows(shards=2) as rows:
        rows.claim(1)
        rows.leave()
        assert (rows.shard, rows.load(WRITER)[1]) == (0, 0)
        rows.words[0][WRITER] = 123
        rows.leave()
        assert rows.load(WRITER)[0] == 123


@pytest.mark.parametrize(
    ("floor", "place", "window", "held"),
    [
        (0, 1, (1, 5), [0, 1, 2, 3]),
        (3, 1, (3, 5), [3, 1, 2, 3]),
        (2, 3, (3, 7), [3, 3, 2, 3]),
        (4, 1, (5, 5), [0, 1, 2, 3]),
    ],
)
def test_of_rows_that_are_passed_over_those_that_may_be_torn_become_the_newest_whole_one(
    floor, place, window, held
):
    with make_rows() as rows:
        put(rows, 4)
        rows.words[0][FLOOR] = floor  # its writer died amid so many rows
        rows.continue_at(0, place)
        assert rows.window() == Window(window[:1], window[1:])
        assert rows.load(HEAD) == window[1:]
        assert rows.parts[0][0].flatten().tolist() == held
