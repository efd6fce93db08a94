from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import InitTracker, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError, LayoutKeyError
from torchrl_unilab.modules.exploration import PerEnvNoise
from torchrl_unilab.modules.squashed import make_td3_actor

RANDOM = ExplorationType.RANDOM


def _noise(*, low=-1.0, high=1.0, seed=0, **kwargs) -> PerEnvNoise:
    torch.manual_seed(seed)
    settings = {"std_min": 0.1, "std_max": 0.4, "init_key": None, **kwargs}
    return PerEnvNoise(low, high, **settings)


def _step(noise: PerEnvNoise, action: torch.Tensor, first: torch.Tensor | None = None):
    batch = TensorDict(action=action.clone(), batch_size=action.shape[:-1])
    if first is not None:
        batch["is_init"] = first
    with set_exploration_type(RANDOM):
        return noise(batch)["action"]


def test_each_environment_has_noise_of_its_own_strength():
    noise = _noise(low=-10.0, high=torch.tensor([10.0, 30.0]))
    actions = torch.stack(
        [_step(noise, torch.tensor([0.0, 10.0]).repeat(6, 1)) for _ in range(4000)]
    )
    std = noise.std
    assert std.shape == (6, 1)
    assert ((std >= 0.1) & (std <= 0.4)).all()
    assert len(std.unique()) == 6
    # In units of half the distance between the bounds: 10 and 20.
    expected = std * torch.tensor([10.0, 20.0])
    torch.testing.assert_close(actions.std(0), expected, rtol=0.06, atol=0.0)
    torch.testing.assert_close(
        actions.mean(0), torch.tensor([0.0, 10.0]).repeat(6, 1), rtol=0.0, atol=0.7
    )


def test_the_strengths_fill_their_range_evenly():
    noise = _noise(std_min=1.0, std_max=3.0)
    _step(noise, torch.zeros(20_000, 1))
    assert noise.std.min() >= 1.0
    assert noise.std.max() <= 3.0
    counts = torch.histc(noise.std, bins=4, min=1.0, max=3.0)
    assert (counts - 5000).abs().max() < 300


def test_noisy_actions_stay_within_the_bounds():
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([0.5, 9.0])
    noise = _noise(low=low, high=high, std_min=5.0, std_max=5.0)
    action = _step(noise, torch.zeros(500, 2, requires_grad=True))
    assert not action.requires_grad
    assert torch.equal(action.amin(0), low)
    assert torch.equal(action.amax(0), high)


@pytest.mark.parametrize("shape", [(4, 1), (4,)], ids=str)
def test_a_new_strength_is_drawn_where_an_episode_starts_and_nowhere_else(shape):
    noise = _noise(init_key="is_init")
    _step(noise, torch.zeros(4, 2), torch.ones(shape, dtype=torch.bool))
    before = noise.std.clone()
    _step(noise, torch.zeros(4, 2), torch.zeros(shape, dtype=torch.bool))
    assert torch.equal(noise.std, before)
    first = torch.tensor([False, True, False, True]).reshape(shape)
    _step(noise, torch.zeros(4, 2), first)
    assert torch.equal(noise.std != before, first.reshape(4, 1))


def test_strengths_known_from_before_hold_although_no_episode_starts_with_the_first_call():
    noise = _noise(init_key="is_init")
    _step(noise, torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.bool))
    assert (noise.std >= 0.1).all()


@pytest.mark.parametrize("how", [ExplorationType.DETERMINISTIC, ExplorationType.MODE], ids=str)
def test_without_exploration_actions_pass_unchanged_and_episodes_have_strengths_of_their_own(how):
    batch = TensorDict(action=torch.randn(4, 2), is_init=torch.tensor([[True], [False]] * 2))
    batch.batch_size = [4]
    before, noise = batch["action"].clone(), _noise(init_key="is_init")
    with set_exploration_type(how):
        assert torch.equal(noise(batch)["action"], before)
        first = noise.std
        noise(batch)
    assert torch.equal(noise.std != first, batch["is_init"])


def test_where_no_exploration_type_is_set_there_is_noise():
    assert _noise()(TensorDict(action=torch.zeros(4, 2), batch_size=[4]))["action"].all()


def test_an_action_without_batch_and_several_batch_dimensions_have_noise_too():
    noise = _noise()
    assert _step(noise, torch.zeros(2)).shape == (2,)
    assert noise.std.shape == (1,)
    assert _step(noise, torch.zeros(2, 3, 4)).shape == (2, 3, 4)
    assert noise.std.shape == (2, 3, 1)
    noise.restore(torch.zeros(2, 3, 1, device="meta"))  # of another device
    _step(noise, torch.zeros(2, 3, 4))
    assert noise.std.device.type == "cpu"


def test_publishing_weights_changes_the_policy_and_leaves_the_strengths():
    policy = TensorDictSequential(make_td3_actor(3, 2, hidden=(4,)), _noise())
    learner = deepcopy(policy)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(1.0)
    observations = TensorDict(observation=torch.zeros(5, 3), batch_size=[5])
    with set_exploration_type(RANDOM):
        policy(observations.copy())
        before = policy[1].std.clone()
        weights = TensorDict.from_module(learner).data
        weights.to_module(policy)
        policy.load_state_dict(learner.state_dict())
        policy(observations.copy())
    assert torch.equal(policy[1].std, before)
    assert all(key[:2] == ("module", "0") for key in weights.keys(True, True))
    assert not _noise().state_dict()


def test_in_a_collector_each_strength_lasts_for_an_episode_and_over_weight_updates():
    noise = _noise(init_key="is_init")
    seen = TensorDictModule(lambda action: noise.std.clone(), ["action"], ["std"])
    env = MujocoBatchEnv("HalfCheetah-v5", 2, seed=0, max_episode_steps=5, stagger=True)
    collector = Collector(
        TransformedEnv(env, InitTracker()),
        TensorDictSequential(make_td3_actor(17, 6, hidden=()), noise, seen),
        frames_per_batch=30,
        total_frames=60,
        exploration_type=RANDOM,
    )
    parts = []
    for part in collector:
        parts.append(part.select("std", "is_init").clone())
        collector.update_policy_weights_()
    collector.shutdown()
    data = torch.cat(parts, dim=1)
    starts = data["is_init"][:, 1:]
    assert torch.equal(data["std"].diff(dim=1) != 0, starts)
    assert starts[0].ne(starts[1]).any()


def test_a_missing_mark_of_the_episodes_is_refused():
    with pytest.raises(LayoutKeyError, match="InitTracker"):
        _noise(init_key="is_init")(TensorDict(action=torch.zeros(2, 1), batch_size=[2]))


@pytest.mark.parametrize(
    "settings",
    [
        {"std_min": 0.5, "std_max": 0.4},
        {"std_min": -0.1},
        {"std_max": float("inf")},
        {"low": 1.0, "high": 1.0},
        {"low": torch.tensor([-1.0, 1.0])},
        {"high": float("inf")},
        {"low": torch.tensor([-1.0, -float("inf")])},
    ],
    ids=str,
)
def test_settings_out_of_order_are_refused(settings):
    with pytest.raises(ConfigError, match="PerEnvNoise"):
        _noise(**settings)
