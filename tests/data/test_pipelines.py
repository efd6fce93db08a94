"""Batches prepared ahead: states, seeds, slots, and what ends each wait."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from tests.support.bounds import DEADLINE, PROMPT
from torchrl_unilab.data.packers import PackerLink, PackOrder, ProcessPacker, SourcePacker
from torchrl_unilab.data.pipelines import (
    DoubleBufferReplayPipeline,
    ReplayPipeline,
    ReplaySnapshot,
    ReplayTickMetadata,
)
from torchrl_unilab.errors import (
    ConfigError,
    SegmentClosedError,
    WorkerError,
    WorkersBehindError,
)
from torchrl_unilab.runtime import Link, WorkerGroup

COUNT = 64
CAPACITY = 512


class Table:
    """Rows that say everywhere which row they are, in shared memory."""

    def __init__(self, rows: int = CAPACITY) -> None:
        self.rows = self._make(CAPACITY, shared=True)
        self.written = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.batches = 0
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.packing = threading.Event()
        self.add(rows)

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows, "written": self.written, "broken": self.broken}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Table.__init__(self, 0)
        self.__dict__.update(state)

    @staticmethod
    def _make(count: int, *, shared: bool) -> TensorDict:
        numbers, flags = torch.zeros(count, 8), torch.zeros(count, 1, dtype=torch.uint8)
        if shared:
            numbers.share_memory_()
            flags.share_memory_()
        fields = {
            "observation": numbers[:, :4],
            "next": {"observation": numbers[:, 4:], "done": flags.view(torch.bool)},
        }
        return TensorDict(fields, [count])

    def add(self, count: int) -> None:
        start = int(self.written)
        for row in range(start, start + count):
            self.rows["observation"][row % CAPACITY] = row
            self.rows["next", "observation"][row % CAPACITY] = row
            self.rows["next", "done"][row % CAPACITY] = bool(row % 2)
        self.written += count

    def snapshot(self) -> ReplaySnapshot:
        written = int(self.written)
        return ReplaySnapshot(written, min(written, CAPACITY))

    def empty_batch(
        self, count: int, *, pin_memory: bool = False, shared: bool = False
    ) -> TensorDict:
        self.batches += 1
        return self._make(count, shared=shared)

    def sample(
        self,
        count: int,
        *,
        seed: int,
        snapshot: ReplaySnapshot | None = None,
        out: TensorDictBase | None = None,
    ) -> TensorDictBase:
        self.packing.set()
        assert self.gate.wait(DEADLINE)
        if self.broken:
            raise LookupError("these rows cannot be read")
        assert snapshot is not None
        assert out is not None
        index = drawn(seed, snapshot.size, count)
        return out.update_(self.rows[index])


def drawn(seed: int, size: int, count: int = COUNT) -> torch.Tensor:
    """The rows of a batch, with repetitions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(size, (count,), generator=generator)


def rows_of(batch: TensorDictBase) -> list[int]:
    """Which rows a batch holds, each of which must be whole."""
    rows = batch["observation"][:, 0].clone()
    assert bool((batch["observation"] == rows[:, None]).all()), "a mixed row"
    assert bool((batch["next", "observation"] == rows[:, None]).all()), "a mixed row"
    assert bool((batch["next", "done"][:, 0] == rows % 2).all()), "a mixed row"
    return rows.int().tolist()


@contextmanager
def hurried(action: Callable[[], Any], after: threading.Event) -> Iterator[None]:
    """Do something in another thread once `after` is set."""

    def wait_and_act() -> None:
        assert after.wait(DEADLINE)
        action()

    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(wait_and_act)
        yield
        future.result(DEADLINE)


def prepare(pipeline: ReplayPipeline, tick: int, min_snapshot_ptr: int) -> None:
    """Prepare a batch; an inline packer raises when it starts, a thread when one waits."""
    pipeline.start_prepare(tick, COUNT, min_snapshot_ptr)
    pipeline.wait_ready()


def poll(happened: Callable[[], Any]) -> None:
    """Ask again and again until it happened."""
    until = time.monotonic() + DEADLINE
    while not happened():
        assert time.monotonic() < until, f"not within {DEADLINE} s"


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture(params=["thread", "inline"])
def packer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# States


def test_a_tick_is_started_once_and_another_only_after_it_was_consumed(table, packer):
    pipeline: ReplayPipeline
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        assert pipeline.start_prepare(3, COUNT) is True
        assert pipeline.start_prepare(3, COUNT) is False
        assert pipeline.wait_until_ready(3, COUNT) is True
        assert pipeline.start_prepare(3, COUNT) is False
        with pytest.raises(RuntimeError, match=r"prepare tick 4: tick 3 has not been consumed"):
            pipeline.start_prepare(4, COUNT)
        with pytest.raises(RuntimeError, match=r"prepare tick 4: tick 3 has not been consumed"):
            pipeline.sample_large_batch(4, COUNT)
        assert rows_of(pipeline.sample_large_batch(3, COUNT)) == drawn(3, CAPACITY).tolist()
        assert pipeline.start_prepare(4, COUNT) is True


def test_a_batch_is_ready_once_it_is_packed_and_not_before(table):
    table.gate.clear()
    with DoubleBufferReplayPipeline(table, sample_count=COUNT) as pipeline:
        assert pipeline.batch_ready(0, COUNT) is False
        pipeline.wait_ready()
        pipeline.start_prepare(0, COUNT)
        assert table.packing.wait(DEADLINE)
        assert pipeline.batch_ready(0, COUNT) is False
        with hurried(table.gate.set, table.packing):
            assert pipeline.wait_until_ready(0, COUNT) is True
        assert pipeline.batch_ready(0, COUNT) is True
        assert pipeline.batch_ready(1, COUNT) is False


# The tick that is being learnt


def test_the_same_tick_is_the_same_batch_until_after_tick(table, packer):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        first = pipeline.sample_large_batch(3, COUNT)
        table.add(COUNT)
        pipeline.start_prepare(4, COUNT)

        again = pipeline.sample_large_batch(3, COUNT)

        assert again["observation"].data_ptr() == first["observation"].data_ptr()
        assert rows_of(again) == drawn(3, CAPACITY).tolist()
        assert pipeline.last_metadata.tick_id == 3


def test_the_tick_that_is_being_learnt_is_ready_and_needs_no_start(table, packer):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        pipeline.sample_large_batch(3, COUNT)

        assert pipeline.batch_ready(3, COUNT) is True
        assert pipeline.wait_until_ready(3, COUNT) is True
        assert pipeline.start_prepare(3, COUNT) is False


def test_a_tick_asked_for_while_another_is_being_learnt_is_an_error(table, packer):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        pipeline.sample_large_batch(3, COUNT)
        pipeline.start_prepare(4, COUNT)

        message = r"sample tick 4: tick 3 is being learnt \(expected .*after_tick\(\)"
        with pytest.raises(RuntimeError, match=message):
            pipeline.sample_large_batch(4, COUNT)

        pipeline.after_tick()
        assert rows_of(pipeline.sample_large_batch(4, COUNT)) == drawn(4, CAPACITY).tolist()


def test_after_tick_a_tick_is_prepared_anew(table, packer):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        pipeline.sample_large_batch(3, COUNT)
        pipeline.after_tick()

        assert pipeline.batch_ready(3, COUNT) is False
        assert pipeline.start_prepare(3, COUNT) is True


def test_waiting_for_a_tick_prepares_it(table, packer):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        assert pipeline.wait_until_ready(3, COUNT) is True

        assert pipeline.batch_ready(3, COUNT) is True
        assert pipeline.start_prepare(3, COUNT) is False


def test_waiting_for_a_tick_while_another_is_prepared_is_an_error(table, packer):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        pipeline.start_prepare(3, COUNT)
        with pytest.raises(RuntimeError, match=r"prepare tick 4: tick 3 has not been consumed"):
            pipeline.wait_until_ready(4, COUNT)


def test_a_restored_pipeline_forgets_the_tick_that_was_being_learnt(table, packer):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        pipeline.sample_large_batch(3, COUNT)
        pipeline.load_state_dict({"base_seed": 7})
        assert rows_of(pipeline.sample_large_batch(3, COUNT)) == drawn(10, CAPACITY).tolist()


def test_the_thread_packs_while_the_learner_goes_on_and_inline_packs_at_once(table):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer="inline") as pipeline:
        pipeline.start_prepare(0, COUNT)
        assert pipeline.batch_ready(0, COUNT) is True
    table.gate.clear()
    with DoubleBufferReplayPipeline(table, sample_count=COUNT) as pipeline:
        pipeline.start_prepare(0, COUNT)  # or this would wait for the gate
        table.gate.set()
        pipeline.wait_ready()


@pytest.mark.parametrize("ask", ["start_prepare", "batch_ready", "sample_large_batch"])
def test_another_batch_size_is_refused_and_changes_nothing(table, packer, ask):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        pipeline.start_prepare(1, COUNT)
        with pytest.raises(ConfigError, match=r"tick 1: 65 rows \(expected 64.*another pipeline"):
            getattr(pipeline, ask)(1, COUNT + 1)
        assert rows_of(pipeline.sample_large_batch(1, COUNT)) == drawn(1, CAPACITY).tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample_count": 0}, "batches of 0 rows"),
        ({"timeout": 0.0}, "0 s to wait"),
        ({"base_seed": -1}, "seed -1"),
        ({"packer": "gpu"}, "packer 'gpu'"),
        ({"native_h2d": "on"}, "native_h2d: 'on'"),
    ],
)
def test_settings_that_cannot_work_are_refused(table, settings, message):
    with pytest.raises(ConfigError, match=message):
        DoubleBufferReplayPipeline(table, **{"sample_count": COUNT, **settings})
    assert table.batches == 0


def test_a_packer_made_for_another_batch_size_is_refused(table):
    packer, link = ProcessPacker.pair(table, COUNT)
    try:
        with pytest.raises(ConfigError, match=r"host batches \[\(64,\), \(64,\)\] .*2 of \(65,\)"):
            DoubleBufferReplayPipeline(table, sample_count=COUNT + 1, packer=packer)
    finally:
        packer.close()
        link.close()


# Seeds


@given(
    base_seed=st.integers(0, 2**40),
    ticks=st.lists(st.integers(0, 2**20), min_size=1, max_size=5),
    ahead=st.lists(st.booleans(), min_size=5, max_size=5),
    inline=st.booleans(),
)
@settings(max_examples=40)
def test_a_tick_gets_the_same_batch_in_any_order_and_whoever_packs(base_seed, ticks, ahead, inline):
    with DoubleBufferReplayPipeline(
        TABLE, sample_count=COUNT, base_seed=base_seed, packer="inline" if inline else "thread"
    ) as pipeline:
        for tick, prepared in zip(ticks, ahead, strict=False):
            if prepared:
                pipeline.start_prepare(tick, COUNT)
            batch = pipeline.sample_large_batch(tick, COUNT)
            assert rows_of(batch) == drawn(base_seed + tick, CAPACITY).tolist()
            pipeline.after_tick()


TABLE = Table()


def test_a_restored_pipeline_draws_with_the_seed_that_was_saved(table, packer):
    settings = {"sample_count": COUNT, "packer": packer}
    with (
        DoubleBufferReplayPipeline(table, base_seed=7, **settings) as saved,
        DoubleBufferReplayPipeline(table, base_seed=1000, **settings) as pipeline,
    ):
        pipeline.start_prepare(3, COUNT)  # with the seed of before: not used
        pipeline.load_state_dict(saved.state_dict())
        for tick in (3, 4):
            batch = pipeline.sample_large_batch(tick, COUNT)
            assert rows_of(batch) == drawn(7 + tick, CAPACITY).tolist()
            pipeline.after_tick()


def test_the_metadata_say_what_was_drawn_from_and_where_it_went(table, packer):
    table.add(100)
    with DoubleBufferReplayPipeline(
        table, sample_count=COUNT, base_seed=40, packer=packer
    ) as pipeline:
        assert pipeline.last_metadata is None
        pipeline.sample_large_batch(2, COUNT)
        pipeline.start_prepare(7, COUNT)
        assert pipeline.last_metadata == ReplayTickMetadata(
            tick_id=2,
            snapshot_ptr=612,
            snapshot_size=512,
            sample_seed=42,
            sample_count=64,
            batch_host_slot=0,
            batch_gpu_slot=None,
        )
        pipeline.after_tick()
        pipeline.sample_large_batch(7, COUNT)
        assert pipeline.last_metadata == ReplayTickMetadata(7, 612, 512, 47, 64, 1, None)


def test_the_manifest_says_how_batches_travel(table, packer):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        assert pipeline.h2d_submitter == "none"
        assert pipeline.transfer_manifest == {
            "device": "cpu",
            "slots": 2,
            "blocks": 2,
            "bytes": COUNT * (8 * 4 + 1),
            "pinned": False,
            "submitter": "none",
            "reason": "the learner reads host memory",
            "packer": packer,
        }


def test_spans_of_packing_and_waiting_are_told_in_order(table, packer):
    spans = []
    with DoubleBufferReplayPipeline(
        table, sample_count=COUNT, packer=packer, trace=lambda *span: spans.append(span)
    ) as pipeline:
        before = time.perf_counter()
        pipeline.sample_large_batch(0, COUNT)
        after = time.perf_counter()
    assert {name for name, _, _ in spans} == {"replay pack", "replay submit", "replay wait"}
    assert len(spans) == 3
    assert all(before <= begin <= end <= after for _, begin, end in spans)


# Slots


def test_the_hot_batch_stays_as_it_is_while_the_next_one_is_prepared(table, packer):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        for tick in range(20):
            batch = pipeline.sample_large_batch(tick, COUNT)
            pipeline.start_prepare(tick + 1, COUNT)
            pipeline.wait_ready()
            assert rows_of(batch) == drawn(tick, CAPACITY).tolist()
            pipeline.after_tick()


def test_a_learner_never_sees_a_batch_change_under_it_while_packing_goes_on(table):
    """Stress: read the hot batch as long as the thread packs the cold one."""
    torch.set_num_threads(1)
    reads = 0
    with DoubleBufferReplayPipeline(table, sample_count=COUNT) as pipeline:
        for tick in range(400):
            batch = pipeline.sample_large_batch(tick, COUNT)
            expected = drawn(tick, CAPACITY).float()
            pipeline.start_prepare(tick + 1, COUNT)
            while True:
                done = pipeline.batch_ready(tick + 1, COUNT)
                assert torch.equal(batch["observation"][:, 3], expected)
                assert torch.equal(batch["next", "observation"][:, 3], expected)
                reads += 1
                if done:
                    break
            pipeline.after_tick()
    assert reads > 400


def test_entries_added_to_a_batch_do_not_stay_in_the_slot(table):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT) as pipeline:
        for tick in range(4):
            batch = pipeline.sample_large_batch(tick, COUNT)
            assert set(batch.keys(True, True)) == set(table.rows.keys(True, True))
            batch["advantage"] = torch.zeros(COUNT)
            batch["next", "value"] = torch.zeros(COUNT)
            pipeline.after_tick()


def test_many_ticks_take_no_more_memory_than_two_slots_nor_more_threads(table):
    with DoubleBufferReplayPipeline(table, sample_count=COUNT) as pipeline:
        addresses, threads, more = set(), set(), set()
        for tick in range(300):
            if tick == 50:
                tracemalloc.start()
            if tick == 150:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
            batch = pipeline.sample_large_batch(tick, COUNT)
            pipeline.start_prepare(tick + 1, COUNT)
            addresses.add(batch["observation"].data_ptr())
            threads = threads or set(threading.enumerate())
            more |= set(threading.enumerate()) - threads
            pipeline.after_tick()
        pipeline.wait_ready()
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert len(addresses) == table.batches == 2
    assert not more
    assert growth < 15_000  # of 150 ticks: not one small object each


# Rows that have to come first


def test_a_batch_waits_for_the_rows_it_is_to_be_drawn_from(packer):
    table = Table(100)
    started = threading.Event()

    def snapshot(real: Callable[[], ReplaySnapshot] = table.snapshot) -> ReplaySnapshot:
        started.set()
        return real()

    table.snapshot = snapshot
    with (
        hurried(lambda: table.add(50), started),
        DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline,
    ):
        pipeline.start_prepare(1, COUNT, min_snapshot_ptr=150)
        batch = pipeline.sample_large_batch(1, COUNT)
        assert rows_of(batch) == drawn(1, 150).tolist()
        assert pipeline.last_metadata.snapshot_ptr == 150


def test_rows_that_do_not_come_are_named_with_those_that_did_and_the_pipeline_goes_on(packer):
    table = Table(100)
    with DoubleBufferReplayPipeline(
        table, sample_count=COUNT, packer=packer, timeout=0.05
    ) as pipeline:
        with pytest.raises(WorkersBehindError, match=r"100 rows .*0\.05 s \(expected 101\)"):
            prepare(pipeline, 0, min_snapshot_ptr=101)
        assert pipeline.batch_ready(0, COUNT) is False
        assert pipeline.start_prepare(0, COUNT, min_snapshot_ptr=100) is True
        assert rows_of(pipeline.sample_large_batch(0, COUNT)) == drawn(0, 100).tolist()


# Failures and the end


@pytest.mark.parametrize("ask", ["batch_ready", "wait_until_ready", "sample_large_batch"])
def test_what_the_thread_fails_with_is_raised_by_whoever_needs_the_batch(table, ask):
    table.broken = True
    with DoubleBufferReplayPipeline(table, sample_count=COUNT) as pipeline:
        pipeline.start_prepare(5, COUNT)
        began = time.monotonic()
        with pytest.raises(LookupError, match="these rows cannot be read") as caught:
            poll(lambda: getattr(pipeline, ask)(5, COUNT))
        assert time.monotonic() - began < PROMPT
        assert "sample" in [frame.name for frame in caught.traceback]  # where it went wrong
        table.broken = False
        assert rows_of(pipeline.sample_large_batch(5, COUNT)) == drawn(5, CAPACITY).tolist()


def test_what_an_inline_packer_fails_with_is_raised_at_once_and_the_tick_is_not_begun(table):
    table.broken = True
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer="inline") as pipeline:
        with pytest.raises(LookupError, match="these rows cannot be read"):
            pipeline.start_prepare(5, COUNT)
        table.broken = False
        assert pipeline.start_prepare(6, COUNT) is True


def test_closing_in_another_thread_ends_the_wait_for_rows(packer):
    table, waiting = Table(10), threading.Event()

    def snapshot(real: Callable[[], ReplaySnapshot] = table.snapshot) -> ReplaySnapshot:
        waiting.set()
        return real()

    table.snapshot = snapshot
    pipeline = DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer)
    with hurried(pipeline.close, waiting):
        began = time.monotonic()
        with pytest.raises(SegmentClosedError, match="close"):  # while waiting, or just before
            prepare(pipeline, 0, min_snapshot_ptr=11)
        assert time.monotonic() - began < PROMPT


def test_a_closed_pipeline_refuses_everything_but_to_be_closed_and_leaves_no_thread(table):
    threads = threading.active_count()
    pipeline = DoubleBufferReplayPipeline(table, sample_count=COUNT)
    batch = pipeline.sample_large_batch(0, COUNT)
    pipeline.start_prepare(1, COUNT)
    assert threading.active_count() == threads + 1
    pipeline.close()
    pipeline.close()
    assert threading.active_count() == threads
    assert rows_of(batch) == drawn(0, CAPACITY).tolist()
    for ask in (pipeline.start_prepare, pipeline.batch_ready, pipeline.sample_large_batch):
        with pytest.raises(SegmentClosedError, match=r"used after close\(\)"):
            ask(1, COUNT)
    with pytest.raises(SegmentClosedError, match=r"used after close\(\)"):
        pipeline.wait_ready()
    pipeline.after_tick()


def test_a_pipeline_that_nobody_closed_takes_its_thread_with_it(table):
    threads = threading.active_count()
    pipeline = DoubleBufferReplayPipeline(table, sample_count=COUNT)
    pipeline.sample_large_batch(0, COUNT)
    thread = next(t for t in threading.enumerate() if t.name.startswith("replay-packer"))
    assert not thread.daemon
    del pipeline
    thread.join(DEADLINE)
    assert threading.active_count() == threads


# A process that packs


def _collect(link: Link, packers: list[PackerLink], table: Table) -> None:
    """A collector: serves its packers between steps, and does what it is told."""
    link.ready()
    while True:
        request = link.request(block=False)
        if request is not None and request[0] == "break":
            table.broken = True
            link.answer()
        elif request is not None and request[0] == "add":
            table.add(request[1])
            link.answer()
        elif request is not None:
            link.answer([packer.closed for packer in packers])
        for packer in packers:
            packer.serve(table, 0.005)


@contextmanager
def collecting(
    table: Table, timeouts: list[float], base_seed: int = 0
) -> Iterator[tuple[WorkerGroup, list[DoubleBufferReplayPipeline]]]:
    """A collector in another process and pipelines, one per timeout, for which it packs."""
    pairs = [ProcessPacker.pair(table, COUNT) for _ in timeouts]
    group = WorkerGroup(_collect, [([link for _, link in pairs], table)], name="collector")
    made = []
    try:
        for (packer, _), timeout in zip(pairs, timeouts, strict=True):
            packer.started(group.wait)
            made.append(
                DoubleBufferReplayPipeline(
                    table, sample_count=COUNT, packer=packer, base_seed=base_seed, timeout=timeout
                )
            )
        yield group, made
    finally:
        for pipeline in made:
            pipeline.close()
        group.stop()


def test_a_process_packs_as_a_thread_does_waits_for_rows_and_sees_the_end():
    table = Table(200)
    with collecting(table, [DEADLINE] * 2, base_seed=9) as (group, (pipeline, closing)):
        assert pipeline.transfer_manifest["packer"] == "process"
        assert closing.start_prepare(0, COUNT, min_snapshot_ptr=10_000)
        with DoubleBufferReplayPipeline(table, sample_count=COUNT, base_seed=9) as threaded:
            for tick in range(50):
                batch = pipeline.sample_large_batch(tick, COUNT)
                assert pipeline.start_prepare(tick + 1, COUNT) is True
                pipeline.wait_ready()  # into the other slot
                expected = threaded.sample_large_batch(tick, COUNT)
                assert rows_of(batch) == rows_of(expected) == drawn(9 + tick, 200).tolist()
                assert pipeline.last_metadata == threaded.last_metadata
                pipeline.after_tick()
                threaded.after_tick()
        pipeline.sample_large_batch(50, COUNT)
        pipeline.after_tick()
        pipeline.start_prepare(51, COUNT, min_snapshot_ptr=201)
        assert pipeline.batch_ready(51, COUNT) is False
        group.ask(0, "add", 1)
        assert rows_of(pipeline.sample_large_batch(51, COUNT)) == drawn(60, 201).tolist()
        pipeline.after_tick()

        with hurried(closing.close, closing_soon := threading.Event()):
            closing_soon.set()
            with pytest.raises(SegmentClosedError, match="closed"):
                closing.wait_until_ready(0, COUNT)
        poll(lambda: group.ask(0, "closed?") == [False, True])
        assert rows_of(pipeline.sample_large_batch(52, COUNT)) == drawn(61, 201).tolist()


def test_a_stopped_process_is_named_or_waited_for_no_longer_than_the_timeout(table, monkeypatch):
    with collecting(table, [DEADLINE]) as (group, (stopped,)):
        process = psutil.Process(group.pids[0])
        stopped.sample_large_batch(0, COUNT)
        stopped.after_tick()
        monkeypatch.setattr(stopped, "_timeout", 0.3)
        process.suspend()
        began = time.monotonic()
        stopped.start_prepare(1, COUNT)
        either = r"no answer .* within 0\.3 s .*is stopped|was stopped by a signal"
        with pytest.raises(WorkerError, match=either) as first:
            stopped.wait_ready()
        assert time.monotonic() - began < PROMPT
        process.resume()
        with pytest.raises(WorkerError) as second:  # it may still be writing
            stopped.sample_large_batch(1, COUNT)
        assert second.value is first.value


def test_a_killed_process_is_named_with_its_signal(table):
    with collecting(table, [DEADLINE]) as (group, (killed,)):
        process = psutil.Process(group.pids[0])
        killed.sample_large_batch(0, COUNT)
        killed.after_tick()
        process.suspend()
        killed.start_prepare(1, COUNT)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"collector 0, .* was ended by SIGKILL"):
            killed.wait_until_ready(1, COUNT)
        assert time.monotonic() - began < PROMPT
        with pytest.raises(WorkerError, match="SIGKILL"):
            killed.sample_large_batch(2, COUNT)


def test_what_a_process_fails_with_is_relayed_with_its_traceback(table):
    with collecting(table, [DEADLINE]) as (group, (pipeline,)):
        group.ask(0, "break")
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"(?s)Traceback.*in serve.*cannot be read"):
            pipeline.sample_large_batch(0, COUNT)
        assert time.monotonic() - began < PROMPT


def test_without_a_group_a_process_that_lets_go_of_its_pipe_is_an_error(table):
    packer, link = ProcessPacker.pair(table, COUNT)
    packer.started()
    assert link.closed
    assert link.serve(table) is False
    with DoubleBufferReplayPipeline(table, sample_count=COUNT, packer=packer) as pipeline:
        for tick in (0, 1):
            with pytest.raises(WorkerError, match="has closed its pipe or died"):
                pipeline.sample_large_batch(tick, COUNT)


def test_a_link_serves_an_order_once_its_rows_are_there_and_ends_with_the_packer():
    table = Table(100)
    packer, link = ProcessPacker.pair(table, COUNT)
    assert link.serve(table) is False
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(packer.pack, PackOrder(1, COUNT, 7, 101, DEADLINE))
        until = time.monotonic() + DEADLINE
        while link._order is None:
            assert link.serve(table) is False
            assert time.monotonic() < until
        assert link.serve(table, 0.001) is False
        assert not future.done()
        table.add(1)
        began = time.monotonic()
        assert link.serve(table, DEADLINE) is True
        assert time.monotonic() - began < PROMPT  # there is nothing to wait for
        assert future.result(DEADLINE) == ReplaySnapshot(101, 101)
    batches = packer.host_batches(COUNT, pin_memory=False)
    assert rows_of(batches[1]) == drawn(7, 101).tolist()
    assert rows_of(batches[0]) == [0] * COUNT
    packer.close()
    packer.close()
    assert link.serve(table, DEADLINE) is False
    assert link.closed
    with pytest.raises(SegmentClosedError):
        packer.pack(PackOrder(0, COUNT, 7, 0, DEADLINE))


def test_an_order_whose_rows_do_not_come_in_a_process_names_both_numbers(table):
    packer, link = ProcessPacker.pair(table, COUNT)
    try:
        for _ in range(2):  # the order is still out, so it stays a failure
            with pytest.raises(WorkersBehindError, match=r"512 rows .*\(expected 600\)"):
                packer.pack(PackOrder(0, COUNT, 7, 600, 0.02))
    finally:
        packer.close()
        link.close()


def test_a_closed_packer_packs_no_more(table):
    packer = SourcePacker(table, background=False)
    packer.host_batches(COUNT, pin_memory=False)
    packer.pack(PackOrder(0, COUNT, 7, 0, 1.0))
    packer.close()
    with pytest.raises(SegmentClosedError):
        packer.pack(PackOrder(0, COUNT, 7, 0, 1.0))
