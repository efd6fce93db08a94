"""Returns of n steps: sums over the rows that follow in the same trajectory."""

from __future__ import annotations

import contextlib
import copy
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.support.processes import receive, spawned, wait_for
from tests.support.striking import exit_code_of, kill_self, strike_at
from tests.support.transitions import (
    add_chain_until_told,
    chained,
    replay_of,
    same,
    steps,
    transitions,
    wrong_chain,
)
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.errors import ConfigError, LayoutDtypeError, LayoutKeyError

STEPS_TO_HALF_A_REWRITE = 4  # stores of the writer, the noted rows and an odd version come first


def get_all(storage: PackedReplayStorage) -> TensorDict:
    """Copies of all rows, each of several steps."""
    return storage.get(torch.arange(len(storage)))


def taken(storage: PackedReplayStorage) -> list[int]:
    """Of how many steps each row is."""
    return get_all(storage)["steps_to_next_obs"].tolist()


def returns(storage: PackedReplayStorage) -> list[float]:
    return get_all(storage)["next", "reward"].flatten().tolist()


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


def assert_equal(got: TensorDict, expected: TensorDict) -> None:
    """Sums and powers may be rounded otherwise."""
    for key in (("next", "reward"), "gamma"):
        torch.testing.assert_close(got.pop(key), expected.pop(key))
    assert same(got, expected)


@given(
    envs=st.integers(1, 3),
    count=st.integers(1, 20),
    n=st.integers(2, 5),
    episode=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    native=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_n_steps_are_what_a_loop_sums_up(envs, count, n, episode, native):
    capacity = 24
    rows = steps(envs, count, seed=count, episode=episode)
    with PackedReplayStorage(capacity, n_step=n, gamma=0.9) as storage:
        for row in rows:
            (storage.add if native else storage.append)(row)
        (floor,), (end,) = storage.rows.window()
        got = storage.get(torch.arange(floor, end).remainder(capacity))
        assert_equal(got, brute_force(torch.cat(rows), envs, floor, n, 0.9))


@pytest.mark.parametrize("shards", [2, 3])
def test_each_shard_has_the_n_steps_that_a_loop_sums_up(shards):
    written = [torch.cat(steps(2, 20, seed=writer, episode=0.1)) for writer in range(shards)]
    example = written[0][0].contiguous()
    settings = {"example": example, "n_step": 3, "gamma": 0.9, "writers": shards}
    with PackedReplayStorage(24 * shards, **settings) as storage:
        for writer, rows in enumerate(written):
            storage.use_writer(writer)
            for row in rows.split(2):
                storage.add(row)
        floors, ends = storage.rows.window()
        for writer, (floor, end) in enumerate(zip(floors, ends, strict=True)):
            got = storage.get(torch.arange(floor, end).remainder(24) * shards + writer)
            assert_equal(got, brute_force(written[writer], 2, floor, 3, 0.9))


def test_environments_that_look_the_same_are_not_mixed_up():
    data = torch.stack(steps(2, 4), 1)
    data["observation"].zero_()
    data["next", "observation"].zero_()
    data["next", "reward"] = torch.tensor([[1.0] * 4, [10.0] * 4]).unsqueeze(-1)
    with PackedReplayStorage(10, n_step=4, gamma=1.0) as storage:
        storage.add(data)
        assert returns(storage) == [4, 40, 3, 30, 2, 20, 1, 10]


def walk(envs: int, t: int, *, first: int = 0, **more: torch.Tensor) -> TensorDict:
    """Step `t` of environments that count up, the next one from one more; rewards are 10**env."""
    seen = torch.arange(first, first + envs).float().unsqueeze(1) + t
    rewards = 10.0 ** torch.arange(envs).unsqueeze(1)
    ahead = {"observation": seen + 1, "reward": rewards, "done": torch.zeros(envs, 1).bool()}
    return TensorDict({"observation": seen, "next": ahead, **more}, [envs])


def test_trajectory_ids_tell_a_step_of_environments_from_a_trajectory():
    with PackedReplayStorage(100, n_step=2, gamma=1.0) as storage:
        for t in range(3):
            ids = TensorDict(traj_ids=torch.arange(4), batch_size=[4])
            storage.append(walk(4, t, collector=ids))
        assert returns(storage) == [2, 20, 200, 2000] * 2 + [1, 10, 100, 1000]


def test_a_chance_match_does_not_make_a_trajectory_of_a_step():
    with PackedReplayStorage(100, n_step=2, gamma=1.0) as storage:
        for t in range(3):
            row = walk(4, t)
            for key in ("observation", ("next", "observation")):
                row[key][2:] += 100.0  # the first two match by chance, and the last two
                row[key][3:] += 100.0
            storage.append(row)
        assert returns(storage) == [2, 20, 200, 2000] * 2 + [1, 10, 100, 1000]


def test_a_trajectory_continues_after_rows_of_which_one_ended_another():
    rows = [walk(1, t) for t in range(6)]
    rows[2]["next", "done"].fill_(True)
    rows[3]["observation"] += 50.0
    rows[3]["next", "observation"] = rows[4]["observation"].clone()
    with PackedReplayStorage(100, n_step=2, gamma=1.0) as storage:
        for first in range(0, 6, 2):
            storage.append(torch.cat(rows[first : first + 2]))
        assert taken(storage) == [2, 2, 1, 2, 2, 1]


def test_what_an_environment_masks_by_nan_is_the_same_in_the_next_row():
    rows = torch.cat([walk(1, t) for t in range(4)])
    for keys in (("observation",), ("next", "observation")):
        rows[keys] = torch.cat([rows[keys], torch.full((4, 1), float("nan"))], 1)
    with replay_of(rows, 100, n_step=3, non_finite="pass") as storage:
        assert taken(storage) == [3, 3, 2, 1]


def test_rollouts_and_steps_give_the_same_returns():
    rows = steps(3, 8, seed=2, episode=0.2)
    with PackedReplayStorage(100, n_step=3) as one, PackedReplayStorage(100, n_step=3) as other:
        for row in rows:
            one.add(row)
        other.add(torch.stack(rows[:5], 1))
        other.add(torch.stack(rows[5:], 1))

        assert same(get_all(one), get_all(other))


def test_trajectories_in_one_append_are_followed_within_it():
    rows = torch.stack(steps(4, 6, seed=1), 1)  # [environments, steps]
    with PackedReplayStorage(100, n_step=3) as storage:
        storage.append(rows.reshape(-1))

        assert get_all(storage)["steps_to_next_obs"].view(4, 6).tolist() == [[3, 3, 3, 3, 2, 1]] * 4


def test_another_number_of_environments_starts_new_trajectories():
    with PackedReplayStorage(100, n_step=9) as storage:
        storage.add(torch.stack(steps(4, 3), 1))
        storage.add(torch.stack(steps(2, 3, seed=5), 1))
        assert taken(storage) == [3] * 4 + [2] * 4 + [1] * 4 + [3] * 2 + [2] * 2 + [1] * 2


def test_rows_that_are_reset_without_an_end_start_a_new_trajectory():
    with PackedReplayStorage(100, n_step=4) as storage:
        for row in [*steps(1, 3), *steps(1, 3, seed=9)]:
            storage.add(row)

        assert taken(storage) == [3, 2, 1, 3, 2, 1]


def test_a_successor_that_is_overwritten_is_never_returned():
    with PackedReplayStorage(10, n_step=3, gamma=1.0) as storage:
        for t in range(40):
            storage.add(chained(0, 3, t, 7))

            assert wrong_chain(storage.sample(50, seed=t), 7, 3) == 0


def rewrite(storage: PackedReplayStorage) -> None:
    storage[torch.tensor([2, 3])] = torch.cat(steps(1, 2, seed=5))


def die_while_rewriting(storage: PackedReplayStorage) -> None:
    def die() -> None:
        strike_at(storage.rows, STEPS_TO_HALF_A_REWRITE, kill_self)
        rewrite(storage)

    assert exit_code_of(die) == -signal.SIGKILL


@pytest.mark.parametrize("write", [rewrite, die_while_rewriting])
def test_a_rewritten_row_follows_none_and_is_followed_by_none(write):
    with PackedReplayStorage(10, n_step=3) as storage:
        for row in steps(1, 6):
            storage.add(row)

        write(storage)

        assert taken(storage) == [2, 1, 1, 1, 2, 1]


def test_views_show_rows_as_they_were_written():
    rows = torch.cat(steps(1, 6))
    with PackedReplayStorage(10, n_step=3) as storage:
        storage.append(rows)

        assert same(storage[:], rows)


@pytest.mark.parametrize("keys", [["critic"], [("critic",)]])
def test_which_observations_are_compared_can_be_said(keys):
    data = transitions(6).set("critic", torch.arange(6.0).unsqueeze(1))
    data["next", "critic"] = data["critic"] + 1
    data["next", "done"].zero_()
    with PackedReplayStorage(64, n_step=9, observation_keys=keys) as storage:
        storage.append(data)

        assert taken(storage) == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("without", "keys", "named"),
    [(("next", "done"), None, r"next\.done"), (None, ["action"], "action")],
    ids=["end", "next observation"],
)
def test_rows_without_what_n_steps_need_are_refused_by_its_name(without, keys, named):
    rows = transitions(6) if without is None else transitions(6).exclude(without)
    with (
        PackedReplayStorage(64, n_step=2, observation_keys=keys) as storage,
        pytest.raises(LayoutKeyError, match=named),
    ):
        storage.append(rows)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_rewards_that_cannot_be_discounted_are_refused(dtype):
    rows = transitions(4)
    rows["next", "reward"] = rows["next", "reward"].to(dtype)
    with (
        PackedReplayStorage(10, n_step=2) as storage,
        pytest.raises(LayoutDtypeError, match=rf"rewards for n_step=2: {dtype}"),
    ):
        storage.append(rows)


@pytest.mark.parametrize("key", ["gamma", ("nonterminal", "of"), ("next", "original_reward")])
def test_rows_with_what_batches_of_several_steps_get_are_refused(key):
    rows = transitions(4).set(key, torch.zeros(4))
    with PackedReplayStorage(10, n_step=2) as storage:
        with pytest.raises(LayoutKeyError, match=r"n_step=2: \['.*'\] \(expected none of"):
            storage.append(rows)
        storage.append(transitions(4))
    with PackedReplayStorage(10) as storage:
        storage.append(rows)


def test_a_key_in_place_of_a_list_of_keys_is_refused():
    with pytest.raises(ConfigError, match=r"'observation' \(expected a list .*\['observation'\]"):
        PackedReplayStorage(64, n_step=2, observation_keys="observation")


@given(
    envs=st.integers(1, 3),
    before=st.integers(1, 12),
    after=st.integers(1, 12),
    capacity=st.integers(8, 40),
    episode=st.sampled_from([0.0, 0.3, 1.0]),
    native=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_returns_continue_over_a_checkpoint(envs, before, after, capacity, episode, native):
    rows = steps(envs, before + after, seed=before * 31 + after, episode=episode)
    kind = {"n_step": 3, "example": rows[0][0]}
    with (
        PackedReplayStorage(capacity, **kind) as whole,
        PackedReplayStorage(capacity, **kind) as resumed,
    ):
        for row in rows[:before]:
            (whole.add if native else whole.append)(row)
        resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
        for row in rows[before:]:
            for storage in (whole, resumed):
                (storage.add if native else storage.append)(row)

        assert same(get_all(resumed), get_all(whole))


@pytest.mark.parametrize("size", [4, 20])  # of 4: the second episode's number is the first's
def test_rows_of_a_storage_that_was_emptied_continue_over_a_checkpoint_and_stop_at_an_end(size):
    rows = [chained(0, 1, t, 4) for t in range(8)]
    kind = {"n_step": 3, "gamma": 1.0}
    with PackedReplayStorage(size, **kind) as storage, PackedReplayStorage(size, **kind) as resumed:
        storage.append(torch.cat(rows[:4]))
        storage._empty()
        storage.append(torch.cat(rows[:2]))
        resumed.load_state_dict(storage.state_dict())
        for each in (storage, resumed):
            each.append(torch.cat(rows[2:6]))

        assert same(get_all(resumed), get_all(storage))
        assert wrong_chain(get_all(resumed), 4, 3) == 0


def test_returns_are_whole_while_two_processes_write():
    example = chained(0, 1, 0, 7)[0].contiguous()
    with (
        PackedReplayStorage(512, example=example, n_step=3, gamma=1.0, writers=2) as storage,
        contextlib.ExitStack() as stack,
    ):
        pipes = [
            stack.enter_context(spawned(add_chain_until_told, storage, writer, 8, 7))[1]
            for writer in range(2)
        ]
        for pipe in pipes:
            receive(pipe)
        wait_for(lambda: storage.size >= 512)
        for _ in range(20):
            assert wrong_chain(storage.sample(512), 7, 3) == 0
        for pipe in pipes:
            pipe.send("stop")
        written = sum(receive(pipe) for pipe in pipes)
        assert storage.ptr == 8 * written
        assert wrong_chain(get_all(storage), 7, 3) == 0


def test_two_processes_in_one_shard_are_refused_with_the_argument_that_makes_it_right():
    data = chained(0, 1, 0, 7)
    with (
        PackedReplayStorage(64, example=data[0].contiguous(), n_step=2) as storage,
        spawned(add_chain_until_told, storage, 0, 1, 7) as (process, pipe),
    ):
        receive(pipe)
        wait_for(lambda: storage.size > 0)
        with pytest.raises(ConfigError, match=rf"process {process.pid}.*writers="):
            storage.add(torch.cat([data, data]))  # a step of two environments, not of one
        assert storage.rows.steps() == ((0, 1),)
