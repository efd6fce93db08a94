from __future__ import annotations

import mujoco
import numpy as np
import pytest

from torchrl_unilab.envs import make_task
from torchrl_unilab.envs.simulations import Simulations, all_finite
from torchrl_unilab.errors import ConfigError

PENDULUM = """
<mujoco>
  <worldbody>
    <body>
      <joint type="slide" axis="1 0 0"/><geom size=".1"/>
      <body><joint name="hinge" axis="0 1 0"/><geom size=".1" pos="0 0 .6"/></body>
    </body>
  </worldbody>
  <actuator>
    <general joint="hinge" dyntype="filter" dynprm="1" ctrlrange="-3 3"/>
  </actuator>
</mujoco>
"""
N = 3


def simulations() -> Simulations:
    return Simulations(make_task("InvertedPendulum-v5", model=PENDULUM), N, 1)


def controls(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-3.0, 3.0, (N, 1))


def test_what_the_batch_does_not_take_is_refused_by_the_tasks_name() -> None:
    asleep = PENDULUM.replace("<worldbody>", '<option><flag sleep="enable"/></option><worldbody>')
    with pytest.raises(ConfigError, match=r"^cannot make 3 simulations of Inv.*: sleep .*expected"):
        Simulations(make_task("InvertedPendulum-v5", model=asleep), N, 1)


@pytest.mark.parametrize("ids", [None, [0, 2]])
def test_a_control_step_is_that_many_steps_of_mujoco_for_each(ids: list[int] | None) -> None:
    physics = simulations()
    model = physics.batch.model
    plain = [mujoco.MjData(model) for _ in range(N)]
    for step in range(5):
        assert physics.step(controls(step), None if ids is None else np.array(ids)) is None
        for i in range(N) if ids is None else ids:
            plain[i].ctrl[:] = controls(step)[i]
            mujoco.mj_step(model, plain[i], nstep=2)  # InvertedPendulum's frame_skip
    np.testing.assert_array_equal(physics.fields["qpos"], [data.qpos for data in plain])
    np.testing.assert_array_equal(physics.fields["qvel"], [data.qvel for data in plain])
    np.testing.assert_array_equal(physics.batch.bind("ctrl"), [data.ctrl for data in plain])


def test_what_is_looked_at_for_divergence_is_all_that_moves() -> None:
    physics = simulations()
    parts = [physics.batch.bind(name).reshape(N, -1) for name in ("time", "qpos", "qvel", "act")]
    physics.step(controls(0))
    assert all(part.all() for part in parts)
    np.testing.assert_array_equal(physics._moving, np.concatenate(parts, axis=1))


def test_a_state_that_is_not_finite_has_diverged_also_where_mujoco_does_not_say_so(monkeypatch):
    physics = simulations()

    def overflow(ids: None, nstep: int) -> None:
        physics.fields["qvel"][1, 0] = np.inf

    monkeypatch.setattr(physics.batch, "step", overflow)
    diverged = physics.step(controls(0))
    assert diverged is not None
    assert diverged.tolist() == [False, True, False]
    assert all_finite(physics.batch.state)


def test_a_placed_simulation_forgets_what_it_was() -> None:
    physics = simulations()
    physics.step(controls(0))
    others = physics.batch.state[[0, 2]].copy()
    physics.place(np.array([1]), np.array([[0.1, 0.2]]), np.array([[0.3, 0.4]]))
    assert physics.fields["qpos"][1].tolist() == [0.1, 0.2]
    assert physics.fields["qvel"][1].tolist() == [0.3, 0.4]
    assert physics.batch.bind("act")[1] == physics.batch.bind("time")[1] == 0.0
    np.testing.assert_array_equal(physics.batch.state[[0, 2]], others)


@pytest.mark.parametrize("which", [0, 1])
def test_a_task_may_not_write_to_the_pose_and_velocity_in_which_all_episodes_start(which):
    with pytest.raises(ValueError, match="read-only"):
        simulations().start[which][0] = 1.0


@pytest.mark.parametrize(
    ("name", "remedy"), [("command", "Give the task `commands`"), ("xpos", "Add it to `reads`")]
)
def test_a_field_that_is_not_there_is_named_with_the_remedy(name: str, remedy: str) -> None:
    with pytest.raises(KeyError, match=f"field '{name}'.*{remedy}"):
        simulations().fields[name]
