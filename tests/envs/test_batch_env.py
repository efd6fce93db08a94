from __future__ import annotations

import copy
import logging
import os
import pickle
import sys
import time
from functools import partial
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from mujoco.batch import SimulationError
from tensordict import TensorDict, TensorDictBase
from torchrl import logger as torchrl_logger
from torchrl.envs import EnvBase, GymEnv, TransformedEnv
from torchrl.envs.transforms import ActionDiscretizer, StepCounter
from torchrl.envs.utils import check_env_specs

from tests.support.playing import act, assert_same, go, play, step
from torchrl_unilab.envs import TASKS, MujocoBatchEnv
from torchrl_unilab.envs.constructor import Constructor

make = partial(MujocoBatchEnv, "Hopper-v5", 3, seed=0)


def test_type_checkers_see_the_class_and_the_arguments_of_what_is_constructed():
    hints = get_type_hints(Constructor.__call__)  # any other type hides both
    made = hints["return"]
    assert hints["self"] == type[made]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(("num_envs", "dtype"), [(3, torch.float32), (1, torch.float64)])
def test_specs_hold_for_every_task(name: str, num_envs: int, dtype: torch.dtype) -> None:
    env = MujocoBatchEnv(name, num_envs, dtype=dtype, seed=0)
    check_env_specs(env)
    data = env.rollout(10)
    for key in ("observation", "reward"):
        assert data["next", key].dtype == dtype
    assert data["next", "reward"].shape[-1:] == (1,)


@pytest.mark.parametrize("name", ["Hopper-v5", "HalfCheetah-v5"])
@pytest.mark.parametrize("device", ["cpu", None])
def test_step_and_maybe_reset_equals_the_base_class(name: str, device: str | None) -> None:
    def policy(root: TensorDictBase, i: int) -> TensorDictBase:
        action = act(lean, i)
        root["action"] = action
        root["flag"] = action[:, :1] > 0
        root["collector", "traj_ids"] = torch.arange(8) + 1
        return root if device else root.clear_device_()

    lean, plain = (MujocoBatchEnv(name, 8, seed=3, max_episode_steps=30) for _ in range(2))
    plain.run_type_checks = True
    lean_root, plain_root = lean.reset(), plain.reset()
    ends = set()
    for i in range(40):
        lean_data, lean_root = lean.step_and_maybe_reset(policy(lean_root, i))
        plain_data, plain_root = EnvBase._step_and_maybe_reset(plain, policy(plain_root, i))
        assert_same(lean_data, plain_data)
        assert_same(lean_root, plain_root)
        ends.add(int(lean_data["next", "done"].sum()))
    assert ends == {0, 8} if name == "HalfCheetah-v5" else {0, 1} <= ends


@pytest.mark.parametrize("given", [{}, {"reward": torch.ones(3, 1), "more": torch.ones(3)}])
@pytest.mark.parametrize("mask", [None, [True, False, True], [True] * 3, [False] * 3])
def test_step_equals_the_base_class(
    given: dict[str, torch.Tensor], mask: list[bool] | None
) -> None:
    after = []
    for base in (MujocoBatchEnv, EnvBase):
        env = make()
        root = env.reset().set("action", act(env, 0))
        if given:
            root["next"] = TensorDict(given, [3])
        if mask is not None:
            root["_step"] = torch.tensor(mask)[:, None]
        after.append(base.step(env, root))
        with pytest.raises(RuntimeError, match="Expected a tensordict with shape"):
            base.step(env, root.exclude("_step", "next")[:2])
    assert_same(*after)


class Doubled(MujocoBatchEnv):
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        after = super()._step(tensordict)
        return after.set("reward", 2 * after["reward"])


def test_a_derived_environment_may_change_what_a_step_gives() -> None:
    plain, doubled = make(), Doubled("Hopper-v5", 3, seed=0)
    for take in (step, lambda env, root: go(env, root)[0]["next"]):
        reward = take(plain, plain.reset())["reward"]
        assert torch.equal(2 * reward, take(doubled, doubled.reset())["reward"])


class Shifted(MujocoBatchEnv):
    """Observes one more than there is when an episode starts."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        began = super()._reset(tensordict, **kwargs)
        return began.set("observation", began["observation"] + 1)


def test_a_derived_environment_may_change_how_episodes_start_also_within_a_rollout() -> None:
    kinds = (MujocoBatchEnv, Shifted)
    plain, shifted = (kind("Hopper-v5", 2, seed=0, max_episode_steps=3) for kind in kinds)
    one, other = (env.rollout(8, break_when_any_done=False) for env in (plain, shifted))
    difference = (other["observation"] - one["observation"]).mean(-1)
    assert difference.round().tolist() == [[1, 0, 0, 1, 0, 0, 1, 0]] * 2


COPIES = {"pickle": lambda env: pickle.loads(pickle.dumps(env)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_built_from_the_constructors_arguments(way: str) -> None:
    env = Doubled("Hopper-v5", 3, seed=5, max_episode_steps=7, dtype=torch.float64)
    expected, _ = play(env, 9)
    other = COPIES[way](env)
    env.close()  # the copy has simulations of its own
    assert type(other) is Doubled
    assert_same(expected, play(other, 9)[0])


@pytest.mark.parametrize("way", COPIES)
def test_a_transformed_environment_can_be_copied(way: str) -> None:
    env = TransformedEnv(MujocoBatchEnv("Hopper-v5", 2, seed=3), StepCounter())
    other = COPIES[way](env)

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", act(env.base_env, 0))

    assert_same(env.rollout(4, policy), other.rollout(4, policy))


def test_later_steps_and_resets_leave_returned_tensors_alone() -> None:
    env = make(max_episode_steps=3)
    root = env.reset()
    returned, copies = [root], [root.clone()]
    for i in range(8):
        data, root = go(env, root.copy(), i)
        returned += [data, root]
        copies += [data.clone(), root.clone()]
    env.reset()
    for one, other in zip(returned, copies, strict=True):
        assert_same(one, other)


def test_writing_to_returned_tensors_leaves_the_environment_alone() -> None:
    env, twin = make(), make()
    root, twin_root = env.reset(), twin.reset()
    for i in range(30):
        data, root = go(env, root.copy(), i)
        expected, twin_root = go(twin, twin_root.copy(), i)
        assert_same(data["next"], expected["next"])
        data["next"].zero_()
        root = root.clone()


@pytest.mark.parametrize("until_done", [True, False])
def test_random_actions_of_a_rollout_are_those_of_rand_action(until_done) -> None:
    settings = {"break_when_any_done": until_done}
    torch.manual_seed(0)
    data = make().rollout(60, **settings)
    torch.manual_seed(0)
    assert_same(data, EnvBase.rollout(make(), 60, **settings))


def test_a_rollout_takes_given_actions_and_those_of_a_derived_environment() -> None:
    class Still(MujocoBatchEnv):
        def rand_action(self, tensordict=None):
            return tensordict.set("action", torch.zeros(3, 3))

    assert not Still("Hopper-v5", 3, seed=0).rollout(3)["action"].any()
    given = torch.linspace(-1.0, 1.0, 18).view(2, 3, 3)
    assert torch.equal(make().rollout(5, actions=given)["action"], given.transpose(0, 1))


def test_random_actions_of_a_transformed_environment_are_of_its_own_spec() -> None:
    env = TransformedEnv(make(), ActionDiscretizer(num_intervals=4))
    assert env.rollout(3)["action"].dtype is torch.int64


def test_rollout_until_all_are_done_ends() -> None:
    data = make().rollout(300, break_when_any_done=False, break_when_all_done=True)
    assert data.shape[1] < 300
    assert data[:, -1]["next", "done"].all()


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_the_same_steps_at_any_number_of_threads(name: str) -> None:
    runs = []
    for threads in (1, 2, 5):
        env = MujocoBatchEnv(name, 7, num_threads=threads, max_episode_steps=10)
        env.set_seed(11)
        runs.append(play(env, 25)[0])
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


def test_seeds_make_a_difference_and_none_is_random() -> None:
    seen = [make(seed=seed).reset()["observation"] for seed in (0, 100, None, None)]
    assert len({tuple(observation.flatten().tolist()) for observation in seen}) == 4


def test_a_set_state_is_the_state_and_starts_an_episode() -> None:
    env = MujocoBatchEnv("Hopper-v5", 4, seed=0, max_episode_steps=5, num_threads=2)
    root = env.reset()
    for i in range(3):
        root = step(env, root, i)
    before = env.get_state()
    new_qpos, new_qvel = given = np.random.default_rng(0).uniform(0.0, 0.1, (2, 2, 6))
    root = env.set_state(new_qpos, new_qvel, ids=np.array([3, 1], dtype=np.uint8))
    for now, new, old in zip(env.get_state(), given, before, strict=True):
        np.testing.assert_array_equal(now[[3, 1]], new)
        np.testing.assert_array_equal(now[::2], old[::2])
    expected = np.concatenate((new_qpos[0, 1:], new_qvel[0])).astype(np.float32)
    np.testing.assert_array_equal(root["observation"][3].numpy(), expected)
    for i in range(2):
        root = step(env, root, i)
    assert root["truncated"].flatten().tolist() == [True, False, True, False]


def diverge(env: MujocoBatchEnv, ids: list[int], speed: float = 1e11) -> None:
    """Give simulations speeds at which MuJoCo gives up."""
    env._state.physics.fields["qvel"][ids] = speed


@pytest.mark.parametrize("speed", [1e11, 1e300, np.inf, np.nan])
def test_a_diverging_simulation_ends_its_episode_and_leaves_the_others_alone(speed: float) -> None:
    env, twin = make(with_reward_terms=True), make(with_reward_terms=True)
    root, twin_root = env.reset(), twin.reset()
    diverged_at, episodes = 5, 0
    for i in range(80):
        if i == diverged_at:
            diverge(env, [1], speed)
        data, root = go(env, root, i)
        expected, twin_root = go(twin, twin_root, i)
        assert_same(data["next"][::2], expected["next"][::2])
        assert_same(root[::2], twin_root[::2])
        assert all(value.isfinite().all() for value in data["next"].values(True, True))
        if i == diverged_at:
            after = data["next"][1]
            assert after["terminated"]
            assert not after["truncated"]
            assert after["reward"] == 0
            assert not any(term.any() for term in after["reward_terms"].values())
            assert not any(part[1].any() for part in env.info.values())
            assert all(part[::2].all() for part in env.info.values())
            default_pose = [1.25, *[0.0] * 10]
            np.testing.assert_array_equal(after["observation"].numpy(), default_pose)
            assert not root["done"][1]
        elif i > diverged_at:
            episodes += int(data["next", "done"][1])
    assert episodes >= 2  # its life goes on
    assert (env.num_diverged, twin.num_diverged) == (1, 0)


def test_a_jump_out_of_sight_overflows_nothing() -> None:
    env = make(with_reward_terms=True)
    root = env.reset()
    env._state.physics.fields["qpos"][0, 0] = 1e300
    after = step(env, root)
    assert after["terminated"].flatten().tolist() == [True, False, False]
    assert after["reward"][0] == 0
    assert not any(term[0].any() for term in after["reward_terms"].values())


def test_diverging_is_counted_and_logged_at_first_and_whenever_the_count_has_doubled() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    torchrl_logger.addHandler(handler)
    env = MujocoBatchEnv("Hopper-v5", 8, seed=0)
    root = env.reset()
    logged = []
    try:
        for i, ids in enumerate(([3], [], [5], [1], [0, 2, 4, 6, 7], [1], [2])):
            diverge(env, ids)
            _, root = go(env, root, i)
            logged.append((env.num_diverged, len(records)))
    finally:
        torchrl_logger.removeHandler(handler)
    assert logged == [(1, 1), (1, 1), (2, 2), (3, 2), (8, 3), (9, 3), (10, 3)]
    assert records[2].levelno == logging.WARNING
    message = records[2].getMessage()
    assert message.startswith("MujocoBatchEnv: simulations [0, 2, 4, 6, 7] of Hopper-v5 diverged")
    assert "8 have since the start" in message


def test_a_simulation_error_terminates_its_simulation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    env, twin = make(), make()
    root = env.reset()
    physics_step = env._state.physics.batch.step

    def failing(ids: Any = None, nstep: int = 1) -> None:
        physics_step(ids, nstep)
        raise SimulationError(np.array([2]), "stack overflow")

    with monkeypatch.context() as patch:
        patch.setattr(env._state.physics.batch, "step", failing)
        data, root = go(env, root)
    expected, _ = go(twin, twin.reset())
    assert data["next", "terminated"].flatten().tolist() == [False, False, True]
    assert data["next", "reward"][2] == 0
    assert_same(data["next"][:2], expected["next"][:2])
    assert env.num_diverged == 1
    assert not step(env, root, 1)["terminated"].any()


def test_a_rollout_has_the_keys_shapes_and_dtypes_of_gym_env() -> None:
    ours = MujocoBatchEnv("Hopper-v5", 3, seed=0, dtype=torch.float64).rollout(5)
    theirs = GymEnv("Hopper-v5").rollout(5)
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in ours.keys(True, True):
        assert ours[key].shape == (3, *theirs[key].shape), key
        # actions and rewards of Gymnasium's are float32, ours are of the dtype asked for
        if key not in ("action", ("next", "reward")):
            assert ours[key].dtype == theirs[key].dtype, key


def test_the_parts_of_the_reward_are_there_when_asked_for_and_add_up() -> None:
    env = MujocoBatchEnv("Ant-v5", 3, seed=0, max_episode_steps=4, with_reward_terms=True)
    check_env_specs(env)
    data = env.rollout(10, break_when_any_done=False)
    terms = data["next", "reward_terms"]
    assert set(terms.keys()) == {
        "reward_forward",
        "reward_ctrl",
        "reward_contact",
        "reward_survive",
    }
    torch.testing.assert_close(sum(terms.values()), data["next", "reward"])
    first = data["reward_terms"][:, ::4]  # of episodes
    assert all((term == 0).all() for term in first.values())
    later, before = data["reward_terms"][:, 1:4], terms[:, :3]
    assert all(torch.equal(term, before[name]) for name, term in later.items())
    assert "reward_terms" not in MujocoBatchEnv("Ant-v5", 1).rollout(1)["next"]


def test_time_is_counted_for_each_phase_and_adds_up_to_less_than_all() -> None:
    env = MujocoBatchEnv("Hopper-v5", 16, seed=0, num_threads=1)
    before = dict(env.phase_seconds)
    assert set(before) == {"physics", "reward", "observation", "reset"}
    start = time.perf_counter()
    env.rollout(20, break_when_any_done=False, auto_reset=True)
    whole = time.perf_counter() - start
    spent = {phase: env.phase_seconds[phase] - before[phase] for phase in before}
    assert min(spent.values()) > 0
    assert sum(spent.values()) < whole


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_actions_of_other_precisions_and_with_gradients_are_accepted(dtype: torch.dtype) -> None:
    env = make()
    action = torch.zeros(3, 3, dtype=dtype, requires_grad=True)
    after = env.step(env.reset().set("action", action))["next"]
    assert after["observation"].dtype == torch.float32


def test_a_transposed_action_has_the_cost_of_a_contiguous_one() -> None:
    envs = [MujocoBatchEnv("HalfCheetah-v5", 5, seed=0) for _ in range(2)]
    action = act(envs[0], 0)
    rewards = [
        env.step(env.reset().set("action", value))["next", "reward"]
        for env, value in zip(envs, (action, action.T.contiguous().T), strict=True)
    ]
    assert torch.equal(*rewards)


@pytest.mark.skipif(sys.platform != "linux", reason="needs sched_getaffinity")
@pytest.mark.parametrize(
    ("cpus", "threads"), [({3}, 1), ({0, 1}, 2), ({0, 1, 5}, 2), ({*range(8)}, 7)]
)
def test_threads_default_to_the_cpus_of_the_process_less_the_learners(cpus, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    env = MujocoBatchEnv("InvertedPendulum-v5", 16)
    assert env._state.physics.batch.nthread == threads
