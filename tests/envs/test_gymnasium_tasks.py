from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensordict import TensorDict

from torchrl_unilab.envs import TASKS, MujocoBatchEnv, make_task
from torchrl_unilab.envs.gymnasium_tasks import Hopper, Walker2d, control_cost

SIMS = 4
SEED = 7


def gym_envs(name: str, count: int = SIMS, **kwargs: Any) -> list[gymnasium.Env]:
    return [gymnasium.make(name, disable_env_checker=True, **kwargs) for _ in range(count)]


def random_actions(env: MujocoBatchEnv, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    low, high = env.action_spec.space.low, env.action_spec.space.high
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.rand(steps, *low.shape, generator=generator, dtype=torch.float32)
    return list((low.float() + noise * (high - low).float()).to(dtype))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_300_steps_over_many_episodes_equal_gymnasium_bit_for_bit(
    name: str, dtype: torch.dtype
) -> None:
    limit = 120
    env = MujocoBatchEnv(name, SIMS, seed=SEED, max_episode_steps=limit, dtype=torch.float64)
    gyms = gym_envs(name, max_episode_steps=limit)
    root = env.reset()
    first = np.stack([gym.reset(seed=SEED + i)[0] for i, gym in enumerate(gyms)])
    np.testing.assert_array_equal(root["observation"].numpy(), first)
    episodes = 0
    for action in random_actions(env, 300, dtype):
        data, root = env.step_and_maybe_reset(root.set("action", action))
        for i, gym in enumerate(gyms):
            obs, reward, terminated, truncated, info = gym.step(action[i].numpy())
            after = data["next"][i]
            np.testing.assert_array_equal(after["observation"].numpy(), obs)
            assert after["reward"].item() == reward
            assert after["terminated"].item() == terminated
            assert after["truncated"].item() == truncated
            assert after["done"].item() == (terminated or truncated)
            for key, value in env.reward_terms.items():
                assert value[i] == info[key], key
            if terminated or truncated:
                episodes += 1
                obs, _ = gym.reset()
            np.testing.assert_array_equal(root["observation"][i].numpy(), obs)
    assert episodes >= 2 * SIMS
    assert env.num_diverged == 0
    env.close()
    for gym in gyms:
        gym.close()


@pytest.mark.parametrize("name", TASKS)
def test_300_steps_past_termination_equal_gymnasium_bit_for_bit(name: str) -> None:
    env = MujocoBatchEnv(name, SIMS, seed=SEED, dtype=torch.float64)
    gyms = [gym.unwrapped for gym in gym_envs(name)]
    root = env.reset()
    qpos, qvel = env.get_state()
    for i, gym in enumerate(gyms):
        gym.reset()
        gym.set_state(qpos[i], qvel[i])
    for action in random_actions(env, 300, torch.float64):
        after = env.step(root.set("action", action))["next"]
        for i, gym in enumerate(gyms):
            obs, reward, terminated, _, _ = gym.step(action[i].numpy())
            np.testing.assert_array_equal(after["observation"][i].numpy(), obs)
            assert after["reward"][i].item() == reward
            assert after["terminated"][i].item() == terminated
    env.close()
    for gym in gyms:
        gym.close()


@pytest.mark.parametrize("name", TASKS)
def test_defaults_are_those_of_gymnasium(name: str) -> None:
    (gym,) = gym_envs(name, 1)
    task = make_task(name)
    env = MujocoBatchEnv(task, 1)
    assert gym.spec is not None
    assert task.max_episode_steps == gym.spec.max_episode_steps
    assert task.frame_skip == gym.unwrapped.frame_skip
    assert env.observation_spec["observation"].shape[1:] == gym.observation_space.shape
    space = env.action_spec.space
    np.testing.assert_array_equal(space.low[0].numpy(), gym.action_space.low)
    np.testing.assert_array_equal(space.high[0].numpy(), gym.action_space.high)
    env.close()
    gym.close()


@pytest.mark.parametrize("task", [Hopper(), Walker2d()])
def test_health_at_and_around_each_bound_equals_gymnasium(
    task: Hopper | Walker2d,
) -> None:
    (gym,) = gym_envs(task.name, 1)
    base = gym.unwrapped
    gym.reset(seed=0)
    qpos = np.tile(base.init_qpos, (1, 1))
    qvel = np.tile(base.init_qvel, (1, 1))
    seen = set()
    for z in (0.7, 0.8, 2.0):
        for angle in (-1.0, -0.2, 0.0, 0.2, 1.0):
            for speed in (-100.0, 0.0, 100.0):
                for nudge in (-np.inf, 0.0, np.inf):
                    qpos[0, 1] = np.nextafter(z, nudge) if nudge else z
                    qpos[0, 2] = np.nextafter(angle, nudge) if nudge else angle
                    qvel[0, -1] = np.nextafter(speed, nudge) if nudge else speed
                    base.data.qpos[:], base.data.qvel[:] = qpos[0], qvel[0]
                    (healthy,) = task.healthy({"qpos": qpos, "qvel": qvel})
                    assert healthy == base.is_healthy
                    seen.add(bool(healthy))
    assert seen == {True, False}
    gym.close()


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 9),
    nu=st.integers(1, 40),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_control_cost_adds_each_row_as_np_sum_adds_a_vector(
    n: int, nu: int, dtype: type, seed: int
) -> None:
    action = np.random.default_rng(seed).standard_normal((n, nu)).astype(dtype)
    expected = np.array([0.1 * np.sum(np.square(row)) for row in action])
    cost = control_cost(action, 0.1)
    assert cost.dtype == expected.dtype
    np.testing.assert_array_equal(cost, expected)


@pytest.mark.parametrize("name", TASKS)
def test_resets_of_one_seed_equal_gymnasium_bit_for_bit(name: str) -> None:
    env = MujocoBatchEnv(name, 32, dtype=torch.float64)
    (gym,) = gym_envs(name, 1)
    env.set_seed(SEED)
    observation = env.reset()["observation"].numpy()
    for i in range(32):
        np.testing.assert_array_equal(observation[i], gym.reset(seed=SEED + i)[0])
    env.close()
    gym.close()


def _ks(sample: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Two-sample Kolmogorov-Smirnov statistic."""
    both = np.concatenate((sample, other))
    left = np.searchsorted(np.sort(sample), both, side="right") / len(sample)
    right = np.searchsorted(np.sort(other), both, side="right") / len(other)
    return float(np.abs(left - right).max())


@pytest.mark.parametrize("name", TASKS)
def test_reset_noise_has_the_distribution_of_the_task(name: str) -> None:
    n = 400
    task = make_task(name)
    env = MujocoBatchEnv(task, n, seed=SEED)
    default_qpos, default_qvel = env.get_state()
    env.reset()
    qpos, qvel = env.get_state()
    rng = np.random.default_rng(0)
    scale = task.reset_noise_scale
    uniform = rng.uniform(-scale, scale, 20_000)
    normal = scale * rng.standard_normal(20_000)
    speed = normal if name == "HalfCheetah-v5" else uniform
    for noise, expected in (
        ((qpos - default_qpos).ravel(), uniform),
        ((qvel - default_qvel).ravel(), speed),
    ):
        # the critical value at the 0.1 % level
        bound = 1.95 * np.sqrt(1 / len(noise) + 1 / len(expected))
        assert _ks(noise, expected) < bound
    assert np.abs(qpos - default_qpos).max() <= scale
    env.close()


def test_parameters_of_a_task_can_be_replaced() -> None:
    costly = replace(make_task("HalfCheetah-v5"), ctrl_cost_weight=1.0)
    env = MujocoBatchEnv(costly, 2, seed=0, dtype=torch.float64)
    action = torch.ones(2, 6)
    env.step(env.reset().set("action", action))
    np.testing.assert_array_equal(env.reward_terms["reward_ctrl"], [-6.0, -6.0])
    env.close()


def test_derived_fields_are_those_of_gymnasium_after_a_step() -> None:
    name = "Walker2d-v5"
    env = MujocoBatchEnv(replace(make_task(name), reads=("xpos", "cvel")), 1, seed=0)
    (gym,) = gym_envs(name, 1)
    gym.reset(seed=0)
    env.reset()
    for action in random_actions(env, 5, torch.float32):
        env.step(TensorDict({"action": action}, [1]))
        gym.step(action[0].numpy())
        for field in ("xpos", "cvel"):
            actual = env._fields[field][0]
            np.testing.assert_array_equal(actual, getattr(gym.unwrapped.data, field))
    env.close()
    gym.close()


def test_unknown_task_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ValueError, match=r"no task 'Ant' \(expected one of HalfChee"):
        make_task("Ant")
    with pytest.raises(ValueError, match="InvertedPendulum-v5"):
        MujocoBatchEnv("Ant")


def test_missing_model_file_is_refused() -> None:
    for file in ("no_such.xml", "/no_such.xml"):
        task = replace(make_task("Hopper-v5"), model=file)
        with pytest.raises(FileNotFoundError, match=r"no file .*no_such.xml \(expect"):
            MujocoBatchEnv(task, 1)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_survive_pickling(name: str) -> None:
    assert pickle.loads(pickle.dumps(make_task(name))) == make_task(name)
