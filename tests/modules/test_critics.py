from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import set_skip_existing
from torch import nn
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.objectives import SACLoss, SoftUpdate

from torchrl_unilab import limits
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import (
    ObservationNormalizer,
    make_actor,
    make_critic,
    make_q_value,
    make_sac_actor,
    make_td3_actor,
)
from torchrl_unilab.modules.mlp import relu_mlp, tanh_mlp


def test_tanh_networks_have_orthogonal_weights_and_a_scaled_last_layer():
    torch.manual_seed(0)
    net = tanh_mlp([4, 8, 2], last_gain=0.01)
    first, _, last = net
    torch.testing.assert_close(first.weight.mT @ first.weight, 2.0 * torch.eye(4))
    torch.testing.assert_close(last.weight @ last.weight.mT, 1e-4 * torch.eye(2))
    assert not any(layer.bias.any() for layer in (first, last))
    for net, gain in ((make_critic(4).net, 1.0), (make_actor(4, 1)[0].net, 0.01)):
        torch.testing.assert_close(net[-1].weight.norm(), torch.tensor(gain))


def test_actor_and_critic_normalise_by_the_same_statistics():
    normalizer = ObservationNormalizer(3)
    actor = make_actor(3, 2, normalizer=normalizer)
    critic = make_critic(3, normalizer=normalizer)
    normalizer.update(torch.randn(50, 3) * 4 + 2)
    assert actor[0].normalizer is critic.normalizer
    assert critic(TensorDict(observation=torch.zeros(5, 3)))["state_value"].shape == (5, 1)
    assert any(key.endswith("normalizer.mean") for key in actor.state_dict())  # published with it


def test_networks_are_relu_layers_with_or_without_normalisation():
    plain = [type(layer) for layer in relu_mlp([3, 4, 5, 1])]
    assert plain == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    normed = relu_mlp([3, 4, 1], layer_norm=True)
    assert [type(layer) for layer in normed] == [nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear]
    assert make_sac_actor(3, 2, hidden=(4,), layer_norm=True)[0].net[-1].out_features == 4
    for make in (make_td3_actor, make_q_value):
        assert make(3, 2, hidden=(4,), layer_norm=True).net[1].normalized_shape == (4,)


def test_a_critic_judges_observation_and_action_side_by_side():
    critic = make_q_value(2, 1, in_key="state", hidden=())
    with torch.no_grad():
        critic.net[0].weight.copy_(torch.tensor([[1.0, 10.0, 100.0]]))
        critic.net[0].bias.fill_(0.5)
    batch = TensorDict(state=torch.tensor([[1.0, 2.0]]), action=torch.tensor([[3.0]]))
    assert critic(batch)["state_action_value"].tolist() == [[321.5]]
    assert list(critic.in_keys) == ["state", "action"]
    assert list(make_critic(2, in_key="state").in_keys) == ["state"]


@pytest.mark.parametrize("make", [make_critic, partial(make_q_value, action_size=1)])
def test_a_value_that_is_there_is_kept_where_existing_ones_are_skipped(make):
    critic = make(3)
    (key,) = critic.out_keys
    batch = TensorDict(observation=torch.zeros(4, 3), action=torch.zeros(4, 1), batch_size=[4])
    batch[key] = torch.full((4, 1), 7.0)
    with set_skip_existing(True):
        assert (critic(batch)[key] == 7.0).all()
    assert not (critic(batch)[key] == 7.0).any()


@pytest.mark.parametrize("make", [make_sac_actor, make_td3_actor, make_actor])
@pytest.mark.parametrize("grad", [True, False])
def test_an_action_that_is_there_is_kept_where_existing_ones_are_skipped(make, grad):
    actor = make(3, 2)
    batch = actor(TensorDict(observation=torch.zeros(4, 3), batch_size=4)).detach()
    batch["action"].fill_(7.0)
    with (
        set_skip_existing(True),
        set_exploration_type(ExplorationType.RANDOM),
        torch.set_grad_enabled(grad),
    ):
        assert (actor(batch)["action"] == 7.0).all()


def test_the_critics_of_a_loss_normalise_by_the_actors_statistics_of_the_moment():
    normalizer = ObservationNormalizer(3)
    actor = make_sac_actor(3, 2, normalizer=normalizer, hidden=(8,))
    critic = make_q_value(3, 2, normalizer=normalizer, hidden=(8,))
    assert critic.normalizer is actor[0].normalizer
    assert not any("normalizer" in key for key in critic.state_dict())
    assert any(key.endswith("normalizer.mean") for key in actor.state_dict())  # published
    loss = SACLoss(actor, critic)
    loss.make_value_estimator(gamma=0.9)
    SoftUpdate(loss, tau=0.1)
    batch = TensorDict(observation=torch.randn(16, 3), batch_size=[16])
    batch["action"] = torch.zeros(16, 2)
    values = []
    for _ in range(2):
        td = batch.copy()
        params = loss.target_qvalue_network_params[0]
        with params.to_module(loss.qvalue_network):
            values.append(loss.qvalue_network(td)["state_action_value"])
        normalizer.update(torch.randn(50, 3) * 4 + 2)
    assert not torch.equal(*values)


@pytest.mark.parametrize("make", [make_critic, partial(make_q_value, action_size=1)])
@pytest.mark.parametrize(("size", "hidden"), [(3, (0,)), (3, (8.0,)), (3, (True,)), (0, (8,))])
def test_a_width_that_is_no_positive_integer_is_refused(make, size, hidden):
    with pytest.raises(ConfigError, match=r"width of a network: .* an integer of at least 1"):
        make(size, hidden=hidden)


@pytest.mark.parametrize("make", [make_critic, partial(make_q_value, action_size=1)])
@pytest.mark.parametrize("hidden", [64, None])
def test_one_width_in_place_of_several_is_refused_with_what_to_give(make, hidden):
    with pytest.raises(ConfigError, match=r"^hidden: .* List the width of each layer, as in \(64,"):
        make(3, hidden=hidden)


@pytest.mark.parametrize("make", [make_critic, partial(make_q_value, action_size=1)])
def test_a_network_that_fits_no_memory_is_refused(make):
    for size, hidden in ((10**12, (8,)), (3, (10**8, 10**8)), (2**62, ())):
        with pytest.raises(
            ConfigError, match=r"network of widths .*: \d+ bytes \(expected at most"
        ):
            make(size, hidden=hidden)


def test_the_weights_of_all_layers_must_fit_memory(monkeypatch):
    nbytes = 4 * (3 * 8 + 8 * 8 + 8 * 1)
    monkeypatch.setattr(limits, "available_memory", lambda: nbytes)
    make_critic(3, hidden=(8, 8))
    monkeypatch.setattr(limits, "available_memory", lambda: nbytes - 1)
    with pytest.raises(ConfigError, match=f"{nbytes} bytes .expected at most {nbytes - 1}"):
        make_critic(3, hidden=(8, 8))
