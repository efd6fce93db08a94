"""What a randomisation saves, and how it goes on from there."""

from __future__ import annotations

import mujoco
import numpy as np
from mujoco.batch import Batch

from torchrl_unilab.envs.randomization import ModelRandomizer, Randomize

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
