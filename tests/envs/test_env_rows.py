"""Which rows are seeded, stepped, started and staggered; what snapshots keep and bring back."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.playing import assert_same, play, step
from tests.support.processes import wait_for
from tests.support.striking import forked
from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.envs.randomization import Randomize

N = 3
SLIPPERY = Randomize("geom_friction[0]", 0.5, 1.5, when="reset")


def make(task: object, **settings: object) -> MujocoBatchEnv:
    return MujocoBatchEnv(task, N, **{"seed": 0, "num_threads": 1, **settings})


@pytest.mark.parametrize("played", [0, 3])
def test_a_snapshot_stays_as_it_was_whatever_is_done_afterwards(played: int) -> None:
    task = replace(make_task("QuadrupedWalk"), command_steps=2)
    options = {"stagger": True, "randomization": [SLIPPERY], "with_reward_terms": True}
    env = make(task, max_episode_steps=4, **options)
    if played:
        play(env, played)
    snapshot = env.snapshot()
    kept = pickle.dumps(snapshot)
    for _ in range(2):
        _, root = play(env, 5)
        assert pickle.dumps(snapshot) == kept
        env.restore(snapshot)
        step(env, root.set("_step", torch.tensor([[True], [False], [True]])))
        assert pickle.dumps(snapshot) == kept


def test_a_restored_environment_counts_divergences_from_then_and_has_no_other_steps_info() -> None:
    env = make("Hopper-v5")
    root = env.reset()
    snapshot = env.snapshot()
    env._state.physics.fields["qvel"][1] = 1e11
    step(env, root)
    assert (env.num_diverged, bool(env.info)) == (1, True)
    env.restore(snapshot)
    assert (env.num_diverged, env.info) == (0, {})


def test_rows_that_continue_after_a_restore_show_the_reward_terms_of_their_last_step() -> None:
    one, other = (make("Ant-v5", with_reward_terms=True) for _ in range(2))
    root = play(one, 3)[1]
    mask = torch.tensor([[True], [False], [False]])
    other.restore(one.snapshot())
    ours, theirs = (env.reset(root.clone().set("_reset", mask)) for env in (one, other))
    for name, term in theirs["reward_terms"].items():
        assert torch.equal(term, ours["reward_terms", name])
    assert theirs["reward_terms", "reward_survive"].flatten().tolist() == [0.0, 1.0, 1.0]
    assert {name: term[1] for name, term in other.reward_terms.items()}["reward_survive"] == 1.0


def test_a_forked_process_may_step_an_environment_of_one_thread() -> None:
    env = make("InvertedPendulum-v5")

    def use() -> None:
        assert env.rollout(2).shape == (N, 2)

    with forked(use) as child:
        wait_for(lambda: os.waitpid(child, os.WNOHANG) == (child, 0))


def test_rows_are_staggered_when_each_of_them_starts_for_the_first_time() -> None:
    env = make("HalfCheetah-v5", stagger=True)
    mask = torch.tensor([[False], [True], [False]])
    env.reset(env.fake_tensordict().select("done", "terminated").set("_reset", mask))
    assert env.snapshot()["to_stagger"].tolist() == [True, False, True]


def test_commands_are_drawn_anew_only_where_a_partial_step_makes_them_due() -> None:
    env = make(replace(make_task("QuadrupedWalk"), command_steps=2))
    root = step(env, env.reset())
    command = env._state.physics.fields["command"]
    for row in range(N):  # those before it stay due until they step
        before = command.copy()
        root = step(env, root.set("_step", torch.arange(N)[:, None] == row))
        assert (command != before).flatten().tolist() == [i == row for i in range(N)]


def test_partial_reset_leaves_the_other_rows_bit_identical() -> None:
    env, twin = (MujocoBatchEnv("Walker2d-v5", 4, seed=0, dtype=torch.float64) for _ in range(2))
    root, twin_root = env.reset(), twin.reset()
    for i in range(4):
        root, twin_root = step(env, root, i), step(twin, twin_root, i)
    mask = torch.tensor([[False], [True], [False], [True]])
    kept = ~mask.flatten()
    before = root["observation"].clone()
    root = env.reset(root.set("_reset", mask))
    assert torch.equal(root["observation"][kept], before[kept])
    assert (root["observation"][~kept] != before[~kept]).any(-1).all()
    for i in range(5):
        root, twin_root = step(env, root, i), step(twin, twin_root, i)
        assert_same(root[kept], twin_root[kept])


def test_a_reset_mask_without_rows_changes_nothing() -> None:
    env = make("Hopper-v5")
    root = env.reset()
    before = root.clone()
    root = env.reset(root.set("_reset", torch.zeros(3, 1, dtype=torch.bool)))
    assert_same(root, before)


def test_step_mask_steps_the_selected_rows_only() -> None:
    env = make("Hopper-v5", max_episode_steps=1, with_reward_terms=True)
    root = env.reset()
    qpos, qvel = env.get_state()
    after = step(env, root.set("_step", torch.tensor([[True], [False], [True]])))
    new_qpos, new_qvel = env.get_state()
    np.testing.assert_array_equal(new_qpos[1], qpos[1])
    np.testing.assert_array_equal(new_qvel[1], qvel[1])
    assert (new_qpos[::2] != qpos[::2]).any(axis=1).all()
    assert after["done"].flatten().tolist() == [True, False, True]
    assert after["reward"][1] == 0
    assert after["reward_terms", "reward_survive"].flatten().tolist() == [1, 0, 1]
    assert torch.equal(after["observation"][1], root["observation"][1])
