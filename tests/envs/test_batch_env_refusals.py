"""What `MujocoBatchEnv` refuses, and that it changes nothing then; its end."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.support.playing import assert_same, step
from torchrl_unilab.envs import TASKS, MujocoBatchEnv, MujocoTask, Outcome, Randomize
from torchrl_unilab.envs.robots.quadruped import QuadrupedWalk
from torchrl_unilab.errors import ConfigError

make = partial(MujocoBatchEnv, "Hopper-v5", 3, seed=0)


@pytest.mark.parametrize("name", ["num_envs", "num_threads", "max_episode_steps"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}: {value} \(expected an integer of at least 1\)"):
        MujocoBatchEnv("Hopper-v5", **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 1.5}, r"num_envs: 1.5 \(expected an integer"),
        ({"num_envs": "4"}, r"num_envs: '4' \(expected an integer"),
        ({"max_episode_steps": 2.5}, r"max_episode_steps: 2.5 \(expected an integer"),
        ({"task": replace(TASKS["Hopper-v5"], frame_skip=1.5)}, "frame_skip: 1.5"),
        ({"task": QuadrupedWalk(command_steps=0)}, r"command_steps: 0 \(expected an integer"),
        (
            {"task": QuadrupedWalk},
            r"task: the class QuadrupedWalk \(expected MujocoTask\)\. Make one",
        ),
        ({"seed": -1}, r"seed: -1 \(expected an integer of at least 0\)"),
        ({"stagger": "no"}, r"stagger: 'no' \(expected False or True\)"),
        ({"auto_reset": True}, r"^MujocoBatchEnv: auto_reset is True \(expected False"),
        ({"dtype": torch.float16}, r"dtype: torch.float16 \(expected torch.float32 or torch.f"),
    ],
)
def test_what_is_no_number_or_no_task_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MujocoBatchEnv(**{"task": "Hopper-v5", "num_envs": 2, **options})


def test_a_seed_below_zero_is_refused_and_changes_nothing() -> None:
    env, other = make(), make()
    with pytest.raises(ConfigError, match="seed: -3"):
        env.set_seed(-3)
    assert_same(env.reset(), other.reset())


def test_a_robot_without_actuators_is_refused() -> None:
    xml = "<mujoco><worldbody><body><freejoint/><geom size='1'/></body></worldbody></mujoco>"
    with pytest.raises(ConfigError, match="no actuators"):
        MujocoBatchEnv(QuadrupedWalk(model=xml, reads=(), randomization=()), 2)


@pytest.mark.parametrize("limits", ["", 'ctrlrange="-inf inf"', 'ctrlrange="-1e39 1e39"'])
def test_an_actuator_whose_actions_have_no_bounds_is_refused(limits: str) -> None:
    xml = (
        '<mujoco><worldbody><body><joint name="turn"/><geom size="1"/></body></worldbody>'
        f'<actuator><motor name="arm" joint="turn" {limits}/></actuator></mujoco>'
    )
    with pytest.raises(ConfigError, match=r"\['arm'\] of .* no control range, or one without end"):
        MujocoBatchEnv(QuadrupedWalk(model=xml, reads=(), randomization=()), 2)


@pytest.mark.parametrize("device", ["bogus", "cuda:99", 1.5])
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    with pytest.raises(ConfigError, match=rf"device is {device!r} \(expected one that PyTorch has"):
        MujocoBatchEnv("Hopper-v5", 2, device=device)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(3, 4), r"action has shape \(3, 4\) \(expected \(3, 3\)\)"),
        (torch.zeros(3), r"action has shape \(3,\) \(expected \(3, 3\)\)"),
        (torch.full((3, 3), torch.nan), r"has 9 non-finite values \(expected none\)"),
    ],
)
def test_a_malformed_action_is_refused_and_changes_nothing(action, message):
    env = make(max_episode_steps=1)
    root = env.reset()
    state = env._state.physics.batch.state.copy()
    with pytest.raises(ValueError, match=message):
        env.step(root.set("action", action))
    np.testing.assert_array_equal(env._state.physics.batch.state, state)
    assert step(env, root.exclude("next"))["truncated"].all()


@pytest.mark.parametrize(
    ("qpos", "ids", "message"),
    [
        (np.zeros((1, 2)), [2], r"ids is \[2\] \(expected distinct integers from 0 to"),
        (np.zeros((1, 2)), [-1], r"ids is \[-1\]"),
        (np.zeros((2, 2)), [1, 1], r"ids is \[1, 1\]"),
        (np.zeros((1, 2)), [0.0], r"ids is \[0.0\]"),
        (np.zeros((1, 2)), [[0], [1, 2]], r"ids is \[\[0\], \[1, 2\]\]"),
        (np.zeros((1, 3)), [0], r"qpos has shape \(1, 3\) .*\(expected \(1, 2\)"),
        (np.zeros((1, 2)), None, r"qpos has shape \(1, 2\) .*\(expected \(2, 2\)"),
        (np.full((1, 2), np.inf), [0], "and 2 non-finite values"),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(qpos, ids, message):
    env = MujocoBatchEnv("InvertedPendulum-v5", 2, seed=0)
    env.reset()
    state = env._state.physics.batch.state.copy()
    with pytest.raises(ValueError, match=message):
        env.set_state(qpos, np.zeros(qpos.shape), ids=ids)
    np.testing.assert_array_equal(env._state.physics.batch.state, state)


USES = {
    "reset": lambda env, td: env.reset(),
    "get_state": lambda env, td: env.get_state(),
    "set_seed": lambda env, td: env.set_seed(1),
    "step": lambda env, td: env.step(td),
    "step_and_maybe_reset": lambda env, td: env.step_and_maybe_reset(td),
    "set_state": lambda env, td: env.set_state(np.zeros((3, 6)), np.zeros((3, 6))),
}


@pytest.mark.parametrize("use", USES)
def test_closing_again_does_nothing_and_use_after_it_is_refused(use: str) -> None:
    env = make()
    td = env.rand_action(env.reset())
    env.close()
    env.close()
    assert env.is_closed
    with pytest.raises(RuntimeError, match=r"is closed \(expected an open one\)"):
        USES[use](env, td)


def test_a_closed_environment_frees_its_simulations() -> None:
    env = make(
        from_pixels=True, pixels_only=False, randomization=[Randomize("body_mass", 0.8, 1.2)]
    )
    env.restore(env.snapshot())
    batch = weakref.ref(env._state.physics.batch)
    env.close()
    gc.collect()
    assert batch() is None
    with pytest.raises(KeyError):
        env.randomizer.values("body_mass")


def test_a_missing_action_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="action"):
        make().step(TensorDict({}, [3]))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_rewards_that_huge_actions_make_infinite_are_blamed_on_these_first():
    env = MujocoBatchEnv("Hopper-v5", num_envs=2, num_threads=1)
    root = env.reset().set("action", torch.full((2, 3), 1e30))
    with pytest.raises(ConfigError, match=r"'reward_ctrl'\] .*Check whether actions are huge, or"):
        env.step(root)
    env.close()


class Crowd(MujocoTask):
    """Twenty balls at rest, which a reset may put at one place: contacts that fit no memory."""

    def initial_state(self, rng, qpos, qvel):
        return np.where(qpos > 1.5, 0.0, qpos), qvel

    def observation(self, fields):
        return (fields["qpos"],)

    def outcome(self, fields, before, action, dt):
        return Outcome(np.zeros(len(action)), np.zeros(len(action), dtype=bool), {})


@pytest.mark.parametrize(("gap", "found"), [(0.01, "cannot make 2 simulations"), (1.0, "reset")])
def test_states_that_do_not_fit_the_models_memory_are_refused(gap, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its warnings
    ball = '<body pos="{} 0 1"><freejoint/><geom size=".1"/></body>'
    balls = "".join(ball.format(gap * number) for number in range(20))
    model = (
        f'<mujoco><size memory="400K"/><worldbody>{balls}<body pos="0 5 0">'
        '<joint name="slide" type="slide"/><geom size=".02"/></body></worldbody>'
        '<actuator><motor joint="slide" ctrlrange="-1 1"/></actuator></mujoco>'
    )
    with pytest.raises(ConfigError, match=rf"{found} of crowd: .*increase <size memory"):
        MujocoBatchEnv(Crowd(name="crowd", model=model), num_envs=2).reset()
