"""Rollouts through TorchRL's replay buffers, in shared memory, and between processes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.data.replay_buffers import SamplerWithoutReplacement

from tests.support.acting import StillEnv, make_policy
from tests.support.processes import DEADLINE, receive, spawned
from tests.support.rings import strike_at
from tests.support.rollouts import (
    BATCH,
    claim_and_die,
    copied_bytes,
    extend_buffer,
    extend_items,
    fill_blocked,
    make_rollout,
    stamp,
    values,
)
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

SLOTS = 4


def stack(*numbers: int) -> TensorDict:
    return torch.stack([make_rollout(number) for number in numbers])


def nbytes(rollout: TensorDict) -> int:
    return sum(leaf.nbytes for leaf in rollout.values(True, True))


# What a storage of TorchRL promises for items, this one promises for rollouts.


def stock(cls=ReplayBuffer, **settings) -> ReplayBuffer:
    sampler = SamplerWithoutReplacement(shuffle=False, drop_last=True)
    return cls(storage=LazyTensorStorage(SLOTS), sampler=sampler, batch_size=2, **settings)


def ours(cls=ReplayBuffer, **settings) -> ReplayBuffer:
    return cls(
        storage=RolloutRingStorage(SLOTS, example=make_rollout()),
        sampler=RolloutRingSampler(),
        writer=RolloutRingWriter(),
        batch_size=2,
        **settings,
    )


@pytest.fixture
def storage() -> Iterator[RolloutRingStorage]:
    with RolloutRingStorage(SLOTS, example=make_rollout()) as storage:
        yield storage


CONTRACT = pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
WARNS_OF_BATCHES = pytest.mark.filterwarnings("ignore:Using `add.*` with a TensorDict")


def compare(script, cls, **settings):
    """Run the same calls on a buffer of each kind; return what both answered."""
    expected = script(stock(cls, **settings))
    buffer = ours(cls, **settings)
    assert script(buffer) == expected
    buffer.storage.close()
    return expected


@CONTRACT
def test_extend_returns_as_many_indices_which_read_what_was_written(cls):
    def script(buffer):
        index = buffer.extend(stack(1, 2, 3))
        return type(index), index.dtype, index.tolist(), values(buffer[index])

    assert compare(script, cls)[2:] == ([0, 1, 2], [1, 2, 3])


@CONTRACT
@WARNS_OF_BATCHES
def test_add_returns_the_index_of_one(cls):
    def script(buffer):
        return [
            (index, type(index), int(buffer[index]["action"][0, 0]))
            for index in (buffer.add(make_rollout(value)) for value in (1, 2))
        ]

    assert compare(script, cls) == [(0, int, 1), (1, int, 2)]


@CONTRACT
def test_length_and_write_count_follow_what_is_written_and_overwritten(cls):
    def script(buffer):
        counts = [(len(buffer), buffer.write_count, buffer.storage._is_full)]
        for _ in range(3):
            buffer.extend(stack(1, 2))
            counts.append((len(buffer), buffer.write_count, buffer.storage._is_full))
        return counts, buffer.stats()

    assert compare(script, cls)[0][-1] == (SLOTS, 6, True)


@CONTRACT
def test_samples_are_the_rollouts_in_order_with_batch_and_device(cls):
    def script(buffer):
        buffer.extend(stack(1, 2, 3, 4))
        samples = [buffer.sample(), buffer.sample()]
        return [
            (values(s), s.batch_size, s.device, s.is_locked, sorted(s.keys(True, True), key=str))
            for s in samples
        ]

    assert [sample[0] for sample in compare(script, cls)] == [[1, 2], [3, 4]]


@CONTRACT
def test_return_info_has_the_index(cls):
    def script(buffer):
        buffer.extend(stack(1, 2, 3))
        sample, info = buffer.sample(return_info=True)
        return values(sample), info["index"].tolist(), info["index"].dtype

    assert compare(script, cls)[:2] == ([1, 2], [0, 1])


@CONTRACT
def test_an_iteration_ends_and_the_next_sees_what_was_written_since(cls):
    def script(buffer):
        epochs = []
        for first in (1, 5):
            buffer.extend(stack(*range(first, first + SLOTS)))
            epochs.append([values(batch) for batch in buffer])
        return epochs, buffer.sampler.ran_out

    assert compare(script, cls) == ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], True)


@CONTRACT
def test_next_ends_as_iteration_does(cls):
    def script(buffer):
        buffer.extend(stack(1, 2, 3, 4))
        return [
            batch if batch is None else values(batch) for batch in (buffer.next() for _ in range(3))
        ]

    assert compare(script, cls) == [[1, 2], [3, 4], None]


@CONTRACT
def test_prefetched_batches_are_the_same(cls):
    def script(buffer):
        buffer.extend(stack(1, 2, 3, 4))
        first = [values(batch) for batch in buffer]
        buffer.extend(stack(5, 6, 7, 8))
        return first, [values(batch) for batch in buffer]

    assert compare(script, cls, prefetch=1) == ([[1, 2], [3, 4]], [[5, 6], [7, 8]])


@CONTRACT
def test_transforms_are_applied_on_the_way_out(cls):
    def double(data):
        return data.set("action", data["action"] * 2)

    def script(buffer):
        buffer.append_transform(double)
        buffer.extend(stack(1, 2, 3))
        return buffer.sample()["action"][:, 0, 0].tolist(), buffer[-1]["action"][0, 0].item()

    assert compare(script, cls) == ([2, 4], 6)


@CONTRACT
def test_inverse_transforms_are_applied_on_the_way_in(cls):
    def triple(data):
        return data.set("action", data["action"] * 3)

    def script(buffer):
        buffer.append_transform(triple, invert=True)
        buffer.extend(stack(1, 2))
        return buffer.sample()["action"][:, 0, 0].tolist()

    assert compare(script, cls) == [3, 6]


@CONTRACT
def test_empty_leaves_nothing(cls):
    def script(buffer):
        buffer.extend(stack(1, 2, 3))
        buffer.empty()
        after = len(buffer), buffer.write_count
        buffer.extend(stack(4, 5))
        return after, len(buffer), buffer.write_count, values(buffer.sample())

    assert compare(script, cls) == ((0, 0), 2, 2, [4, 5])


@CONTRACT
def test_can_sample_says_whether_a_batch_is_there(cls):
    def script(buffer):
        answers = []
        for _ in range(2):
            answers.append(buffer.can_sample())
            buffer.extend(stack(1))
        return [*answers, buffer.can_sample()]

    assert compare(script, cls) == [False, False, True]


@CONTRACT
@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_a_checkpoint_brings_back_what_was_unread_and_the_count(cls, way, tmp_path):
    made = []

    def script(buffer):
        fresh = (ours if isinstance(buffer.storage, RolloutRingStorage) else stock)(cls)
        made.append(fresh)
        buffer.extend(stack(1, 2, 3))
        if way == "state_dict":
            fresh.load_state_dict(buffer.state_dict())
        else:
            path = tmp_path / type(buffer.storage).__name__
            buffer.dumps(path)
            fresh.loads(path)
        restored = len(fresh), fresh.write_count, values(fresh[:])
        fresh.extend(stack(4))
        return restored, len(fresh), fresh.write_count, values(fresh.sample()), len(buffer)

    assert compare(script, cls) == ((3, 3, [1, 2, 3]), 4, 4, [1, 2], 3)
    made[1].storage.close()


def test_a_spawned_process_extends_the_same_buffer():
    def script(buffer):
        buffer.share()
        buffer.extend(stack(1))  # TorchRL's own needs content before it can be shared
        with spawned(extend_items, buffer, 2, 2) as (process, pipe):
            count = receive(pipe)
            process.join(DEADLINE)
        return count, buffer.write_count, len(buffer), values(buffer[:])

    with RolloutRingStorage(SLOTS, example=make_rollout(), writers=2) as storage:
        mine = ReplayBuffer(
            storage=storage, sampler=RolloutRingSampler(), writer=RolloutRingWriter(), batch_size=2
        )
        assert script(mine) == script(stock()) == (3, 3, 3, [1, 2, 3])


@CONTRACT
def test_a_position_is_contained_as_in_any_storage(cls):
    def script(buffer):
        buffer.extend(stack(1, 2))
        storage = buffer.storage
        return [i in storage for i in (-3, -2, 1, 2)], storage.contains(
            torch.tensor([1, 2])
        ).tolist()

    assert compare(script, cls) == ([False, True, True, False], [True, False])


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        [0, 2],
        slice(1, None),
        range(2),
        torch.tensor([2, 0]),
        torch.tensor(1),
        torch.tensor([True, False, True]),
        slice(0, 0),
    ],
    ids=str,
)
def test_a_storage_is_read_by_any_index_without_consuming(index):
    def read(storage):
        storage.set(range(3), stack(1, 2, 3))
        return storage.get(index), len(storage)

    expected, length = read(LazyTensorStorage(SLOTS))
    with RolloutRingStorage(SLOTS, example=make_rollout()) as storage:
        found, unread = read(storage)
        assert (found.batch_size, unread) == (expected.batch_size, length)
        assert (found == expected).all()
        found.zero_()  # a copy
        assert values(storage.get(slice(None))) == [1, 2, 3]


# Writing


def test_a_rollout_without_a_leading_dimension_is_one_slot():
    buffer = ours()
    assert buffer.extend(make_rollout(1)).tolist() == [0]
    assert buffer.extend([make_rollout(2), make_rollout(3)]).tolist() == [1, 2]
    assert values(buffer[:]) == [1, 2, 3]
    buffer.storage.close()


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer, RolloutReplayBuffer])
@pytest.mark.parametrize("lazy", [False, True])
def test_extend_copies_each_byte_once(cls, lazy):
    storage = RolloutRingStorage(SLOTS, example=make_rollout())
    parts = {} if cls is RolloutReplayBuffer else {"writer": RolloutRingWriter()}
    buffer = cls(storage=storage, sampler=RolloutRingSampler(), batch_size=1, **parts)
    rollout = make_rollout(7)
    size = nbytes(rollout)
    if lazy:
        rollout = LazyStackedTensorDict.lazy_stack(list(rollout.unbind(-1)), -1)
    with copied_bytes() as copies:
        buffer.extend(rollout)
    assert sum(copies) == size
    assert values(buffer.sample()) == [7]
    storage.close()


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


def test_a_sample_is_extended_into_another_buffer_but_for_its_index():
    with RolloutRingStorage(2) as first, RolloutRingStorage(2, example=make_rollout()) as second:
        buffer = RolloutReplayBuffer(storage=first, batch_size=2)
        for value in (1, 2):
            buffer.extend(make_rollout(value))
        sample = buffer.sample()
        with pytest.raises(LayoutKeyError, match=r"unknown \['index'\]"):
            second.write_all(sample)
        second.write_all(sample.exclude("index"))
        assert values(second[:]) == [1, 2]


def bad(kind: str):
    rollout = make_rollout(1)
    if kind == "shape":
        rollout["next", "reward"] = torch.zeros(*BATCH, 2)
    elif kind == "dtype":
        rollout["next", "state", "count"] = torch.zeros(*BATCH, 2)
    elif kind == "missing":
        del rollout["next", "done"]
    elif kind == "unknown":
        rollout["next", "value"] = torch.zeros(BATCH)
    elif kind == "not a tensor":
        rollout["next", "note"] = NonTensorData("x", batch_size=BATCH)
    return rollout


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
    rollout = bad(kind)
    if lazy:
        rollout = LazyStackedTensorDict.lazy_stack(list(rollout.unbind(-1)), -1)
    with RolloutRingStorage(1, example=make_rollout(), overflow="block") as storage:
        with pytest.raises(error, match=message):
            storage.write(rollout)
        with pytest.raises(error, match=message):
            storage.write_all([make_rollout(1), rollout])
        assert storage.write_count == 0
        assert storage.write(make_rollout(2), timeout=0.0)  # no slot was taken


def test_parts_of_a_lazy_stack_that_differ_are_refused():
    parts = list(make_rollout(1).unbind(-1))
    parts[1]["observation"] = torch.zeros(2, 9)
    with (
        RolloutRingStorage(1, example=make_rollout()) as storage,
        pytest.raises(LayoutShapeError, match="'observation'"),
    ):
        storage.write(LazyStackedTensorDict.lazy_stack(parts, -1))


def test_keys_of_one_dotted_name_are_refused():
    example = TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}}, [2])
    with pytest.raises(LayoutKeyError, match="each dotted name once"):
        RolloutRingStorage(example=example)


@pytest.mark.parametrize("settings", [{"slots": 0}, {"writers": 0}, {"overflow": "wait"}], ids=str)
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
    assert not storage.write(make_rollout(2), timeout=0.0)
    assert storage.claim(timeout=0.0) is None
    with pytest.raises(WaitTimeoutError, match=r"no slot was free for 0\.01 s"):
        buffer.extend(make_rollout(2))
    assert values(buffer.sample()) == [1]
    buffer.extend(make_rollout(3))
    assert (values(buffer.sample()), storage.dropped) == ([3], (0,))
    storage.close()


# Layout


def test_a_storage_of_a_spec_holds_rollouts_of_the_spec():
    spec = Composite(
        observation=Unbounded((*BATCH, 4)),
        critic=Bounded(-1, 1, (*BATCH, 5), dtype=torch.bfloat16),
        action=Categorical(3, BATCH),
        next=Composite(
            reward=Unbounded((*BATCH, 1)),
            done=Categorical(2, (*BATCH, 1), dtype=torch.bool),
            state=Composite(count=Unbounded((*BATCH, 2), dtype=torch.int32), shape=BATCH),
            shape=BATCH,
        ),
        shape=BATCH,
    )
    with RolloutRingStorage.from_spec(spec, 2) as storage:
        assert storage.max_size == 2
        storage.write(make_rollout(3))
        assert values(storage[:]) == [3]


def test_a_lazy_storage_takes_the_layout_of_the_first_rollout():
    with RolloutRingStorage(SLOTS) as storage:
        assert not storage.initialized
        assert (len(storage), storage.write_count, storage.dropped) == (0, 0, (0,))
        with pytest.raises(RuntimeError, match="its schema is not known"):
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
        files = set(os.listdir("/proc/self/fd"))
        importlib.import_module("torchrl_unilab.data")
        taken = set(os.listdir("/proc/self/fd")) - files
        started = multiprocessing.active_children() or threading.active_count() > 1
        os._exit(1 if taken or started else 0)
    assert os.waitpid(child, 0)[1] == 0


# Reading


@pytest.mark.parametrize("take", ["oldest", "newest"])
def test_a_sample_takes_rollouts_out_and_the_older_ones_with_them(storage, take):
    buffer = RolloutReplayBuffer(
        storage=storage, sampler=RolloutRingSampler(take=take), batch_size=1
    )
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


def test_a_sample_larger_than_the_ring_is_a_wrong_setting(storage):
    with pytest.raises(ConfigError, match="the ring has 4 slots"):
        RolloutReplayBuffer(storage=storage, batch_size=5).sample()


def test_parts_for_other_storages_are_refused():
    with pytest.raises(ConfigError, match="expected 'oldest' or 'newest'"):
        RolloutRingSampler(take="best")
    with pytest.raises(ConfigError, match="storage of a RolloutRingWriter: LazyTensorStorage"):
        ReplayBuffer(storage=LazyTensorStorage(2), writer=RolloutRingWriter())
    with pytest.raises(ConfigError, match="storage of a RolloutRingSampler: LazyTensorStorage"):
        RolloutRingSampler().sample(LazyTensorStorage(2), 1)


def test_what_is_left_of_a_batch_waits_for_the_next_iteration(storage):
    buffer = RolloutReplayBuffer(storage=storage, batch_size=2)
    buffer.extend(stack(1, 2, 3))
    assert [values(batch) for batch in buffer] == [[1, 2]]
    buffer.extend(stack(4))
    assert [values(batch) for batch in buffer] == [[3, 4]]


def test_prefetching_threads_lose_and_double_nothing():
    with RolloutRingStorage(8, example=make_rollout()) as storage:
        buffer = RolloutReplayBuffer(storage=storage, batch_size=1, prefetch=3)
        seen = []
        for first in range(1, 81, 8):
            buffer.extend(stack(*range(first, first + 8)))
            seen += [value for batch in buffer for value in values(batch)]
        assert sorted(seen) == list(range(1, 81))
        assert (storage.read_count, len(buffer), storage.dropped) == (80, 0, (0,))


@pytest.mark.parametrize("looked_at", [1, SLOTS])
def test_looking_at_rollouts_does_not_stop_the_process_from_writing(looked_at):
    with RolloutRingStorage(SLOTS, example=make_rollout(), timeout=0.0) as storage:
        storage.write_all(stack(1, 2, 3, 4))
        storage.get(range(looked_at))
        storage.write_all(stack(5, 6))
        assert values(storage[:]) == [3, 4, 5, 6]
        assert sum(storage.dropped + storage.skipped) == 2
        assert storage.read_count == 0
        assert storage.write_count == 6


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


def test_a_closed_storage_refuses_everything():
    storage = RolloutRingStorage(SLOTS, example=make_rollout())
    storage.write(make_rollout(1))
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
        storage.state_dict,
        lambda: storage.use_writer(0),
        storage.__getstate__,
    ]
    for use in uses:
        with pytest.raises(SegmentClosedError):
            use()


# Checkpoints


def test_a_checkpoint_counts_on_from_all_counters(tmp_path):
    with RolloutRingStorage(2, example=make_rollout(), writers=2) as storage:
        for writer, value in ((1, 1), (0, 2), (0, 3), (0, 4), (1, 5)):
            storage.use_writer(writer)
            storage.write(make_rollout(value))
        storage.release(storage.acquire())
        storage.dumps(tmp_path)
        before = storage.state_dict()
    with RolloutRingStorage(2, writers=2) as restored:
        restored.loads(tmp_path)
        assert (restored.written, restored.dropped, restored.read_count) == ((3, 2), (1, 0), 1)
        assert values(restored[:]) == [3, 4, 5]
        after = restored.state_dict()
        assert (after["counts"], after["of"]) == (before["counts"], [0, 0, 1])
        restored.use_writer(1)
        assert restored.claim(0.0) is not None
        assert restored.commit() == 3


def test_a_checkpoint_of_nothing_is_loaded():
    with RolloutRingStorage(2) as storage, RolloutRingStorage(2) as other:
        other.load_state_dict(storage.state_dict())
        assert not other.initialized
    with RolloutRingStorage(2, example=make_rollout()) as storage, RolloutRingStorage(2) as other:
        other.load_state_dict(storage.state_dict())
        assert (other.initialized, len(other)) == (True, 0)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (
            lambda: RolloutRingStorage(SLOTS, example=make_rollout(batch=(2, 4))),
            LayoutShapeError,
            "shape of",
        ),
        (lambda: RolloutRingStorage(SLOTS, example=bad("unknown")), LayoutKeyError, "next.value"),
        (
            lambda: RolloutRingStorage(SLOTS, example=make_rollout().auto_batch_size_(1)),
            LayoutShapeError,
            "batch size",
        ),
        (lambda: RolloutRingStorage(2), ConfigError, "cannot load 3 rollouts of one writer"),
        (lambda: RolloutRingStorage(SLOTS, writers=2), ConfigError, "1 writers"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(target, error, message):
    with RolloutRingStorage(SLOTS, example=make_rollout()) as source, target() as storage:
        source.write_all(stack(1, 2, 3))
        with pytest.raises(error, match=message):
            storage.load_state_dict(source.state_dict())
        assert (len(storage), storage.write_count) == (0, 0)


def test_a_checkpoint_is_not_loaded_over_unread_rollouts(storage):
    storage.write(make_rollout(1))
    state = storage.state_dict()
    with pytest.raises(RuntimeError, match="1 are unread and 0 leased"):
        storage.load_state_dict(state)
    lease = storage.acquire()
    with pytest.raises(RuntimeError, match="0 are unread and 1 leased"):
        storage.load_state_dict(state)
    storage.release(lease)
    storage.load_state_dict(state)
    assert values(storage[:]) == [1]


# Processes


@pytest.mark.parametrize("explicit", [False, True])
def test_rollouts_of_several_processes_arrive_whole_in_order_and_counted(explicit):
    writers, rollouts = 2, 40
    storage = RolloutRingStorage(2, example=make_rollout(), writers=writers, overflow="block")
    buffer = RolloutReplayBuffer(
        storage=storage, sampler=RolloutRingSampler(timeout=DEADLINE), batch_size=1, shared=True
    )
    with (
        spawned(extend_buffer, buffer, 0, rollouts, explicit) as (_, first),
        spawned(extend_buffer, buffer, 1, rollouts, explicit) as (_, second),
    ):
        for pipe in (first, second):
            receive(pipe)
        for pipe in (first, second):
            pipe.send("go")
        seen = [values(buffer.sample())[0] for _ in range(writers * rollouts)]
        for writer in range(writers):
            own = [value for value in seen if stamp(writer, 0) < value <= stamp(writer, rollouts)]
            assert own == [stamp(writer, i + 1) for i in range(rollouts)]
        assert [receive(pipe) for pipe in (first, second)] == [{"torch.int64"}] * 2
        assert (storage.written, storage.dropped) == ((rollouts,) * writers, (0,) * writers)
        assert (buffer.write_count, storage.read_count, len(buffer)) == (80, 80, 0)
    storage.close()


def test_a_stock_collector_fills_the_ring():
    with RolloutRingStorage(2) as storage:
        buffer = RolloutReplayBuffer(storage=storage, batch_size=1)
        collector = Collector(
            StillEnv(),
            make_policy(3.0),
            frames_per_batch=5,
            total_frames=15,
            replay_buffer=buffer,
            auto_register_policy_transforms=False,
        )
        for _ in collector:
            assert (buffer.sample()["action"] == 3.0).all()
        collector.shutdown()
        assert (storage.write_count, storage.read_count) == (3, 3)


def test_free_running_collectors_fill_one_ring():
    single = Collector(
        StillEnv(),
        make_policy(3.0),
        frames_per_batch=5,
        total_frames=5,
        auto_register_policy_transforms=False,
    )
    example = next(iter(single)).clone()
    single.shutdown()
    storage = RolloutRingStorage(2, example=example, writers=2, overflow="block")
    buffer = RolloutReplayBuffer(
        storage=storage, sampler=RolloutRingSampler(timeout=DEADLINE), batch_size=1, shared=True
    )
    collector = MultiAsyncCollector(
        [StillEnv] * 2, make_policy(3.0), frames_per_batch=5, total_frames=-1, replay_buffer=buffer
    )
    collector.start()
    while not all(storage.written):
        assert (buffer.sample()["action"] == 3.0).all()
    collector.shutdown()
    assert storage.dropped == (0, 0)
    storage.close()


def test_a_storage_without_a_schema_does_not_go_to_another_process():
    with (
        RolloutRingStorage(2) as storage,
        pytest.raises(RuntimeError, match=r"its schema is not known .*Build it with example="),
        spawned(claim_and_die, storage),
    ):
        pass


def test_one_write_before_sharing_makes_the_schema_known():
    with RolloutRingStorage(2, writers=2) as storage:
        storage.write(make_rollout(1))
        with spawned(claim_and_die, storage) as (_, pipe):
            assert receive(pipe) == "claimed"


def test_a_killed_writer_is_recovered_and_replaced_while_leases_and_rollouts_stay():
    with RolloutRingStorage(2, example=make_rollout(), writers=2, overflow="block") as storage:
        storage.use_writer(0)
        storage.write_all([make_rollout(1), make_rollout(2)])
        lease = storage.acquire()
        with spawned(claim_and_die, storage) as (process, pipe):
            receive(pipe)
            with pytest.raises(RuntimeError, match=f"process {process.pid} is alive"):
                storage.recover(1)
            process.kill()
            process.join(DEADLINE)
            with pytest.raises(ConfigError, match="recover those of the dead"):
                storage.use_writer(1)
            assert (storage.recover(1), storage.recover(1)) == (1, 0)
        assert (storage.lost, storage.written) == ((0, 0), (2, 0))
        assert (storage.unread(0), storage.unread(1)) == (1, 0)
        storage.use_writer(1)
        storage.write(make_rollout(3))
        assert values(storage[:]) == [2, 3]
        assert values(lease.rollout.unsqueeze(0)) == [1]


def test_what_a_killed_writer_had_counted_and_not_handed_over_is_lost():
    with RolloutRingStorage(2, example=make_rollout()) as storage:
        with spawned(commit_and_die, storage) as (process, pipe):
            receive(pipe)
            process.join(DEADLINE)
        revision = storage._mutation_revision
        assert storage.recover(0) == 1
        assert (storage.written, storage.lost, len(storage)) == ((1,), (1,), 0)
        assert storage._mutation_revision > revision
        storage.write(make_rollout(1))
        with RolloutRingStorage(2) as other:
            other.load_state_dict(storage.state_dict())
            assert (other.written, other.lost) == ((2,), (1,))
        writer = RolloutRingWriter()
        writer.register_storage(storage)
        writer._empty()
        assert (storage.written, storage.lost) == ((0,), (0,))


def commit_and_die(pipe, storage) -> None:
    """Be killed before a rollout is handed to the reader, when it is counted."""
    storage.claim()
    pipe.send("claimed")
    strike_at(storage.ring, 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    storage.commit()


def test_what_an_interrupt_kept_from_the_caller_is_among_the_leases():
    with RolloutRingStorage(2, example=make_rollout()) as storage:
        storage.write(make_rollout(1))
        storage.acquire()  # the result is lost
        (lease,) = storage.leases
        storage.release(lease)
        assert storage.leases == []
        assert storage.read_count == 1


def test_a_lease_releases_itself_at_the_end_of_a_block():
    with RolloutRingStorage(2, example=make_rollout()) as storage:
        storage.write(make_rollout(4))
        with storage.acquire() as rollout:
            assert values(rollout.unsqueeze(0)) == [4]
        assert storage.read_count == 1


def test_a_blocked_writer_does_not_keep_the_reader_out_and_one_that_ended_is_not_dead():
    storage = RolloutRingStorage(2, example=make_rollout(), overflow="block")
    buffer = RolloutReplayBuffer(
        storage=storage, sampler=RolloutRingSampler(timeout=DEADLINE), batch_size=1
    ).share()
    with spawned(fill_blocked, buffer, 8) as (process, pipe):
        receive(pipe)
        assert [values(buffer.sample())[0] for _ in range(8)] == list(range(1, 9))
        assert receive(pipe) == "done"
        process.join(DEADLINE)
        assert not storage.wait(0.0)
    storage.close()
