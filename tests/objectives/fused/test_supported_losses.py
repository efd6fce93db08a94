"""Which losses and networks SAC's and TD3's fused updates take, and how they refuse others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.objectives import SACLoss, TD3Loss

from tests.support.altered import altered, hook, subclassed
from tests.support.off_policy import ACT, OBS, fused, make_loss, make_transitions, transitions_of
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import make_critic, make_q_value, make_sac_actor, make_td3_actor
from torchrl_unilab.objectives import FusedSACUpdate, FusedTD3Update

UPDATES = {"sac": FusedSACUpdate, "td3": FusedTD3Update}
Change = Callable[[Any, Any], object]

pytestmark = pytest.mark.usefixtures("double_precision")


def _loss(algorithm: str = "sac", change: Change | None = None, **settings) -> SACLoss | TD3Loss:
    """A supported loss but for a change to its actor and critic, or its settings."""
    critic = make_q_value(OBS, ACT, hidden=(8,))
    if algorithm == "sac":
        actor, kind = make_sac_actor(OBS, ACT, hidden=(8,)), SACLoss
    else:
        actor, kind = make_td3_actor(OBS, ACT, hidden=(8,)), TD3Loss
        settings["bounds"] = -1.0, 1.0
    if change:
        change(actor, critic)
    return kind(actor, critic, **settings)


def _tanh(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out))


def _normalised(norm: nn.Module, *before: nn.Module) -> nn.Sequential:
    """A network of TD3's actor that normalises its last hidden layer."""
    return nn.Sequential(*before, nn.Linear(OBS, 8), norm, nn.ReLU(), nn.Linear(8, ACT))


def _one_twice_and_one_frozen() -> nn.Sequential:
    """A network of SAC's actor of which one layer comes twice, and another one is not learnt."""
    first, twice = nn.Linear(OBS, 8).requires_grad_(False), nn.Linear(8, 8)
    layers = (first, nn.ReLU(), twice, nn.ReLU(), twice, nn.ReLU(), nn.Linear(8, 2 * ACT))
    return nn.Sequential(*layers)


NETWORKS: dict[str, dict[str, Change]] = {
    "sac": {
        "tanh critic": lambda _, critic: altered(critic, net=_tanh(OBS + ACT, 1)),
        "tanh actor": lambda actor, _: altered(actor[0], net=_tanh(OBS, 2 * ACT)),
        "no bias": lambda actor, _: altered(
            actor[0], net=nn.Sequential(nn.Linear(OBS, 2 * ACT, bias=False))
        ),
        "other actor": lambda actor, _: subclassed(actor),
        "other head": lambda actor, _: subclassed(actor[0]),
        "other critic": lambda _, critic: subclassed(critic),
        "other normaliser of the actor": lambda actor, _: altered(actor[0], normalizer=nn.Tanh()),
        "other normaliser of the critics": lambda _, critic: critic.__init__(
            "observation", nn.Tanh(), critic.net
        ),
        "spectral norm": lambda _, critic: nn.utils.spectral_norm(critic.net[0]),
        "hook": lambda _, critic: critic.net[0].register_forward_hook(hook),
        "frozen": lambda actor, _: actor[0].net[0].bias.requires_grad_(False),
        "a layer twice, and one frozen": lambda actor, _: altered(
            actor[0], net=_one_twice_and_one_frozen()
        ),
        "mixed dtypes": lambda _, critic: critic.float(),
    },
    "td3": {
        "ends in tanh": lambda actor, _: altered(
            actor, net=nn.Sequential(nn.Linear(OBS, ACT), nn.Tanh())
        ),
        "two linear layers": lambda actor, _: altered(
            actor, net=nn.Sequential(nn.Linear(OBS, 8), nn.Linear(8, ACT))
        ),
        "other normalisation": lambda actor, _: altered(
            actor, net=_normalised(nn.LayerNorm(8, bias=False))
        ),
        "normalised in part": lambda actor, _: altered(
            actor, net=_normalised(nn.LayerNorm(8), nn.Linear(OBS, OBS), nn.ReLU())
        ),
        "other actor": lambda actor, _: subclassed(actor),
    },
}
SETTINGS: dict[str, list[dict[str, object]]] = {
    "sac": [
        *({"num_qvalue_nets": 1}, {"num_qvalue_nets": 3}, {"delay_qvalue": False}),
        *({"delay_actor": True}, {"reduction": "sum"}, {"loss_function": "huber"}),
        *({"skip_done_states": True}, {"value_network": make_critic(OBS, hidden=(8,)).double()}),
    ],
    "td3": [
        *({"num_qvalue_nets": 10}, {"delay_actor": False}, {"delay_qvalue": False}),
        {"reduction": "sum"},
    ],
}
LOSSES: dict[str, dict[str, Callable[[Any], object]]] = {
    "sac": {
        "hook of the actor": lambda loss: loss.actor_network.register_forward_hook(hook),
        "hook of the critics": lambda loss: loss.qvalue_network.register_forward_pre_hook(hook),
        "hook on gradients": lambda loss: (
            loss.actor_network[0].net[0].register_full_backward_hook(hook)
        ),
        "hook on a parameter": lambda loss: next(loss.parameters()).register_hook(torch.zeros_like),
        "subclass": subclassed,
        "frozen temperature": lambda loss: loss.log_alpha.requires_grad_(False),
        "renamed action": lambda loss: loss.set_keys(action="torque"),
        "renamed value": lambda loss: loss.set_keys(state_action_value="return"),
        "other estimator": lambda loss: loss.make_value_estimator("tdlambda", gamma=0.9, lmbda=0.9),
    },
    "td3": {"subclass": subclassed},
}


def _assert_refused(algorithm: str, loss: SACLoss | TD3Loss) -> None:
    """Assert that a loss is refused, and left as it was."""
    before = {name: p.data_ptr() for name, p in loss.named_parameters()}
    assert not UPDATES[algorithm].supports(loss)
    with pytest.raises(ConfigError, match="by the loss and an optimiser"):
        fused(loss)
    assert {name: p.data_ptr() for name, p in loss.named_parameters()} == before


def _cases(table: dict[str, Any]) -> pytest.MarkDecorator:
    cases = [(algorithm, case) for algorithm in table for case in table[algorithm]]
    return pytest.mark.parametrize(("algorithm", "case"), cases, ids=str)


@_cases(NETWORKS)
def test_other_networks_are_refused_and_left_as_they_were(algorithm, case):
    _assert_refused(algorithm, _loss(algorithm, NETWORKS[algorithm][case]))


@_cases(SETTINGS)
def test_losses_of_other_settings_are_refused_and_left_as_they_were(algorithm, case):
    _assert_refused(algorithm, _loss(algorithm, **case))


@_cases(LOSSES)
def test_losses_that_were_altered_are_refused_and_left_as_they_were(algorithm, case):
    LOSSES[algorithm][case](loss := _loss(algorithm))
    _assert_refused(algorithm, loss)


@pytest.mark.parametrize("on", ["network", "parameter"])
@pytest.mark.parametrize("algorithm", UPDATES)
def test_a_hook_that_comes_after_the_update_is_refused(algorithm, on):
    loss = _loss(algorithm)
    update = fused(loss)
    if on == "network":
        loss.qvalue_network.register_forward_hook(hook)
    else:
        next(loss.parameters()).register_hook(torch.zeros_like)
    with pytest.raises(ConfigError, match=r"hook on a network or a parameter: .* fused=False"):
        update.prepare(make_transitions(8, OBS, ACT))


@pytest.mark.parametrize("algorithm", UPDATES)
def test_a_supported_loss_is_that_of_our_networks(algorithm):
    assert UPDATES[algorithm].supports(_loss(algorithm))


@pytest.mark.parametrize("tau", [1.5, -0.1, float("nan")])
def test_a_share_for_the_targets_below_zero_or_beyond_one_is_refused(tau):
    with pytest.raises(ConfigError, match=rf"tau: {tau} "):
        fused(make_loss("sac"), tau=tau)


def test_an_estimator_that_normalises_rewards_is_refused():
    loss = make_loss("sac")
    loss.make_value_estimator(gamma=0.9, average_rewards=True)
    with pytest.raises(ConfigError, match="average_rewards"):
        fused(loss)


@pytest.mark.parametrize("algorithm", UPDATES)
def test_a_loss_whose_targets_an_update_moves_does_not_warn_that_they_stand_still(algorithm):
    loss = make_loss(algorithm)
    batch = transitions_of(loss, 8, 0)
    with pytest.warns(UserWarning, match="target"):
        loss(batch)
    fused(loss)
    loss(batch)  # a warning would be an error
