"""What is saved of priorities, and restored."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RoundRobinWriter,
    TensorDictReplayBuffer,
)

from tests.support.prioritized import (
    ALPHA,
    BETA,
    CAPACITY,
    numbered_rows,
    prioritized_buffer,
    raw_priorities,
)
from torchrl_unilab.data import PackedPrioritizedSampler, PackedReplayStorage, PackedReplayWriter
from torchrl_unilab.errors import CheckpointError


@pytest.fixture
def storage():
    with PackedReplayStorage(CAPACITY, example=numbered_rows(1)[0]) as made:
        yield made


def test_a_restored_buffer_draws_by_the_priorities_that_were_saved(storage, tmp_path):
    buffer = prioritized_buffer(storage, rows=8)
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    buffer.dumps(tmp_path / "files")
    saved = buffer.state_dict()
    torch.save(saved, tmp_path / "state.pt")
    for restore in (
        lambda other: other.loads(tmp_path / "files"),
        lambda other: other.load_state_dict(saved),
        lambda other: other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)),
    ):
        with PackedReplayStorage(CAPACITY, example=numbered_rows(1)[0]) as again:
            other = prioritized_buffer(again)
            restore(other)
            other.sample()
            assert raw_priorities(other) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("to_disk", [False, True])
def test_a_buffer_that_is_set_back_draws_by_the_priorities_of_then(storage, to_disk, tmp_path):
    buffer = prioritized_buffer(storage, rows=8)
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    buffer.sample()
    expected, saved = raw_priorities(buffer), buffer.state_dict()
    buffer.dumps(tmp_path)
    buffer.update_priority(torch.arange(8), torch.full((8,), 3.0))
    if to_disk:
        buffer.loads(tmp_path)
    else:
        buffer.load_state_dict(saved)
    buffer.sample()
    assert raw_priorities(buffer) == expected


@pytest.mark.parametrize("within", [False, True])
def test_rows_that_a_checkpoint_left_out_are_not_drawn(within, storage):
    buffer = prioritized_buffer(storage, rows=CAPACITY)
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([9.0] * 5 + [2.0] * 11))
    saved = buffer.state_dict()
    saved["_storage"]["header"]["floors"][0] += 5  # overwritten before they were copied
    with PackedReplayStorage(CAPACITY, example=numbered_rows(1)[0]) as again:
        other = prioritized_buffer(again, max_priority_within_buffer=within)
        other.load_state_dict(saved)
        assert set(other.sample()["index"].tolist()) == set(range(5, CAPACITY))
        other.extend(numbered_rows(1))
        assert raw_priorities(other) == [1 if within else 9, 0, 0, 0, 0] + [2] * 11
        assert set(other.sample()["index"].tolist()) == {0, *range(5, CAPACITY)}


@pytest.mark.parametrize("way", ["state", "sampler"])
def test_priorities_of_a_fuller_buffer_are_taken_for_the_rows_that_there_are(way, storage):
    buffer = prioritized_buffer(storage, rows=CAPACITY)
    buffer.update_priority(torch.arange(CAPACITY), torch.full((CAPACITY,), 2.0))
    buffer.sample()
    with PackedReplayStorage(CAPACITY, example=numbered_rows(1)[0]) as again:
        other = prioritized_buffer(again)
        if way == "state":
            other.sampler.load_state_dict(buffer.sampler.state_dict())
        else:
            other.set_sampler(buffer.sampler)
        other.extend(numbered_rows(4))
        assert set(other.sample()["x"].tolist()) == {0.0, 1.0, 2.0, 3.0}
        assert raw_priorities(other) == [2, 2, 2, 2]


def test_rows_in_place_of_all_others_are_drawn_and_those_are_not(tmp_path):
    with PackedReplayStorage(100) as few, PackedReplayStorage(100) as storage:
        few.append(TensorDict(x=torch.zeros(5), batch_size=[5]))
        few.dumps(tmp_path)
        buffer = TensorDictReplayBuffer(
            storage=storage,
            sampler=PackedPrioritizedSampler(100, 0.6, 0.4),
            writer=PackedReplayWriter(),
            batch_size=64,
        )
        buffer.extend(TensorDict(x=torch.ones(50), batch_size=[50]))
        assert (buffer.sample()["x"] == 1.0).all()
        storage.loads(tmp_path)
        assert (buffer.sample()["x"] == 0.0).all()


def test_state_of_a_sampler_of_another_capacity_is_refused(storage):
    other = PackedPrioritizedSampler(CAPACITY - 1, ALPHA, BETA)
    with pytest.raises(CheckpointError, match=f"of {CAPACITY - 1} rows .expected {CAPACITY}"):
        prioritized_buffer(storage).sampler.load_state_dict(other.state_dict())


def test_files_of_a_sampler_of_another_capacity_are_refused_and_nothing_is_changed(tmp_path):
    PackedPrioritizedSampler(CAPACITY - 1, 0.1, 0.2, eps=0.3).dumps(tmp_path)
    sampler = PackedPrioritizedSampler(CAPACITY, ALPHA, BETA)
    sampler.update_priority(torch.arange(2), torch.tensor([1.0, 3.0]))
    with pytest.raises(CheckpointError, match=f"of {CAPACITY - 1} rows .expected {CAPACITY}"):
        sampler.loads(tmp_path)
    assert (sampler.alpha, sampler.beta, sampler._eps) == (ALPHA, BETA, 1e-8)
    assert sampler.default_priority == 3.0


def _minima(values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(values == 0, math.inf)


def _give_two_trees(sampler: PackedPrioritizedSampler) -> None:
    """Give it what the methods of a stock sampler read and write by numbers."""
    sampler._sum_tree = sampler._sum_tree.values.clone()
    sampler._min_tree = _minima(sampler._sum_tree)


@pytest.mark.parametrize(
    ("writes", "reads"),
    [
        (PackedPrioritizedSampler, PackedPrioritizedSampler),
        (PackedPrioritizedSampler, PrioritizedSampler),
        (PrioritizedSampler, PackedPrioritizedSampler),
    ],
)
def test_files_go_both_ways_between_it_and_a_stock_sampler(writes, reads, tmp_path):
    one, other = (
        PackedPrioritizedSampler(CAPACITY, ALPHA, BETA, dtype=torch.float64) for _ in range(2)
    )
    one.update_priority(torch.arange(3), torch.tensor([1.0, 1e39, 2.0], dtype=torch.float64))
    values = one._sum_tree.values.clone()
    for methods, sampler in (writes, one), (reads, other):
        if methods is PrioritizedSampler:
            _give_two_trees(sampler)
    writes.dumps(one, tmp_path)
    reads.loads(other, tmp_path)
    minima = torch.from_file(str(tmp_path / "mintree.memmap"), size=CAPACITY, dtype=torch.float64)
    loaded = other._sum_tree[torch.arange(CAPACITY)]
    torch.testing.assert_close(loaded, values, rtol=1e-6, atol=0)
    torch.testing.assert_close(minima, _minima(values), rtol=1e-6, atol=0)
    assert (other.default_priority, other._max_priority[1]) == (1e39, 1)


@pytest.mark.parametrize("times", [2, 3])
def test_files_are_loaded_as_often_as_one_likes(times, storage, tmp_path):
    buffer = prioritized_buffer(storage, rows=2)
    buffer.update_priority(torch.arange(2), torch.tensor([1.0, 3.0]))
    buffer.dumps(tmp_path)
    with PackedReplayStorage(CAPACITY, example=numbered_rows(1)[0]) as again:
        other = prioritized_buffer(again)
        for _ in range(times):
            other.loads(tmp_path)
            other.extend(numbered_rows(1))
            assert raw_priorities(other) == [1, 3, 3]


def test_a_sampler_that_knows_no_highest_priority_is_saved_and_loaded(storage, tmp_path):
    other = PackedPrioritizedSampler(CAPACITY, ALPHA, BETA)
    other.update_priority(torch.arange(2), torch.tensor([1.0, 3.0]))
    fresh = PackedPrioritizedSampler(CAPACITY, ALPHA, BETA)
    overwritten = prioritized_buffer(storage, max_priority_within_buffer=True, rows=4)
    for name, sampler in ("fresh", fresh), ("overwritten", overwritten.sampler):
        sampler.dumps(tmp_path / name)
        other.loads(tmp_path / name)
        assert other.default_priority == 1.0
        index = torch.arange(CAPACITY)
        assert torch.equal(other._sum_tree[index], sampler._sum_tree[index])


def test_a_state_stays_what_it_was(tmp_path):
    sampler = PackedPrioritizedSampler(CAPACITY, ALPHA, BETA)
    sampler.update_priority(torch.arange(2), torch.tensor([1.0, 3.0]))
    sampler.dumps(tmp_path)
    sampler.update_priority(torch.arange(2), torch.tensor([1.0, 7.0]))
    state = sampler.state_dict()
    sampler.loads(tmp_path)
    assert sampler.default_priority == 3.0
    sampler.load_state_dict(state)
    assert sampler.default_priority == 7.0


@pytest.mark.parametrize("writer", [PackedReplayWriter, RoundRobinWriter])
def test_rows_of_a_stock_checkpoint_are_not_new_when_its_writer_continues(writer, storage):
    stock = prioritized_buffer(LazyTensorStorage(CAPACITY), writer=RoundRobinWriter())
    for _ in range(2):
        stock.extend(numbered_rows(CAPACITY - 3))
    stock.update_priority(torch.arange(CAPACITY), torch.tensor([5.0] + [0.5] * (CAPACITY - 1)))
    buffer = prioritized_buffer(storage, writer=writer())
    buffer.load_state_dict(stock.state_dict())
    buffer.sample()
    read = storage.read_since(())[1]
    new = buffer.extend(numbered_rows(2))
    buffer.sample()
    expected = [5.0] + [0.5] * (CAPACITY - 1)
    for position in new.tolist():
        expected[position] = 5.0
    assert raw_priorities(buffer) == expected
    assert storage.read_since(read)[0].batch_size == torch.Size([2])


def test_rows_that_a_stock_storage_has_no_longer_are_not_drawn():
    stock = LazyTensorStorage(CAPACITY)
    buffer = prioritized_buffer(stock, count=64, rows=4)
    few = stock.state_dict()
    buffer.extend(numbered_rows(8, first=4))
    buffer.update_priority(torch.arange(12), torch.arange(1.0, 13.0))
    stock.load_state_dict(few)
    assert set(buffer.sample()["x"].tolist()) <= {0.0, 1.0, 2.0, 3.0}
