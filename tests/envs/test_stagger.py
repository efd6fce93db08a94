"""First episodes of random lengths, so that simulations do not end theirs all at once."""

from __future__ import annotations

import numpy as np

from tests.support.playing import play
from torchrl_unilab.envs import MujocoBatchEnv

N = 3


def staggered(seed: int, num_envs: int = N, steps: int = 20) -> MujocoBatchEnv:
    settings = {"num_threads": 1, "max_episode_steps": steps, "stagger": True}
    return MujocoBatchEnv("HalfCheetah-v5", num_envs, seed=seed, **settings)


def ends(env: MujocoBatchEnv, steps: int) -> list[list[int]]:
    """Steps, from 0, at which each simulation's episodes are truncated."""
    truncated = env.rollout(steps, break_when_any_done=False)["next", "truncated"].squeeze(-1)
    return [row.nonzero().flatten().tolist() for row in truncated]


def test_staggered_first_episodes_end_apart_and_all_later_ones_are_whole():
    found = ends(staggered(0), 65)
    assert all(0 <= first < 20 for first, *_ in found)
    assert len({first for first, *_ in found}) == N
    assert all(set(np.diff(steps)) == {20} for steps in found)
    env = staggered(0, 16, steps=2)
    assert {first for first, *_ in ends(env, 4)} == {0, 1}
    env.close()


def test_each_seed_staggers_anew():
    env = staggered(0)
    first = ends(env, 25)
    env.set_seed(0)
    assert ends(env, 25) == first
    env.set_seed(1)
    assert ends(env, 25) != first


def test_a_staggered_environment_is_restored_before_its_first_episodes():
    one, other = (staggered(seed) for seed in (0, 9))
    play(other, 30)
    other.restore(one.snapshot())
    assert ends(other, 25) == ends(one, 25)
