from __future__ import annotations

import contextlib
import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import RewardScaling, TransformedEnv
from torchrl.envs.transforms import Transform

from tests.support.acting import make_policy
from tests.support.collecting import (
    Agents,
    CountingEnv,
    EndingForAgents,
    linear_policy,
    transformed_env,
)
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import make_actor
from torchrl_unilab.trainers import BackgroundEvaluation, evaluate
from torchrl_unilab.weight_update import UniLabShmTransport

make_env = partial(MujocoBatchEnv, "InvertedPendulum-v5", 3, num_threads=1, max_episode_steps=50)


@pytest.fixture(scope="module")
def policy() -> nn.Module:
    return make_actor(4, 1)


@pytest.mark.parametrize("episodes", [1, 2, 5])
def test_as_many_episodes_are_played_as_asked_for_however_many_environments(policy, episodes):
    env = make_env()
    env.set_seed(5)

    returns = evaluate(env, policy, episodes=episodes)

    env.close()
    assert returns.shape == (episodes,)
    assert (returns > 0).all()


@pytest.mark.parametrize("inplace", [False, "empty"])
def test_a_policy_that_returns_a_tensordict_of_its_own_earns_what_it_does_in_place(inplace):
    returns = []
    for policy in (linear_policy(inplace=True), linear_policy(inplace=inplace)):
        env = transformed_env()
        env.set_seed(5)
        returns.append(evaluate(env, policy))
        env.close()
    assert torch.equal(*returns)


@pytest.mark.parametrize("count", ["episodes", "max_steps"])
def test_no_episodes_at_all_and_no_steps_are_refused(policy, count):
    env = make_env()
    with pytest.raises(ConfigError, match=rf"{count}: 0 \(expected an integer of at least 1\)"):
        evaluate(env, policy, **{count: 0})
    env.close()


def test_dropout_and_batch_statistics_are_off_while_a_policy_is_evaluated():
    layers = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    layers[0].eval()  # as a user has frozen it
    normed = TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])
    plain = TensorDictModule(layers[2], in_keys=["observation"], out_keys=["action"])
    layers[0].running_var.fill_(1.0 - layers[0].eps)  # it changes nothing by these statistics

    env = make_env()
    expected = evaluate(env, plain, seed=5)
    assert torch.equal(evaluate(env, normed, seed=5), expected)
    assert [layer.training for layer in layers] == [False, True, True]
    layers.train()
    assert torch.equal(evaluate(env, normed, seed=5), expected)
    env.close()
    assert not layers[0].running_mean.any()
    with (
        contextlib.closing(UniLabShmTransport.from_state_dict(normed)) as published,
        contextlib.closing(
            BackgroundEvaluation(make_env, normed, published, interval=1, seed=5)
        ) as background,
    ):
        background.register(Mock(collected_frames=1, total_frames=1, _stop_training=False))
        background()  # of the last batch: it waits
        assert background.evaluations[0].mean_return == expected.mean()


class RewardNoise(Transform):
    def _step(self, tensordict: TensorDictBase, after: TensorDictBase) -> TensorDictBase:
        return after.set("reward", torch.randn_like(after["reward"]))


def test_a_seed_repeats_noise_as_well_and_leaves_torchs_generator_alone(policy):
    env = TransformedEnv(make_env(), RewardNoise())
    state = torch.get_rng_state()
    first, again, other = (evaluate(env, policy, max_steps=5, seed=seed) for seed in (3, 3, 4))
    env.close()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_episodes_are_whole_where_the_environment_staggers_its_first():
    returns = []
    for stagger in (False, True):
        make = partial(MujocoBatchEnv, "HalfCheetah-v5", 8, num_threads=1, stagger=stagger)
        env = TransformedEnv(make(max_episode_steps=20), RewardScaling(loc=1.0, scale=0.0))
        cheetah = make_actor(17, 6)
        env.set_seed(0)
        returns.append(evaluate(env, cheetah).round().tolist())  # each step earns 1
        env.close()
    assert returns == [[20.0] * 8] * 2


def test_returns_are_sums_over_all_rewards_of_an_environment():
    returns = []
    for env in (Agents(), CountingEnv()):
        returns.append(evaluate(env, make_policy(0.0), seed=0))
    torch.testing.assert_close(*returns)


def test_an_environment_that_ends_for_agents_alone_is_refused():
    with pytest.raises(ConfigError, match=r"done keys .*'agents'"):
        evaluate(EndingForAgents(), make_policy(0.0))


def test_what_an_environment_earns_after_its_episode_does_not_count_even_if_it_is_no_number():
    rewards, done = torch.tensor([[1.0, 1.0], [math.nan, 1.0]]), torch.eye(2, dtype=torch.bool)
    steps = [({"next": {"reward": r, "done": d}}, None) for r, d in zip(rewards, done, strict=True)]
    env = Mock(batch_size=rewards[0].shape, device="cpu", reward_keys=["reward"])
    env.done_keys = ["done", "terminated"]
    env.step_and_maybe_reset.side_effect = steps
    assert evaluate(env, lambda current: current).tolist() == [1.0, 2.0]
