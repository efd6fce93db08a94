"""Packed replay without a buffer: `add`, `append`, `sample`, its counts, its end."""

from __future__ import annotations

import gc
import math
import re
import weakref

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tests.support.processes import shared_mappings
from tests.support.transitions import flags, replay_of, same, stamped, transitions
from torchrl_unilab.data import DoubleBufferReplayPipeline, PackedReplayStorage
from torchrl_unilab.errors import (
    ConfigError,
    ContentionError,
    LayoutDtypeError,
    LayoutError,
    LayoutKeyError,
    LayoutShapeError,
    SegmentClosedError,
)


@pytest.mark.parametrize("count", [-1, 0, 1.5])
def test_as_many_rows_as_there_cannot_be_are_not_sampled(count):
    with replay_of(transitions(3), 10) as storage:
        for sample in (storage.sample, storage.empty_batch):
            with pytest.raises(
                ConfigError, match=rf"rows to sample: {count} \(expected an integer"
            ):
                sample(count)


def test_a_batch_that_fits_no_memory_is_refused_before_it_is_taken():
    with replay_of(transitions(3), 10) as storage:
        for make in (
            storage.empty_batch,
            lambda count: DoubleBufferReplayPipeline(storage, sample_count=count),
        ):
            for count in (10**12, 2**62):
                with pytest.raises(ConfigError, match=rf"batch of {count} rows: \d+ bytes"):
                    make(count)


def test_capacity_one_holds_the_last_row():
    with PackedReplayStorage(1) as storage:
        for seed in range(3):
            storage.append(transitions(2, seed))
            assert same(storage[:], transitions(2, seed)[1:])
            assert storage.sample(3)["index"].tolist() == [0, 0, 0]


def test_of_more_rows_than_fit_the_last_ones_stay():
    with replay_of(transitions(3), 10) as storage:
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


def test_the_graph_of_a_final_observation_is_let_go_of():
    mask, weight = torch.ones(4, dtype=torch.bool), torch.ones(17, requires_grad=True)
    held = weakref.ref(weight)
    with PackedReplayStorage(20) as storage:
        storage.add(
            transitions(4), terminal_mask=mask, terminal_next_obs=torch.rand(4, 17) * weight
        )
        del weight
        gc.collect()
        assert held() is None


@pytest.mark.parametrize(
    ("mask", "finals"),
    [
        (torch.zeros(3, dtype=torch.bool), torch.zeros(4, 17)),
        (torch.zeros(4, 1, dtype=torch.bool), torch.zeros(4, 17)),
        (torch.zeros(4), torch.zeros(4, 17)),
        ([False] * 4, torch.zeros(4, 17)),
        (torch.zeros(4, dtype=torch.bool), None),
        (None, torch.zeros(4, 17)),
        (torch.ones(4, dtype=torch.bool), torch.zeros(3, 17)),
        (torch.ones(4, dtype=torch.bool), torch.zeros(4, 16)),
        (torch.ones(4, dtype=torch.bool), TensorDict({"pixels": torch.zeros(4, 1)}, [4])),
        (
            torch.ones(4, dtype=torch.bool),
            TensorDict({"observation": torch.zeros(4, 17), "pixels": torch.zeros(4, 1)}, [4]),
        ),
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
        with replay_of(rows, 10, non_finite=policy) as storage:
            assert (storage.ptr, storage.non_finite) == (5, counted)


@pytest.mark.parametrize("key", [("agents", "action"), ("action", "arm"), ("next", "a", "reward")])
def test_what_is_not_finite_is_refused_under_any_key_of_actions_and_rewards(key):
    rows = TensorDict({key: torch.tensor([[1.0], [math.nan]]), "seen": torch.full((2,), math.nan)})
    with PackedReplayStorage(10) as storage, pytest.raises(ConfigError, match="row 1 is not"):
        storage.append(rows.auto_batch_size_(1))


def test_large_finite_values_are_not_taken_for_infinite_ones():
    rows = transitions(5)
    rows["next", "reward"].fill_(3e38)
    with replay_of(rows, 10) as storage:
        assert storage.ptr == 5


def test_the_same_seed_and_snapshot_give_the_same_batch_while_its_rows_are_there():
    with replay_of(transitions(60), 100) as storage:
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
    with replay_of(transitions(100), 100) as storage:
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


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_rows_are_refused_by_their_shape(shape):
    with PackedReplayStorage(10) as storage:
        for _ in range(2):
            with pytest.raises(LayoutShapeError, match=rf"{re.escape(str([*shape]))} .*not empty"):
                storage.add(transitions(6)[:1].expand(1, *shape)[0])
            storage.add(transitions(1))


def test_sampling_before_any_row_says_so():
    with PackedReplayStorage(10, example=transitions(1)[0]) as storage:
        with pytest.raises(RuntimeError, match=r"0 of 0 can be sampled \(expected at least 1"):
            storage.sample(4)
        assert storage.snapshot()[:2] == (0, 0)
    with PackedReplayStorage(10) as storage, pytest.raises(RuntimeError, match="0 of 10 written"):
        storage.sample(4)


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
    with replay_of(transitions(3), 10) as storage:
        batch = storage.sample(2, seed=0)
        expected = batch.clone()

    with pytest.raises(SegmentClosedError, match="closed"):
        use(storage)
    assert same(batch, expected)
    assert "closed" in repr(storage)


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

    with replay_of(rows(0, 3), 8) as storage:
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


def test_a_row_is_counted_once_however_many_of_its_numbers_are_not_finite():
    rows = transitions(4)
    rows["action"][:2, 0] = math.nan
    rows["next", "reward"][1:3] = math.inf
    with replay_of(rows, 8, non_finite="count") as storage:
        assert storage.non_finite == 3


def test_a_writers_rows_lie_at_every_nth_position_in_a_circle():
    rows = transitions(3)
    with PackedReplayStorage(8, example=rows[0], writers=2) as storage:
        storage.use_writer(1)
        assert storage.append(rows[:2]).tolist() == [1, 3]
        assert storage.append(rows).tolist() == [5, 7, 1]
        assert storage.add(rows[:1]) == 3


def test_rows_are_drawn_by_the_generator_of_their_buffer():
    with replay_of(transitions(64), 64) as storage:
        buffer, drawn = ReplayBuffer(storage=storage), []
        for seed in (3, 3, 4):
            buffer.set_rng(torch.Generator().manual_seed(seed))
            drawn.append(storage.sample(32)["index"].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


# What is new


def read_stamps(storage: PackedReplayStorage, counted: tuple[int, ...]) -> tuple[list[int], ...]:
    rows, counted = storage.read_since(counted)
    return rows["count"][:, 0].tolist(), counted


@pytest.mark.parametrize("rows", [2, 9])
def test_rows_written_after_the_storage_was_emptied_are_new(rows):
    with replay_of(stamped(torch.arange(5)), 10) as storage:
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
