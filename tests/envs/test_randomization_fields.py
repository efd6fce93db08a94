"""Which fields and columns may be randomised, and which one number may go to together."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from tests.support.randomized import FRICTION, GAIN, MASS, MODEL, N, make
from torchrl_unilab.envs.randomization import ModelRandomizer, Randomize
from torchrl_unilab.errors import ConfigError

TWO_OF_EACH = """
<mujoco>
  <asset>
    <material name="mat1" specular="0.5"/> <material name="mat2" specular="0.5"/>
  </asset>
  <worldbody>
    <light name="light1" cutoff="40"/> <light name="light2" cutoff="40"/>
    <camera name="cam1" fovy="40"/> <camera name="cam2" fovy="40"/>
    <site name="site1" size=".1"/> <site name="site2" size=".1"/>
    <body name="body1"><joint name="jnt1" damping="1"/><geom name="geom1" size=".1"/></body>
    <body name="body2"><joint name="jnt2" damping="1"/><geom name="geom2" size=".1"/></body>
  </worldbody>
  <contact>
    <pair name="pair1" geom1="geom1" geom2="geom2" margin="1"/>
    <pair name="pair2" geom1="geom1" geom2="geom2" margin="1"/>
  </contact>
  <equality>
    <joint name="eq1" joint1="jnt1" joint2="jnt2"/> <joint name="eq2" joint1="jnt2"/>
  </equality>
  <tendon>
    <fixed name="tendon1" margin="1"><joint joint="jnt1" coef="1"/></fixed>
    <fixed name="tendon2" margin="1"><joint joint="jnt2" coef="1"/></fixed>
  </tendon>
  <actuator><motor name="actuator1" joint="jnt1"/><motor name="actuator2" joint="jnt2"/></actuator>
  <sensor>
    <jointpos name="sensor1" joint="jnt1" cutoff="1"/>
    <jointpos name="sensor2" joint="jnt2" cutoff="1"/>
  </sensor>
</mujoco>
"""
ONE_OF_EACH = """
<mujoco><worldbody><body><joint/><geom size=".1" pos=".2 0 0"/></body></worldbody></mujoco>
"""


def test_fields_of_as_many_objects_of_another_kind_are_refused():
    batch = Batch(mujoco.MjModel.from_xml_string(ONE_OF_EACH), 1, 1)
    with pytest.raises(ConfigError, match="have not the same objects"):
        ModelRandomizer(batch, [Randomize(("jnt_stiffness", "geom_margin"), 0.5, 1.5)], "test")


@pytest.mark.parametrize(
    "field",
    [
        *("actuator_gear[0]", "body_mass", "cam_fovy", "dof_damping", "eq_solref", "geom_friction"),
        *("jnt_pos", "light_cutoff", "mat_specular", "pair_margin", "sensor_cutoff", "site_size"),
        "tendon_margin",
    ],
)
def test_objects_of_each_kind_are_chosen_by_name(field: str) -> None:
    batch = Batch(mujoco.MjModel.from_xml_string(TWO_OF_EACH), 1, 1)
    kind = {"dof": "jnt"}.get(field.split("_")[0], field.split("_")[0])
    chosen = Randomize(field, 7.0, 7.0, "set", objects=(f"{kind}2",))
    randomizer = ModelRandomizer(batch, [chosen], "test")
    randomizer.seed([np.random.default_rng(0)])
    *others, second = randomizer.values(field.removesuffix("[0]"))[0]
    assert np.ravel(second)[0] == 7.0
    assert not np.isin(7.0, others)


def test_a_body_without_mass_keeps_none_and_the_others_are_scaled():
    batch = Batch(mujoco.MjModel.from_xml_string(ONE_OF_EACH), 1, 1)
    randomizer = ModelRandomizer(batch, [Randomize("body_mass", 0.5, 0.5)], "test")
    randomizer.seed([np.random.default_rng(0)])
    assert randomizer.values("body_mass")[0].tolist() == [0.0, 0.5 * batch.model.body_mass[1]]


@pytest.mark.parametrize("field", ["body_ipos", "body_iquat"])
def test_centres_of_bodies_that_are_compiled_as_simple_are_refused(field):
    body = '<body name="one"><freejoint/><geom size=".1"/></body>'
    one = f"<mujoco><worldbody>{body}</worldbody></mujoco>"
    moved = [Randomize(f"{field}[0]", 0.01, 0.02, "add", ("one",))]
    with pytest.raises(ConfigError, match=rf"{field} of \['one'\], .* as simple \(expected bodies"):
        ModelRandomizer(Batch(mujoco.MjModel.from_xml_string(one), 1, 1), moved, "test")
    other = mujoco.MjModel.from_xml_string(one.replace('"one"', '"one" simple="false"'))
    ModelRandomizer(Batch(other, 1, 1), moved, "test").seed([np.random.default_rng(0)])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Randomize("body_weight", 1, 2), "'body_weight' .expected a field of floating-point"),
        (Randomize("geom_contype", 1, 2), "'geom_contype' .expected a field of floating"),
        (Randomize("geom_friction[3]", 1, 2), r"'geom_friction\[3\]' .expected a field"),
        (Randomize("body_mass[0]", 1, 2), r"'body_mass\[0\]' .expected a field"),
        (Randomize("opt.timestep", 1, 2), "'opt.timestep' .expected .* not the timestep"),
        (Randomize("tendon_stiffness", 1, 2), "'tendon_stiffness' .expected .* the model has"),
        (Randomize("body_mass", 1, 2, objects=("trunk",)), "no object 'trunk' .expected one of"),
        (Randomize("opt.gravity", 1, 2, objects=("x",)), "no object 'x'"),
        (Randomize(("body_mass", "geom_size"), 1, 2), "have not the same objects"),
        (Randomize((), 1, 2), "have not the same objects"),
        (Randomize("body_mass", 1, 2, objects=()), "have not the same objects .* at least one"),
        (Randomize("body_mass", 0, 2), r"body_mass can become 0.0 .expected masses"),
        (Randomize("body_mass", -0.13, 2, "add"), r"body_mass can become -0.13"),
        (Randomize("body_inertia[1]", -1, 2, "set"), r"body_inertia can become -1.0"),
        (Randomize("dof_invweight0", 1, 2), "MuJoCo derives dof_invweight0 .* .expected one that"),
        (Randomize("geom_aabb", 1, 2), "MuJoCo derives geom_aabb from"),
    ],
)
def test_what_the_model_has_not_is_refused_and_nothing_is_expanded(spec, message):
    batch = Batch(MODEL, 2, 1)
    with pytest.raises(ConfigError, match=message):
        ModelRandomizer(batch, [MASS, spec], "test")
    assert batch.expanded("body_mass") is None
    with pytest.raises(ConfigError, match="randomization of QuadrupedWalk: "):
        make([MASS, spec])
    for other in (MASS, [3]):
        with pytest.raises(
            ConfigError, match=r"randomization of .* \(expected (Sequence|Randomize)\)"
        ):
            make(other)


def test_what_a_column_may_lose_is_checked_for_that_column_alone() -> None:
    torso = mujoco.mj_name2id(MODEL, mujoco.mjtObj.mjOBJ_BODY, "torso")
    inertia = MODEL.body_inertia[torso]
    loss = inertia.mean()
    assert inertia[2] < loss < inertia[0]
    env = make([Randomize("body_inertia[0]", -loss, 0.0, "add", objects=("torso",))])
    env.reset()
    drawn = env.randomizer.values("body_inertia")[:, torso]
    assert (drawn[:, 0] < inertia[0]).all()
    np.testing.assert_array_equal(drawn[:, 1:], np.tile(inertia[1:], (N, 1)))


@pytest.mark.parametrize(
    ("specs", "field"),
    [
        ((), "body_mass"),
        ((), "geom_friction"),
        ([FRICTION, GAIN], "body_subtreemass"),  # they need no constants
    ],
)
def test_what_does_not_differ_is_not_expanded(specs: Sequence[Randomize], field: str) -> None:
    assert make(specs)._state.physics.batch.expanded(field) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *((bad, "") for bad in ({"low": 2.0}, {"high": float("inf")}, {"how": "multiply"})),
        ({"when": "never"}, ""),
        ({"low": None}, r"low and high: None \(expected a finite number"),
        ({"objects": "torso"}, r"objects: 'torso' \(expected a tuple of names\). Give"),
        ({"objects": (1,)}, r"objects: \(1,\) \(expected a tuple of names"),
        ({"fields": 5}, r"fields: 5 \(expected a tuple of names"),
    ],
)
def test_a_malformed_spec_is_refused(options, message):
    with pytest.raises(ConfigError, match=message or r"^Randomize body_mass: .*\(expected"):
        Randomize(**{"fields": "body_mass", "low": 0.5, "high": 1.0, **options})
