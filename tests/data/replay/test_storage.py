"""Packed replay in one process: against TorchRL's own storage, and its native surface."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
)
from torchrl.envs.transforms import RewardScaling

from tests.support.processes import shared_mappings
from tests.support.transitions import flags, same, stamped, transitions
from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter
from torchrl_unilab.errors import (
    CheckpointError,
    ConfigError,
    ContentionError,
    LayoutDtypeError,
    LayoutError,
    LayoutKeyError,
    LayoutShapeError,
    SegmentClosedError,
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
            got["next", "reward"],
            transitions(60)["next", "reward"][got["index"]] * 2.0 + 1.0,
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
    with PackedReplayStorage(8) as storage:
        storage.append(transitions(4))
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
    [("max_size", 1e6), ("max_size", 1), ("writers", 1.5), ("n_step", "3"), ("n_step", 0)],
)
def test_counts_that_are_no_integers_or_too_small_are_refused(setting, value):
    settings = {"max_size": 10, "writers": 2, setting: value}
    with pytest.raises(
        ConfigError, match=rf"storage {setting}: {value!r} \(expected an integer of"
    ):
        PackedReplayStorage(**settings)


@pytest.mark.parametrize("count", [-1, 0, 1.5])
def test_as_many_rows_as_there_cannot_be_are_not_sampled(count):
    with PackedReplayStorage(10) as storage:
        storage.append(transitions(3))
        for sample in (storage.sample, storage.empty_batch):
            with pytest.raises(
                ConfigError, match=rf"rows to sample: {count} \(expected an integer"
            ):
                sample(count)


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


@pytest.mark.parametrize("write", ["append", "add"])
def test_rows_that_do_not_match_are_refused_and_nothing_is_written(write):
    with PackedReplayStorage(10) as storage:
        storage.append(transitions(3))
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


@pytest.mark.parametrize(
    "settings",
    [
        {"max_size": 0},
        {"writers": 0},
        {"n_step": 0},
        {"gamma": 1.5},
        {"timeout": 0.0},
        {"non_finite": "drop"},
        {"max_size": 2, "writers": 3},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        PackedReplayStorage(**{"max_size": 10, **settings})


def test_rows_that_do_not_fit_are_refused_with_what_would_before_anything_is_made(monkeypatch):
    monkeypatch.setattr("torchrl_unilab.data.replay.shared.free_bytes", lambda: 1 << 20)
    with PackedReplayStorage(1 << 20) as storage:
        with pytest.raises(SegmentSpaceError, match="rows would"):
            storage.append(transitions(2))
        assert not storage.initialized


# Native surface


def test_capacity_one_holds_the_last_row():
    with PackedReplayStorage(1) as storage:
        for seed in range(3):
            storage.append(transitions(2, seed))
            assert same(storage[:], transitions(2, seed)[1:])
            assert storage.sample(3)["index"].tolist() == [0, 0, 0]


def test_of_more_rows_than_fit_the_last_ones_stay():
    with PackedReplayStorage(10) as storage:
        storage.append(transitions(3))
        index = storage.append(transitions(25, 5))
        assert index.tolist() == [(3 + i) % 10 for i in range(25)]
        at = torch.arange(18, 28).remainder(10)
        assert same(storage.get(at), transitions(25, 5)[15:])
        assert storage.snapshot()[:2] == (28, 10)


def test_steps_lie_one_after_the_other_whatever_the_batch_is_shaped_like():
    rows = transitions(12).reshape(4, 3)  # environments, steps
    for name in ("next",):
        rows[name, "done"] = rows[name, "terminated"] | rows[name, "truncated"]
        rows[name, "truncated"] &= ~rows[name, "terminated"]
    with PackedReplayStorage(12) as storage:
        assert storage.add(rows) == 0
        assert same(storage[:], rows.transpose(0, 1).reshape(-1))


def test_done_is_terminated_or_truncated_and_both_is_terminated():
    rows = transitions(4)
    rows["next", "terminated"] = torch.tensor([[0], [1], [0], [1]]).bool()
    rows["next", "truncated"] = torch.tensor([[0], [0], [1], [1]]).bool()
    rows["next", "done"] = flags(4)
    with PackedReplayStorage(4) as storage:
        storage.add(rows)
        got = storage[:]["next"]
    assert got["done"].flatten().tolist() == [False, True, True, True]
    assert got["terminated"].flatten().tolist() == [False, True, False, True]
    assert got["truncated"].flatten().tolist() == [False, False, True, False]


@pytest.mark.parametrize("form", ["rows", "masked", "tensordict"])
@pytest.mark.parametrize("steps_", [1, 3])
def test_the_true_final_observation_takes_the_place_of_the_reset_one(form, steps_):
    rows = transitions(4 * steps_).reshape(4, steps_)
    finals = torch.rand(4, steps_, 17)
    mask = torch.rand(4, steps_) < 0.5
    mask[0, 0], mask[1, 0] = True, False
    expected = torch.where(mask.unsqueeze(-1), finals, rows["next", "observation"])
    given = {
        "rows": finals,
        "masked": finals[mask],
        "tensordict": TensorDict({"observation": finals[mask]}, [int(mask.sum())]),
    }[form]
    if steps_ == 1:
        rows, mask, expected = rows[:, 0], mask[:, 0], expected[:, 0]
        given = finals[:, 0] if form == "rows" else given
    with PackedReplayStorage(20) as storage:
        storage.add(rows, terminal_mask=mask, terminal_next_obs=given)
        got = storage[:]["next", "observation"]
    assert torch.equal(got, expected.reshape(4, steps_, 17).transpose(0, 1).reshape(-1, 17))


@pytest.mark.parametrize(
    ("mask", "finals"),
    [
        (torch.zeros(3, dtype=torch.bool), torch.zeros(4, 17)),
        (torch.zeros(4, 1, dtype=torch.bool), torch.zeros(4, 17)),
        (torch.zeros(4), torch.zeros(4, 17)),
        (torch.zeros(4, dtype=torch.bool), None),
        (None, torch.zeros(4, 17)),
        (torch.ones(4, dtype=torch.bool), torch.zeros(3, 17)),
        (torch.ones(4, dtype=torch.bool), torch.zeros(4, 16)),
        (torch.ones(4, dtype=torch.bool), TensorDict({"pixels": torch.zeros(4, 1)}, [4])),
    ],
)
def test_a_final_observation_of_the_wrong_shape_is_an_error(mask, finals):
    with PackedReplayStorage(10) as storage:
        with pytest.raises(LayoutError):
            storage.add(transitions(4), terminal_mask=mask, terminal_next_obs=finals)
        assert storage.ptr == 0


@pytest.mark.parametrize("key", ["action", ("next", "reward")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_counted_or_passed(key, value):
    rows = transitions(5)
    rows[key][3, 0] = value
    rows[key][1, 0] = value
    with PackedReplayStorage(10) as storage:
        with pytest.raises(ConfigError, match="row 1 is not finite"):
            storage.append(rows)
        assert storage.ptr == 0
    for policy, counted in (("count", 2), ("pass", 0)):
        with PackedReplayStorage(10, non_finite=policy) as storage:
            storage.append(rows)
            assert (storage.ptr, storage.non_finite) == (5, counted)


def test_large_finite_values_are_not_taken_for_infinite_ones():
    rows = transitions(5)
    rows["next", "reward"].fill_(3e38)
    with PackedReplayStorage(10) as storage:
        storage.append(rows)
        assert storage.ptr == 5


def test_the_same_seed_and_snapshot_give_the_same_batch_while_its_rows_are_there():
    with PackedReplayStorage(100) as storage:
        storage.append(transitions(60))
        snapshot = storage.snapshot()
        assert snapshot[:2] == (60, 60)
        first = storage.sample(50, seed=7, snapshot=snapshot).clone()
        storage.append(transitions(40, 1))
        assert same(storage.sample(50, seed=7, snapshot=snapshot), first)
        assert not torch.equal(
            storage.sample(50, seed=8, snapshot=snapshot)["index"], first["index"]
        )
        assert (storage.sample(500, seed=7)["index"] >= 60).any()


def test_rows_of_a_snapshot_that_are_gone_are_drawn_from_those_that_are_left():
    with PackedReplayStorage(100) as storage:
        storage.append(transitions(100))
        snapshot = storage.snapshot()
        first = storage.sample(50, seed=7, snapshot=snapshot).clone()
        storage.append(transitions(60, 1))
        again = storage.sample(50, seed=7, snapshot=snapshot)
        kept = first["index"] >= 60
        assert same(again[kept], first[kept])
        assert (again["index"] >= 60).all()
        storage.append(transitions(40, 1))
        with pytest.raises(ContentionError, match="overwritten"):
            storage.sample(50, seed=7, snapshot=snapshot)


def test_sampling_before_any_row_says_so():
    with PackedReplayStorage(10, example=transitions(1)[0]) as storage:
        with pytest.raises(RuntimeError, match=r"0 of 0 can be sampled \(expected at least 1"):
            storage.sample(4)
        assert storage.snapshot()[:2] == (0, 0)
        with pytest.raises(ConfigError, match="at least 1"):
            storage.sample(0)
    with PackedReplayStorage(10) as storage, pytest.raises(RuntimeError, match="0 of 10 rows"):
        storage.sample(4)


def read_stamps(storage: PackedReplayStorage, counted: tuple[int, ...]) -> tuple[list[int], ...]:
    rows, counted = storage.read_since(counted)
    return rows["count"][:, 0].tolist(), counted


@pytest.mark.parametrize("rows", [2, 9])
def test_rows_written_after_the_storage_was_emptied_are_new(rows):
    with PackedReplayStorage(10) as storage:
        storage.append(stamped(torch.arange(5)))
        _, counted = read_stamps(storage, ())
        storage._empty()
        storage.append(stamped(torch.arange(100, 100 + rows)))

        found, counted = read_stamps(storage, counted)

        assert found == [*range(100, 100 + rows)]
        assert read_stamps(storage, counted)[0] == []


def test_rows_are_new_once_over_a_checkpoint():
    with PackedReplayStorage(10) as storage, PackedReplayStorage(10) as used:
        storage.append(stamped(torch.arange(3)))
        storage._empty()  # so that rows are not numbered as in another storage
        storage.append(stamped(torch.arange(5)))
        _, counted = read_stamps(storage, ())
        storage.append(stamped(torch.arange(5, 7)))
        used.append(stamped(torch.arange(33)))

        used.load_state_dict(storage.state_dict())

        assert read_stamps(used, counted)[0] == [5, 6]


# End


@pytest.mark.parametrize(
    "use",
    [
        lambda storage: storage.append(transitions(1)),
        lambda storage: storage.add(transitions(1)),
        lambda storage: storage.sample(1),
        lambda storage: storage.snapshot(),
    ],
)
def test_after_close_what_was_sampled_stays_and_all_else_is_a_python_error(use):
    with PackedReplayStorage(10) as storage:
        storage.append(transitions(3))
        batch = storage.sample(2, seed=0)
        expected = batch.clone()

    with pytest.raises(SegmentClosedError, match="closed"):
        use(storage)
    assert same(batch, expected)
    assert "closed" in repr(storage)


@pytest.mark.parametrize("writer", [RoundRobinWriter, PackedReplayWriter])
def test_a_buffer_over_a_closed_storage_has_a_repr(writer):
    with PackedReplayStorage(10) as storage:
        buffer = ReplayBuffer(storage=storage, writer=writer(), batch_size=2)
        buffer.extend(transitions(3))
    assert "closed" in repr(buffer)


def test_a_closed_replay_holds_no_shared_memory():
    before = shared_mappings()
    storage = PackedReplayStorage(10, example=transitions(1)[0])
    storage.append(transitions(3))
    storage.sample(2)
    assert shared_mappings() == before + 1

    storage.close()

    assert shared_mappings() == before
    assert "closed" in repr(storage)


def test_rows_that_cannot_be_copied_leave_nothing_behind():
    def rows(first: int, end: int) -> TensorDict:
        return TensorDict({"x": torch.arange(first, end)}, [end - first])

    with PackedReplayStorage(8) as storage:
        storage.append(rows(0, 3))
        with pytest.raises((RuntimeError, NotImplementedError)):
            storage.append(rows(0, 2).to("meta"))
        assert storage.snapshot()[:2] == (3, 3)
        assert storage.append(rows(3, 5)).tolist() == [3, 4]
        assert storage[:]["x"].tolist() == [0, 1, 2, 3, 4]


def test_rows_first_seen_in_inference_mode_are_written_in_any():
    with PackedReplayStorage(8) as storage:
        with torch.inference_mode():
            storage.append(stamped(torch.arange(2)))
            storage.add(stamped(torch.arange(2, 4)))
        storage.append(stamped(torch.arange(4, 6)))
        storage.add(stamped(torch.arange(6, 8)))
        assert storage[:]["count"][:, 0].tolist() == list(range(8))


@pytest.mark.parametrize("rows", [1, 3])
def test_final_observations_of_another_dtype_are_refused(rows):
    with PackedReplayStorage(16, example=transitions(1)[0]) as storage:
        finals = transitions(rows)["observation"].double()
        with pytest.raises(LayoutDtypeError, match=r"float64 \(expected torch.float32\)"):
            storage.add(
                transitions(3),
                terminal_mask=torch.tensor([True, False, False]),
                terminal_next_obs=finals,
            )
        assert storage.size == 0


def test_final_observations_of_some_keys_alone_are_refused():
    rows = transitions(4)
    rows["state"] = rows["next", "state"] = torch.zeros(4, 2)
    mask, some = torch.ones(4, dtype=torch.bool), TensorDict(state=torch.ones(4, 2))
    with PackedReplayStorage(16) as storage:
        with pytest.raises(LayoutKeyError, match=r"without \['next.observation'\]"):
            storage.add(rows, terminal_mask=mask, terminal_next_obs=some)
        assert not len(storage)


@pytest.mark.parametrize("stored", ["terminated", "truncated"])
def test_done_is_what_the_one_stored_flag_says_or_it_says_itself(stored):
    rows = transitions(4)
    rows["next", stored] = torch.tensor([[True], [False], [True], [False]])
    rows["next", "done"] = torch.tensor([[True], [True], [False], [False]])
    for name in {"terminated", "truncated"} - {stored}:
        del rows["next", name]
    with PackedReplayStorage(16) as storage:
        storage.add(rows)
        assert storage[:]["next", "done"].flatten().tolist() == [True, True, True, False]


def test_rewards_of_several_steps_end_where_done_says_and_the_one_stored_flag_does_not():
    with PackedReplayStorage(16, n_step=3, gamma=1.0) as storage:
        for step, done in enumerate([False, True, False, False]):
            flags = {"done": torch.tensor([[done]]), "truncated": torch.zeros(1, 1).bool()}
            reward = torch.tensor([[10.0**step]])
            observation = torch.full((1, 1), float(step))
            after = {"observation": observation + 1, "reward": reward, **flags}
            storage.add(TensorDict({"observation": observation, "next": after}, [1]))
        rewards = storage.sample(64)["next", "reward"]
    assert set(rewards.flatten().tolist()) <= {11.0, 10.0, 1100.0, 1000.0}


@pytest.mark.parametrize("writer", [None, PackedReplayWriter()])
def test_rows_are_added_beside_a_buffer_unless_its_writer_numbers_them(writer):
    rows = TensorDict(x=torch.arange(4.0), batch_size=[4])
    with PackedReplayStorage(16) as storage:
        TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=2).extend(rows)
        if writer is None:
            with pytest.raises(LayoutKeyError, match=r"without 'index'.*a PackedReplayWriter"):
                storage.add(rows.select("x"))
        else:
            storage.add(rows.select("x"))
        assert len(storage) == (4 if writer is None else 8)


@pytest.mark.parametrize("full", [False, True])
def test_after_rows_that_were_refused_a_stock_writer_goes_on(full):
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
    with PackedReplayStorage(8) as storage:
        storage.append(transitions(5))
        before = storage[:].clone()
        with pytest.raises(IndexError, match="no row -6: 5 are written"):
            storage[-6] = transitions(1)[0]
        storage[-5] = transitions(6)[5]
        assert (storage[1:] == before[1:]).all()


def test_rows_of_which_some_are_refused_are_not_appended_either():
    rows = transitions(2)
    rows["next", "reward"][1] = torch.nan
    with PackedReplayStorage(8) as storage:
        storage.append(transitions(5))
        with pytest.raises(ConfigError, match="not finite"):
            storage.set([5, 0], rows)
        assert len(storage) == 5


def test_rows_that_one_shard_cannot_take_are_not_loaded():
    with PackedReplayStorage(8, writers=2) as storage:
        storage.load_rows(transitions(4))
        with pytest.raises(CheckpointError, match="a writer's part of the storage takes 4"):
            storage.load_rows(transitions(5))
        assert storage.size == 4
