"""Rollouts are written to the ring and read from it, through buffers and in place."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import threading

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from tests.support.rollouts import copied_bytes, make_rollout, misfit, stack, values
from torchrl_unilab.data import (
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingStorage,
    RolloutRingWriter,
)
from torchrl_unilab.errors import (
    ConfigError,
    LayoutDtypeError,
    LayoutKeyError,
    LayoutShapeError,
    SegmentClosedError,
    WaitTimeoutError,
)


def across_time(rollout: TensorDict) -> LazyStackedTensorDict:
    """A rollout as collectors stack it: lazily, of its steps."""
    return LazyStackedTensorDict.lazy_stack(list(rollout.unbind(-1)), -1)


# Writing


def test_a_claim_while_a_slot_is_claimed_drops_nothing():
    with RolloutRingStorage(2, example=make_rollout(), overflow="overwrite") as storage:
        storage.write(make_rollout(1))
        assert storage.wait()
        places = {storage.claim()["action"].data_ptr() for _ in range(2)}
        assert len(places) == 1
        assert (len(storage), storage.skipped) == (1, (0,))
        assert values(storage[:]) == [1]


def test_a_rollout_without_a_leading_dimension_is_one_slot(storage):
    buffer = ReplayBuffer(storage=storage, sampler=RolloutRingSampler(), writer=RolloutRingWriter())
    assert buffer.extend(make_rollout(1)).tolist() == [0]
    assert buffer.extend([make_rollout(2), make_rollout(3)]).tolist() == [1, 2]
    assert values(buffer[:]) == [1, 2, 3]


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer, RolloutReplayBuffer])
@pytest.mark.parametrize("lazy", [False, True])
def test_extend_copies_each_byte_once(storage, cls, lazy):
    parts = {} if cls is RolloutReplayBuffer else {"writer": RolloutRingWriter()}
    buffer = cls(storage=storage, sampler=RolloutRingSampler(), batch_size=1, **parts)
    rollout = make_rollout(7)
    with copied_bytes() as copies:
        buffer.extend(across_time(rollout) if lazy else rollout)
    assert sum(copies) == sum(leaf.nbytes for leaf in rollout.values(True, True))
    assert values(buffer.sample()) == [7]


def test_a_lazy_stack_of_more_steps_is_refused_before_a_slot_is_claimed(storage):
    with pytest.raises(LayoutShapeError, match=r"\(2, 4\) \(expected \(2, 3\)\)"):
        storage.write(across_time(make_rollout(1, (2, 4))))
    assert storage.ring.writer is None


def test_a_claimed_slot_is_read_where_it_was_filled(storage):
    slot = storage.claim()
    assert slot.is_locked
    slot.update_(make_rollout(5))
    with copied_bytes() as copies:
        assert storage.commit() == 1
        lease = storage.acquire()
    assert lease.rollout["critic"].data_ptr() == slot["critic"].data_ptr()
    assert not copies
    assert values(lease.rollout.unsqueeze(0)) == [5]
    assert lease.writer == 0
    storage.release(lease)
    assert (storage.read_count, len(storage)) == (1, 0)


def test_views_of_a_slot_are_built_once():
    with RolloutRingStorage(1, example=make_rollout()) as storage:
        seen = set()
        for _ in range(3):
            seen.add(id(storage.claim()))
            storage.commit()
            lease = storage.acquire()
            seen.add(id(lease.rollout))
            storage.release(lease)
        assert len(seen) == 1


def test_an_abandoned_slot_is_free_again():
    with RolloutRingStorage(1, example=make_rollout(), overflow="block") as storage:
        storage.claim()
        storage.abandon()
        assert len(storage) == 0
        assert storage.write(make_rollout(1), timeout=0.0)


def test_a_sample_is_extended_into_another_buffer_but_for_its_index(storage):
    with RolloutRingStorage(2) as other:
        other.write_all([make_rollout(1), make_rollout(2)])
        sample = RolloutReplayBuffer(storage=other, batch_size=2).sample()
    with pytest.raises(LayoutKeyError, match=r"unknown \['index'\]"):
        storage.write_all(sample)
    storage.write_all(sample.exclude("index"))
    assert values(storage[:]) == [1, 2]


def test_a_rollout_is_written_without_its_graph(storage):
    rollout = make_rollout(3)
    rollout["observation"].requires_grad_()
    storage.write(rollout)
    assert not storage[0]["observation"].requires_grad


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("shape", LayoutShapeError, r"shape of 'next.reward': \(2.*, 2\) \(expected \(2.*, 1\)"),
        ("dtype", LayoutDtypeError, "dtype of 'next.state.count': torch.float32"),
        ("missing", LayoutKeyError, r"missing \['next.done'\]"),
        ("unknown", LayoutKeyError, r"unknown \['next.value'\]"),
        ("not a tensor", LayoutDtypeError, "entry 'next.note': NonTensorData"),
    ],
)
def test_a_rollout_that_does_not_fit_is_refused_by_the_name_of_its_key(kind, error, message, lazy):
    rollout = across_time(misfit(kind)) if lazy else misfit(kind)
    with RolloutRingStorage(1, example=make_rollout(), overflow="block") as storage:
        with pytest.raises(error, match=message):
            storage.write(rollout)
        with pytest.raises(error, match=message):
            storage.write_all([make_rollout(1), rollout])
        assert storage.write_count == 0
        assert storage.write(make_rollout(2), timeout=0.0)  # no slot was taken


def test_parts_of_a_lazy_stack_that_differ_are_refused(storage):
    rollout = across_time(make_rollout(1))
    rollout.tensordicts[1]["observation"] = torch.zeros(2, 9)
    with pytest.raises(LayoutShapeError, match="'observation'"):
        storage.write(rollout)


@pytest.mark.parametrize(
    "settings",
    [{"slots": 0}, {"writers": 0}, {"overflow": "wait"}, {"timeout": -1.0}, {"timeout": "10"}],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_at_once(settings):
    with pytest.raises(ConfigError):
        RolloutRingStorage(**settings)


def test_no_rollout_and_replacing_one_are_refused(storage):
    with pytest.raises(RuntimeError, match="no rollout in the data"):
        storage.write_all(stack(1)[:0])
    with pytest.raises(LayoutDtypeError, match=r"tuple \(expected a TensorDict\)"):
        storage.write_all((make_rollout(1),))
    with pytest.raises(RuntimeError, match="cannot replace rollout 0"):
        storage[0] = make_rollout(1)


def test_block_waits_and_says_what_to_do():
    storage = RolloutRingStorage(1, example=make_rollout(), overflow="block", timeout=0.01)
    buffer = RolloutReplayBuffer(storage=storage, batch_size=1)
    buffer.extend(make_rollout(1))
    for _ in range(2):  # in the ring, and held by the reader
        assert not storage.write(make_rollout(2), timeout=0.0)
        assert storage.claim(timeout=0.0) is None
        assert storage.wait(0.0)
    with pytest.raises(WaitTimeoutError, match=r"no slot was free for 0\.01 s"):
        buffer.extend(make_rollout(2))
    assert values(buffer.sample()) == [1]
    buffer.extend(make_rollout(3))
    assert (values(buffer.sample()), storage.dropped) == ([3], (0,))
    storage.close()


# Layout


def test_a_lazy_storage_takes_the_layout_of_the_first_rollout():
    with RolloutRingStorage(4) as storage:
        assert not storage.initialized
        assert (len(storage), storage.write_count, storage.dropped) == (0, 0, (0,))
        with pytest.raises(RuntimeError, match=r"cannot use .*0 of 4 written"):
            storage.claim()
        storage.write(make_rollout(1))
        assert storage.initialized
        with pytest.raises(LayoutShapeError):
            storage.write(make_rollout(1, (2, 4)))


def test_importing_takes_no_memory_and_starts_no_process():
    child = os.fork()
    if child == 0:
        for name in [name for name in sys.modules if name.startswith("torchrl_unilab")]:
            del sys.modules[name]
        files, children = set(os.listdir("/proc/self/fd")), {*multiprocessing.active_children()}
        importlib.import_module("torchrl_unilab.data")
        taken = set(os.listdir("/proc/self/fd")) - files
        started = {*multiprocessing.active_children()} - children or threading.active_count() > 1
        os._exit(1 if taken or started else 0)
    assert os.waitpid(child, 0)[1] == 0


# Reading


@pytest.mark.parametrize("take", ["oldest", "newest"])
def test_a_sample_takes_rollouts_out_and_the_older_ones_with_them(storage, take):
    sampler = RolloutRingSampler(take=take)
    buffer = RolloutReplayBuffer(storage=storage, sampler=sampler, batch_size=1)
    buffer.extend(stack(1, 2, 3))
    assert values(buffer.sample()) == ([1] if take == "oldest" else [3])
    left = 2 if take == "oldest" else 0
    assert (len(buffer), storage.skipped, storage.read_count) == (left, (2 - left,), 1)
    assert buffer.sampler.ran_out == (left == 0)
    buffer.extend(stack(4))
    assert values(buffer.sample()) == ([2] if take == "oldest" else [4])
    assert storage.write_count == storage.read_count + sum(storage.skipped) + len(buffer)


def test_too_large_a_sample_takes_nothing(storage):
    buffer = RolloutReplayBuffer(storage=storage, batch_size=3)
    with pytest.raises(WaitTimeoutError, match="cannot sample 3 rollouts: 0 are unread"):
        buffer.sample()
    buffer.extend(stack(1, 2))
    with pytest.raises(WaitTimeoutError, match="cannot sample 3 rollouts: 2 are unread"):
        buffer.sample()
    assert (len(buffer), storage.read_count) == (2, 0)
    buffer.extend(stack(3))
    assert values(buffer.sample()) == [1, 2, 3]


def test_a_ring_that_knows_no_rollout_yet_has_none_to_sample():
    with RolloutRingStorage(4) as storage:
        buffer = RolloutReplayBuffer(storage=storage, batch_size=1)
        with pytest.raises(WaitTimeoutError, match="cannot sample 1 rollouts: 0 are unread"):
            buffer.sample()


def test_a_sample_larger_than_the_ring_is_a_wrong_setting(storage):
    with pytest.raises(ConfigError, match=r"to sample: 5 .*an integer of 1 to 4"):
        RolloutReplayBuffer(storage=storage, batch_size=5).sample()


def test_parts_for_other_storages_are_refused():
    with pytest.raises(ConfigError, match="expected 'oldest' or 'newest'"):
        RolloutRingSampler(take="best")
    with pytest.raises(ConfigError, match="timeout of a RolloutRingSampler: None"):
        RolloutRingSampler(timeout=None)
    with pytest.raises(ConfigError, match="storage of a RolloutRingWriter: LazyTensorStorage"):
        ReplayBuffer(storage=LazyTensorStorage(2), writer=RolloutRingWriter())
    with pytest.raises(ConfigError, match="storage of a RolloutRingSampler: LazyTensorStorage"):
        RolloutRingSampler().sample(LazyTensorStorage(2), 1)


def test_what_is_left_of_a_batch_waits_for_the_next_iteration(storage):
    buffer = RolloutReplayBuffer(storage=storage, batch_size=2)
    buffer.extend(stack(1, 2, 3))
    assert [values(batch) for batch in buffer] == [[1, 2]]
    assert [*buffer] == []
    buffer.extend(stack(4))
    assert [values(batch) for batch in buffer] == [[3, 4]]
    assert [*buffer] == []


def test_prefetching_threads_lose_and_double_nothing():
    with RolloutRingStorage(8, example=make_rollout()) as storage:
        buffer = RolloutReplayBuffer(storage=storage, batch_size=1, prefetch=3)
        seen = []
        for first in range(1, 81, 8):
            buffer.extend(stack(*range(first, first + 8)))
            seen += [value for batch in buffer for value in values(batch)]
        assert sorted(seen) == list(range(1, 81))
        assert (storage.read_count, len(buffer), storage.dropped) == (80, 0, (0,))


@pytest.mark.parametrize("looked_at", [1, 4])
def test_looking_at_rollouts_does_not_stop_the_process_from_writing(looked_at):
    with RolloutRingStorage(4, example=make_rollout(), timeout=0.0) as storage:
        storage.write_all(stack(1, 2, 3, 4))
        storage.get(range(looked_at))
        storage.write_all(stack(5, 6))
        assert values(storage[:]) == [3, 4, 5, 6]
        assert sum(storage.dropped + storage.skipped) == 2
        assert storage.read_count == 0
        assert storage.write_count == 6


def test_looking_at_loaded_rollouts_does_not_stop_the_process_from_writing():
    made = [RolloutRingStorage(2, example=make_rollout(), timeout=0.0) for _ in range(2)]
    with made[0] as saved, made[1] as loaded:
        saved.write_all(stack(1, 2))
        loaded.load_state_dict(saved.state_dict())
        assert values(loaded[:]) == [1, 2]
        loaded.write_all(stack(3))
        assert values(loaded[:]) == [2, 3]


def test_a_writer_makes_room_by_its_own_oldest_that_was_looked_at_and_by_no_others():
    settings = {"writers": 2, "timeout": 0.0}
    with RolloutRingStorage(2, example=make_rollout(), **settings) as storage:
        for writer, value in ((1, 9), (0, 1), (0, 2)):
            storage.use_writer(writer)
            storage.write(make_rollout(value))
        assert values(storage[:]) == [9, 1, 2]
        storage.write(make_rollout(3))
        assert values(storage[:]) == [9, 2, 3]


def test_an_index_that_took_rollouts_out_reads_copies_from_then_on(storage):
    storage.write_all(stack(1, 2))
    drawn = storage.draw(1)
    assert [values(storage.get(drawn)) for _ in range(3)] == [[1], [2], [2]]
    assert (len(storage), storage.read_count) == (1, 1)


def test_positions_that_were_drawn_are_void_once_a_write_made_room_by_one():
    with RolloutRingStorage(2, example=make_rollout(), timeout=0.0) as storage:
        storage.write_all(stack(1, 2))
        drawn = storage.draw(1)
        storage.write(make_rollout(3))
        assert values(storage.get(drawn)) == [2]
        assert (len(storage), storage.read_count) == (2, 0)


def test_looking_at_the_oldest_holds_no_more_than_that(storage):
    storage.write_all(stack(1, 2, 3))
    storage.get(torch.tensor([0, 0]))
    assert storage.ring.available() == 2
    storage.get(-2)
    assert (storage.ring.available(), len(storage)) == (0, 3)


def test_waiting_ends_with_a_rollout_and_at_its_timeout():
    with RolloutRingStorage(1, example=make_rollout(), timeout=0.0) as storage:
        assert not storage.wait(0.0)
        storage.write(make_rollout(1))
        assert storage.wait(0.0)
        assert len(storage) == 1
        assert storage.wait(0.0)
        storage.write(make_rollout(2))  # what was waited for makes room as well
        assert values(storage[:]) == [2]


def test_there_is_no_rollout_beyond_the_last(storage):
    storage.write(make_rollout(1))
    for index in (1, -2, [0, 1]):
        with pytest.raises(IndexError, match="1 are unread"):
            storage.get(index)


def test_a_closed_storage_refuses_everything(storage):
    storage.write(make_rollout(1))
    assert storage.rollout_size == (2, 3)
    storage.close()
    storage.close()
    assert storage.closed
    uses = [
        lambda: storage.write(make_rollout(1)),
        lambda: storage.write_all(stack(1)),
        storage.claim,
        storage.acquire,
        storage.wait,
        storage.filenos,
        lambda: storage.get(0),
        lambda: len(storage),
        lambda: storage.write_count,
        lambda: storage.read_count,
        lambda: storage.ring,
        lambda: storage.rollout_size,
        storage.state_dict,
        lambda: storage.use_writer(0),
        storage.__getstate__,
    ]
    for use in uses:
        with pytest.raises(SegmentClosedError):
            use()
    assert repr(storage) == "RolloutRingStorage(slots=4, writers=1, closed)"
