from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import mujoco
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import ActionScaling, Compose

from tests.support.carts import CART, Cart, make
from torchrl_unilab.envs.robots.quadruped import QUADRUPED
from torchrl_unilab.envs.robots.task import (
    Stride,
    joint_addresses,
    projected_gravity,
    to_body_frame,
    tracking,
)
from torchrl_unilab.envs.robots.transforms import ActionDelay, ObservationNoise
from torchrl_unilab.errors import ConfigError, UniLabError


@dataclass(frozen=True, kw_only=True)
class SeeingCart(Cart):
    def critic(self, fields: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        return {"velocity": fields["qvel"]}

    def failed(self, fields: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        out: NDArray[np.bool_] = fields["qpos"][:, 0] > 0.01
        return out


# The terms


def test_observations_are_the_terms_in_order_and_the_critics_come_after_the_actors() -> None:
    env = make(SeeingCart(), dtype=torch.float64)
    root = env.set_state([[0.1, 0.2]], [[3.0, 4.0]], ids=[1])
    command = env._state.physics.fields["command"][1].tolist()
    assert root["observation"][1].tolist() == [0.1, *command]
    assert root["critic_observation"][1].tolist() == [0.1, *command, 3.0, 4.0]
    assert env.observation_spec["critic_observation"].shape == (3, 5)


def test_without_terms_for_the_critic_there_is_no_group_for_it() -> None:
    env = make(Cart())
    assert set(env.observation_spec.keys()) == {"observation"}


def test_the_reward_is_the_weighted_sum_of_the_named_terms() -> None:
    env = make(Cart(), with_reward_terms=True, dtype=torch.float64)
    root = env.reset()
    root = env.step_mdp(env.step(root.set("action", torch.full((3, 1), 0.25).double())))
    after = env.step(root.set("action", torch.full((3, 1), 1.0).double()))["next"]
    # 1.1 kg, pushed for 0.01 s each, the pole hanging on
    speed = torch.as_tensor(env.get_state()[1][:, :1])
    assert (speed > 0.011).all()
    assert torch.equal(after["reward_terms", "speed"], 2.0 * speed)
    assert after["reward_terms", "effort"].flatten().tolist() == [-0.5 * 0.75] * 3
    assert torch.allclose(after["reward"], 2.0 * speed - 0.375, rtol=0, atol=1e-15)


def test_the_action_before_an_episodes_first_is_zero() -> None:
    env = make(Cart(), with_reward_terms=True, max_episode_steps=1)
    for _ in range(3):
        data, _ = env.step_and_maybe_reset(env.reset().set("action", torch.ones(3, 1)))
        assert data["next", "reward_terms", "effort"].flatten().tolist() == [-0.5] * 3


@pytest.mark.parametrize("weights", [{"speed": 1.0}, {"speed": 1.0, "effort": 1.0, "style": 1.0}])
def test_terms_and_weights_with_different_names_are_refused(weights: dict[str, float]) -> None:
    env = make(Cart(weights=weights))
    with pytest.raises(ConfigError, match=r"Cart: rewards returned the terms \['effort', 'speed'"):
        env.step(env.reset().set("action", torch.zeros(3, 1)))


def _mine(**methods: Any) -> Cart:
    return type("Mine", (Cart,), methods)(name="Mine")


@pytest.mark.parametrize("names", ["reads", "remembers", "joint_names"])
def test_one_text_in_the_place_of_several_names_is_refused(names: str) -> None:
    with pytest.raises(ConfigError, match=rf"{names}: 'ctrl' \(expected a tuple of names"):
        Cart(**{names: "ctrl"})


@pytest.mark.parametrize("weight", [None, "1", float("nan")])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"Cart: weight of 'speed': .* \(expected a finite"):
        Cart(weights={"speed": weight, "effort": 1.0})


@pytest.mark.parametrize("one", [2.0, 2, True])
def test_a_constant_term_is_that_of_all_simulations_and_true_is_one(one: Any) -> None:
    def rewards(self: Cart, stride: Stride) -> Mapping[str, Any]:
        return {"speed": one, "effort": stride.action}

    env = make(_mine(rewards=rewards))
    after = env.step(env.reset().set("action", torch.tensor([[0.0], [0.5], [1.0]])))["next"]
    assert after["reward"].flatten().tolist() == [2.0 * one, 2.0 * one - 0.25, 2.0 * one - 0.5]


SHAPE = "Mine: the reward term 'speed' has shape"


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (lambda _: np.zeros(2), rf"{SHAPE} \(2,\) of float64 \(expected \(3,\)"),
        (lambda stride: stride.action.mean(), rf"{SHAPE} \(\) of float32 \(expected \(3,\)"),
        (lambda _: np.full(3, 1j), rf"{SHAPE} \(3,\) of complex128 \(expected \(3,\)"),
        (lambda _: ["fast"] * 3, rf"{SHAPE} \(3,\) of <U4 \(expected \(3,\)"),
        (lambda _: np.full(3, np.nan), r"first in simulation 0, by the terms \['speed'\]"),
        (
            lambda stride: stride.before["qvel"],
            r"'qvel': not kept from before .*\['ctrl'\]\). Add it to `remembers`",
        ),
    ],
)
def test_a_reward_term_that_is_none_is_refused_by_name(term: Any, message: str) -> None:
    rewards = lambda _, stride: {"speed": term(stride), "effort": 0.0}  # noqa: E731
    with pytest.raises(UniLabError, match=message):
        make(_mine(rewards=rewards)).rollout(1)


@pytest.mark.parametrize(
    ("method", "terms"),
    [("rewards", np.zeros(3)), ("actor", np.zeros((3, 2))), ("critic", [np.zeros((3, 2))])],
)
def test_terms_without_names_are_refused_by_their_method(method: str, terms: Any) -> None:
    message = rf"Mine: `{method}` returned {type(terms).__name__} \(expected terms by name"
    with pytest.raises(UniLabError, match=message):
        make(_mine(**{method: lambda *_: terms})).rollout(1)


@pytest.mark.parametrize("terms", [{}, {"x": np.zeros((2, 1))}])
def test_an_observation_without_a_row_for_each_simulation_is_refused(terms: Any) -> None:
    shapes = re.escape(str([term.shape for term in terms.values()]))
    message = rf"'observation' of Mine has parts of shapes {shapes} \(expected at least one, each"
    with pytest.raises(UniLabError, match=rf"{message} \(3, width\)"):
        make(_mine(actor=lambda *_: terms)).rollout(1)


@pytest.mark.parametrize("finite", [True, False])
def test_an_action_that_is_not_finite_is_blamed_on_an_observation_that_is_not(finite: bool) -> None:
    def actor(self: Cart, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"x": fields["qpos"] / (1.0 if finite else 0.0), "speed": fields["qvel"]}

    with np.errstate(all="ignore"):
        env = make(_mine(actor=actor))
        action = torch.full((3, 1), torch.nan)
        message = "Check the policy" if finite else r"Correct the task: its \['observation'\]"
        with pytest.raises(ConfigError, match=message):
            env.step(env.reset().set("action", action))


def test_an_episode_ends_where_the_task_says_it_failed() -> None:
    env = make(SeeingCart())
    root = env.set_state([[0.009, 0.0]], [[1.0, 0.0]], ids=[1])
    after = env.step(root.set("action", torch.zeros(3, 1)))["next"]
    assert after["terminated"].flatten().tolist() == [False, True, False]


# Commands


def test_commands_are_drawn_in_their_ranges_per_simulation_and_episode() -> None:
    env = make(Cart(), num_envs=200)
    root = env.reset()
    first = root["observation"][:, 1:].clone()
    assert (first[:, 0].abs() <= 1.0).all()
    assert first[:, 0].min() < -0.9
    assert first[:, 0].max() > 0.9
    assert (first[:, 1] == 3.0).all()
    mask = torch.arange(200)[:, None] < 50
    after = env.reset(root.set("_reset", mask))["observation"][:, 1:]
    assert torch.equal(after[50:], first[50:])
    assert (after[:50, 0] != first[:50, 0]).all()


def test_commands_hold_for_command_steps() -> None:
    env = make(Cart(command_steps=3))
    root, seen = env.reset(), []
    for _ in range(9):
        seen.append(root["observation"][0, 1].item())
        root = env.step_mdp(env.step(root.set("action", torch.zeros(3, 1))))
    assert seen[0] == seen[1] == seen[2] != seen[3]
    assert seen[3] == seen[4] == seen[5] != seen[6]


def test_a_task_may_have_no_commands() -> None:
    assert Cart().command_size == 2
    assert replace(Cart(), commands={}).command_size == 0


@pytest.mark.parametrize(
    "bounds",
    [(1.0, 0.0), (0.0, float("nan")), (float("-inf"), 0.0), 1.0, (1.0,), ("0", "1"), "01", None],
)
def test_a_range_that_is_not_two_finite_numbers_in_order_is_refused(bounds: Any) -> None:
    with pytest.raises(ConfigError, match=r"Cart: range of command 'speed': .*\(expected"):
        Cart(commands={"speed": bounds})


# The model


@pytest.mark.parametrize("what", ["weights", "commands"])
def test_weights_and_commands_without_names_are_refused(what: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Cart: {what}: list \(expected Mapping\)"):
        Cart(**{what: [1.0]})


@pytest.mark.parametrize("name", ["cfrc_int", "cacc"])
def test_forces_within_and_accelerations_are_computed_where_they_are_read(name: str) -> None:
    env = make(Cart(reads=(name,)))
    env.rollout(3)
    assert env._state.physics.fields[name].any()


def test_episodes_start_in_the_keyframe_asked_for_and_joints_are_measured_from_it() -> None:
    task = Cart(home="home", joint_names=("hinge",))
    env = make(task)
    env.reset()
    qpos, qvel = env.get_state()
    assert qpos.tolist() == [[0.5, 0.25]] * 3
    assert qvel.tolist() == [[1.0, 0.0]] * 3
    fields = {"qpos": np.array([[0.5, 1.0]]), "qvel": np.array([[2.0, 3.0]])}
    assert task.joint_positions(fields).tolist() == [[0.75]]
    assert task.joint_velocities(fields).tolist() == [[3.0]]


def test_a_keyframe_that_is_not_there_is_refused() -> None:
    env = make(Cart(home="hone"))
    with pytest.raises(ConfigError, match=r"home: 'hone' \(expected 'home'\)\. Name a keyframe"):
        env.reset()


def test_joints_are_found_by_name_in_the_order_asked_for() -> None:
    model = mujoco.MjModel.from_xml_path(str(QUADRUPED))
    found = joint_addresses(model, ["rear_right_knee", "root", "front_left_hip"])
    assert found.qpos.tolist() == [14, 0, 1, 2, 3, 4, 5, 6, 7]
    assert found.qvel.tolist() == [13, 0, 1, 2, 3, 4, 5, 6]
    assert joint_addresses(model).qpos.tolist() == list(range(7, 15))
    assert joint_addresses(model).names[0] == "front_left_hip"


def test_ball_joints_have_four_positions_and_three_velocities() -> None:
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><body><joint name="b" type="ball"/><geom size=".1"/>'
        '<body pos="1 0 0"><joint name="h"/><geom size=".1"/></body></body></worldbody></mujoco>'
    )
    found = joint_addresses(model, ["h", "b"])
    assert found.qpos.tolist() == [4, 0, 1, 2, 3]
    assert found.qvel.tolist() == [3, 0, 1, 2]


def test_an_unknown_joint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no joints \['knee'\] \(expected some of \['x', 'hi"):
        joint_addresses(mujoco.MjModel.from_xml_string(CART), ["x", "knee"])


UNNAMED = """
<mujoco>
  <worldbody>
    <body>
      <joint type="slide"/><geom size=".1"/>
      <body><joint type="hinge"/><geom size=".1" pos=".3 0 0"/><site name="tip"/></body>
    </body>
  </worldbody>
  <actuator><general site="tip" ctrlrange="-1 1" dyntype="filter" dynprm="1"/></actuator>
  <keyframe><key name="held" act="0.7"/></keyframe>
</mujoco>
"""


def test_joints_without_names_count() -> None:
    found = joint_addresses(mujoco.MjModel.from_xml_string(UNNAMED))
    assert (found.qpos.tolist(), found.qvel.tolist()) == ([0, 1], [0, 1])


@pytest.mark.parametrize("place", ['mpos="2 0 1"', 'mpos="1 0 1" mquat="0 1 0 0"'])
def test_a_keyframe_that_moves_or_turns_a_mocap_body_is_refused(place: str) -> None:
    body = '<worldbody><body name="goal" mocap="true" pos="1 0 1"/>'
    moved = UNNAMED.replace("<worldbody>", body).replace('act="0.7"', "{}")
    make(Cart(model=moved.format('mpos="1 0 1"'), home="held")).reset()
    with pytest.raises(ConfigError, match=r"keyframe 'held' moves mocap bodies"):
        make(Cart(model=moved.format(place), home="held")).reset()


def test_a_keyframe_with_activations_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'held' has activations \[0.7\]"):
        make(Cart(model=UNNAMED, home="held")).reset()


# The arithmetic


def test_the_body_frame_is_mujocos() -> None:
    rng = np.random.default_rng(0)
    quaternions, vectors = rng.standard_normal((200, 4)), 10.0 * rng.standard_normal((200, 3))
    quaternions[:8] = [*np.eye(4), *-np.eye(4)]
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    expected = []
    for quaternion, vector in zip(quaternions, vectors, strict=True):
        matrix = np.zeros(9)
        mujoco.mju_quat2Mat(matrix, quaternion)
        expected.append(matrix.reshape(3, 3).T @ vector)
    np.testing.assert_allclose(to_body_frame(quaternions, vectors), expected, atol=1e-12)
    down = to_body_frame(quaternions, np.array([0.0, 0.0, -1.0]))  # one vector for all
    np.testing.assert_allclose(projected_gravity(quaternions), down, atol=1e-12)


def test_tracking_is_one_without_error_and_falls_with_its_length() -> None:
    error = np.array([[0.0, 0.0], [3.0, 4.0], [-6.0, 8.0]])
    np.testing.assert_allclose(tracking(error, 5.0), np.exp([0.0, -1.0, -4.0]))
    np.testing.assert_allclose(tracking(np.array([0.0, 2.0]), 2.0), np.exp([0.0, -1.0]))


# Whole


def test_a_task_of_a_class_that_only_this_program_knows_travels_by_cloudpickle() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(Cart):
        def actor(self, fields: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
            return super().actor(fields) | {"more": self.joint_velocities(fields)}

    task = Own()
    assert len(task.joints.names) == 2  # looked up before it travels
    env = make(pickle.loads(cloudpickle.dumps(task)))
    assert env.reset()["observation"].shape == (3, 5)


# what TorchRL's own collectors say when they are first imported
@pytest.mark.filterwarnings("ignore:Creating .* inherits from WeightUpdaterBase:DeprecationWarning")
def test_such_a_task_trains_with_transforms_and_a_critic_that_sees_more() -> None:
    from tests.support.training import trainer_of
    from torchrl_unilab.collectors import APPOCollector
    from torchrl_unilab.trainers import APPOConfig, build_learner

    def create() -> TransformedEnv:
        transforms = Compose(ActionScaling(), ActionDelay(1), ObservationNoise(0.1))
        return TransformedEnv(make(SeeingCart(), num_envs=8), transforms)

    sizes = {"num_envs": 8, "num_steps": 16, "hidden": (8,)}
    config = APPOConfig(**sizes, critic_observation="critic_observation")
    loss = build_learner(create(), config).loss
    assert loss.actor_network.in_keys == ["observation"]
    assert list(loss.critic_network.in_keys) == ["critic_observation"]
    before = [parameter.clone() for parameter in loss.critic_network.parameters()]
    collector = APPOCollector(create, loss.actor_network, frames_per_batch=128, inline=True)
    trainer_of(collector, loss, total_frames=256, config=config).train()
    pairs = zip(before, loss.critic_network.parameters(), strict=True)
    assert not any(torch.equal(old, new) for old, new in pairs)
