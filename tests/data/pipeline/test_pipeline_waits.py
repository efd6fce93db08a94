"""What ends the wait for a batch: rows that come, failures, and the end of the pipeline."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.bounds import DEADLINE
from tests.support.striking import exit_code_of
from tests.support.tables import COUNT, Table, drawn, make_pipeline, rows_of
from torchrl_unilab.data.pipeline.pipeline import DoubleBufferReplayPipeline
from torchrl_unilab.errors import SegmentClosedError, UsageError, WaitTimeoutError


@contextmanager
def concurrently(action: Callable[[], Any], after: threading.Event) -> Iterator[None]:
    """Do something in another thread once `after` is set."""

    def wait_and_act() -> None:
        assert after.wait(DEADLINE)
        action()

    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(wait_and_act)
        yield
        future.result(DEADLINE)


# Rows that have to come first


def test_a_batch_waits_for_the_rows_it_has_to_be_drawn_from(packer):
    table = Table(100)
    with (
        concurrently(lambda: table.write(50), after=table.counted),
        make_pipeline(table, packer=packer) as pipeline,
    ):
        pipeline.start_prepare(1, COUNT, min_snapshot_ptr=150)
        assert rows_of(pipeline.sample_large_batch(1, COUNT)) == drawn(1, 150)
        assert pipeline.last_metadata.snapshot_ptr == 150


def test_rows_that_do_not_come_are_named_with_those_that_did(packer):
    table = Table(100)
    with make_pipeline(table, packer=packer, timeout=0.05) as pipeline:
        with pytest.raises(WaitTimeoutError, match=r"100 rows .*0\.05 s \(expected 101\)"):
            wait_for(pipeline, min_ptr=101)
        assert pipeline.batch_ready(0, COUNT) is False
        assert pipeline.start_prepare(0, COUNT, min_snapshot_ptr=100) is True  # it can go on


def wait_for(pipeline: DoubleBufferReplayPipeline, min_ptr: int) -> None:
    """Prepare tick 0; an inline packer raises when it starts, a thread when one waits."""
    pipeline.start_prepare(0, COUNT, min_ptr)
    pipeline.wait_ready()


def test_a_batch_that_is_dropped_waits_for_no_rows_and_the_next_one_may():
    table = Table(10)
    with make_pipeline(table, timeout=1000 * DEADLINE) as pipeline:
        pipeline.start_prepare(0, COUNT, min_snapshot_ptr=99)
        assert table.counted.wait(DEADLINE)
        pipeline.discard()
        table.counted.clear()
        with concurrently(lambda: table.write(1), after=table.counted):
            pipeline.start_prepare(1, COUNT, min_snapshot_ptr=11)
            pipeline.sample_large_batch(1, COUNT)
        assert pipeline.last_metadata.snapshot_ptr == 11


# Failures and the end


@pytest.mark.parametrize("ask", ["batch_ready", "wait_until_ready", "sample_large_batch"])
def test_what_the_thread_fails_with_is_raised_by_the_call_that_needs_the_batch(table, ask):
    table.broken = True
    with make_pipeline(table) as pipeline:
        pipeline.start_prepare(5, COUNT)
        assert table.sampling.wait(DEADLINE)
        pipeline._prepared.exception()  # batch_ready does not wait
        with pytest.raises(LookupError, match="these rows cannot be read") as caught:
            getattr(pipeline, ask)(5, COUNT)
        assert "sample" in [frame.name for frame in caught.traceback]  # where it went wrong
        table.broken = False
        assert rows_of(pipeline.sample_large_batch(5, COUNT)) == drawn(5)


def test_what_an_inline_packer_fails_with_is_raised_at_once_and_the_tick_is_not_started(table):
    table.broken = True
    with make_pipeline(table, packer="inline") as pipeline:
        with pytest.raises(LookupError, match="these rows cannot be read"):
            pipeline.start_prepare(5, COUNT)
        table.broken = False
        assert pipeline.start_prepare(6, COUNT) is True


def test_a_dropped_batch_may_fail(table):
    table.broken = True
    with make_pipeline(table) as pipeline:
        pipeline.start_prepare(5, COUNT)
        pipeline.discard()
        table.broken = False
        assert pipeline.start_prepare(5, COUNT) is True


def test_closing_in_another_thread_ends_the_wait_for_rows(packer):
    table = Table(10)
    pipeline = make_pipeline(table, packer=packer, timeout=10 * DEADLINE)
    with (
        concurrently(pipeline.close, after=table.counted),
        pytest.raises(SegmentClosedError, match="close"),
    ):
        wait_for(pipeline, min_ptr=11)


ASKS = {
    "start_prepare": (1, COUNT),
    "batch_ready": (1, COUNT),
    "wait_until_ready": (1, COUNT),
    "sample_large_batch": (1, COUNT),
    "wait_ready": (),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_closed_pipeline_refuses_to_be_asked(pipeline, ask):
    pipeline.start_prepare(1, COUNT)
    pipeline.close()
    with pytest.raises(SegmentClosedError, match="cannot use replay pipeline: it is closed"):
        getattr(pipeline, ask)(*ASKS[ask])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_is_refused_a_pipeline_whose_thread_it_lacks(table):
    with make_pipeline(table, packer="thread") as pipeline:
        pipeline.sample_large_batch(0, COUNT)

        def prepare() -> None:
            with pytest.raises(UsageError, match="in a forked process, without its thread"):
                pipeline.start_prepare(1, COUNT)

        assert exit_code_of(prepare) == 0


def test_a_pipeline_is_closed_more_than_once_and_its_ticks_end(pipeline):
    batch = pipeline.sample_large_batch(0, COUNT)
    pipeline.close()
    pipeline.close()
    pipeline.after_tick()
    assert rows_of(batch) == drawn(0)


@pytest.mark.parametrize("closed", [True, False])
def test_a_pipeline_takes_its_thread_with_it_closed_or_not(table, closed):
    before = set(threading.enumerate())
    pipeline = make_pipeline(table)
    pipeline.sample_large_batch(0, COUNT)
    (thread,) = set(threading.enumerate()) - before
    if closed:
        pipeline.close()
    del pipeline
    thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_neither_copied_nor_pickled(table, copied):
    with make_pipeline(table) as pipeline, pytest.raises(UsageError, match="it has a thread"):
        copied(pipeline)
