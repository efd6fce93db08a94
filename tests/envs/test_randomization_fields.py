"""Which fields one number may go to together."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from torchrl_unilab.envs.randomization import ModelRandomizer, Randomize
from torchrl_unilab.errors import ConfigError

ONE_OF_EACH = """
<mujoco><worldbody><body><joint/><geom size=".1" pos=".2 0 0"/></body></worldbody></mujoco>
"""


def test_fields_of_as_many_objects_of_another_kind_are_refused():
    batch = Batch(mujoco.MjModel.from_xml_string(ONE_OF_EACH), 1, 1)
    with pytest.raises(ConfigError, match="have not the same objects"):
        ModelRandomizer(batch, [Randomize(("jnt_stiffness", "geom_margin"), 0.5, 1.5)], "test")


def test_a_body_without_mass_keeps_none_and_the_others_are_scaled():
    batch = Batch(mujoco.MjModel.from_xml_string(ONE_OF_EACH), 1, 1)
    randomizer = ModelRandomizer(batch, [Randomize("body_mass", 0.5, 0.5)], "test")
    randomizer.seed([np.random.default_rng(0)])
    assert randomizer.values("body_mass")[0].tolist() == [0.0, 0.5 * batch.model.body_mass[1]]
