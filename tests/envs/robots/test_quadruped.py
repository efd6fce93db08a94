"""The example robot: its numbers, by hand, and its environment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrl.envs.utils import check_env_specs

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.envs.robots.quadruped import QuadrupedWalk
from torchrl_unilab.envs.robots.task import RobotTask, Stride

TASK = QuadrupedWalk()
HALF = 0.5**0.5


@pytest.fixture
def fields() -> dict[str, np.ndarray]:
    """Two robots that look along y, at the first and at the third quarter of the clock."""
    qpos, qvel, feet = np.zeros((2, 15)), np.zeros((2, 14)), np.zeros((2, 12))
    qpos[:, 2:7] = [0.27, HALF, 0.0, 0.0, HALF]
    qvel[:, :6] = [0.1, 0.6, 0.3, 0.8, 0.4, 0.2]
    feet[:, 2::3] = [0.04, 0.06, 0.08, 0.02]
    state = {"qpos": qpos, "qvel": qvel, "sensordata": feet, "time": np.array([1, 3]) / 8}
    return {**state, "command": np.full((2, 1), 0.5), "ctrl": np.ones((2, 8))}


def test_it_is_rewarded_for_its_speed_and_the_feet_whose_turn_it_is_and_charged_for_the_rest(
    fields,
):
    before = {"ctrl": np.full((2, 8), 0.5)}
    found = TASK.rewards(Stride(fields, before, fields["ctrl"], 0.02))
    expected = {"forward": 0.8, "sideways": 0.01, "turning": 0.04, "tilt": 0.0, "action_rate": 2.0}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], [value] * 2, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(found["lift"], [0.5, 2.0])  # one pair each, none beyond its share


def test_tilt_is_the_part_of_gravity_that_is_not_straight_down(fields):
    fields["qpos"][:, 3:7] = [np.cos(0.25), 0.0, np.sin(0.25), 0.0]  # half a radian
    found = TASK.rewards(Stride(fields, fields, fields["ctrl"], 0.02))["tilt"]
    np.testing.assert_allclose(found, np.sin(0.5) ** 2)


def test_the_actor_observes_a_clock_and_the_critic_the_velocity_as_the_robot_has_it(fields):
    seen, more = TASK.actor(fields), TASK.critic(fields)
    np.testing.assert_allclose(seen["clock"], [[1.0, 0.0], [-1.0, 0.0]], atol=1e-12)
    np.testing.assert_allclose(seen["turning"], [[0.2, 0.1, 0.05]] * 2)
    np.testing.assert_allclose(more["velocity"], [[0.6, -0.1, 0.3]] * 2)
    assert more["height"].tolist() == [0.27] * 2


def test_a_torso_that_is_low_has_fallen_however_upright(fields):
    fields["qpos"][1, 2] = 0.12
    assert TASK.failed(fields).tolist() == [False, True]


def test_episodes_start_with_joints_that_are_a_little_off_the_pose_that_is_given():
    pose, still = np.linspace(1.0, 2.0, 15), np.zeros(14)
    start, velocity = TASK.initial_state(np.random.default_rng(0), pose, still)
    moved = np.abs(start - pose)
    assert not moved[:7].any()
    assert (moved[7:] > 0.0).all()
    assert (moved[7:] <= TASK.reset_noise).all()
    assert velocity is still


@pytest.mark.parametrize("which", [0, 1])
def test_a_robot_may_not_write_to_the_pose_and_velocity_of_home(which):
    home = RobotTask.initial_state(TASK, np.random.default_rng(0), np.zeros(15), np.zeros(14))
    with pytest.raises(ValueError, match="read-only"):
        home[which][0] = 1.0


def test_the_quadruped_is_an_environment_with_critic_commands_and_terms() -> None:
    env = MujocoBatchEnv(TASK, 4, seed=0, with_reward_terms=True, max_episode_steps=5)
    check_env_specs(env)
    assert set(env.reward_terms) == set(TASK.weights)
    widths = [env.observation_spec[key].shape[1] for key in ("observation", "critic_observation")]
    assert widths == [25, 29]


def test_the_quadruped_stands_when_it_is_asked_nothing() -> None:
    env = MujocoBatchEnv(QuadrupedWalk(reset_noise=0.0), 2, seed=0)
    still = lambda td: td.set("action", torch.zeros(2, 8))  # noqa: E731
    assert not env.rollout(100, still, break_when_any_done=False)["next", "done"].any()
    height = env.get_state()[0][:, 2]
    assert ((height > 0.24) & (height < 0.28)).all()


def test_a_fallen_quadruped_ends_its_episode() -> None:
    env = MujocoBatchEnv(TASK, 2, seed=0)
    qpos, qvel = np.zeros((2, 15)), np.zeros((2, 14))
    qpos[:, 2], qpos[:, 3] = 0.267, 1.0
    qpos[1, 3:5] = np.cos(0.5), np.sin(0.5)  # rolled over by one radian
    root = env.set_state(qpos, qvel)
    after = env.step(root.set("action", torch.zeros(2, 8)))["next"]
    assert after["terminated"].flatten().tolist() == [False, True]
