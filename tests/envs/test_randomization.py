from __future__ import annotations

import pickle
from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mujoco.batch import Batch

from tests.support.playing import play
from tests.support.randomized import (
    ALL,
    FRICTION,
    GAIN,
    MASS,
    MODEL,
    TASK,
    N,
    assert_same,
    make,
    values,
)
from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.envs.randomization import ModelRandomizer, Randomize
from torchrl_unilab.errors import ConfigError

# What is drawn


def test_scaled_values_are_the_models_own_times_a_number_in_the_range() -> None:
    env = make()
    torso = MODEL.body("torso").id
    mass, inertia = env.randomizer.values("body_mass"), env.randomizer.values("body_inertia")
    factor = mass[:, torso] / MODEL.body_mass[torso]
    assert ((factor >= 0.5) & (factor < 1.5)).all()
    assert len(set(factor)) == N
    np.testing.assert_allclose(inertia[:, torso], factor[:, None] * MODEL.body_inertia[torso])
    others = [i for i in range(MODEL.nbody) if i != torso]
    np.testing.assert_array_equal(mass[:, others], np.tile(MODEL.body_mass[others], (N, 1)))


def test_fields_named_together_get_the_same_number_for_each_object() -> None:
    env = make()
    gain = env.randomizer.values("actuator_gainprm")
    bias = env.randomizer.values("actuator_biasprm")
    np.testing.assert_array_equal(gain[:, :, 0], -bias[:, :, 1])
    assert len(np.unique(gain[:, :, 0])) == N * 8
    np.testing.assert_array_equal(gain[:, :, 1:], np.tile(MODEL.actuator_gainprm[:, 1:], (N, 1, 1)))


def test_a_shared_number_is_one_for_all_objects() -> None:
    env = make()
    feet = [i for i in range(MODEL.ngeom) if MODEL.geom(i).name.endswith("_foot")]
    assert len(feet) == 4
    friction = env.randomizer.values("geom_friction")
    for row in friction[:, feet, 0]:
        assert len(set(row)) == 1
    assert len(set(friction[:, feet[0], 0])) == N
    others = [i for i in range(MODEL.ngeom) if i not in feet]
    np.testing.assert_array_equal(
        friction[:, others], np.tile(MODEL.geom_friction[others], (N, 1, 1))
    )


def test_adding_and_setting() -> None:
    env = make(
        [
            Randomize("body_ipos[0]", 0.01, 0.02, "add", objects=("torso",)),
            Randomize("opt.gravity[2]", -10.5, -9.0, "set"),
            Randomize("opt.viscosity", 0.25, 0.25, "set"),
        ]
    )
    torso = MODEL.body("torso").id
    moved = env.randomizer.values("body_ipos")[:, torso] - MODEL.body_ipos[torso]
    assert ((moved[:, 0] >= 0.01) & (moved[:, 0] < 0.02)).all()
    assert not moved[:, 1:].any()
    gravity = env.randomizer.values("opt.gravity")
    assert ((gravity[:, 2] >= -10.5) & (gravity[:, 2] < -9.0)).all()
    assert not gravity[:, :2].any()
    assert env.randomizer.values("opt.viscosity").tolist() == [[0.25]] * N


def test_the_dofs_of_a_joint_get_one_number() -> None:
    env = make([Randomize("dof_armature", 1.0, 2.0, "set", objects=("root", "rear_left_hip"))])
    armature = env.randomizer.values("dof_armature")
    root = MODEL.joint("root").dofadr[0]
    assert (armature[:, root : root + 6] == armature[:, [root]]).all()
    hip = MODEL.joint("rear_left_hip").dofadr[0]
    assert (armature[:, hip] != armature[:, root]).all()
    untouched = [i for i in range(6, MODEL.nv) if i != hip]
    assert (armature[:, untouched] == MODEL.dof_armature[untouched]).all()


def test_several_specs_of_one_field_follow_one_another() -> None:
    env = make(
        [
            Randomize("body_mass", 2.0, 2.0, objects=("torso",)),
            Randomize("body_mass", 0.5, 0.5, "add", objects=("*",)),
        ]
    )
    mass = env.randomizer.values("body_mass")
    np.testing.assert_allclose(mass[:, MODEL.body("torso").id], 2.0 * 3.2 + 0.5)
    np.testing.assert_allclose(mass[:, MODEL.body("rear_left_thigh").id], 0.25 + 0.5)


@settings(max_examples=25)
@given(
    how=st.sampled_from(["scale", "add", "set"]),
    low=st.floats(0.1, 2.0),
    width=st.floats(0.0, 3.0),
    shared=st.booleans(),
    resets=st.lists(st.lists(st.integers(0, 3), unique=True), max_size=4),
)
def test_any_number_of_redraws_applies_one_number_to_the_models_value(
    how: str, low: float, width: float, shared: bool, resets: list[list[int]]
) -> None:
    batch = Batch(MODEL, 4, 1)
    spec = Randomize("actuator_gainprm[0]", low, low + width, how, shared=shared, when="reset")
    randomizer = ModelRandomizer(batch, [spec], "test")
    randomizer.seed(np.random.default_rng(i) for i in range(4))
    for ids in resets:
        before = randomizer.values("actuator_gainprm")
        randomizer.reset(np.array(sorted(ids), dtype=np.intp))
        others = [i for i in range(4) if i not in ids]
        now = randomizer.values("actuator_gainprm")
        np.testing.assert_array_equal(now[others], before[others])
    gain = randomizer.values("actuator_gainprm")[:, :, 0]
    number = {"scale": gain / 30.0, "add": gain - 30.0, "set": gain}[how]
    assert (number >= low - 1e-9).all()
    assert (number <= low + width + 1e-9).all()
    if shared:
        assert np.ptp(gain, axis=1).max() == 0


# Constants that follow


def test_constants_that_depend_on_masses_are_those_of_a_model_with_these_masses() -> None:
    env = make([MASS])
    for i in range(N):
        spec = TASK.load_spec()
        model = spec.compile()
        model.body_mass[:] = env.randomizer.values("body_mass")[i]
        model.body_inertia[:] = env.randomizer.values("body_inertia")[i]
        mujoco.mj_setConst(model, mujoco.MjData(model))
        for name in ("body_subtreemass", "dof_M0", "body_invweight0", "actuator_acc0"):
            np.testing.assert_allclose(
                env._state.physics.batch.expanded(name)[i],
                getattr(model, name),
                rtol=1e-12,
                err_msg=name,
            )


def test_a_simulation_moves_as_mujoco_moves_its_model() -> None:
    env = make()
    qpos, qvel = env.get_state()
    env.set_state(qpos, qvel)
    action = torch.linspace(-0.5, 0.5, 8).expand(N, 8)
    root = env.reset()
    qpos, qvel = env.get_state()
    for _ in range(5):
        root = env.step_mdp(env.step(root.set("action", action)))
    after, _ = env.get_state()
    assert len({row.tobytes() for row in after}) == N
    for i in range(N):
        model = env._state.physics.batch.get_model(i)
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:] = qpos[i], qvel[i]
        mujoco.mj_forward(model, data)
        data.ctrl[:] = action[i].numpy()
        for _ in range(5 * TASK.frame_skip):
            mujoco.mj_step(model, data)
        np.testing.assert_array_equal(after[i], data.qpos)


TILTED = """
<mujoco>
  <worldbody>
    <geom name="floor" type="plane" size="50 50 .1"/>
    <body name="base" pos="0 0 .11">
      <freejoint/>
      <geom type="box" size=".1 .1 .1" mass="1"/>
      <body name="arm" pos=".3 0 0" simple="false">
        <joint name="hinge" axis="0 1 0"/>
        <geom type="box" size=".05 .03 .02" pos=".02 0 0" mass=".5"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="hinge" ctrlrange="-1 1"/></actuator>
</mujoco>
"""


@pytest.mark.parametrize(
    ("field", "name", "of", "attribute"),
    [
        ("jnt_axis[0]", "hinge", "joint", "axis"),
        ("body_quat[1]", "arm", "body", "quat"),
        ("geom_quat[1]", "floor", "geom", "quat"),
    ],
)
def test_what_is_tilted_moves_as_that_of_a_model_compiled_so(field, name, of, attribute):
    spec = mujoco.MjSpec.from_string(TILTED)
    tilted = getattr(spec, of)(name)
    value = getattr(tilted, attribute).copy()
    value[int(field[-2])] += 0.3
    setattr(tilted, attribute, value)
    compiled = spec.compile()
    data = mujoco.MjData(compiled)
    model = mujoco.MjModel.from_xml_string(TILTED)
    batch = Batch(model, 1, 1)
    randomizer = ModelRandomizer(batch, [Randomize(field, 0.3, 0.3, "add", (name,))], "test")
    randomizer.seed([np.random.default_rng(0)])
    batch.reset()
    for _ in range(100):
        batch.step()
        mujoco.mj_step(compiled, data)
    np.testing.assert_allclose(batch.bind("qpos")[0], data.qpos, rtol=1e-12)
    randomizer.close()


def test_a_task_that_reads_a_randomised_or_derived_field_sees_each_simulations_own() -> None:
    task = replace(TASK, reads=(*TASK.reads, "body_mass", "body_subtreemass"))
    env = MujocoBatchEnv(task, N, seed=0, randomization=[MASS])
    np.testing.assert_array_equal(
        env._state.physics.fields["body_mass"], env.randomizer.values("body_mass")
    )
    total = env._state.physics.fields["body_mass"].sum(axis=1)
    np.testing.assert_allclose(env._state.physics.fields["body_subtreemass"][:, 0], total)
    env.set_seed(1)
    np.testing.assert_array_equal(
        env._state.physics.fields["body_mass"], env.randomizer.values("body_mass")
    )


# When it is drawn


def test_models_drawn_at_resets_change_in_the_rows_that_reset_only() -> None:
    specs = [replace(MASS, when="reset"), replace(GAIN, when="reset"), FRICTION]
    env = make(specs)
    root = env.reset()
    before = values(env, specs)
    mask = torch.tensor([True, False, False, True, False, True])
    env.reset(root.set("_reset", mask[:, None]))
    after = values(env, specs)
    for name in ("body_mass", "body_inertia", "actuator_gainprm", "actuator_biasprm"):
        changed = (after[name] != before[name]).reshape(N, -1).any(axis=1)
        assert changed.tolist() == mask.tolist(), name
    np.testing.assert_array_equal(after["geom_friction"], before["geom_friction"])


# From what it is drawn


@pytest.mark.parametrize("when", ["start", "reset"])
def test_a_seed_gives_the_same_models_and_steps_at_any_number_of_threads(when: str) -> None:
    specs = [replace(spec, when=when) for spec in ALL]
    runs = []
    for threads in (1, 2, 5):
        env = make(specs, seed=None, num_threads=threads, max_episode_steps=4)
        env.set_seed(7)
        runs.append((play(env, 10)[0]["next", "observation"], values(env)))
    for steps, models in runs[1:]:
        assert torch.equal(steps, runs[0][0])
        assert_same(models, runs[0][1])


def test_a_simulations_models_follow_from_its_own_seed() -> None:
    one, other = make(seed=3, num_envs=N), make(seed=5, num_envs=N)
    for name, value in values(one).items():
        np.testing.assert_array_equal(value[2:], values(other)[name][:-2], err_msg=name)


def test_the_models_of_a_row_do_not_depend_on_which_others_reset() -> None:
    specs = [replace(spec, when="reset") for spec in ALL]
    env, twin = make(specs), make(specs)

    def reset(one: MujocoBatchEnv, *rows: int) -> None:
        mask = torch.zeros(N, 1, dtype=torch.bool)
        mask[list(rows)] = True
        one.reset(one.fake_tensordict().select("done", "terminated").set("_reset", mask))

    for rows in ([0, 1, 3], [1, 4], [0, 3]):
        reset(env, *rows)
    for rows in ([3], [0], [3, 5], [0, 5]):
        reset(twin, *rows)
    ours, theirs = values(env), values(twin)
    for name in ours:
        np.testing.assert_array_equal(ours[name][[0, 2, 3]], theirs[name][[0, 2, 3]])
        assert (ours[name][[1, 5]] != theirs[name][[1, 5]]).any()


def test_different_seeds_give_different_models_and_none_is_random() -> None:
    masses = set()
    for seed in (0, 100, None, None):
        env = make([MASS], seed=seed)
        masses.add(env.randomizer.values("body_mass").tobytes())
    assert len(masses) == 4


@pytest.mark.parametrize("when", ["start", "reset"])
def test_initial_states_and_commands_are_those_without_randomisation(when: str) -> None:
    plain = make(())
    random = make([replace(spec, when=when) for spec in ALL])
    for _ in range(3):
        plain.reset()
        random.reset()
        np.testing.assert_array_equal(plain.get_state()[0], random.get_state()[0])
        np.testing.assert_array_equal(
            plain._state.physics.fields["command"], random._state.physics.fields["command"]
        )


# Who says so


def test_nothing_is_drawn_for_a_closed_environment() -> None:
    env = make((replace(MASS, when="reset"),))
    randomizer = env.randomizer
    env.close()
    before = randomizer.state_dict()
    randomizer.reset(np.arange(N))
    randomizer.seed([np.random.default_rng(0)] * N)
    assert np.array_equal(before["numbers"], randomizer.state_dict()["numbers"])


def test_a_tasks_own_randomisation_is_the_default_and_can_be_turned_off() -> None:
    task = pickle.loads(pickle.dumps(replace(make_task("Hopper-v5"), randomization=(FEET,))))
    env = MujocoBatchEnv(task, 3, seed=0)
    assert env.randomizer.values("geom_friction").shape == (3, 5, 3)
    env = MujocoBatchEnv(task, 3, seed=0, randomization=())
    with pytest.raises(KeyError):
        env.randomizer.values("geom_friction")


FEET = Randomize("geom_friction[0]", 0.5, 1.0, objects=("foot_geom",))


# What is saved


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


@pytest.mark.parametrize("change", [{"objects": ("*_thigh",), "shared": True}, {"how": "add"}])
def test_numbers_for_other_objects_or_by_another_way_are_not_taken_for_these(change):
    one, other = make([MASS]), make([replace(MASS, **change)])
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
