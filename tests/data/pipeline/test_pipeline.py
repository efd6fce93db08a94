"""Batches prepared ahead: states, seeds and slots."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.support.bounds import DEADLINE
from tests.support.tables import COUNT, Table, drawn, make_pipeline, rows_of
from torchrl_unilab.data.pipeline.pipeline import DoubleBufferReplayPipeline, ReplayTickMetadata
from torchrl_unilab.errors import ConfigError

# Ticks


ASKING = pytest.mark.parametrize("ask", ["start_prepare", "wait_until_ready", "sample_large_batch"])


@ASKING
def test_a_tick_that_was_asked_for_or_is_being_learnt_is_not_started_again(pipeline, ask):
    getattr(pipeline, ask)(3, COUNT)
    assert pipeline.start_prepare(3, COUNT) is False
    assert pipeline.wait_until_ready(3, COUNT) is True
    assert pipeline.batch_ready(3, COUNT) is True


@ASKING
def test_another_tick_waits_until_the_prepared_one_was_sampled(pipeline, ask):
    pipeline.start_prepare(3, COUNT)

    with pytest.raises(RuntimeError, match=r"prepare tick 4: tick 3 has not been consumed"):
        getattr(pipeline, ask)(4, COUNT)

    assert rows_of(pipeline.sample_large_batch(3, COUNT)) == drawn(3)
    assert pipeline.start_prepare(4, COUNT) is True


def test_a_batch_is_ready_once_it_is_packed_and_not_before(table):
    table.gate.clear()
    with make_pipeline(table) as pipeline:
        pipeline.start_prepare(0, COUNT)
        assert table.sampling.wait(DEADLINE)
        assert pipeline.batch_ready(0, COUNT) is False
        table.gate.set()
        assert pipeline.wait_until_ready(0, COUNT) is True
        assert pipeline.batch_ready(0, COUNT) is True


def test_only_the_tick_that_was_asked_for_is_ready(pipeline):
    pipeline.wait_ready()  # for nothing
    assert pipeline.batch_ready(0, COUNT) is False
    pipeline.wait_until_ready(0, COUNT)
    assert pipeline.batch_ready(1, COUNT) is False


def test_an_inline_packer_has_packed_when_start_prepare_returns(table):
    with make_pipeline(table, packer="inline") as pipeline:
        pipeline.start_prepare(0, COUNT)
        assert pipeline.batch_ready(0, COUNT) is True


def test_the_same_tick_is_the_same_batch_until_after_tick(table, pipeline):
    first = pipeline.sample_large_batch(3, COUNT)
    table.write(COUNT)
    pipeline.start_prepare(4, COUNT)

    again = pipeline.sample_large_batch(3, COUNT)

    assert again["observation"].data_ptr() == first["observation"].data_ptr()
    assert rows_of(again) == drawn(3)
    assert pipeline.last_metadata.tick_id == 3


def test_a_tick_asked_for_while_another_is_being_learnt_is_an_error(pipeline):
    pipeline.sample_large_batch(3, COUNT)
    pipeline.start_prepare(4, COUNT)

    message = r"sample tick 4: tick 3 is being learnt \(expected .*after_tick\(\)"
    with pytest.raises(RuntimeError, match=message):
        pipeline.sample_large_batch(4, COUNT)

    pipeline.after_tick()
    assert rows_of(pipeline.sample_large_batch(4, COUNT)) == drawn(4)


def test_after_tick_a_tick_is_prepared_anew(pipeline):
    pipeline.sample_large_batch(3, COUNT)
    pipeline.after_tick()

    assert pipeline.batch_ready(3, COUNT) is False
    assert pipeline.start_prepare(3, COUNT) is True


@pytest.mark.parametrize("state", ["prepared", "learnt"])
def test_a_restored_pipeline_uses_no_batch_of_before_and_the_seed_that_was_saved(
    table, pipeline, state
):
    with make_pipeline(table, base_seed=7) as saved:
        if state == "prepared":
            pipeline.start_prepare(3, COUNT)
        else:
            pipeline.sample_large_batch(3, COUNT)

        pipeline.load_state_dict(saved.state_dict())

        assert rows_of(pipeline.sample_large_batch(3, COUNT)) == drawn(10)


# Settings


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"sample_count": 0}, "sample_count: 0"),
        ({"sample_count": True}, "sample_count: True"),
        ({"sample_count": "8"}, "sample_count: '8'"),
        ({"sample_count": None}, "sample_count: None"),
        ({"timeout": 0.0}, "timeout: 0.0"),
        ({"timeout": float("nan")}, "timeout: nan"),
        ({"timeout": None}, "timeout: None"),
        ({"base_seed": -1}, "base_seed: -1"),
        ({"base_seed": 1.5}, "base_seed: 1.5"),
        ({"base_seed": float("nan")}, "base_seed: nan"),
        ({"base_seed": torch.tensor(1.0)}, "base_seed: tensor"),
        ({"packer": "gpu"}, "packer: 'gpu'"),
        ({"device": 5}, "device 5"),
        ({"device": None}, "device None"),
        ({"device": "nope"}, "device 'nope'"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(table, setting, message):
    with pytest.raises(ConfigError, match=message):
        make_pipeline(table, **setting)
    assert table.batches == 0


@pytest.mark.parametrize(
    "source",
    [ReplayBuffer(), LazyTensorStorage(10), TensorDict(), None],
    ids=lambda source: type(source).__name__,
)
def test_what_a_pipeline_cannot_sample_from_is_refused(source):
    message = rf"source: {type(source).__name__} \(expected PackedReplayStorage\)"
    with pytest.raises(ConfigError, match=message):
        DoubleBufferReplayPipeline(source, sample_count=8)


@pytest.mark.parametrize("rows", [-1, 1.5, "1", True, float("nan")], ids=repr)
def test_rows_to_wait_for_that_are_no_number_of_rows_are_refused(pipeline, rows):
    with pytest.raises(ConfigError, match=rf"min_snapshot_ptr: {rows!r} \(expected an integer"):
        pipeline.start_prepare(0, COUNT, min_snapshot_ptr=rows)
    assert pipeline.start_prepare(0, COUNT) is True


@pytest.mark.parametrize("ask", ["start_prepare", "batch_ready", "sample_large_batch"])
@pytest.mark.parametrize(
    ("tick", "count", "message"),
    [
        *((bad, COUNT, f"tick: {bad!r} .expected an int") for bad in (-1, 1.5, "1", None, True)),
        (1, COUNT + 1, "tick 1: 65 rows .expected 64.*another pipeline"),
    ],
)
def test_another_size_or_what_is_no_tick_is_refused_and_changes_nothing(
    pipeline, ask, tick, count, message
):
    pipeline.start_prepare(1, COUNT)
    with pytest.raises(ConfigError, match=message):
        getattr(pipeline, ask)(tick, count)
    assert rows_of(pipeline.sample_large_batch(1, COUNT)) == drawn(1)


def test_integers_of_numpy_are_integers(table, packer):
    with make_pipeline(
        table, sample_count=np.int32(COUNT), base_seed=np.int64(3), packer=packer
    ) as pipeline:
        for tick in np.arange(2):
            assert pipeline.start_prepare(tick, np.int64(COUNT)) is True
            assert rows_of(pipeline.sample_large_batch(tick, COUNT)) == drawn(3 + int(tick))
            assert type(pipeline.last_metadata.tick_id) is int
            pipeline.after_tick()
        assert repr(pipeline.state_dict()) == "{'base_seed': 3}"


@pytest.mark.parametrize(
    "state", [{}, None, *({"base_seed": seed} for seed in (-5, None, "x", 1.5, True))], ids=str
)
def test_a_state_without_a_seed_is_refused_and_changes_nothing(pipeline, state):
    pipeline.wait_until_ready(3, COUNT)
    with pytest.raises(ConfigError, match=r"base_seed: .* \(expected an integer of at least 0"):
        pipeline.load_state_dict(state)
    assert pipeline.batch_ready(3, COUNT)
    assert pipeline.state_dict() == {"base_seed": 0}


# What is drawn, and what is said about it


@given(
    base_seed=st.integers(0, 2**40),
    ticks=st.lists(st.integers(0, 2**20), min_size=1, max_size=5),
    ahead=st.lists(st.booleans(), min_size=5, max_size=5),
    packer=st.sampled_from(["thread", "inline"]),
)
@settings(max_examples=40)
def test_a_tick_gets_the_same_batch_in_any_order_and_any_thread(base_seed, ticks, ahead, packer):
    with make_pipeline(TABLE, base_seed=base_seed, packer=packer) as pipeline:
        for tick, prepared in zip(ticks, ahead, strict=False):
            if prepared:
                pipeline.start_prepare(tick, COUNT)
            assert rows_of(pipeline.sample_large_batch(tick, COUNT)) == drawn(base_seed + tick)
            pipeline.after_tick()


TABLE = Table()


def test_the_metadata_say_what_was_drawn_from_and_where_it_went(table, packer):
    table.write(100)
    with make_pipeline(table, base_seed=40, packer=packer) as pipeline:
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


def test_the_manifest_says_how_batches_travel(pipeline, packer):
    assert pipeline.transfer_manifest == {
        "device": "cpu",
        "slots": 2,
        "blocks": 1,
        "bytes": COUNT * (8 + 8 * 4 + 4),  # positions, observations, flags
        "pinned": False,
        "submitter": pipeline.h2d_submitter,
        "packer": packer,
    }
    assert pipeline.h2d_submitter == "none"


# Slots


def test_a_learner_never_sees_a_batch_change_under_it_while_the_thread_packs(table):
    """Stress: read the hot batch as long as the thread packs the cold one."""
    reads = 0
    with make_pipeline(table) as pipeline:
        for tick in range(400):
            batch = pipeline.sample_large_batch(tick, COUNT)
            expected = torch.tensor(drawn(tick), dtype=torch.float32)
            pipeline.start_prepare(tick + 1, COUNT)
            ready = False
            while not ready:
                ready = pipeline.batch_ready(tick + 1, COUNT)
                assert torch.equal(batch["observation"][:, 3], expected)
                assert torch.equal(batch["next", "observation"][:, 3], expected)
                reads += 1
            pipeline.after_tick()
    assert reads >= 400


def test_entries_added_to_a_batch_do_not_stay_in_the_slot(table, pipeline):
    made = {*table.empty_batch(COUNT).keys(True, True)}
    for tick in range(4):
        batch = pipeline.sample_large_batch(tick, COUNT)
        assert {*batch.keys(True, True)} == made
        batch["advantage"] = torch.zeros(COUNT)
        batch["next", "value"] = torch.zeros(COUNT)
        pipeline.after_tick()


def test_many_ticks_take_no_more_memory_than_two_slots_nor_more_threads(table):
    with make_pipeline(table) as pipeline:
        addresses, threads = set(), []
        for tick in range(300):
            if tick == 50:
                tracemalloc.start()
            if tick == 150:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
            batch = pipeline.sample_large_batch(tick, COUNT)
            pipeline.start_prepare(tick + 1, COUNT)
            addresses.add(batch["observation"].data_ptr())
            threads.append(threading.active_count())
            pipeline.after_tick()
        pipeline.wait_ready()
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert len(addresses) == table.batches == 2
    assert max(threads) == threads[0]  # one of an earlier test may end meanwhile
    assert growth < 15_000  # of 150 ticks: not one small object each
