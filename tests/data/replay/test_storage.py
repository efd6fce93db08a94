"""Packed replay as a storage: against TorchRL's own, its forms, its errors, beside buffers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, RandomSampler
from torchrl.envs.transforms import RewardScaling

from tests.support.transitions import replay_of, same, transitions
from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter
from torchrl_unilab.errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    LayoutKeyError,
    LayoutShapeError,
    PositionError,
    SegmentSpaceError,
    UsageError,
)


def buffers(sampler, cls=ReplayBuffer, capacity=100):
    """A stock buffer and a packed one, of the same samplers."""
    return [
        cls(storage=storage(capacity), sampler=sampler(), batch_size=32)
        for storage in (LazyTensorStorage, PackedReplayStorage)
    ]


# Against TorchRL's own storage


@pytest.mark.parametrize("writer", [None, PackedReplayWriter])
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("sizes", [[40, 50, 30], [7, 100, 1], [99, 1, 1]])
def test_batches_equal_the_stock_storages_for_a_seed(cls, writer, sizes):
    stock, packed = buffers(RandomSampler, cls)
    if writer is not None:
        packed.set_writer(writer())
    for seed, size in enumerate(sizes):
        index = [buffer.extend(transitions(size, seed)).tolist() for buffer in (stock, packed)]
        assert index[0] == index[1]
        assert len(stock) == len(packed)
        assert stock.write_count == packed.write_count
        for _ in range(3):
            batches = []
            for buffer in (stock, packed):
                torch.manual_seed(seed)
                batches.append(buffer.sample())
            assert same(*batches)
    assert same(stock[:].exclude("index"), packed[:].exclude("index"))


class Tree:
    """What TorchRL's segment trees do, whose extension may not be there: of sums, or of minima."""

    def __init__(self, empty: float, reduce: Callable[[torch.Tensor], torch.Tensor], size: int):
        self.values, self.reduce = torch.full((size,), empty), reduce

    def __getitem__(self, index):
        return self.values[index]

    def __setitem__(self, index, value):
        self.values[index] = torch.as_tensor(value, dtype=torch.float32)

    def query(self, start, end):
        return self.reduce(self.values[start:end]).item()

    def scan_lower_bound(self, mass):
        return torch.searchsorted(self.values.cumsum(0), torch.as_tensor(mass).float())


def test_prioritised_batches_and_weights_equal_the_stock_storages(monkeypatch):
    module = "torchrl.data.replay_buffers.samplers.prioritized"
    for precision in ("32", "64"):
        monkeypatch.setattr(f"{module}.SumSegmentTreeFp{precision}", partial(Tree, 0.0, torch.sum))
        monkeypatch.setattr(
            f"{module}.MinSegmentTreeFp{precision}", partial(Tree, float("inf"), torch.min)
        )
    pair = buffers(lambda: PrioritizedSampler(100, 0.7, 0.5), TensorDictReplayBuffer)
    for seed in range(4):
        batches = []
        for buffer in pair:
            torch.manual_seed(seed)
            np.random.seed(seed)
            buffer.extend(transitions(40, seed).set("td_error", torch.arange(40.0)))
            batch = buffer.sample()
            batch["td_error"] = batch["next", "reward"][:, 0]
            buffer.update_tensordict_priority(batch)
            batches.append(batch)
        assert same(*batches)


def test_transforms_and_prefetch_see_the_same_batches():
    batches = []
    for storage in (LazyTensorStorage(100), PackedReplayStorage(100)):
        buffer = TensorDictReplayBuffer(
            storage=storage,
            batch_size=16,
            prefetch=2,
            transform=RewardScaling(loc=1.0, scale=2.0, in_keys=[("next", "reward")]),
        )
        buffer.extend(transitions(60))
        torch.manual_seed(0)
        got = torch.stack([buffer.sample() for _ in range(3)])
        assert torch.equal(
            got["next", "reward"], transitions(60)["next", "reward"][got["index"]] * 2.0 + 1.0
        )
        batches.append(got)
    assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))


@pytest.mark.parametrize(
    "index",
    [
        slice(9, 2, -2),
        range(4),
        [1, -2, 1],
        torch.tensor(2),
        torch.tensor([[1, 2], [3, 4]]),
        [[1, 2], [3, 4]],
        torch.arange(20) % 3 == 0,
        [i % 3 == 0 for i in range(20)],
        np.array([5, 6]),
        torch.tensor([], dtype=torch.int64),
    ],
    ids=str,
)
def test_every_kind_of_index_reads_what_it_does_in_a_tensor(index):
    data = transitions(20)
    with PackedReplayStorage(20) as storage:
        storage.set(range(20), data)
        expected = data[list(range(20))[index]] if isinstance(index, slice) else data[index]
        assert same(storage.get(index), expected)


@pytest.mark.parametrize("form", [torch.as_tensor, torch.Tensor.numpy], ids=["tensor", "array"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_reads_and_writes_where_it_says(dtype, form):
    data, chosen = transitions(20), torch.arange(20) % 3 == 0
    mask = form(chosen.to(dtype))
    with PackedReplayStorage(20) as storage:
        storage.set(range(20), data)
        assert same(storage[mask], data[chosen])
        storage.set(mask, data[~chosen][:7])
        data[chosen] = data[~chosen][:7]
        assert same(storage[:], data)


def test_rows_are_written_in_the_shape_of_lists_of_lists():
    data = transitions(4)
    with PackedReplayStorage(4) as storage:
        storage.set(range(4), data)
        storage.set([[3, 2], [1, 0]], data.reshape(2, 2))
        assert same(storage[:], data[[3, 2, 1, 0]])


@pytest.mark.parametrize(
    "index", [torch.tensor(True), np.array(True), True, ["x"], [[0], [1, 2]]], ids=repr
)
def test_what_are_no_positions_is_neither_read_nor_written(index):
    data = transitions(4)
    with PackedReplayStorage(4) as storage:
        storage.set(range(4), data)
        for use in (lambda: storage[index], lambda: storage.set(index, data[3])):
            with pytest.raises(IndexError, match=r"positions of .* \(expected integers or"):
                use()
        assert same(storage[:], data)


@pytest.mark.parametrize("index", [20, -21, [0, 20], torch.tensor([-21])], ids=str)
def test_an_index_out_of_range_is_refused(index):
    with PackedReplayStorage(40) as storage:
        storage.set(range(20), transitions(20))
        with pytest.raises(IndexError, match="20 are written"):
            storage.get(index)


@pytest.mark.parametrize("index", [3, torch.tensor([3])], ids=str)
def test_a_row_that_was_emptied_is_refused_as_a_wrong_index_and_an_error_of_ours(index):
    with replay_of(transitions(4), 8) as storage:
        storage._empty()
        with pytest.raises(
            UsageError, match=r"^no row 3: 0 are written .expected at least 4"
        ) as no:
            storage.get(index)
        assert isinstance(no.value, IndexError)


def test_rows_that_leave_a_gap_are_refused():
    with PackedReplayStorage(20) as storage:
        storage.set(range(5), transitions(5))
        with pytest.raises(RuntimeError, match="5 are written"):
            storage.set(range(7, 9), transitions(2))
        assert len(storage) == 5


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("max_size", count) for count in (1e6, 1, 0)),
        *(("writers", count) for count in (1.5, 0)),
        *(("n_step", count) for count in ("3", 0)),
        *(("gamma", 1.5), ("gamma", "1"), ("timeout", 0.0), ("non_finite", "drop")),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(setting, value):
    settings = {"max_size": 10, "writers": 2, setting: value}
    with pytest.raises(ConfigError, match=rf"replay storage {setting}: {value!r} \(expected "):
        PackedReplayStorage(**settings)


@pytest.mark.parametrize("other", [{"a": torch.zeros(3)}, {"b": torch.zeros(2)}])
def test_a_list_of_rows_of_several_forms_is_refused(other):
    rows = [TensorDict(a=torch.zeros(2)), TensorDict(other)]
    with PackedReplayStorage(20) as storage:
        for write in (storage.append, storage.add, ReplayBuffer(storage=storage).extend):
            with pytest.raises(LayoutShapeError, match=r"2 of several forms \(expected the same"):
                write(rows)
        assert storage.size == 0


def test_add_of_one_row_and_of_a_list_of_rows():
    rows = transitions(4)
    buffer = ReplayBuffer(storage=PackedReplayStorage(10), batch_size=2)
    assert buffer.add(rows[0]) == 0
    assert buffer.extend([rows[1], rows[2], rows[3]]).tolist() == [1, 2, 3]
    assert same(buffer[:], rows)
    buffer.storage.close()


def test_emptied_and_filled_again_it_counts_from_zero():
    for writer in (None, PackedReplayWriter()):
        buffer = ReplayBuffer(storage=PackedReplayStorage(10), batch_size=2, writer=writer)
        buffer.extend(transitions(13))
        buffer.empty()
        assert (len(buffer), buffer.write_count, buffer.storage.size) == (0, 0, 0)
        with pytest.raises(RuntimeError, match="empty"):
            buffer.sample()
        assert buffer.extend(transitions(3, 2)).tolist() == [0, 1, 2]
        assert same(buffer[:], transitions(3, 2))
        for counts in ([3, 5, 5, 7], [0, 2, 2, 4]):  # as the stock buffer does
            buffer.empty(empty_write_count=counts[0] == 0)
            seen = [buffer.write_count]
            buffer.extend(transitions(2))
            seen.append(buffer.write_count)
            buffer.empty(empty_write_count=False)
            seen.append(buffer.write_count)
            buffer.extend(transitions(2))
            assert [*seen, buffer.write_count] == counts
        buffer.storage.close()


# Forms


def test_nested_keys_and_mixed_dtypes_come_back_as_they_were():
    data = TensorDict(
        {
            "a": torch.rand(5, 2, 3, dtype=torch.float64),
            "b": {"c": {"d": torch.arange(5, dtype=torch.int16)}, "e": torch.rand(5, 1).bfloat16()},
            "f": torch.rand(5, 3) < 0.5,
            "g": torch.rand(5, 1, dtype=torch.complex64),
            "h": torch.arange(5, dtype=torch.uint8).unsqueeze(1),
            "critic": torch.rand(5, 9),
        },
        [5],
    )
    with PackedReplayStorage(5) as storage:
        storage.set(range(5), data)
        assert same(storage[:], data)
        assert list(storage[:].keys(True, True)) == list(data.keys(True, True))


def test_rows_with_a_time_dimension_keep_it():
    data = transitions(6).reshape(2, 3)
    buffer = ReplayBuffer(storage=PackedReplayStorage(5), batch_size=4)
    buffer.extend(data)
    assert buffer.sample().batch_size == (4, 3)
    assert same(buffer[:], data)


def test_rows_with_a_time_dimension_are_replaced_and_keep_the_index_that_a_writer_added():
    buffer = TensorDictReplayBuffer(storage=PackedReplayStorage(5), batch_size=4)
    buffer.extend(transitions(6).reshape(2, 3))
    buffer[1] = transitions(3, seed=1)
    assert same(buffer[1].exclude("index"), transitions(3, seed=1))
    assert buffer[:]["index"].tolist() == [[0] * 3, [1] * 3]


@pytest.mark.parametrize("write", ["append", "add"])
def test_rows_that_do_not_match_are_refused_and_nothing_is_written(write):
    with replay_of(transitions(3), 10) as storage:
        with pytest.raises(LayoutShapeError, match="action"):
            getattr(storage, write)(transitions(3, 1).set("action", torch.zeros(3, 5)))
        assert storage.ptr == 3
        assert same(storage[:], transitions(3))


def test_what_cannot_be_a_row_makes_no_storage():
    with PackedReplayStorage(10) as storage:
        with pytest.raises(LayoutKeyError):
            storage.append(TensorDict({}, [2]))
        assert not storage.initialized
        with pytest.raises(RuntimeError, match="at least one"):
            storage.append(transitions(3)[:0])


def test_rows_that_do_not_fit_are_refused_with_what_would_before_anything_is_made(monkeypatch):
    monkeypatch.setattr("torchrl_unilab.data.replay.shared.free_bytes", lambda: 1 << 20)
    with PackedReplayStorage(1 << 20) as storage:
        with pytest.raises(SegmentSpaceError, match="rows would") as refused:
            storage.append(transitions(2))
        assert not storage.initialized
    [fit] = map(int, re.findall(r"About (\d+) rows would", str(refused.value)))
    with replay_of(transitions(2), fit) as storage:
        assert 0 <= (1 << 20) - storage.nbytes < (1 << 20) / 10


# Beside buffers and their writers


@pytest.mark.parametrize("writer", [RoundRobinWriter, PackedReplayWriter])
def test_a_buffer_over_a_closed_storage_has_a_repr(writer):
    with PackedReplayStorage(10) as storage:
        buffer = ReplayBuffer(storage=storage, writer=writer(), batch_size=2)
        buffer.extend(transitions(3))
    assert "closed" in repr(buffer)


@pytest.mark.parametrize("writer", [None, PackedReplayWriter()])
def test_rows_are_added_beside_a_buffer_unless_its_writer_numbers_them(writer):
    rows = TensorDict(x=torch.arange(4.0), batch_size=[4])
    with PackedReplayStorage(16) as storage:
        TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=2).extend(rows)
        if writer is None:
            with pytest.raises(LayoutKeyError, match=r"no 'index'.*a PackedReplayWriter"):
                storage.add(rows.select("x"))
        else:
            storage.add(rows.select("x"))
        assert len(storage) == (4 if writer is None else 8)


@pytest.mark.parametrize("full", [False, True])
def test_after_rows_that_were_refused_a_stock_writer_continues(full):
    with PackedReplayStorage(8) as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        buffer.extend(transitions(8 if full else 2))
        for refused in (transitions(3).select("action"), torch.zeros(3)):
            with pytest.raises(LayoutError):
                buffer.extend(refused)
        written = storage.ptr
        buffer.extend(transitions(4))
        assert storage.ptr == written + 4


def test_a_position_before_the_first_is_refused():
    with replay_of(transitions(5), 8) as storage:
        before = storage[:].clone()
        with pytest.raises(IndexError, match="no row -6: 5 are written"):
            storage[-6] = transitions(1)[0]
        storage[-5] = transitions(6)[5]
        assert (storage[1:] == before[1:]).all()


def test_rows_of_which_some_are_refused_are_not_appended_either():
    rows = transitions(2)
    rows["next", "reward"][1] = torch.nan
    with replay_of(transitions(5), 8) as storage:
        with pytest.raises(ConfigError, match="not finite"):
            storage.set([5, 0], rows)
        assert len(storage) == 5


def test_rows_behind_a_shard_without_any_are_sampled_and_not_read_by_position():
    with PackedReplayStorage(8, example=transitions(1)[0], writers=2) as storage:
        storage.use_writer(1)
        storage.append(transitions(3))
        assert (len(storage), storage.size, len(storage[:]), 0 in storage) == (1, 3, 0, False)
        with pytest.raises(PositionError, match="no row 0: 0 are written"):
            storage[0]
        assert len(storage.sample(8)) == 8


def test_rows_that_one_shard_cannot_take_are_not_loaded():
    with PackedReplayStorage(8, writers=2) as storage:
        storage.load_rows(transitions(4))
        with pytest.raises(CheckpointError, match="a writer's part of the storage takes 4"):
            storage.load_rows(transitions(5))
        assert storage.size == 4
