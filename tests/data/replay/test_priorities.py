"""Sampling by priority, over rows of this process and of others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    Writer,
)

from torchrl_unilab.data import PackedPrioritizedSampler, PackedReplayStorage, PackedReplayWriter
from torchrl_unilab.errors import CheckpointError, ConfigError, LayoutShapeError, UsageError

CAPACITY = 16
ALPHA, BETA = 0.7, 0.5


def _rows(count: int, first: int = 0) -> TensorDict:
    """Rows that name their own number."""
    return TensorDict(x=torch.arange(first, first + count).float(), batch_size=[count])


@pytest.fixture
def storage():
    with PackedReplayStorage(CAPACITY, example=_rows(1)[0]) as made:
        yield made


def _buffer(
    storage: PackedReplayStorage, count: int = 4096, writer: Writer | None = None, **options
) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=storage,
        sampler=PackedPrioritizedSampler(CAPACITY, ALPHA, BETA, **options),
        writer=writer,
        batch_size=count,
        priority_key="td_error",
    )


def _written_by_others(storage: PackedReplayStorage, rows: TensorDict) -> torch.Tensor:
    """Write rows of which no buffer is told, as of those of another process."""
    return storage.append(rows)


def _raw(buffer: TensorDictReplayBuffer) -> list[float]:
    """The priorities that rows have, rounded."""
    tree, n = buffer.sampler._sum_tree, len(buffer)
    return [round(float(tree[i] ** (1 / ALPHA)), 4) for i in range(n)]


@pytest.mark.parametrize("over", ["packed", "stock"])
def test_rows_are_drawn_as_often_as_their_priority_says(over, storage):
    torch.manual_seed(0)
    buffer = _buffer(storage if over == "packed" else LazyTensorStorage(CAPACITY), count=20_000)
    buffer.extend(_rows(8))
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
    buffer = _buffer(storage, count=2)
    buffer.extend(_rows(8))
    sample = buffer.sample()
    sample["td_error"] = torch.tensor([5.0, 5.0])
    buffer.update_tensordict_priority(sample)
    learnt = sample["index"].unique().tolist()
    assert _raw(buffer) == [5.0 if i in learnt else 1.0 for i in range(8)]


def test_rows_of_others_have_the_highest_priority_so_far(storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(8))
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    buffer.sample()
    _written_by_others(storage, _rows(4, first=8))
    assert set(buffer.sample()["x"].tolist()) == set(map(float, range(12)))
    assert _raw(buffer) == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]


def test_rows_that_others_overwrite_lose_their_priority(storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(CAPACITY))
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([2.0, 9.0] + [1.0] * 14))
    buffer.sample()
    _written_by_others(storage, _rows(1, first=CAPACITY))
    buffer.sample()
    assert _raw(buffer)[:3] == [9, 9, 1]


def test_a_highest_priority_that_others_overwrite_is_one_no_more(storage):
    buffer = _buffer(storage, max_priority_within_buffer=True)
    buffer.extend(_rows(CAPACITY))
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([9.0] + [0.5] * 15))
    for _ in range(2):
        _written_by_others(storage, _rows(1))
        buffer.sample()
    assert _raw(buffer)[:3] == [9, 1, 0.5]


def test_rows_of_others_keep_the_priority_that_they_were_given(storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(2))
    index = _written_by_others(storage, _rows(2, first=2))
    buffer.update_priority(index[:1], torch.tensor([5.0]))
    buffer.sample()
    assert _raw(buffer) == [1, 1, 5, 1]


def test_own_rows_keep_the_priority_that_they_were_given(storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(2))
    buffer.sample()
    index = buffer.extend(_rows(2, first=2))
    buffer.update_priority(index, torch.tensor([0.25, 0.5]))
    buffer.sample()
    assert _raw(buffer) == [1, 1, 0.25, 0.5]


def test_rows_of_a_shard_that_is_ahead_are_drawn():
    with PackedReplayStorage(CAPACITY, example=_rows(1)[0], writers=2) as storage:
        buffer = _buffer(storage)
        _written_by_others(storage, _rows(4))
        storage.use_writer(1)
        _written_by_others(storage, _rows(2, first=4))
        assert buffer.sample()["x"].unique().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_restored_buffer_draws_by_the_priorities_that_were_saved(storage, tmp_path):
    buffer = _buffer(storage)
    buffer.extend(_rows(8))
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    buffer.dumps(tmp_path / "files")
    saved = buffer.state_dict()
    for restore in (
        lambda other: other.loads(tmp_path / "files"),
        lambda other: other.load_state_dict(saved),
    ):
        with PackedReplayStorage(CAPACITY, example=_rows(1)[0]) as again:
            other = _buffer(again)
            restore(other)
            other.sample()
            assert _raw(other) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("to_disk", [False, True])
def test_a_buffer_that_is_set_back_draws_by_the_priorities_of_then(storage, to_disk, tmp_path):
    buffer = _buffer(storage)
    buffer.extend(_rows(8))
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    buffer.sample()
    expected, saved = _raw(buffer), buffer.state_dict()
    buffer.dumps(tmp_path)
    buffer.update_priority(torch.arange(8), torch.full((8,), 3.0))
    if to_disk:
        buffer.loads(tmp_path)
    else:
        buffer.load_state_dict(saved)
    buffer.sample()
    assert _raw(buffer) == expected


@pytest.mark.parametrize("within", [False, True])
def test_rows_that_a_checkpoint_left_out_are_not_drawn(within, storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(CAPACITY))
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([9.0] * 5 + [2.0] * 11))
    saved = buffer.state_dict()
    saved["_storage"]["header"]["floors"][0] += 5  # overwritten before they were copied
    with PackedReplayStorage(CAPACITY, example=_rows(1)[0]) as again:
        other = _buffer(again, max_priority_within_buffer=within)
        other.load_state_dict(saved)
        assert set(other.sample()["index"].tolist()) == set(range(5, CAPACITY))
        other.extend(_rows(1))
        assert _raw(other) == [1 if within else 9, 0, 0, 0, 0] + [2] * 11
        assert set(other.sample()["index"].tolist()) == {0, *range(5, CAPACITY)}


@pytest.mark.parametrize("way", ["state", "sampler"])
def test_priorities_of_a_fuller_buffer_are_taken_for_the_rows_that_there_are(way, storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(CAPACITY))
    buffer.update_priority(torch.arange(CAPACITY), torch.full((CAPACITY,), 2.0))
    buffer.sample()
    with PackedReplayStorage(CAPACITY, example=_rows(1)[0]) as again:
        other = _buffer(again)
        if way == "state":
            other.sampler.load_state_dict(buffer.sampler.state_dict())
        else:
            other.set_sampler(buffer.sampler)
        other.extend(_rows(4))
        assert set(other.sample()["x"].tolist()) == {0.0, 1.0, 2.0, 3.0}
        assert _raw(other) == [2, 2, 2, 2]


def test_an_emptied_buffer_forgets_priorities(storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(8))
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    buffer.empty()
    buffer.extend(_rows(2))
    buffer.sample()
    assert _raw(buffer) == [1, 1]


def test_a_device_is_refused():
    with pytest.raises(ConfigError, match="device: cuda"):
        PackedPrioritizedSampler(8, ALPHA, BETA, device="cuda")


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
def test_numbers_below_0_or_not_finite_are_refused(name, bad):
    with pytest.raises(ConfigError, match=f"{name}: {bad} .*finite"):
        PackedPrioritizedSampler(8, **{"alpha": ALPHA, "beta": BETA, name: bad})


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_an_exponent_stays_what_it_was_when_another_is_refused(name, bad):
    sampler = PackedPrioritizedSampler(8, 0.5, 0.5)
    with pytest.raises(ConfigError, match=f"{name}: {bad} .*finite"):
        setattr(sampler, name, bad)
    assert getattr(sampler, name) == 0.5
    setattr(sampler, name, 0.25)
    assert getattr(sampler, name) == 0.25


@pytest.mark.parametrize(
    ("name", "bad", "expected"),
    [
        ("max_capacity", 0, "an integer of at least 1"),
        ("max_capacity", 8.0, "an integer of at least 1"),
        ("reduction", "sum", "max or min or median or mean"),
        ("dtype", torch.float16, "torch.float32 or torch.float64"),
        ("dtype", torch.int64, "torch.float32 or torch.float64"),
    ],
)
def test_what_no_sampler_can_be_is_refused(name, bad, expected):
    settings = {"max_capacity": 8, "alpha": ALPHA, "beta": BETA, name: bad}
    with pytest.raises(ConfigError, match=f"{name}: {bad} .expected {expected}"):
        PackedPrioritizedSampler(**settings)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_priority_that_is_none_is_refused_and_none_is_set(bad, storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(2))
    with pytest.raises(ValueError, match="cannot set priorities"):
        buffer.update_priority(torch.arange(2), torch.tensor([3.0, bad]))
    assert _raw(buffer) == [1, 1]


def test_an_empty_buffer_says_so(storage):
    with pytest.raises(RuntimeError, match="0 rows"):
        _buffer(storage).sample()


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


def test_priorities_of_rows_that_are_gone_are_left_out(storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(8))
    buffer.empty()
    buffer.extend(_rows(2, first=100))
    buffer.update_priority(torch.arange(8), torch.full((8,), 5.0))
    assert set(buffer.sample()["x"].tolist()) == {100.0, 101.0}
    assert _raw(buffer) == [5.0, 5.0]
    buffer.update_priority(torch.tensor([5, 6]), torch.tensor([1.0, 2.0]))
    assert set(buffer.sample()["x"].tolist()) == {100.0, 101.0}


@pytest.mark.parametrize("written", [2, 4, 8])
@pytest.mark.parametrize("writers", [1, 2])
def test_priorities_of_rows_beyond_the_storage_are_left_out(writers, written):
    with PackedReplayStorage(4, example=_rows(1)[0], writers=writers) as storage:
        buffer = _buffer(storage, count=64)
        for shard in range(writers):
            storage.use_writer(shard)
            _written_by_others(storage, _rows(written))
        buffer.update_priority(torch.tensor([0, 5, 15]), torch.tensor([1.0, 1000.0, 1000.0]))
        assert int(buffer.sample()["index"].max()) < 4
        assert not buffer.sampler._sum_tree.values[4:].any()
        with pytest.raises(ConfigError, match="max_capacity"):
            buffer.update_priority(CAPACITY, 1.0)


@pytest.mark.parametrize("index", [0, [0], torch.tensor([0, -1])], ids=str)
def test_where_nothing_was_written_no_priority_is_set(index):
    with PackedReplayStorage(CAPACITY) as storage:
        buffer = _buffer(storage)
        buffer.update_priority(index, 1.0)
        assert not buffer.sampler._sum_tree.values.any()
        buffer.extend(_rows(2))
        assert _raw(buffer) == [1, 1]


@pytest.mark.parametrize("writers", [1, 2])
def test_priorities_of_rows_that_another_process_emptied_are_left_out(writers):
    with PackedReplayStorage(CAPACITY, example=_rows(1)[0], writers=writers) as storage:
        buffer = _buffer(storage, count=64)
        for shard in range(writers):
            storage.use_writer(shard)
            _written_by_others(storage, _rows(8))
        index = buffer.sample()["index"]
        storage._empty()
        _written_by_others(storage, _rows(3, first=100))
        buffer.update_priority(index, torch.full((64,), 5.0))
        for _ in range(3):
            assert set(buffer.sample()["x"].tolist()) == {100.0, 101.0, 102.0}


def test_rows_that_are_gone_before_they_are_drawn_are_not_there_to_draw(storage, monkeypatch):
    buffer = _buffer(storage)
    buffer.extend(_rows(8))
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
    assert buffer.sampler._sum_tree.least() == float("inf")


def test_while_all_rows_are_replaced_none_is_new(storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(8))
    rows = storage.rows
    rows.all_alone(lambda: rows._replace(lambda: buffer.mark_update(torch.arange(8))))
    _written_by_others(storage, _rows(1))
    assert buffer.sample()["x"].unique().tolist() == [0.0]


def test_a_tensor_of_priorities_may_be_used_again(storage):
    buffer, priority, index = _buffer(storage), torch.full((4,), 5.0), torch.arange(4)
    buffer.extend(_rows(8))
    buffer.update_priority(index, priority)
    priority.fill_(float("nan"))
    index.fill_(0)
    buffer.extend(_rows(1))
    assert _raw(buffer)[-1] == 5.0
    assert int(buffer.sampler._max_priority[1]) == 0


def test_rows_that_a_stock_storage_has_no_longer_are_not_drawn():
    stock = LazyTensorStorage(CAPACITY)
    buffer = _buffer(stock, count=64)
    buffer.extend(_rows(4))
    few = stock.state_dict()
    buffer.extend(_rows(8, first=4))
    buffer.update_priority(torch.arange(12), torch.arange(1.0, 13.0))
    stock.load_state_dict(few)
    assert set(buffer.sample()["x"].tolist()) <= {0.0, 1.0, 2.0, 3.0}


def test_a_sampler_that_inference_mode_made_or_emptied_is_one_like_any_other(storage):
    with torch.inference_mode():
        buffer = _buffer(storage)
    for _ in range(2):
        buffer.extend(_rows(2))
        buffer.update_priority(torch.arange(2), torch.tensor([2.0, 3.0]))
        assert _raw(buffer) == [2, 3]
        with torch.inference_mode():
            buffer.empty()


def test_priorities_of_float64_keep_their_range_and_powers_that_are_none_are_refused(storage):
    buffer = _buffer(storage, dtype=torch.float64)
    buffer.extend(_rows(2))
    buffer.update_priority(torch.arange(2), torch.tensor([1e39, 1e39], dtype=torch.float64))
    buffer.extend(_rows(1))
    assert float(buffer.sampler._sum_tree[2]) == pytest.approx(1e39**ALPHA)
    buffer.sampler.alpha = 9.0
    with pytest.raises(ConfigError, match="1e\\+100 the highest"):
        buffer.update_priority(torch.arange(2), torch.tensor([1.0, 1e100], dtype=torch.float64))


def test_state_of_a_sampler_of_another_capacity_is_refused(storage):
    other = PackedPrioritizedSampler(CAPACITY - 1, ALPHA, BETA)
    with pytest.raises(CheckpointError, match=f"of {CAPACITY - 1} rows .expected {CAPACITY}"):
        _buffer(storage).sampler.load_state_dict(other.state_dict())


def test_files_of_a_sampler_of_another_capacity_are_refused_and_nothing_is_changed(tmp_path):
    PackedPrioritizedSampler(CAPACITY - 1, 0.1, 0.2, eps=0.3).dumps(tmp_path)
    sampler = PackedPrioritizedSampler(CAPACITY, ALPHA, BETA)
    sampler.update_priority(torch.arange(2), torch.tensor([1.0, 3.0]))
    with pytest.raises(CheckpointError, match=f"of {CAPACITY - 1} rows .expected {CAPACITY}"):
        sampler.loads(tmp_path)
    assert (sampler.alpha, sampler.beta, sampler._eps) == (ALPHA, BETA, 1e-8)
    assert sampler.default_priority == 3.0


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
    writes.dumps(one, tmp_path)
    reads.loads(other, tmp_path)
    index = torch.arange(CAPACITY)
    for loaded, saved in (other._sum_tree, one._sum_tree), (other._min_tree, one._min_tree):
        torch.testing.assert_close(loaded[index], saved[index], rtol=1e-6, atol=0)
    assert (other.default_priority, other._max_priority[1]) == (1e39, 1)


@pytest.mark.parametrize("times", [2, 3])
def test_files_are_loaded_as_often_as_one_likes(times, storage, tmp_path):
    buffer = _buffer(storage)
    buffer.extend(_rows(2))
    buffer.update_priority(torch.arange(2), torch.tensor([1.0, 3.0]))
    buffer.dumps(tmp_path)
    with PackedReplayStorage(CAPACITY, example=_rows(1)[0]) as again:
        other = _buffer(again)
        for _ in range(times):
            other.loads(tmp_path)
            other.extend(_rows(1))
            assert _raw(other) == [1, 3, 3]


def test_a_sampler_that_knows_no_highest_priority_is_saved_and_loaded(storage, tmp_path):
    other = PackedPrioritizedSampler(CAPACITY, ALPHA, BETA)
    other.update_priority(torch.arange(2), torch.tensor([1.0, 3.0]))
    fresh = PackedPrioritizedSampler(CAPACITY, ALPHA, BETA)
    overwritten = _buffer(storage, max_priority_within_buffer=True)
    overwritten.extend(_rows(4))
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


@pytest.mark.parametrize("zeros", [1, 4])
def test_priorities_of_0_are_refused_without_an_eps_and_none_is_set(zeros, storage):
    buffer = _buffer(storage, eps=0.0)
    buffer.extend(_rows(4))
    with pytest.raises(ConfigError, match=r"0.0 is the least one.*an eps above 0"):
        buffer.update_priority(torch.arange(4), torch.tensor([0.0] * zeros + [2.0] * (4 - zeros)))
    assert _raw(buffer) == [1, 1, 1, 1]


def test_as_many_priorities_as_rows_are_asked_for(storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(4))
    with pytest.raises(LayoutShapeError, match="3 of 4 rows"):
        buffer.update_priority(torch.arange(4), torch.ones(3))
    buffer.update_priority(torch.arange(0), torch.ones(0))
    buffer.update_priority(torch.arange(4), torch.full((4, 1), 2.0))
    assert _raw(buffer) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([True, False, True, False]),
        np.array([True, False, True, False]),
        torch.tensor([1, 0, 1, 0], dtype=torch.uint8),
        slice(None, None, 2),
        [0, 2],
        torch.tensor([[0], [2]], dtype=torch.int32),
    ],
    ids=["mask", "array", "bytes", "slice", "list", "column"],
)
def test_priorities_are_set_where_an_index_says(index, storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(4))
    buffer.update_priority(index, torch.tensor([5.0, 6.0]))
    assert _raw(buffer) == [5, 1, 6, 1]


@pytest.mark.parametrize("index", [1, np.int64(1), np.array(1), torch.tensor(1)])
def test_a_priority_is_set_of_one_row(index, storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(4))
    buffer.update_priority(index, 5.0)
    assert _raw(buffer) == [1, 5, 1, 1]


@pytest.mark.parametrize(
    "index",
    [1.7, torch.tensor(1.7), torch.tensor([1.7]), True, torch.tensor([True, False])],
    ids=str,
)
def test_positions_that_are_none_are_refused_and_no_priority_is_set(index, storage):
    buffer = _buffer(storage)
    buffer.extend(_rows(4))
    with pytest.raises(IndexError, match="expected"):
        buffer.update_priority(index, 5.0)
    assert _raw(buffer) == [1, 1, 1, 1]


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


@pytest.mark.parametrize("writer", [PackedReplayWriter, RoundRobinWriter])
@given(
    within=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from("wup"), st.integers(0, 2**32 - 1)), max_size=25),
)
def test_priorities_are_those_of_a_stock_sampler(writer, within, steps):
    model = _Stock(within=within)
    with PackedReplayStorage(CAPACITY, example=_rows(1)[0]) as storage:
        sampler = PackedPrioritizedSampler(CAPACITY, ALPHA, BETA, max_priority_within_buffer=within)
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=sampler, writer=writer(), batch_size=4
        )
        for step, seed in [("w", 0), *steps]:
            torch.manual_seed(seed)
            if step == "w":
                index = buffer.extend(_rows(1 + seed % 5))
                model.write(index.tolist())
            elif step == "u":
                index = torch.randperm(len(buffer))[: 1 + seed % 7]
                # Eighths, so that no two that are rounded can change places.
                priorities = torch.randint(1, 40, (len(index),)) / 8
                buffer.update_priority(index, priorities)
                model.set(dict(zip(index.tolist(), priorities.tolist(), strict=True)))
            else:
                buffer.sample()
        assert _raw(buffer) == [round(model.raw[i], 4) for i in range(len(buffer))]


@pytest.mark.parametrize("writer", [PackedReplayWriter, RoundRobinWriter])
def test_more_rows_than_fit_get_the_highest_priority_that_was_there(writer, storage):
    buffer = _buffer(storage, writer=writer(), max_priority_within_buffer=True)
    buffer.extend(_rows(CAPACITY))
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([50.0] + [1.0] * (CAPACITY - 1)))
    buffer.extend(_rows(CAPACITY + 1))
    assert _raw(buffer) == [50] * CAPACITY


def test_rows_that_are_written_in_place_get_the_highest_priority_too(storage):
    buffer = _buffer(storage, writer=RoundRobinWriter())
    buffer.extend(_rows(CAPACITY))
    buffer.update_priority(torch.arange(CAPACITY), torch.tensor([5.0] + [0.5] * (CAPACITY - 1)))
    storage.set(torch.tensor([7]), _rows(1), set_cursor=False)
    buffer.mark_update(torch.tensor([7]))
    assert _raw(buffer)[6:9] == [0.5, 5.0, 0.5]


def test_a_sampler_that_is_smaller_than_the_storage_is_refused(storage):
    sampler = PackedPrioritizedSampler(CAPACITY - 1, ALPHA, BETA)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    with pytest.raises(ConfigError, match=rf"max_capacity: {CAPACITY - 1} .*at least {CAPACITY}"):
        buffer.extend(_rows(CAPACITY))
    with pytest.raises(ConfigError, match="max_capacity"):
        buffer.sample()
