from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import set_composite_lp_aggregate
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import make_actor, make_sac_actor
from torchrl_unilab.modules.gaussian import HALF_LOG_2PI, DiagonalNormal, GaussianActor


@pytest.mark.parametrize("grad", [True, False])
def test_an_observation_may_be_given_by_name_or_alone(grad):
    actor, observation = make_actor(3, 2), torch.randn(4, 3)
    with torch.set_grad_enabled(grad), set_exploration_type(ExplorationType.DETERMINISTIC):
        expected = actor(TensorDict(observation=observation, batch_size=[4]))
        by_name, alone = actor(observation=observation), actor(observation)
    for key, *found in zip(actor.out_keys, by_name, alone, strict=True):
        assert all(torch.equal(value, expected[key]) for value in found), key


@pytest.mark.parametrize("grad", [True, False])
def test_the_action_is_written_to_the_tensordict_that_is_given_for_it(grad):
    observation, out = TensorDict(observation=torch.randn(4, 3), batch_size=[4]), TensorDict()
    with torch.set_grad_enabled(grad):
        actor = make_actor(3, 2)
        assert actor(observation, tensordict_out=out) is out
    assert {*actor.out_keys} <= {*out.keys()}


def test_the_scale_may_be_given_by_an_integer():
    assert make_actor(3, 2, log_std=-1).module[0].log_std.tolist() == [-1.0, -1.0]


def test_the_actor_gives_action_and_log_probability_and_its_mean_without_exploration():
    actor = make_actor(3, 2)
    batch = actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))
    assert batch["action"].shape == (5, 2)
    assert batch["action_log_prob"].shape == (5,)
    torch.testing.assert_close(batch["scale"], torch.full((5, 2), -1.0).exp())
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        batch = actor(batch.select("observation"))
    assert torch.equal(batch["action"], batch["loc"])


@pytest.mark.parametrize("make", [make_actor, make_sac_actor])
def test_what_is_written_can_be_changed_and_changes_nothing_else(make):
    actor, observation = make(3, 2), TensorDict(observation=torch.randn(5, 3), batch_size=[5])
    with torch.no_grad():
        batch = actor(observation)
        before = batch["loc"].clone()
        for key in {*actor.out_keys} - {"loc", "scale"}:
            batch[key].add_(1.0)
    assert torch.equal(batch["loc"], before)


NOISELESS = [None, ExplorationType.DETERMINISTIC, ExplorationType.MEAN, ExplorationType.MODE]


@pytest.mark.parametrize("kind", NOISELESS, ids=str)
@pytest.mark.parametrize("make", [make_actor, make_sac_actor])
def test_without_exploration_it_acts_as_torchrls_actor_without_its_distribution(make, kind):
    actor, observation = make(3, 2), TensorDict(observation=torch.randn(5, 3), batch_size=[5])
    last, made = actor[-1], actor[-1].distribution_class
    with set_exploration_type(kind):
        with mock.patch.object(last, "distribution_class", side_effect=made) as torchrls_own:
            torchrls = actor(observation.copy())  # with gradients
        assert torchrls_own.called
        no_distribution = mock.patch.object(last, "distribution_class", side_effect=AssertionError)
        with torch.no_grad(), no_distribution:
            ours = actor(observation.copy())
    torch.testing.assert_close(ours, torchrls)


@pytest.mark.parametrize("grad", [True, False])
def test_a_way_to_act_that_the_distribution_has_not_is_refused_as_torchrl_does(grad):
    observation = TensorDict(observation=torch.zeros(5, 3), batch_size=[5])
    with (
        torch.set_grad_enabled(grad),
        set_exploration_type(ExplorationType.MEDIAN),
        pytest.raises(NotImplementedError, match="median is not implemented"),
    ):
        make_actor(3, 2)(observation)


def test_the_distribution_agrees_with_torchrls():
    loc, scale, other = torch.randn(4, 3), torch.rand(4, 3) + 0.1, torch.randn(4, 3)
    ours, theirs = DiagonalNormal(loc, scale), IndependentNormal(loc, scale, tanh_loc=False)
    torch.testing.assert_close(ours.log_prob(other), theirs.log_prob(other))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.deterministic_sample, theirs.deterministic_sample)
    divergence = torch.distributions.kl_divergence(ours, DiagonalNormal(other, scale))
    torch.testing.assert_close(divergence, ((loc - other) / scale).square().sum(-1) / 2)


def _noise(actor: GaussianActor, steps: int, envs: int = 64) -> torch.Tensor:
    """What the actor adds to its mean, in standard deviations, [steps, envs, 2]."""
    drawn = []
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        for _ in range(steps):
            batch = actor(TensorDict(observation=torch.randn(envs, 3), batch_size=[envs]))
            drawn.append((batch["action"] - batch["loc"]) / batch["scale"])
    return torch.stack(drawn)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_noise_follows_the_step_before_as_far_as_asked_and_each_sample_is_standard(correlation):
    torch.manual_seed(0)
    noise = _noise(make_actor(3, 2, noise_correlation=correlation), 1000)
    assert noise.mean().abs() < 0.05
    assert abs(noise.std() - 1.0) < 0.03
    for lag in (1, 2, 3):
        followed = (noise[lag:] * noise[:-lag]).mean()
        assert abs(followed - correlation**lag) < 0.03, lag
    assert (noise[:, :, 0] * noise[:, :, 1]).mean().abs() < 0.03  # dimensions and
    assert (noise[:, 1:] * noise[:, :-1]).mean().abs() < 0.03  # environments stand alone


def test_the_log_probability_is_of_the_action_alone_whatever_the_noise_follows():
    torch.manual_seed(0)
    actor = make_actor(3, 2, noise_correlation=0.9)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        for _ in range(3):
            batch = actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))
    noise = (batch["action"] - batch["loc"]) / batch["scale"]
    expected = (-0.5 * noise.square() - batch["scale"].log() - HALF_LOG_2PI).sum(-1)
    torch.testing.assert_close(batch["action_log_prob"], expected)


def test_noise_continues_after_a_snapshot_and_begins_anew_for_other_environments():
    torch.manual_seed(0)
    actor = make_actor(3, 2, noise_correlation=0.999)
    [last] = _noise(actor, 1)
    state = actor.snapshot()
    other = make_actor(3, 2, noise_correlation=0.999)
    other.restore(state)
    [following] = _noise(other, 1)
    torch.testing.assert_close(following, last, atol=0.3, rtol=0)
    assert not torch.equal(following, last)
    torch.testing.assert_close(actor.snapshot(), last)  # the other's draw left it alone
    assert _noise(other, 1, envs=3).shape == (1, 3, 2)
    other.restore(torch.zeros(64, 2, device="meta"))  # of another device
    assert _noise(other, 1).std() > 0.5


@pytest.mark.parametrize("correlation", [-0.1, 1.0, 1.5, float("nan")])
def test_a_correlation_out_of_its_range_is_refused(correlation):
    with pytest.raises(ConfigError, match=r"noise_correlation: .*expected a number in \[0, 1\)"):
        make_actor(3, 2, noise_correlation=correlation)


@pytest.mark.parametrize("log_std", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_is_refused(log_std):
    with pytest.raises(ConfigError, match="log_std"):
        make_actor(3, 2, log_std=log_std)


@pytest.mark.parametrize("grad", [True, False])
def test_the_log_probability_has_one_name_whatever_torchrl_calls_its_own(grad):
    observation = TensorDict(observation=torch.zeros(5, 3), batch_size=[5])
    with set_composite_lp_aggregate(True), torch.set_grad_enabled(grad):
        actor = make_actor(3, 2)
        assert "action_log_prob" in actor.out_keys
        assert {*actor(observation).keys()} == {"observation", *actor.out_keys}


def test_noise_is_neither_published_nor_saved_with_the_weights():
    actor = make_actor(3, 2, noise_correlation=0.5)
    names = set(actor.state_dict())
    _noise(actor, 2)
    assert set(actor.state_dict()) == names
    assert actor.snapshot() is not None


def test_no_observations_give_no_actions_with_and_without_gradients():
    actor = make_actor(3, 2)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            none = actor(TensorDict(observation=torch.zeros(0, 3), batch_size=[0]))
        assert (none["action"].shape, none["action_log_prob"].shape) == ((0, 2), (0,))
