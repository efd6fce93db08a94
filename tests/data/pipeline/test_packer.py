"""A process that packs the learner's batches between its own steps, and its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from tests.support.bounds import DEADLINE, PROMPT
from tests.support.tables import COUNT, Table, drawn, rows_of
from torchrl_unilab.data.pipeline.packer import (
    PackerLink,
    PackOrder,
    ProcessPacker,
    ReplaySnapshot,
)
from torchrl_unilab.data.pipeline.pipeline import DoubleBufferReplayPipeline
from torchrl_unilab.errors import SegmentClosedError, WorkerError
from torchrl_unilab.runtime import Link, WorkerGroup

ORDER = PackOrder(slot=1, count=COUNT, seed=7, snapshot=ReplaySnapshot(100, 100))


@pytest.fixture
def table() -> Table:
    return Table(200)


@pytest.fixture
def pair(table: Table) -> Iterator[tuple[ProcessPacker, PackerLink]]:
    packer, link = ProcessPacker.pair(table, COUNT)
    yield packer, link
    packer.close()
    link.close()


# Both ends in this process


def test_an_order_is_packed_into_its_slot_and_no_other(table, pair):
    packer, link = pair
    with ThreadPoolExecutor(1) as executor:
        packed = executor.submit(packer.pack, ORDER, DEADLINE)
        assert link.serve(table, DEADLINE) is True
        packed.result(DEADLINE)
    assert rows_of(packer.batches[1]) == drawn(7, 100)
    assert rows_of(packer.batches[0]) == [0] * COUNT


def test_without_an_order_nothing_is_packed(table, pair):
    assert pair[1].serve(table) is False


def test_a_link_sees_the_end_of_the_packer(table, pair):
    packer, link = pair
    packer.close()
    assert link.serve(table, DEADLINE) is False
    assert link.closed
    assert link.serve(table, DEADLINE) is False


def test_a_closed_packer_packs_no_more(pair):
    packer, _ = pair
    packer.close()
    packer.close()
    with pytest.raises(SegmentClosedError, match="pipeline was closed"):
        packer.pack(ORDER, DEADLINE)


def test_closing_in_another_thread_ends_the_wait_for_an_answer(pair):
    packer, link = pair
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(packer.pack, ORDER, 10 * DEADLINE)
        assert link._connection.poll(DEADLINE)  # the order is out
        packer.close()
        with pytest.raises(SegmentClosedError, match="pipeline was closed"):
            waiting.result(DEADLINE)


def test_an_order_that_is_not_served_in_time_is_the_last_one(pair):
    packer, _ = pair
    for _ in range(2):  # the first order is still out: a late answer would write to its slot
        with pytest.raises(WorkerError, match=r"no answer .* within 0\.02 s .*does not serve"):
            packer.pack(ORDER, 0.02)


def test_without_a_group_a_process_that_closes_its_link_is_an_error(table, pair):
    packer, link = pair
    packer.started()
    assert link.closed
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        for tick in (0, 1):
            with pytest.raises(WorkerError, match="has closed its pipe or died"):
                pipeline.sample_large_batch(tick, COUNT)


# Two processes


def _collect(link: Link, packers: list[PackerLink], table: Table) -> None:
    """A collector: serves its packers between steps, and breaks, adds rows or answers."""
    link.ready()
    while True:
        request = link.request(block=False)
        if request is not None:
            if request[0] == "break":
                table.broken = True
            elif request[0] == "add":
                table.add(request[1])
            link.answer([packer.closed for packer in packers])
        for packer in packers:
            packer.serve(table, 0.005)


@contextmanager
def collecting(
    table: Table, pipelines: int = 1
) -> Iterator[tuple[WorkerGroup, list[DoubleBufferReplayPipeline]]]:
    """A collector in another process, and pipelines for which it packs."""
    pairs = [ProcessPacker.pair(table, COUNT) for _ in range(pipelines)]
    group = WorkerGroup(_collect, [([link for _, link in pairs], table)], name="collector")
    made = []
    try:
        for packer, _ in pairs:
            packer.started(group.wait)
            made.append(
                DoubleBufferReplayPipeline(
                    table, sample_count=COUNT, packer=packer, base_seed=9, timeout=DEADLINE
                )
            )
        yield group, made
    finally:
        for pipeline in made:
            pipeline.close()
        group.stop()


def test_a_process_packs_what_a_thread_would(table):
    with (
        collecting(table) as (_, (pipeline,)),
        DoubleBufferReplayPipeline(table, sample_count=COUNT, base_seed=9) as threaded,
    ):
        assert pipeline.transfer_manifest["packer"] == "process"
        for tick in range(50):
            batch = pipeline.sample_large_batch(tick, COUNT)
            assert pipeline.start_prepare(tick + 1, COUNT) is True
            pipeline.wait_ready()  # into the other slot
            expected = threaded.sample_large_batch(tick, COUNT)
            assert rows_of(batch) == rows_of(expected) == drawn(9 + tick, 200)
            assert pipeline.last_metadata == threaded.last_metadata
            pipeline.after_tick()
            threaded.after_tick()


def test_a_process_packs_once_its_rows_have_come_and_outlives_one_of_its_pipelines(table):
    with collecting(table, 2) as (group, (pipeline, closing)):
        pipeline.start_prepare(51, COUNT, min_snapshot_ptr=201)
        assert pipeline.batch_ready(51, COUNT) is False
        closing.close()
        group.ask(0, "add", 1)
        assert rows_of(pipeline.sample_large_batch(51, COUNT)) == drawn(60, 201)
        _poll(lambda: group.ask(0, "closed?") == [False, True])


def _poll(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE
    while not happened():
        assert time.monotonic() < until, f"not within {DEADLINE} s"


def test_a_stopped_process_is_named_or_waited_for_no_longer_than_the_timeout(table, monkeypatch):
    with collecting(table) as (group, (pipeline,)):
        process = psutil.Process(group.pids[0])
        pipeline.sample_large_batch(0, COUNT)
        monkeypatch.setattr(pipeline, "_timeout", 0.3)
        process.suspend()
        pipeline.start_prepare(1, COUNT)
        began = time.monotonic()
        either = r"no answer .* within 0\.3 s .*is stopped|was stopped by a signal"
        with pytest.raises(WorkerError, match=either):
            pipeline.wait_ready()
        assert time.monotonic() - began < PROMPT
        process.resume()


def test_a_killed_process_is_named_with_its_signal(table):
    with collecting(table) as (group, (pipeline,)):
        process = psutil.Process(group.pids[0])
        process.suspend()
        pipeline.start_prepare(1, COUNT)
        os.kill(process.pid, signal.SIGKILL)
        for tick in (1, 2):
            with pytest.raises(WorkerError, match=r"collector 0, .* was ended by SIGKILL"):
                pipeline.wait_until_ready(tick, COUNT)


def test_what_a_process_fails_with_is_relayed_with_its_traceback(table):
    with collecting(table) as (group, (pipeline,)):
        group.ask(0, "break")
        with pytest.raises(WorkerError, match=r"(?s)Traceback.*in serve.*cannot be read"):
            pipeline.sample_large_batch(0, COUNT)
