from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

from torchrl_unilab.envs import TASKS, MujocoBatchEnv, MujocoTask, make_task
from torchrl_unilab.envs.gymnasium.base import contact_forces
from torchrl_unilab.envs.gymnasium.humanoids import Humanoid
from torchrl_unilab.envs.gymnasium.runners import Ant, Hopper, Walker2d
from torchrl_unilab.errors import ConfigError

SIMS = 2
SEED = 7
ENDING = ("Ant", "Hopper", "Humanoid", "InvertedDoublePendulum", "InvertedPendulum", "Walker2d")
ENDLESS = ("HalfCheetah", "HumanoidStandup", "Pusher", "Reacher", "Swimmer")

# every option of each task, with another value than its default
RUNNER = {
    "frame_skip": 3,
    "forward_reward_weight": 1.7,
    "ctrl_cost_weight": 0.03,
    "reset_noise_scale": 0.02,
    "exclude_current_positions_from_observation": False,
}
HEALTHY = {"healthy_reward": 0.7, "terminate_when_unhealthy": False}
HUMANOID = {
    "frame_skip": 3,
    "ctrl_cost_weight": 0.03,
    "reset_noise_scale": 0.02,
    "exclude_current_positions_from_observation": False,
    "include_cinert_in_observation": False,
    "include_cvel_in_observation": False,
    "include_qfrc_actuator_in_observation": False,
    "include_cfrc_ext_in_observation": False,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "Ant-v5": {
        **RUNNER,
        **HEALTHY,
        "contact_cost_weight": 0.02,
        "main_body": "aux_2",
        "healthy_z_range": (0.4, 0.7),
        "contact_force_range": (-0.3, 2.0),
        "include_cfrc_ext_in_observation": False,
    },
    "HalfCheetah-v5": RUNNER,
    "Hopper-v5": {
        **RUNNER,
        **HEALTHY,
        "healthy_state_range": (-2.0, 1.5),
        "healthy_z_range": (0.9, 1.3),
        "healthy_angle_range": (-0.1, 0.15),
    },
    "Humanoid-v5": {
        **HUMANOID,
        **HEALTHY,
        "forward_reward_weight": 0.9,
        "contact_cost_weight": 1e-4,
        "contact_cost_range": (0.1, 2.0),
        "healthy_z_range": (0.8, 1.38),
    },
    "HumanoidStandup-v5": {
        **HUMANOID,
        "uph_cost_weight": 3.0,
        "impact_cost_weight": 1e-5,
        "impact_cost_range": (0.05, 0.5),
    },
    "InvertedDoublePendulum-v5": {
        "frame_skip": 3,
        "healthy_reward": 0.7,
        "reset_noise_scale": 0.02,
    },
    "InvertedPendulum-v5": {"frame_skip": 3, "reset_noise_scale": 0.02},
    "Pusher-v5": {
        "frame_skip": 3,
        "reward_near_weight": 0.7,
        "reward_dist_weight": 1.3,
        "reward_control_weight": 0.3,
    },
    "Reacher-v5": {"frame_skip": 3, "reward_dist_weight": 1.3, "reward_control_weight": 0.3},
    "Swimmer-v5": RUNNER,
    "Walker2d-v5": {
        **RUNNER,
        **HEALTHY,
        "healthy_z_range": (1.0, 1.24),
        "healthy_angle_range": (-0.1, 0.15),
    },
}


@contextmanager
def gym_envs(name: str, count: int = SIMS, **options: Any) -> Iterator[list[gymnasium.Env]]:
    envs = [gymnasium.make(name, disable_env_checker=True, **options) for _ in range(count)]
    yield envs
    for env in envs:
        env.close()


batch_env = partial(MujocoBatchEnv, num_threads=1)


def random_actions(env: MujocoBatchEnv, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    low, high = env.action_spec.space.low, env.action_spec.space.high
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.rand(steps, *low.shape, generator=generator, dtype=torch.float32)
    return list((low.float() + noise * (high - low).float()).to(dtype))


def assert_same_bits(actual: Any, expected: Any, what: str) -> None:
    one, other = (np.asarray(value, dtype=np.float64) for value in (actual, expected))
    if one.shape != other.shape or one.tobytes() != other.tobytes():
        np.testing.assert_array_equal(one, other, err_msg=what, strict=True)
        raise AssertionError(f"{what} differs in the sign of a zero")


def assert_same_step(
    env: MujocoBatchEnv, after: TensorDictBase, i: int, step: tuple[Any, ...]
) -> None:
    obs, reward, terminated, truncated, info = step
    assert_same_bits(after["observation"][i].numpy(), obs, "observation")
    assert_same_bits(after["reward"][i].item(), reward, "reward")
    assert after["terminated"][i].item() == terminated
    assert after["truncated"][i].item() == truncated
    assert after["done"][i].item() == (terminated or truncated)
    told = env.reward_terms | env.info
    assert told.keys() == info.keys()
    assert not env.reward_terms.keys() & env.info.keys()
    for key, value in told.items():
        assert_same_bits(value[i], info[key], key)


def steps_beside_gymnasium(
    task: str | MujocoTask, steps: int, limit: int, dtype: torch.dtype, **options: Any
) -> list[tuple[Any, ...]]:
    """Play episodes of at most `limit` steps, equal to Gymnasium's; return Gymnasium's steps."""
    env = batch_env(task, SIMS, seed=SEED, max_episode_steps=limit, dtype=torch.float64)
    played = []
    with gym_envs(env.task.name, max_episode_steps=limit, **options) as gyms:
        root = env.reset()
        for i, gym in enumerate(gyms):
            assert_same_bits(root["observation"][i], gym.reset(seed=SEED + i)[0], "reset")
        for action in random_actions(env, steps, dtype):
            data, root = env.step_and_maybe_reset(root.set("action", action))
            for i, gym in enumerate(gyms):
                step = gym.step(action[i].numpy())
                assert_same_step(env, data["next"], i, step)
                played.append(step)
                observation = gym.reset()[0] if step[2] or step[3] else step[0]
                assert_same_bits(root["observation"][i], observation, "the next observation")
    assert env.num_diverged == 0
    return played


def test_there_are_all_of_gymnasium_s_tasks() -> None:
    assert list(TASKS) == [f"{name}-v5" for name in sorted(ENDING + ENDLESS)]
    known = {
        spec.id
        for spec in gymnasium.registry.values()
        if str(spec.entry_point).startswith("gymnasium.envs.mujoco.") and spec.version == 5
    }
    assert set(TASKS) == known


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    ("steps", "limit"), [(70, 20), pytest.param(1000, 90, marks=pytest.mark.slow)]
)
def test_episodes_equal_gymnasium_bit_for_bit(name: str, steps: int, limit: int) -> None:
    played = steps_beside_gymnasium(name, steps, limit, torch.float32)
    ended = sum(terminated or truncated for _, _, terminated, truncated, _ in played)
    assert ended >= SIMS * (steps // limit)
    for key in {"reward_contact", "reward_impact"} & played[0][4].keys():
        assert any(info[key] for *_, info in played)  # something was touched


@pytest.mark.parametrize("name", [f"{name}-v5" for name in ENDING])
def test_steps_past_termination_equal_gymnasium_bit_for_bit(name: str) -> None:
    env = batch_env(name, 1, seed=SEED, max_episode_steps=500, dtype=torch.float64)
    terminated = 0
    with gym_envs(name, 1, max_episode_steps=500) as (gym,):
        root = env.reset()
        qpos, qvel = env.get_state()
        gym.reset()
        gym.unwrapped.set_state(qpos[0], qvel[0])
        for action in random_actions(env, 146 if name == "Ant-v5" else 50, torch.float64):
            after = env.step(root.set("action", action))["next"]
            assert_same_step(env, after, 0, gym.step(action[0].numpy()))
            terminated += after["terminated"].item()
    assert terminated > 5


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("steps", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_steps_with_own_options_equal_gymnasium_bit_for_bit(name: str, steps: int) -> None:
    options = OPTIONS[name]
    task = make_task(name, **options)
    played = steps_beside_gymnasium(task, steps, 40, torch.float64, **options)
    if "terminate_when_unhealthy" in options:
        # the ranges are such that both healthy and unhealthy states are seen
        survived = {info["reward_survive"] for *_, info in played}
        assert survived == {0.0, options["healthy_reward"]}


@pytest.mark.filterwarnings("ignore:compiler attribute 'settotalmass':UserWarning")
@pytest.mark.parametrize("name", TASKS)
def test_steps_of_an_own_model_equal_gymnasium_bit_for_bit(name: str, tmp_path: Path) -> None:
    spec = mujoco.MjSpec.from_file(str(make_task(name).model_path()))
    spec.option.timestep *= 0.75
    spec.bodies[1].pos += [0.0, 0.0, 0.01]
    model = str(tmp_path / "model.xml")
    spec.compile()
    spec.to_file(model)
    steps_beside_gymnasium(make_task(name, model=model), 30, 20, torch.float64, xml_file=model)


def test_a_path_is_a_file_and_a_mere_name_an_asset_as_gymnasium_has_it(tmp_path, monkeypatch):
    asset = make_task("Hopper-v5").model_path()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, path in (
        ("./hopper.xml", "hopper.xml"),
        ("../hopper.xml", "../hopper.xml"),
        ("~/hopper.xml", str(tmp_path / "hopper.xml")),
        (Path("hopper.xml"), "hopper.xml"),
        (str(tmp_path / "hopper.xml"), str(tmp_path / "hopper.xml")),
        ("hopper.xml", str(asset)),
    ):
        assert make_task("Hopper-v5", model=given).model_path() == Path(path)


@pytest.mark.parametrize("name", TASKS)
def test_options_and_their_defaults_are_those_of_gymnasium(name: str) -> None:
    with gym_envs(name, 1) as (gym,):
        parameters = dict(inspect.signature(type(gym.unwrapped).__init__).parameters)
    for key in ("self", "default_camera_config", "kwargs"):
        del parameters[key]
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    defaults["model"] = defaults.pop("xml_file")
    task = make_task(name)
    assert {key: getattr(task, key) for key in defaults} == defaults
    own = {field.name for field in fields(task)} - {field.name for field in fields(MujocoTask)}
    assert own == defaults.keys() - {"model", "frame_skip"}
    assert OPTIONS[name].keys() == defaults.keys() - {"model"}
    for key, value in OPTIONS[name].items():
        assert value != defaults[key]


@pytest.mark.parametrize("name", TASKS)
def test_spaces_and_limits_are_those_of_gymnasium(name: str) -> None:
    env = batch_env(name, 1)
    with gym_envs(name, 1) as (gym,):
        assert gym.spec is not None
        assert env.max_episode_steps == gym.spec.max_episode_steps
        assert env.observation_spec["observation"].shape[1:] == gym.observation_space.shape
        space = env.action_spec.space
        np.testing.assert_array_equal(space.low[0].numpy(), gym.action_space.low)
        np.testing.assert_array_equal(space.high[0].numpy(), gym.action_space.high)


@pytest.mark.parametrize("task", [Hopper(), Walker2d(), Ant(), Humanoid()])
def test_health_at_and_around_each_bound_equals_gymnasium(task):
    seen = set()
    height = 2 if isinstance(task, Ant | Humanoid) else 1
    with gym_envs(task.name, 1) as (gym,):
        base = gym.unwrapped
        gym.reset(seed=0)
        qpos, qvel = base.init_qpos[None].copy(), base.init_qvel[None].copy()
        for z in (0.2, 0.7, 0.8, 1.0, 2.0):
            for angle in (-1.0, -0.2, 0.0, 0.2, 1.0):
                for speed in (-100.0, 0.0, 100.0, math.nan):
                    for nudge in (-np.inf, 0.0, np.inf):
                        qpos[0, height + 1] = np.nextafter(angle, nudge) if nudge else angle
                        qpos[0, height] = np.nextafter(z, nudge) if nudge else z
                        qvel[0, -1] = np.nextafter(speed, nudge) if nudge else speed
                        base.data.qpos[:], base.data.qvel[:] = qpos[0], qvel[0]
                        (healthy,) = task.healthy({"qpos": qpos, "qvel": qvel})
                        assert healthy == base.is_healthy
                        seen.add(bool(healthy))
    assert seen == {True, False}


@pytest.mark.parametrize("name", TASKS)
def test_resets_of_one_seed_equal_gymnasium_bit_for_bit(name: str) -> None:
    env = batch_env(name, 16, dtype=torch.float64)
    env.reset()
    env.set_seed(SEED)
    observation = env.reset()["observation"].numpy()
    with gym_envs(name, 1) as (gym,):
        for i in range(16):
            assert_same_bits(observation[i], gym.reset(seed=SEED + i)[0], "reset")


def test_contact_forces_are_zero_where_no_step_was_made() -> None:
    forces = np.ones((3, 2, 6))
    shown = contact_forces({"cfrc_ext": forces, "time": np.array([0.01, 0.0, 5.0])})
    np.testing.assert_array_equal(shown[:, 1, 3], [1.0, 0.0, 1.0])
    assert forces.all()
    assert contact_forces({"cfrc_ext": forces, "time": np.ones(3)}) is forces


@pytest.mark.parametrize("name", TASKS)
def test_what_a_step_returned_is_not_changed_by_later_steps(name: str) -> None:
    env = batch_env(name, 2, seed=SEED)
    root = env.reset()
    first, *later = random_actions(env, 4, torch.float32)
    env.step(root.set("action", first))
    told = env.reward_terms | env.info
    copies = {key: value.copy() for key, value in told.items()}
    for action in later:
        env.step(root.set("action", action))
    for key, value in told.items():
        np.testing.assert_array_equal(value, copies[key])


def test_missing_model_file_is_refused() -> None:
    for file in ("no_such.xml", "/no_such.xml"):
        with pytest.raises(FileNotFoundError, match=r"no file .*no_such.xml \(expect"):
            MujocoBatchEnv(make_task("Hopper-v5", model=file), 1)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("Hopper-v5", "healthy_z_range", 1.0),
        ("Hopper-v5", "healthy_state_range", (1.0,)),
        ("Ant-v5", "contact_force_range", (1.0, -1.0)),
        ("Humanoid-v5", "contact_cost_range", (None, 1.0)),
        ("Hopper-v5", "healthy_z_range", (float("nan"), 1.0)),
        ("Ant-v5", "reset_noise_scale", -1.0),
        ("Ant-v5", "reset_noise_scale", float("inf")),
        ("Ant-v5", "forward_reward_weight", "2"),
        ("Reacher-v5", "reward_dist_weight", float("nan")),
        ("Hopper-v5", "healthy_reward", True),
        ("Hopper-v5", "terminate_when_unhealthy", "no"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(name: str, option: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{name}: {option}: .* \(expected (two|a|a finite|True or) [nF]"
    ):
        make_task(name, **{option: value})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (make_task("Ant-v5", main_body="trunk"), r"no body 'trunk' \(expected one of world, tor"),
        (make_task("Ant-v5", main_body=14), r"no body 14 \(.* or a number below 14\)"),
        (make_task("Ant-v5", main_body=-1), r"no body -1"),
        (make_task("Ant-v5", main_body=""), r"no body ''"),  # some bodies have no name
        (make_task("Reacher-v5", model="pusher_v5.xml"), r"no body 'fingertip'"),
    ],
)
def test_bodies_that_the_model_lacks_are_refused(task: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MujocoBatchEnv(task, 1)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_survive_pickling(name: str) -> None:
    task = make_task(name, **OPTIONS[name])
    assert pickle.loads(pickle.dumps(task)) == task
