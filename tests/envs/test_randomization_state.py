"""What a randomisation saves, and how it goes on from there."""

from __future__ import annotations

from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch
from mujoco.batch import Batch

from tests.support.playing import play
from tests.support.randomized import MASS, N, assert_same, make, values
from torchrl_unilab.envs.randomization import ModelRandomizer, Randomize
from torchrl_unilab.errors import ConfigError

BALL = "<mujoco><worldbody><body><freejoint/><geom size='.1'/></body></worldbody></mujoco>"


def test_models_and_those_to_come_are_the_same_whenever_a_state_is_loaded():
    batch = Batch(mujoco.MjModel.from_xml_string(BALL), 3, 1)
    mass = Randomize("body_mass", 0.5, 1.5, when="reset")
    randomizer = ModelRandomizer(batch, [mass], "test")
    randomizer.seed(np.random.default_rng(i) for i in range(3))
    state, first = randomizer.state_dict(), randomizer.values("body_mass")
    later = []
    older = {key: value for key, value in state.items() if key != "of"}
    for saved in (state, older):
        randomizer.load_state_dict(saved)
        np.testing.assert_array_equal(randomizer.values("body_mass"), first)
        randomizer.reset(np.arange(3))
        later.append(randomizer.values("body_mass"))
    np.testing.assert_array_equal(*later)
    assert (later[0] != first)[:, 1].all()


def test_numbers_of_other_fields_are_not_taken_for_these():
    one, other = make([MASS]), make([replace(MASS, objects=("*_thigh",), shared=True)])
    with pytest.raises(ConfigError, match="ModelRandomizer: what is drawn, shapes and generators"):
        other.restore(one.snapshot())
    wider = make([replace(MASS, low=0.1)])
    wider.restore(one.snapshot())
    assert_same(values(wider, [MASS]), values(one, [MASS]))


def test_models_drawn_at_the_start_survive_resets_states_and_divergence() -> None:
    env = make(max_episode_steps=3)
    before = values(env)
    play(env, 10)
    env.reset()
    qpos, _ = env.get_state()
    root = env.set_state(qpos[:1], np.full((1, 14), 1e11), ids=[2])
    env.step_and_maybe_reset(root.set("action", torch.zeros(N, 8)))
    assert env.num_diverged == 1
    assert_same(values(env), before)
