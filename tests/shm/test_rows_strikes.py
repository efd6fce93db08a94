"""Interrupts, stops and kills at any point or step leave shared rows whole and writable."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import pytest
import torch

from tests.support.bounds import PROMPT
from tests.support.interrupts import each_interrupt
from tests.support.shared_rows import Batch, again, make_rows, numbered, put, read_all, read_at
from tests.support.striking import exit_code_of, forked, kill_self, stop_self, strike_at
from torchrl_unilab.errors import WaitTimeoutError
from torchrl_unilab.shm import lock as lock_module
from torchrl_unilab.shm import rows as rows_module
from torchrl_unilab.shm import shards as shards_module
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.window import Window

PROTOCOL = [lock_module, rows_module, shards_module]

ACTIONS: dict[str, Callable[[SharedRows], object]] = {
    "append": lambda rows: put(rows, 3),
    "claim": lambda rows: rows.claim(0),
    "rewrite": lambda rows: rows.rewrite(torch.tensor([2, 0]), numbered(900, 2)),
    "clear": lambda rows: rows.clear(),
    "replace": lambda rows: rows.replace(
        Window((0,) * rows.shards, (5,) * rows.shards),
        lambda shard, first, count: numbered(800, count),
        [(100, 0, 1)] * rows.shards,
    ),
}


def check_whole_and_writable(rows: SharedRows) -> None:
    """All readable rows are whole, and each shard can be written to at once."""
    read_all(rows)
    for shard in range(rows.shards):
        put(rows, 3, shard)
    for numbers, head in zip(read_all(rows), rows.window().heads, strict=True):
        assert numbers[-3:] == [*range(head - 3, head)]
    assert read_at(rows, [*range(rows.extent(rows.window())[0])])


def shapes(*cases: tuple[object, ...]) -> pytest.MarkDecorator:
    """Cases of an action and of the shards that it is tried on; all others are slow."""
    slow = [(name, shards) for name in ACTIONS for shards in (1, 3) if (name, shards) not in cases]
    slow_cases = [pytest.param(*case, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize(("name", "shards"), [*cases, *slow_cases])


@shapes(("append", 1), ("claim", 1), ("rewrite", 1), ("clear", 3), ("replace", 3))
def test_an_interrupt_at_any_point_leaves_rows_that_others_write_and_read(name, shards):
    with make_rows(8, shards, timeout=0.5, holding=10) as rows:
        (ask, asked), (answer, answered) = os.pipe(), os.pipe()
        other = again(rows, 0.5)

        def serve() -> None:
            while os.read(ask, 1):
                check_whole_and_writable(other)
                os.write(answered, b"1")

        with forked(serve):
            os.close(answered)
            for interrupt in each_interrupt(*PROTOCOL):
                interrupt.during(lambda: ACTIONS[name](rows))
                assert interrupt.leaves_gradients
                os.write(asked, b"1")
                assert os.read(answer, 1), "another process cannot go on"
                check_whole_and_writable(rows)
        for descriptor in (ask, asked, answer):
            os.close(descriptor)


def steps_of(name: str, shards: int) -> int:
    with make_rows(8, shards, holding=5) as rows:
        count = strike_at(rows, 0, kill_self)
        ACTIONS[name](rows)
        return count()


def kill_at(nth: int, name: str, rows: SharedRows) -> None:
    """Have a process do something to rows, and killed before its nth step."""

    def die() -> None:
        own = again(rows, PROMPT)
        strike_at(own, nth, kill_self)
        ACTIONS[name](own)

    assert exit_code_of(die) == -signal.SIGKILL


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
    with make_rows(8, shards, timeout=PROMPT, holding=10) as rows:

        def write_on() -> None:
            own = again(rows, PROMPT)
            while True:
                put(own, 3, shards - 1)

        with forked(write_on) if beside else contextlib.nullcontext():
            for nth in range(1, steps_of(name, shards) + 1):
                kill_at(nth, name, rows)
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
    with make_rows(holding=10) as rows:  # of which those from the third on are readable
        kill_at(3, "append", rows)
        assert rows.window() == Window((5,), (10,))
        assert read_at(rows, [2, 3, 4, 5]) == [5, 5, 5, 5]
        put(rows, 3)
        assert read_at(rows, [2, 3, 4, 5]) == [10, 11, 12, 5]


@pytest.mark.parametrize("name", ["append", "rewrite", "replace"])
def test_a_process_stopped_at_any_step_is_waited_for_within_bounds_and_named(name):
    for nth in range(1, steps_of(name, 1) + 1):
        with make_rows(timeout=0.02, holding=10) as rows:

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
        with make_rows(8, 3, holding=4) as rows:
            kill_at(nth, "replace", rows)
            rows.wait(0)
            assert rows.extent(rows.window())[0] in (0, 4 * 3, 5 * 3)


def test_a_replacement_that_fails_leaves_no_rows():
    with make_rows(holding=5) as rows:
        with pytest.raises(ZeroDivisionError):
            rows.replace(Window((0,), (3,)), lambda *_: 1 // 0, [(0, 0, 1)])

        assert rows.extent(rows.window()) == (0, False)
        check_whole_and_writable(rows)
