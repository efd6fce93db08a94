"""Packed replay: next observations derived from successors, and returns of n steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from tests.support.transitions import OBSERVATIONS, flags, steps, transitions
from torchrl_unilab.data.packed_links import successors
from torchrl_unilab.data.packed_replay import PackedReplayStorage
from torchrl_unilab.data.packed_writer import PackedReplayWriter
from torchrl_unilab.errors import ConfigError, LayoutKeyError


def same(a, b) -> None:
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    for key in a.keys(True, True):
        assert torch.equal(a[key], b[key]), key


def chain_lengths(storage: PackedReplayStorage) -> int:
    """How many rows that can be read refer to a successor."""
    rows = storage.rows
    floor, end, _ = rows.window()
    links, _ = rows.layout.unpack(rows.block[:, rows.layout.link])
    links = links[torch.arange(floor, end).remainder(rows.capacity)]
    return int(((links > 0) & (links <= rows.capacity)).sum())


# Successors


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_successors_are_the_first_equal_rows(following, observed):
    found = successors(
        torch.tensor(following, dtype=torch.int32).unsqueeze(1),
        torch.tensor(observed, dtype=torch.int32).unsqueeze(1),
        torch.zeros(len(following), dtype=torch.int64),
    ).tolist()
    assert found == [observed.index(x) if x in observed else -1 for x in following]


def test_a_successor_comes_later():
    same_words = torch.zeros(3, 2, dtype=torch.int32)
    assert successors(same_words, same_words, torch.arange(1, 4)).tolist() == [-1, -1, -1]


# Derived next observations


@given(
    envs=st.integers(1, 4),
    count=st.integers(1, 25),
    capacity=st.integers(4, 40),
    slots=st.integers(4, 40),
    episode=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    native=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_derived_rows_are_the_stored_ones_whatever_comes(
    envs, count, capacity, slots, episode, native
):
    """A serial oracle: a plain table of whole transitions."""
    slots = min(slots, capacity)
    rows = steps(envs, count, seed=envs * 100 + count, episode=episode)
    with PackedReplayStorage(
        capacity, next_observation="derived", final_observations=slots
    ) as storage:
        whole = []
        for row in rows:
            (storage.add if native else storage.append)(row)
            whole.append(row)
            table = torch.cat(whole)
            floor, end, head = storage.rows.window()
            assert end == head == len(table)
            assert floor >= len(table) - capacity
            if slots == capacity:
                assert floor == max(0, len(table) - capacity)
            numbers = torch.arange(floor, end)
            assert storage.size == len(numbers)
            same(storage.get(numbers.remainder(capacity)), table[floor:])
            if len(numbers):
                batch = storage.sample(20, seed=count)
                number = storage.rows.rows_at(batch.pop("index"), head)
                same(batch, table[number])


def test_rows_within_episodes_are_linked_and_only_they():
    rows = steps(4, 10, seed=1)
    rows[5]["next", "done"][2] = True  # where the final observation is another one
    rows[5]["next", "observation"][2] += 1.0
    with PackedReplayStorage(100, next_observation="derived") as storage:
        for row in rows:
            storage.add(row)
        assert chain_lengths(storage) == 9 * 4 - 1


@pytest.mark.parametrize("writer", [None, PackedReplayWriter])
def test_trajectories_of_an_extend_are_linked_to_those_of_the_next(writer):
    rows = torch.stack(steps(4, 12, seed=1), 1)  # [environments, steps]
    buffer = ReplayBuffer(
        storage=PackedReplayStorage(100, next_observation="derived"),
        writer=None if writer is None else writer(),
        batch_size=8,
    )
    for first in (0, 6):
        buffer.extend(rows[:, first : first + 6].reshape(-1))
    assert chain_lengths(buffer.storage) == 11 * 4
    expected = torch.cat([rows[:, first : first + 6].reshape(-1) for first in (0, 6)])
    same(buffer[:], expected)
    buffer.storage.close()


def test_steps_and_trajectories_give_the_same_rows():
    rows = steps(3, 8, seed=2, episode=0.2)
    with (
        PackedReplayStorage(100, next_observation="derived") as one,
        PackedReplayStorage(100, next_observation="derived") as other,
    ):
        for row in rows:
            one.add(row)
        other.add(torch.stack(rows, 1))
        same(one[:], other[:])
        assert chain_lengths(one) == chain_lengths(other)


def test_another_number_of_environments_starts_new_chains():
    with PackedReplayStorage(100, next_observation="derived") as storage:
        storage.add(torch.stack(steps(4, 3), 1))
        table = torch.cat([torch.cat(steps(4, 3)), torch.cat(steps(2, 3, seed=5))])
        storage.add(torch.stack(steps(2, 3, seed=5), 1))
        same(storage[:], table)
        assert chain_lengths(storage) == 2 * 4 + 2 * 2


def test_a_successor_that_is_overwritten_is_never_returned():
    """The floor passes a row before its successor: in each window, links point into it."""
    with PackedReplayStorage(10, next_observation="derived") as storage:
        for row in steps(3, 40, seed=3):
            storage.add(row)
            rows = storage.rows
            floor, end, head = rows.window()
            links, _ = rows.layout.unpack(rows.block[:, rows.layout.link])
            numbers = torch.arange(floor, end)
            links = links[numbers.remainder(10)]
            linked = (links > 0) & (links <= 10)
            follower = rows.rows_at(links[linked].long() - 1, head)
            assert (follower > numbers[linked]).all()
            assert (follower >= floor).all()
            assert (follower < end).all()


def test_short_episodes_give_up_the_oldest_rows_and_no_sample_points_to_them():
    with PackedReplayStorage(
        64, next_observation="derived", final_observations=8, writers=1
    ) as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=500)
        rows = torch.cat(steps(1, 60, seed=4, episode=1.0))
        for row in rows.split(1):
            buffer.extend(row)
        assert storage.size == 8
        assert len(buffer) == 60
        batch, info = buffer.sample(return_info=True)
        assert info["index"].min() == 52
        same(batch, rows[info["index"]])
        with pytest.raises(IndexError, match="given up"):
            buffer[3]


def test_more_ends_in_one_write_than_there_is_room_for_are_refused():
    with PackedReplayStorage(64, next_observation="derived", final_observations=8) as storage:
        with pytest.raises(ConfigError, match="at most 8"):
            storage.add(torch.cat(steps(9, 1)))
        assert storage.ptr == 0


def test_rows_cannot_be_rewritten():
    with PackedReplayStorage(64, next_observation="derived") as storage:
        storage.append(transitions(10))
        with pytest.raises(RuntimeError, match="stored"):
            storage[2] = transitions(1)[0]


def test_which_observations_are_derived_can_be_said_and_is_checked():
    data = transitions(6)
    data["critic"] = torch.rand(6, 3)
    data["next", "critic"] = torch.rand(6, 3)
    with PackedReplayStorage(64, next_observation="derived") as storage:
        storage.append(data)
        assert storage._form.linked == (("observation",), ("critic",))
        same(storage[:], data)
    with PackedReplayStorage(
        64, next_observation="derived", observation_keys=["critic"]
    ) as storage:
        storage.append(data)
        assert storage._form.linked == (("critic",),)
        same(storage[:], data)
    with (
        PackedReplayStorage(64, next_observation="derived", observation_keys=["action"]) as storage,
        pytest.raises(LayoutKeyError, match="action"),
    ):
        storage.append(data)


def test_derived_rows_take_at_most_six_tenths_of_the_stock_storages_bytes():
    capacity, episode, envs = 262_144, 1000, 256
    row = transitions(envs)
    stock = sum(leaf.nbytes for leaf in row.values(True, True)) // envs
    assert stock == 170
    with PackedReplayStorage(
        capacity, next_observation="derived", example=row[0], writers=2
    ) as storage:
        for t in range(0, capacity // envs + 20, 16):
            storage.add(_long(envs, t, 16, episode))
        assert storage.size == capacity
        assert storage.nbytes <= 0.6 * stock * capacity
        assert storage.rows._slots_free() > 0


def _long(envs: int, first: int, count: int, episode: int) -> TensorDict:
    """Steps whose observation is (environment, step): none is drawn, for speed."""
    t = torch.arange(first, first + count + 1).float().expand(envs, count + 1)
    seen = torch.stack([torch.arange(envs).float().unsqueeze(1).expand_as(t), t], -1)
    seen = seen.repeat(1, 1, 9)[..., :OBSERVATIONS]
    done = ((t[:, 1:] % episode) == 0).unsqueeze(-1)
    ahead = torch.where(done, seen[:, 1:] + 0.5, seen[:, 1:])
    no = flags(envs, count)
    return TensorDict(
        {
            "observation": seen[:, :-1],
            "action": torch.zeros(envs, count, 6),
            **dict.fromkeys(("done", "terminated", "truncated"), no),
            "next": {
                "observation": ahead,
                "reward": torch.zeros(envs, count, 1),
                "done": done,
                "terminated": no,
                "truncated": done,
            },
        },
        [envs, count],
    )


def test_samplers_of_torchrl_read_derived_rows_as_the_stock_storages():
    rows = torch.cat(steps(2, 60, seed=7, episode=0.1))
    batches = []
    for storage in (LazyTensorStorage(100), PackedReplayStorage(100, next_observation="derived")):
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=32)
        for block in rows.split(6):
            buffer.extend(block.clone())
        torch.manual_seed(0)
        batches.append(buffer.sample())
    same(*batches)


# Returns of n steps


def brute_force(table: TensorDict, envs: int, floor: int, n: int, gamma: float) -> TensorDict:
    """Sum up step by step; row (t, env) lies at t * envs + env."""
    out = table.clone()
    count = len(table)
    reward = table["next", "reward"].double()
    taken = torch.ones(count, dtype=torch.int64)
    for i in range(count):
        last, total, scale = i, reward[i].clone(), 1.0
        for _ in range(n - 1):
            follower = last + envs
            goes_on = follower < count and torch.equal(
                table["observation"][follower], table["next", "observation"][last]
            )
            if table["next", "done"][last] or not goes_on:
                break
            last, scale = follower, scale * gamma
            total += scale * reward[last]
            taken[i] += 1
        for key in ("observation", "done", "terminated", "truncated"):
            out["next", key][i] = table["next", key][last]
        out["next", "reward"][i] = total.float()
    out["next", "original_reward"] = table["next", "reward"]
    out["steps_to_next_obs"] = taken
    out["gamma"] = gamma ** taken.float()
    out["nonterminal"] = taken > 1
    return out[floor:]


@given(
    envs=st.integers(1, 3),
    count=st.integers(1, 20),
    n=st.integers(2, 5),
    episode=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    derived=st.sampled_from(["stored", "derived"]),
    native=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_n_steps_are_what_a_loop_sums_up(envs, count, n, episode, derived, native):
    capacity = 24
    rows = steps(envs, count, seed=count, episode=episode)
    with PackedReplayStorage(capacity, n_step=n, gamma=0.9, next_observation=derived) as storage:
        for row in rows:
            (storage.add if native else storage.append)(row)
        floor, end, _ = storage.rows.window()
        got = storage.get(torch.arange(floor, end).remainder(capacity))
        expected = brute_force(torch.cat(rows), envs, floor, n, 0.9)
        for key in (("next", "reward"), "gamma"):
            torch.testing.assert_close(got.pop(key), expected.pop(key))
        same(got, expected)


def test_three_steps_by_hand():
    seen = torch.arange(6.0).unsqueeze(1)
    data = TensorDict(
        {
            "observation": seen[:5],
            "next": {
                "observation": seen[1:],
                "reward": torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]]),
                "done": torch.tensor([[0], [0], [0], [1], [0]]).bool(),
            },
        },
        [5],
    )
    with PackedReplayStorage(10, n_step=3, gamma=0.5) as storage:
        storage.append(data)
        got = storage[:]
    assert got["next", "reward"].flatten().tolist() == [3.0, 6.0, 8.0, 8.0, 16.0]
    assert got["next", "observation"].flatten().tolist() == [3.0, 4.0, 4.0, 4.0, 5.0]
    assert got["next", "done"].flatten().tolist() == [False, True, True, True, False]
    assert got["steps_to_next_obs"].tolist() == [3, 3, 2, 1, 1]
    assert got["gamma"].tolist() == [0.125, 0.125, 0.25, 0.5, 0.5]
    assert got["nonterminal"].tolist() == [True, True, True, False, False]
    assert got["next", "original_reward"].flatten().tolist() == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_n_steps_stop_at_the_write_head_and_go_on_once_there_is_more():
    rows = steps(1, 5, seed=1)
    with PackedReplayStorage(10, n_step=3) as storage:
        taken = []
        for row in rows:
            storage.add(row)
            taken.append(storage[:]["steps_to_next_obs"].tolist())
    assert taken == [[1], [2, 1], [3, 2, 1], [3, 3, 2, 1], [3, 3, 3, 2, 1]]


def test_environments_that_look_the_same_are_not_mixed_up():
    data = torch.stack(steps(2, 4), 1)
    data["observation"].zero_()
    data["next", "observation"].zero_()
    data["next", "reward"] = torch.tensor([[1.0] * 4, [10.0] * 4]).unsqueeze(-1)
    with PackedReplayStorage(10, n_step=4, gamma=1.0) as storage:
        storage.add(data)
        assert storage[:]["next", "reward"].flatten().tolist() == [4, 40, 3, 30, 2, 20, 1, 10]


def test_n_steps_need_a_reward_and_an_end():
    with (
        PackedReplayStorage(10, n_step=2) as storage,
        pytest.raises(LayoutKeyError, match=r"next\.done"),
    ):
        storage.append(transitions(3).exclude(("next", "done")))
