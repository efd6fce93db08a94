"""Shared rows: what is readable, who may write, and what interrupts, stops and kills leave."""

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

from tests.support.bounds import PROMPT
from tests.support.striking import (
    exit_code_of,
    forked,
    interrupt_each_line,
    kill_self,
    stop_self,
    strike_at,
)
from torchrl_unilab.errors import ConfigError, ContentionError, WaitTimeoutError
from torchrl_unilab.shm import lock as lock_module
from torchrl_unilab.shm import rows as rows_module
from torchrl_unilab.shm import shards as shards_module
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.window import Window

WIDTHS = (3, 1)
WORDS = sum(WIDTHS)
PROTOCOL = [lock_module, rows_module, shards_module]
both_shapes = pytest.mark.parametrize("shards", [1, 3])


@contextlib.contextmanager
def make_rows(
    shard_rows: int = 8, shards: int = 1, timeout: float = 10.0, holding: int = 0
) -> Iterator[SharedRows]:
    with SharedSegment(SharedRows.nbytes(WIDTHS, shards, shard_rows)) as segment:
        rows = SharedRows(segment, WIDTHS, shards, shard_rows, timeout)
        if holding:
            put(rows, holding)
        yield rows


def again(rows: SharedRows, timeout: float = 10.0) -> SharedRows:
    """The same rows as another process or thread has them."""
    return SharedRows(rows.segment, rows.widths, rows.shards, rows.shard_rows, timeout)


def numbered(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32).unsqueeze(1).repeat(1, WORDS)


def put(rows: SharedRows, count: int, shard: int = 0) -> int:
    """Append rows whose words are their numbers."""
    rows._shard, rows._shard_pid = shard, os.getpid()
    words = numbered(0, count)
    return rows.append(words.split(WIDTHS, 1), lambda _, head: words.add_(head))


class Batch:
    """Where rows are gathered to."""

    def __init__(self, rows: SharedRows, count: int) -> None:
        self.blocks, self.words = rows.blocks, torch.full((count, WORDS), -1, dtype=torch.int32)
        self.calls: list[list[int]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(
        self, places: torch.Tensor | None, positions: torch.Tensor, heads: tuple[int, ...]
    ) -> None:
        at = slice(None) if places is None else places
        found = [block.index_select(0, positions) for block in self.blocks]
        self.words[at] = torch.cat(found, 1)
        self.calls.append(positions.tolist())
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the rows, which are whole."""
        assert (self.words == self.words[:, :1]).all(), self.words
        return self.words[:, 0].tolist()


def read_at(rows: SharedRows, positions: list[int]) -> list[int]:
    batch = Batch(rows, len(positions))
    rows.read_at(torch.tensor(positions), batch)
    return batch.numbers


def read_all(rows: SharedRows) -> list[list[int]]:
    """Numbers of all readable rows of each shard; all are whole and the ones they should be."""
    window, found = rows.window(), []
    for shard, (floor, head) in enumerate(zip(*window, strict=True)):
        number = torch.arange(floor, head)
        batch = Batch(rows, len(number))
        rows.read(window, number * rows.shards + shard, batch, pytest.fail)
        assert batch.numbers == number.tolist() or rows.revision >> 48
        found.append(batch.numbers)
    return found


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


def test_rows_being_written_are_not_readable_and_neither_are_those_below_them():
    with make_rows(holding=6) as rows:
        seen: list[Window] = []
        fill = rows.fill

        def look(*arguments) -> None:
            seen.append(rows.window())
            fill(*arguments)

        rows.fill = look  # type: ignore[method-assign]
        put(rows, 4)

        assert seen == [Window((2,), (6,))]
        assert rows.window() == Window((2,), (10,))


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
        batch = Batch(rows, 2)
        batch.meanwhile = lambda: rows.rewrite(torch.tensor([6]), numbered(66, 1).split(WIDTHS, 1))

        if at:
            rows.read_at(torch.tensor([1, 6]), batch)
        else:
            rows.read(rows.window(), torch.tensor([1, 6]), batch, pytest.fail)

        assert (batch.numbers, batch.calls) == ([1, 66], [[1, 6], [1, 6]])


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

        def gather(places, positions, heads) -> None:
            put(rows, 8)

        window = rows.window()
        with pytest.raises(ContentionError, match=r"on each try for 0\.02 s"):
            rows.read_at(torch.tensor([1]), gather)
        with pytest.raises(ContentionError, match=r"on each try for 0\.02 s"):
            rows.read(
                window,
                torch.tensor([1]),
                gather,
                lambda count: rows.draw(count, rows.window(), None),
            )


def test_rows_rewritten_while_they_are_copied_are_copied_again_or_an_error(monkeypatch):
    with make_rows(holding=8) as rows:
        settled, once = rows.settled, iter([rows.touch])

        def rewritten(rewrite: Callable[[], object]) -> object:
            versions = settled()
            rewrite()
            return versions

        monkeypatch.setattr(rows, "settled", lambda: rewritten(next(once, int)))
        [(first, (numbers, _))] = rows.copies(0, rows.window())
        assert (first, numbers[:, 0].tolist()) == (0, [*range(8)])

        monkeypatch.setattr(rows, "settled", lambda: rewritten(rows.touch))
        rows.timeout = 0.02
        with pytest.raises(ContentionError, match=r"on each try for 0\.02 s"):
            next(rows.copies(0, rows.window()))


@both_shapes
def test_cleared_rows_count_from_position_zero_and_reads_of_old_ones_are_drawn_again(shards):
    with make_rows(4, shards) as rows:
        for shard in range(shards):
            put(rows, 3, shard)
        window, revision = rows.window(), rows.revision
        batch = Batch(rows, 1)

        def clear() -> None:
            rows.clear()
            put(rows, 1, 0)

        batch.meanwhile = clear
        rows.read(
            window, rows.draw(1, window, None), batch, lambda n: rows.draw(n, rows.window(), None)
        )

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


def test_the_shard_of_a_living_process_is_refused_by_its_id_and_that_of_a_dead_one_is_not():
    with make_rows(8, 2) as rows:
        with (
            claimant(lambda: rows.claim(1)) as (child, _),
            pytest.raises(ConfigError, match=f"process {child} is alive"),
        ):
            rows.claim(1)

        assert rows.claim(1) == 1


def test_rows_are_cleared_and_the_shard_of_another_process_stays_its_own():
    with make_rows(8, 2) as rows, claimant(lambda: put(rows, 3, rows.claim(0))) as (child, _):
        rows.clear()
        with pytest.raises(ConfigError, match=f"process {child} is alive"):
            rows.claim(0)
        assert rows.claim() == 1


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


# Interrupts, stops, kills


ACTIONS: dict[str, Callable[[SharedRows], object]] = {
    "append": lambda rows: put(rows, 3),
    "claim": lambda rows: rows.claim(0),
    "rewrite": lambda rows: rows.rewrite(
        torch.tensor([2, 0]), numbered(900, 1).repeat(2, 1).split(WIDTHS, 1)
    ),
    "clear": lambda rows: rows.clear(),
    "replace": lambda rows: rows.replace(
        Window((0,) * rows.shards, (5,) * rows.shards),
        lambda shard, first, count: numbered(800, count).split(WIDTHS, 1),
    ),
}


def check_whole_and_writable(rows: SharedRows) -> None:
    """All readable rows are whole, and each shard can be written to at once."""
    read_all(rows)
    for shard in range(rows.shards):
        put(rows, 3, shard)
    for numbers, head in zip(read_all(rows), rows.window().heads, strict=True):
        assert numbers[-3:] == [*range(head - 3, head)]
    length, _ = rows.extent(rows.window())
    batch = Batch(rows, length)
    rows.read_at(torch.arange(length), batch)
    assert batch.numbers


def shapes(*cases: tuple[object, ...]) -> pytest.MarkDecorator:
    """Cases of an action and of the shards that it is tried on; all others are slow."""
    slow = [(name, shards) for name in ACTIONS for shards in (1, 3) if (name, shards) not in cases]
    slow_cases = [pytest.param(*case, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize(("name", "shards"), [*cases, *slow_cases])


@shapes(("append", 1), ("claim", 1), ("rewrite", 1), ("clear", 3), ("replace", 3))
def test_an_interrupt_at_any_line_leaves_rows_that_others_write_and_read(name, shards):
    with make_rows(8, shards, timeout=0.5) as rows:
        for shard in range(shards):
            [put(rows, 5, shard) for _ in range(2)]
        (ask, asked), (answer, answered) = os.pipe(), os.pipe()
        other = again(rows, 0.5)

        def serve() -> None:
            while os.read(ask, 1):
                check_whole_and_writable(other)
                os.write(answered, b"1")

        lines = 0
        with forked(serve):
            os.close(answered)
            for where in interrupt_each_line(lambda: ACTIONS[name](rows), PROTOCOL):
                lines += 1
                os.write(asked, b"1")
                assert os.read(answer, 1), f"another process cannot go on after {where}"
                check_whole_and_writable(rows)
        for descriptor in (ask, asked, answer):
            os.close(descriptor)
        assert lines > 10


def steps_of(name: str, shards: int) -> int:
    with make_rows(8, shards) as rows:
        for shard in range(shards):
            put(rows, 5, shard)
        count = strike_at(rows, 0, kill_self)
        ACTIONS[name](rows)
        return count()


@pytest.mark.parametrize(
    ("shards", "beside"),
    [
        pytest.param(1, False, id="alone"),
        pytest.param(3, True, id="beside another writer"),
        pytest.param(3, False, id="alone in three shards", marks=pytest.mark.slow),
        pytest.param(1, True, id="beside another writer of its shard", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["append", "rewrite", "clear", "replace"])
def test_a_process_killed_at_any_step_leaves_whole_rows_without_a_wait(name, beside, shards):
    with make_rows(8, shards, timeout=PROMPT) as rows:
        for shard in range(shards):
            [put(rows, 5, shard) for _ in range(2)]
        steps = steps_of(name, shards)

        def write_on() -> None:
            own = again(rows, PROMPT)
            while True:
                put(own, 3, shards - 1)

        with forked(write_on) if beside else contextlib.nullcontext():
            for nth in range(1, steps + 1):

                def die(nth: int = nth) -> None:
                    own = again(rows, PROMPT)
                    strike_at(own, nth, kill_self)
                    ACTIONS[name](own)

                assert exit_code_of(die) == -signal.SIGKILL
                if not beside:
                    check_whole_and_writable(rows)
                else:
                    batch, window = Batch(rows, 16), rows.readable()
                    if window.size:
                        redraw = lambda n: rows.draw(n, rows.readable(), None)  # noqa: E731
                        rows.read(window, rows.draw(16, window, None), batch, redraw)
                        assert batch.numbers
        check_whole_and_writable(rows)


def test_the_unfinished_rows_of_a_killed_writer_are_replaced_by_the_oldest_until_written_again():
    with make_rows() as rows:
        [put(rows, 5) for _ in range(2)]  # rows 2 to 9 are readable

        def die() -> None:
            own = again(rows)
            strike_at(own, 3, kill_self)
            put(own, 2)

        assert exit_code_of(die) == -signal.SIGKILL
        assert rows.window() == Window((4,), (10,))
        assert read_at(rows, [2, 3, 4]) == [4, 4, 4]
        put(rows, 2)
        assert read_at(rows, [2, 3, 4]) == [10, 11, 4]


def test_a_shard_whose_writer_was_killed_amid_as_many_rows_as_it_has_is_not_read():
    with make_rows(8, 2) as rows:
        [put(rows, 8, shard) for shard in range(2)]
        rows.words[0][shards_module.FLOOR] = 8

        with pytest.raises(ContentionError, match="no whole row in a shard"):
            read_at(rows, [0])
        assert read_at(rows, [1]) == [0]


@pytest.mark.parametrize("name", ["append", "rewrite", "replace"])
def test_a_process_stopped_at_any_step_is_waited_for_within_bounds_and_named(name):
    for nth in range(1, steps_of(name, 1) + 1):
        with make_rows(timeout=0.02) as rows:
            [put(rows, 5) for _ in range(2)]

            def stop(nth: int = nth, rows: SharedRows = rows) -> None:
                own = again(rows)
                strike_at(own, nth, stop_self)
                ACTIONS[name](own)

            with forked(stop) as child:
                os.waitpid(child, os.WUNTRACED)
                with pytest.raises(WaitTimeoutError, match=f"process ({child}|{os.getpid()})"):
                    put(rows, 3)
                os.kill(child, signal.SIGCONT)
                os.waitpid(child, 0)
            check_whole_and_writable(rows)


def test_a_killed_process_that_replaces_rows_leaves_all_of_them_or_none():
    for nth in range(1, steps_of("replace", 3) + 1):
        with make_rows(8, 3) as rows:
            [put(rows, 4, shard) for shard in range(3)]

            def die(nth: int = nth, rows: SharedRows = rows) -> None:
                own = again(rows)
                strike_at(own, nth, kill_self)
                ACTIONS["replace"](own)

            assert exit_code_of(die) == -signal.SIGKILL
            rows.wait(0)
            assert rows.extent(rows.window())[0] in (0, 4 * 3, 5 * 3)


# Copies of whole shards


@both_shapes
def test_copies_of_a_window_are_its_rows_newest_first(shards, monkeypatch):
    with make_rows(8, shards) as rows:
        monkeypatch.setattr(rows, "chunk_rows", 3)
        for shard in range(shards):
            [put(rows, 5, shard) for _ in range(3)]

        for shard in range(shards):
            found: list[int] = []
            for first, parts in rows.copies(shard, rows.window()):
                words = torch.cat([*parts], 1)
                assert (words[:, 0].tolist(), words[:, -1].tolist()) == 2 * (
                    [*range(first, first + len(words))],
                )
                found = words[:, 0].tolist() + found
            assert found == [*range(7, 15)]


@pytest.mark.parametrize(("width", "chunk"), [(1, 1024), (1 << 20, 4), (1 << 23, 1)])
def test_large_rows_are_copied_a_few_at_a_time(width, chunk):
    with SharedSegment(SharedRows.nbytes([width], 1, 1)) as segment:
        assert SharedRows(segment, [width], 1, 1, timeout=1.0).chunk_rows == chunk


def test_a_replacement_that_fails_leaves_no_rows():
    with make_rows(holding=5) as rows:
        with pytest.raises(ZeroDivisionError):
            rows.replace(Window((0,), (3,)), lambda *_: 1 // 0)

        assert rows.extent(rows.window()) == (0, False)
        check_whole_and_writable(rows)


def test_rows_that_are_passed_over_begin_new_steps():
    with SharedSegment(SharedRows.nbytes([1], 1, 4)) as segment:
        rows = SharedRows(segment, [1], 1, 4, timeout=1.0)

        def append_step() -> None:
            parts = [torch.zeros(2, 1, dtype=torch.int32)]
            rows.append(parts, lambda shard, head: rows.note_steps(shard, 2))

        append_step()
        append_step()
        assert rows.steps() == ((0, 2),)
        rows.continue_at(0, 2)
        assert rows.steps() == ((6, 2),)
        append_step()
        assert rows.steps() == ((6, 2),)
