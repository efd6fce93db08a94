"""Sampling by priority, over rows of this process and of others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import LazyTensorStorage, RoundRobinWriter, TensorDictReplayBuffer

from tests.support.prioritized import (
    ALPHA,
    BETA,
    CAPACITY,
    numbered_rows,
    prioritized_buffer,
    raw_priorities,
    written_by_others,
)
from torchrl_unilab.data import PackedPrioritizedSampler, PackedReplayStorage, PackedReplayWriter
from torchrl_unilab.errors import ConfigError, LayoutShapeError, UsageError

WRITERS = pytest.mark.parametrize("writer", [PackedReplayWriter, RoundRobinWriter])


@pytest.fixture
def storage():
    with PackedReplayStorage(CAPACITY, example=numbered_rows(1)[0]) as made:
        yield made


@pytest.mark.parametrize("over", ["packed", "stock"])
def test_rows_are_drawn_as_often_as_their_priority_says(over, storage):
    torch.manual_seed(0)
    buffer = prioritized_buffer(
        storage if over == "packed" else LazyTensorStorage(CAPACITY), count=20_000
    )
    buffer.extend(numbered_rows(8))
    priority = torch.arange(1.0, 9.0)
    buffer.update_priority(torch.arange(8), priority)
    sample = buffer.sample()
    expected = priority**ALPHA / (priority**ALPHA).sum()
    share = sample["x"].long().bincount(minlength=8) / 20_000
    torch.testing.assert_close(share, expected, atol=0.01, rtol=0)
    # The weights, over those of the row that is drawn least often.
    weight = (8 * expected) ** -BETA
    weight = (weight / weight.max())[sample["index"].long()]
    torch.testing.assert_close(sample["priority_weight"], weight, atol=1e-5, rtol=1e-5)


def test_priorities_follow_the_sample_that_was_learnt_from(storage):
    buffer = prioritized_buffer(storage, count=2, rows=8)
    sample = buffer.sample()
    sample["td_error"] = torch.tensor([5.0, 5.0])
    buffer.update_tensordict_priority(sample)
    learnt = sample["index"].unique().tolist()
    assert raw_priorities(buffer) == [5.0 if i in learnt else 1.0 for i in range(8)]


def test_rows_of_others_have_the_highest_priority_so_far(storage):
    buffer = prioritized_buffer(storage, rows=8)
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    buffer.sample()
    written_by_others(storage, numbered_rows(4, first=8))
    assert set(buffer.sample()["x"].tolist()) == set(map(float, range(12)))
    assert raw_priorities(buffer) == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]


def test_rows_that_others_overwrite_lose_their_priority(storage):
    buffer = prioritized_buffer(storage, rows=CAPACITY)
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([2.0, 9.0] + [1.0] * 14))
    buffer.sample()
    written_by_others(storage, numbered_rows(1, first=CAPACITY))
    buffer.sample()
    assert raw_priorities(buffer)[:3] == [9, 9, 1]


def test_a_highest_priority_that_others_overwrite_is_one_no_more(storage):
    buffer = prioritized_buffer(storage, max_priority_within_buffer=True, rows=CAPACITY)
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([9.0] + [0.5] * 15))
    for _ in range(2):
        written_by_others(storage, numbered_rows(1))
        buffer.sample()
    assert raw_priorities(buffer)[:3] == [9, 1, 0.5]


def test_rows_of_others_keep_the_priority_that_they_were_given(storage):
    buffer = prioritized_buffer(storage, rows=2)
    index = written_by_others(storage, numbered_rows(2, first=2))
    buffer.update_priority(index[:1], torch.tensor([5.0]))
    buffer.sample()
    assert raw_priorities(buffer) == [1, 1, 5, 1]


def test_rows_of_a_shard_that_is_ahead_are_drawn():
    with PackedReplayStorage(CAPACITY, example=numbered_rows(1)[0], writers=2) as storage:
        buffer = prioritized_buffer(storage)
        written_by_others(storage, numbered_rows(4))
        storage.use_writer(1)
        written_by_others(storage, numbered_rows(2, first=4))
        assert buffer.sample()["x"].unique().tolist() == [0, 1, 2, 3, 4, 5]


def test_an_emptied_buffer_forgets_priorities(storage):
    buffer = prioritized_buffer(storage, rows=8)
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    buffer.empty()
    buffer.extend(numbered_rows(2))
    buffer.sample()
    assert raw_priorities(buffer) == [1, 1]


def test_a_device_is_refused():
    with pytest.raises(ConfigError, match="device: 'cuda'"):
        PackedPrioritizedSampler(8, ALPHA, BETA, device="cuda")


BAD = [-1.0, math.nan, math.inf]
WRONG = [*BAD, "1"]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_an_exponent_stays_what_it_was_when_another_is_refused(name, bad):
    sampler = PackedPrioritizedSampler(8, 0.5, 0.5)
    with pytest.raises(ConfigError, match=rf"{name}: {bad} .*a number in \[0, inf\)"):
        setattr(sampler, name, bad)
    assert getattr(sampler, name) == 0.5
    setattr(sampler, name, 0.25)
    assert getattr(sampler, name) == 0.25


@pytest.mark.parametrize(
    ("name", "bad", "expected"),
    [
        *((name, bad, r"a number in \[0,") for name in ("alpha", "beta", "eps") for bad in WRONG),
        ("max_capacity", 0, "an integer of at least 1"),
        ("max_capacity", 8.0, "an integer of at least 1"),
        ("max_capacity", 10**12, "at most"),
        ("reduction", "sum", "'max', 'min', 'median' or 'mean'"),
        ("dtype", torch.float16, "torch.float32 or torch.float64"),
        ("dtype", torch.int64, "torch.float32 or torch.float64"),
    ],
)
def test_what_no_sampler_can_be_is_refused(name, bad, expected):
    settings = {"max_capacity": 8, "alpha": ALPHA, "beta": BETA, name: bad}
    with pytest.raises(ConfigError, match=f"{name}:? {bad!r}.* .expected {expected}"):
        PackedPrioritizedSampler(**settings)


@pytest.mark.parametrize("bad", BAD)
def test_a_priority_that_is_none_is_refused_and_none_is_set(bad, storage):
    buffer = prioritized_buffer(storage, rows=2)
    with pytest.raises(ValueError, match="cannot set priorities"):
        buffer.update_priority(torch.arange(2), torch.tensor([3.0, bad]))
    assert raw_priorities(buffer) == [1, 1]


def test_an_empty_buffer_says_so(storage):
    with pytest.raises(RuntimeError, match="0 rows"):
        prioritized_buffer(storage).sample()


def test_priorities_of_rows_that_are_gone_are_left_out(storage):
    buffer = prioritized_buffer(storage, rows=8)
    buffer.empty()
    buffer.extend(numbered_rows(2, first=100))
    buffer.update_priority(torch.arange(8), torch.full((8,), 5.0))
    assert set(buffer.sample()["x"].tolist()) == {100.0, 101.0}
    assert raw_priorities(buffer) == [5.0, 5.0]
    buffer.update_priority(torch.tensor([5, 6]), torch.tensor([1.0, 2.0]))
    assert set(buffer.sample()["x"].tolist()) == {100.0, 101.0}


@pytest.mark.parametrize("written", [2, 4, 8])
@pytest.mark.parametrize("writers", [1, 2])
def test_priorities_of_rows_beyond_the_storage_are_left_out(writers, written):
    with PackedReplayStorage(4, example=numbered_rows(1)[0], writers=writers) as storage:
        buffer = prioritized_buffer(storage, count=64)
        for shard in range(writers):
            storage.use_writer(shard)
            written_by_others(storage, numbered_rows(written))
        buffer.update_priority(torch.tensor([0, 5, 15]), torch.tensor([1.0, 1000.0, 1000.0]))
        assert int(buffer.sample()["index"].max()) < 4
        assert not buffer.sampler._sum_tree.values[4:].any()
        with pytest.raises(ConfigError, match="max_capacity"):
            buffer.update_priority(CAPACITY, 1.0)


@pytest.mark.parametrize("over", ["packed", "stock"])
@pytest.mark.parametrize("index", [0, [0], torch.tensor([0, -1])], ids=str)
def test_where_nothing_was_written_no_priority_is_set(index, over):
    with PackedReplayStorage(CAPACITY) as storage:
        buffer = prioritized_buffer(storage if over == "packed" else LazyTensorStorage(CAPACITY))
        buffer.update_priority(index, 1.0)
        assert not buffer.sampler._sum_tree.values.any()
        buffer.extend(numbered_rows(2))
        assert raw_priorities(buffer) == [1, 1]


@pytest.mark.parametrize("writers", [1, 2])
def test_priorities_of_rows_that_another_process_emptied_are_left_out(writers):
    with PackedReplayStorage(CAPACITY, example=numbered_rows(1)[0], writers=writers) as storage:
        buffer = prioritized_buffer(storage, count=64)
        for shard in range(writers):
            storage.use_writer(shard)
            written_by_others(storage, numbered_rows(8))
        index = buffer.sample()["index"]
        storage._empty()
        written_by_others(storage, numbered_rows(3, first=100))
        buffer.update_priority(index, torch.full((64,), 5.0))
        for _ in range(3):
            assert set(buffer.sample()["x"].tolist()) == {100.0, 101.0, 102.0}


def test_rows_that_are_gone_before_they_are_drawn_are_not_there_to_draw(storage, monkeypatch):
    buffer = prioritized_buffer(storage, rows=8)
    buffer.sample()
    length = PackedReplayStorage.__len__

    def emptied(self: PackedReplayStorage) -> int:
        """The length, after which another process empties the storage."""
        monkeypatch.undo()
        count = length(self)
        self._empty()
        return count

    monkeypatch.setattr(PackedReplayStorage, "__len__", emptied)
    with pytest.raises(UsageError, match="0 rows"):
        buffer.sampler.sample(storage, 4)
    buffer.update_priority(torch.arange(8), torch.ones(8))
    assert buffer.sampler._sum_tree.minimum() == float("inf")


def test_while_all_rows_are_replaced_none_is_new(storage):
    buffer = prioritized_buffer(storage, rows=8)
    rows = storage.rows
    rows.all_locked(lambda: rows._replace(lambda: buffer.mark_update(torch.arange(8))))
    written_by_others(storage, numbered_rows(1))
    assert buffer.sample()["x"].unique().tolist() == [0.0]


def test_a_tensor_of_priorities_may_be_used_again(storage):
    buffer, priority, index = prioritized_buffer(storage), torch.full((4,), 5.0), torch.arange(4)
    buffer.extend(numbered_rows(8))
    buffer.update_priority(index, priority)
    priority.fill_(float("nan"))
    index.fill_(0)
    buffer.extend(numbered_rows(1))
    assert raw_priorities(buffer)[-1] == 5.0
    assert int(buffer.sampler._max_priority[1]) == 0


def test_a_sampler_that_inference_mode_made_or_emptied_is_one_like_any_other(storage):
    with torch.inference_mode():
        buffer = prioritized_buffer(storage)
    for _ in range(2):
        buffer.extend(numbered_rows(2))
        buffer.update_priority(torch.arange(2), torch.tensor([2.0, 3.0]))
        assert raw_priorities(buffer) == [2, 3]
        with torch.inference_mode():
            buffer.empty()


def test_priorities_of_float64_keep_their_range_and_powers_that_are_none_are_refused(storage):
    buffer = prioritized_buffer(storage, dtype=torch.float64, rows=2)
    buffer.update_priority(torch.arange(2), torch.tensor([1e39, 1e39], dtype=torch.float64))
    buffer.extend(numbered_rows(1))
    assert float(buffer.sampler._sum_tree.values[2]) == pytest.approx(1e39**ALPHA)
    buffer.sampler.alpha = 9.0
    with pytest.raises(ConfigError, match="1e\\+100 the highest"):
        buffer.update_priority(torch.arange(2), torch.tensor([1.0, 1e100], dtype=torch.float64))


@pytest.mark.parametrize("zeros", [1, 4])
def test_priorities_of_0_are_refused_without_an_eps_and_none_is_set(zeros, storage):
    buffer = prioritized_buffer(storage, eps=0.0, rows=4)
    with pytest.raises(ConfigError, match=r"0.0 is the least one.*an eps above 0"):
        buffer.update_priority(torch.arange(4), torch.tensor([0.0] * zeros + [2.0] * (4 - zeros)))
    assert raw_priorities(buffer) == [1, 1, 1, 1]


def test_as_many_priorities_as_rows_are_asked_for(storage):
    buffer = prioritized_buffer(storage, rows=4)
    with pytest.raises(LayoutShapeError, match="3 of 4 rows"):
        buffer.update_priority(torch.arange(4), torch.ones(3))
    buffer.update_priority(torch.arange(0), torch.ones(0))
    buffer.update_priority(torch.arange(4), torch.full((4, 1), 2.0))
    assert raw_priorities(buffer) == [2, 2, 2, 2]


TWO, MASK = torch.tensor([5.0, 6.0]), torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    ("index", "priority", "expected"),
    [
        *(
            (index, TWO, [5, 1, 6, 1])
            for index in (MASK, MASK.numpy(), MASK.byte(), slice(None, None, 2), [0, 2])
        ),
        (torch.tensor([[0], [2]], dtype=torch.int32), TWO, [5, 1, 6, 1]),
        *((one, 5.0, [1, 5, 1, 1]) for one in (1, np.int64(1), np.array(1), torch.tensor(1))),
    ],
)
def test_priorities_are_set_where_an_index_says(index, priority, expected, storage):
    buffer = prioritized_buffer(storage, rows=4)
    buffer.update_priority(index, priority)
    assert raw_priorities(buffer) == expected


@pytest.mark.parametrize(
    "index",
    [1.7, torch.tensor(1.7), torch.tensor([1.7]), True, torch.tensor([True, False])],
    ids=str,
)
def test_positions_that_are_none_are_refused_and_no_priority_is_set(index, storage):
    buffer = prioritized_buffer(storage, rows=4)
    with pytest.raises(IndexError, match="expected"):
        buffer.update_priority(index, 5.0)
    assert raw_priorities(buffer) == [1, 1, 1, 1]


class _Stock:
    """What TorchRL's sampler does to raw priorities, row by row."""

    def __init__(self, *, within: bool) -> None:
        self.raw, self.most, self.within = dict[int, float](), None, within

    def set(self, priorities: dict[int, float]) -> None:
        highest = max(priorities, key=priorities.__getitem__)
        if self.most is None or priorities[highest] > self.most[0]:
            self.most = priorities[highest], highest
        self.raw.update(priorities)
        if self.within and self.most[1] in priorities:
            highest = max(self.raw, key=self.raw.__getitem__)
            self.most = self.raw[highest], highest

    def write(self, rows: list[int]) -> None:
        self.set(dict.fromkeys(rows, 1.0 if self.most is None else self.most[0]))
        if self.within and self.most[1] in rows:
            self.most = None


@WRITERS
@given(
    within=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from("wup"), st.integers(0, 2**32 - 1)), max_size=25),
)
def test_priorities_are_those_of_a_stock_sampler(writer, within, steps):
    model = _Stock(within=within)
    with PackedReplayStorage(CAPACITY, example=numbered_rows(1)[0]) as storage:
        sampler = PackedPrioritizedSampler(CAPACITY, ALPHA, BETA, max_priority_within_buffer=within)
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=sampler, writer=writer(), batch_size=4
        )
        for step, seed in [("w", 0), *steps]:
            torch.manual_seed(seed)
            if step == "w":
                index = buffer.extend(numbered_rows(1 + seed % 5))
                model.write(index.tolist())
            elif step == "u":
                index = torch.randperm(len(buffer))[: 1 + seed % 7]
                # Eighths, so that no two that are rounded can change places.
                priorities = torch.randint(1, 40, (len(index),)) / 8
                buffer.update_priority(index, priorities)
                model.set(dict(zip(index.tolist(), priorities.tolist(), strict=True)))
            else:
                buffer.sample()
        assert raw_priorities(buffer) == [round(model.raw[i], 4) for i in range(len(buffer))]


@WRITERS
def test_more_rows_than_fit_get_the_highest_priority_that_was_there(writer, storage):
    buffer = prioritized_buffer(storage, writer=writer(), max_priority_within_buffer=True)
    buffer.extend(numbered_rows(CAPACITY))
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([50.0] + [1.0] * (CAPACITY - 1)))
    buffer.extend(numbered_rows(CAPACITY + 1))
    assert raw_priorities(buffer) == [50] * CAPACITY


def test_rows_that_are_written_in_place_get_the_highest_priority_too(storage):
    buffer = prioritized_buffer(storage, writer=RoundRobinWriter(), rows=CAPACITY)
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([5.0] + [0.5] * (CAPACITY - 1)))
    storage.set(torch.tensor([7]), numbered_rows(1), set_cursor=False)
    buffer.mark_update(torch.tensor([7]))
    assert raw_priorities(buffer)[6:9] == [0.5, 5.0, 0.5]


def test_a_sampler_that_is_smaller_than_the_storage_is_refused(storage):
    sampler = PackedPrioritizedSampler(CAPACITY - 1, ALPHA, BETA)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    with pytest.raises(ConfigError, match=rf"max_capacity: {CAPACITY - 1} .*at least {CAPACITY}"):
        buffer.extend(numbered_rows(CAPACITY))
    with pytest.raises(ConfigError, match="max_capacity"):
        buffer.sample()
