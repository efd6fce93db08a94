"""Shared rows: what is readable, and who may write."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.shared_rows import Batch, again, make_rows, numbered, put, read_all, read_at
from tests.support.striking import forked
from torchrl_unilab.errors import ConfigError, ContentionError
from torchrl_unilab.shm import shards as shards_module
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.segment import SharedSegment

both_shapes = pytest.mark.parametrize("shards", [1, 3])


# What is readable, and where it lies


@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_positions_have_no_gap_whatever_the_shards_have(shards, shard_rows, writes):
    with make_rows(shard_rows, shards) as rows:
        heads, serial = [0] * shards, {}
        for shard, count in writes:
            shard, count = shard % shards, min(count, shard_rows)
            assert put(rows, count, shard) == heads[shard]
            for row in range(heads[shard], heads[shard] + count):
                serial[row % shard_rows * shards + shard] = row
            heads[shard] += count
        without_gap = 0
        while without_gap in serial:
            without_gap += 1

        window = rows.window()

        assert rows.extent(window) == (without_gap, False)
        assert window.heads == tuple(heads)
        assert window.size == len(serial)
        assert rows.lineage().written == sum(heads)
        if without_gap:
            assert read_at(rows, [*range(without_gap)]) == [serial[p] for p in range(without_gap)]


@both_shapes
def test_drawn_rows_are_uniform_over_all_shards(shards):
    with make_rows(8, shards) as rows:
        for shard in range(shards):
            put(rows, 2 + 2 * shard, shard)
        window = rows.window()

        ids = rows.draw(window.size * 1000, window, torch.Generator().manual_seed(0))

        counts = torch.bincount(rows.positions(ids), minlength=8 * shards)
        readable = counts[counts > 0]
        assert len(readable) == window.size
        assert 840 < readable.min() <= readable.max() < 1160  # five standard deviations


@pytest.mark.parametrize("at", [False, True])
def test_rows_rewritten_while_they_are_read_are_all_read_again(at):
    with make_rows(holding=8) as rows:
        batch = Batch(rows, 2, lambda: rows.rewrite(torch.tensor([6]), numbered(66, 1)))
        if at:
            rows.read_at(torch.tensor([1, 6]), batch)
        else:
            rows.read(rows.window(), torch.tensor([1, 6]), batch, pytest.fail)

        assert (batch.numbers, batch.calls) == ([1, 66], [[1, 6], [1, 6]])


def test_only_rows_that_are_overwritten_are_drawn_again_and_each_comes_to_its_own_place():
    drawn = [torch.tensor([7, 2]), torch.tensor([5])]
    with make_rows(holding=8) as rows:
        batch = Batch(rows, 4, lambda: put(rows, 2), lambda: put(rows, 1))
        rows.read(rows.window(), torch.tensor([6, 7, 0, 1]), batch, lambda _: drawn.pop(0))
        assert (batch.numbers, batch.calls) == ([6, 7, 7, 5], [[6, 7, 0, 1], [7, 2], [5]])


def test_only_positions_that_are_overwritten_are_read_again_and_each_comes_to_its_own_place():
    with make_rows(holding=8) as rows:
        batch = Batch(rows, 3, lambda: put(rows, 2), lambda: put(rows, 7))
        rows.read_at(torch.tensor([5, 1, 0]), batch)
        assert (batch.numbers, batch.calls) == ([5, 9, 16], [[5, 1, 0], [1, 0], [0]])


def test_a_row_that_the_next_append_hides_again_is_waited_for_again():
    with make_rows(holding=8) as rows:
        rows.words[0][shards_module.FLOOR] = 2  # an append of two rows is in flight
        alone, appends = rows.locked, iter([2, 8])

        def finish(shard, action):
            rows.locked = alone
            put(rows, next(appends))
            found = alone(shard, action)
            rows.words[0][shards_module.FLOOR] = 10  # the next one, of eight
            rows.locked = finish
            return found

        rows.locked = finish

        assert read_at(rows, [1]) == [17]


def test_rows_overwritten_faster_than_they_are_read_are_an_error():
    with make_rows(timeout=0.02, holding=8) as rows:
        at, window = torch.tensor([1]), rows.window()
        gather = lambda *_: put(rows, 8)  # noqa: E731
        redraw = lambda count: rows.draw(count, rows.window(), None)  # noqa: E731
        for read in (
            lambda: rows.read_at(at, gather),
            lambda: rows.read(window, at, gather, redraw),
        ):
            with pytest.raises(ContentionError, match=r"on each try for 0\.02 s"):
                read()


def test_rows_rewritten_while_they_are_copied_are_copied_again_or_an_error(monkeypatch):
    with make_rows(holding=8) as rows:
        settled, once = rows.settled, iter([rows.touch])

        def rewritten(rewrite: Callable[[], object]) -> object:
            versions = settled()
            rewrite()
            return versions

        monkeypatch.setattr(rows, "settled", lambda: rewritten(next(once, int)))
        [(first, words)] = rows.copies(0, rows.window())
        assert (first, words[:, 0].tolist()) == (0, [*range(8)])

        monkeypatch.setattr(rows, "settled", lambda: rewritten(rows.touch))
        rows.timeout = 0.02
        with pytest.raises(ContentionError, match=r"on each try for 0\.02 s"):
            next(rows.copies(0, rows.window()))


@both_shapes
def test_cleared_rows_count_from_position_zero_and_reads_of_old_ones_are_drawn_again(shards):
    with make_rows(4, shards, holding=3) as rows:
        window, revision = rows.window(), rows.revision
        batch = Batch(rows, 1, lambda: (rows.clear(), put(rows, 1)))
        redraw = lambda count: rows.draw(count, rows.window(), None)  # noqa: E731
        rows.read(window, rows.draw(1, window, None), batch, redraw)

        assert batch.numbers == [4]
        assert rows.extent(rows.window()) == (1, False)
        assert rows.lineage().written == 1
        assert rows.revision > revision


# Writers


@contextlib.contextmanager
def claimant(claim: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """A process that claims a shard and lives on: its id, and the shard."""
    reads, writes = os.pipe()
    with forked(lambda: (os.write(writes, bytes([claim()])), signal.pause())) as child:
        shard = os.read(reads, 1)[0]
        os.close(reads)
        os.close(writes)
        yield child, shard


@both_shapes
def test_processes_claim_free_shards_first_and_share_them_then(shards):
    with make_rows(8, shards) as rows, contextlib.ExitStack() as stack:
        taken = [rows.shard]
        for _ in range(shards):
            taken.append(stack.enter_context(claimant(lambda: rows.shard))[1])

        assert taken[:shards] == [*range(shards)]
        assert 0 <= taken[shards] < shards


def test_the_shard_of_a_living_process_is_refused_by_its_id_also_once_rows_were_cleared():
    with make_rows(8, 2) as rows:
        with claimant(lambda: put(rows, 3, rows.claim(0))) as (child, _):
            for prepare in (int, rows.clear):
                prepare()
                with pytest.raises(ConfigError, match=f"process {child} is alive"):
                    rows.claim(0)
            assert rows.claim() == 1

        assert rows.claim(0) == 0  # it is dead


def test_threads_and_processes_that_share_a_shard_write_one_after_the_other():
    with make_rows(4096) as rows:

        def write() -> None:
            own = again(rows)
            for _ in range(50):
                put(own, 8)

        threads = [threading.Thread(target=write) for _ in range(2)]
        with forked(write) as one, forked(write) as two:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for child in (one, two):
                os.waitpid(child, 0)

        assert read_all(rows) == [[*range(4 * 50 * 8)]]


def test_a_shard_whose_writer_was_killed_amid_as_many_rows_as_it_has_is_not_read():
    with make_rows(8, 2, holding=8) as rows:
        rows.words[0][shards_module.FLOOR] = 8

        with pytest.raises(ContentionError, match="no whole row in a shard"):
            read_at(rows, [0])
        assert read_at(rows, [1]) == [0]


# Copies of whole shards


@both_shapes
def test_copies_of_a_window_are_its_rows_newest_first(shards, monkeypatch):
    with make_rows(8, shards, holding=15) as rows:
        monkeypatch.setattr(rows, "chunk_rows", 3)
        for shard in range(shards):
            found: list[int] = []
            for first, words in rows.copies(shard, rows.window()):
                assert (words[:, 0].tolist(), words[:, -1].tolist()) == 2 * (
                    [*range(first, first + len(words))],
                )
                found = words[:, 0].tolist() + found
            assert found == [*range(7, 15)]


@pytest.mark.parametrize(("width", "chunk"), [(1, 1024), (1 << 20, 4), (1 << 23, 1)])
def test_large_rows_are_copied_a_few_at_a_time(width, chunk):
    with SharedSegment(SharedRows.nbytes([width], 1, 1)) as segment:
        assert SharedRows(segment, [width], 1, 1, timeout=1.0).chunk_rows == chunk
