"""Which losses and networks SAC's and TD3's fused updates take, and how they refuse others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.objectives import SACLoss, TD3Loss

from tests.support.off_policy import ACT, OBS, fused, make_loss, make_transitions, transitions_of
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import make_critic, make_q_value, make_sac_actor, make_td3_actor
from torchrl_unilab.modules.critics import QValue
from torchrl_unilab.modules.squashed import (
    SquashedDeterministicActor,
    SquashedGaussianActor,
    SquashedGaussianParameters,
)
from torchrl_unilab.objectives import FusedSACUpdate, FusedTD3Update

UPDATES = {"sac": FusedSACUpdate, "td3": FusedTD3Update}

pytestmark = pytest.mark.usefixtures("double_precision")


def _replaced(algorithm: str = "sac", **parts) -> SACLoss | TD3Loss:
    """A supported loss but for one part."""
    make = {"sac": make_sac_actor, "td3": make_td3_actor}[algorithm]
    actor = parts.pop("actor", None) or make(OBS, ACT, hidden=(8,))
    critic = parts.pop("critic", None) or make_q_value(OBS, ACT, hidden=(8,))
    head = actor[0] if algorithm == "sac" else actor
    head.net = parts.pop("actor_net", head.net)
    critic.net = parts.pop("critic_net", critic.net)
    if algorithm == "sac":
        return SACLoss(actor, critic, **parts)
    return TD3Loss(actor, critic, bounds=(-1.0, 1.0), **parts)


def _frozen() -> SACLoss:
    actor = make_sac_actor(OBS, ACT, hidden=(8,))
    actor[0].net[0].bias.requires_grad_(False)
    return _replaced(actor=actor)


def _shared_and_frozen() -> SACLoss:
    """A loss of whose actor one layer comes twice, and another one is not learnt."""
    first, twice = nn.Linear(OBS, 8).requires_grad_(False), nn.Linear(8, 8)
    layers = (first, nn.ReLU(), twice, nn.ReLU(), twice, nn.ReLU(), nn.Linear(8, 2 * ACT))
    return _replaced(actor_net=nn.Sequential(*layers))


def _renamed(**keys: str) -> SACLoss:
    loss = _replaced()
    loss.set_keys(**keys)
    return loss


def _other_estimator() -> SACLoss:
    loss = _replaced()
    loss.make_value_estimator("tdlambda", gamma=0.9, lmbda=0.9)
    return loss


def _computed(compute: Callable[[nn.Module], object]) -> SACLoss:
    """A loss of whose critics' first layer a hook computes something."""
    critic = make_q_value(OBS, ACT, hidden=(8,))
    compute(critic.net[0])
    return _replaced(critic=critic)


def _hooked(hook: Callable[[SACLoss], object]) -> SACLoss:
    loss = _replaced()
    hook(loss)
    return loss


class _Actor(SquashedDeterministicActor):
    pass


class _Critic(QValue):
    pass


class _Loss(SACLoss):
    pass


class _DelayedLoss(TD3Loss):
    pass


class _Gaussian(SquashedGaussianActor):
    pass


class _Head(SquashedGaussianParameters):
    pass


def _other(module: nn.Module, kind: type) -> Any:
    """The module, as of a class that may do something else."""
    object.__setattr__(module, "__class__", kind)
    return module


def _other_head() -> SACLoss:
    actor = make_sac_actor(OBS, ACT, hidden=(8,))
    _other(actor[0], _Head)
    return _replaced(actor=actor)


def _other_normalizer() -> SACLoss:
    actor = make_sac_actor(OBS, ACT, hidden=(8,))
    actor[0].normalizer = nn.Tanh()
    return _replaced(actor=actor)


def _other_actor() -> TD3Loss:
    bounds = torch.full((ACT,), -1.0), torch.ones(ACT)
    return _replaced(
        "td3", actor=_Actor("observation", None, make_td3_actor(OBS, ACT).net, *bounds)
    )


def _tanh(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out))


def _norm_without_bias() -> nn.Sequential:
    norm = nn.LayerNorm(8, bias=False)
    return nn.Sequential(nn.Linear(OBS, 8), norm, nn.ReLU(), nn.Linear(8, ACT))


def _frozen_temperature() -> SACLoss:
    loss = _replaced()
    loss.log_alpha.requires_grad_(False)
    return loss


UNSUPPORTED = {
    "sac": {
        "tanh critic": lambda: _replaced(critic_net=_tanh(OBS + ACT, 1)),
        "tanh actor": lambda: _replaced(actor_net=_tanh(OBS, 2 * ACT)),
        "no bias": lambda: _replaced(actor_net=nn.Sequential(nn.Linear(OBS, 2 * ACT, bias=False))),
        "one critic": lambda: _replaced(num_qvalue_nets=1),
        "three critics": lambda: _replaced(num_qvalue_nets=3),
        "no targets": lambda: _replaced(delay_qvalue=False),
        "target actor": lambda: _replaced(delay_actor=True),
        "sum": lambda: _replaced(reduction="sum"),
        "state value": lambda: _replaced(value_network=make_critic(OBS, hidden=(8,))),
        "other distance": lambda: _replaced(loss_function="huber"),
        "other actor": lambda: _replaced(actor=_other(make_sac_actor(OBS, ACT), _Gaussian)),
        "other head": _other_head,
        "other normaliser of the actor": _other_normalizer,
        "skips": lambda: _replaced(skip_done_states=True),
        "other critic": lambda: _replaced(
            critic=_Critic("observation", None, make_q_value(OBS, ACT).net)
        ),
        "spectral norm": lambda: _computed(nn.utils.spectral_norm),
        "hook": lambda: _computed(lambda layer: layer.register_forward_hook(lambda *_: None)),
        "hook of the actor": lambda: _hooked(
            lambda loss: loss.actor_network.register_forward_hook(lambda *_: None)
        ),
        "hook of the critics": lambda: _hooked(
            lambda loss: loss.qvalue_network.register_forward_pre_hook(lambda *_: None)
        ),
        "hook on gradients": lambda: _hooked(
            lambda loss: loss.actor_network[0].net[0].register_full_backward_hook(lambda *_: None)
        ),
        "hook on a parameter": lambda: _hooked(
            lambda loss: next(loss.parameters()).register_hook(torch.zeros_like)
        ),
        "subclass": lambda: _Loss(make_sac_actor(OBS, ACT), make_q_value(OBS, ACT)),
        "frozen": _frozen,
        "a layer twice, and one frozen": _shared_and_frozen,
        "frozen temperature": _frozen_temperature,
        "mixed dtypes": lambda: _replaced(critic=make_q_value(OBS, ACT).float()),
        "other normaliser of the critics": lambda: _replaced(
            critic=QValue("observation", nn.Tanh(), make_q_value(OBS, ACT).net)
        ),
        "renamed action": lambda: _renamed(action="torque"),
        "renamed value": lambda: _renamed(state_action_value="return"),
        "other estimator": _other_estimator,
    },
    "td3": {
        "ends in tanh": lambda: _replaced(
            "td3", actor_net=nn.Sequential(nn.Linear(OBS, ACT), nn.Tanh())
        ),
        "two linear layers": lambda: _replaced(
            "td3", actor_net=nn.Sequential(nn.Linear(OBS, 8), nn.Linear(8, ACT))
        ),
        "other normalisation": lambda: _replaced("td3", actor_net=_norm_without_bias()),
        "normalised in part": lambda: _replaced(
            "td3",
            actor_net=nn.Sequential(
                *(nn.Linear(OBS, 8), nn.ReLU()),
                *(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()),
                nn.Linear(8, ACT),
            ),
        ),
        "other actor": _other_actor,
        "subclass": lambda: _other(_replaced("td3"), _DelayedLoss),
        "ten critics": lambda: _replaced("td3", num_qvalue_nets=10),
        "no target actor": lambda: _replaced("td3", delay_actor=False),
        "no target critics": lambda: _replaced("td3", delay_qvalue=False),
        "sum": lambda: _replaced("td3", reduction="sum"),
    },
}


@pytest.mark.parametrize(
    ("algorithm", "case"), [(name, case) for name in UNSUPPORTED for case in UNSUPPORTED[name]]
)
def test_other_losses_and_networks_are_refused_and_left_as_they_were(algorithm, case):
    loss = UNSUPPORTED[algorithm][case]()
    before = {name: p.data_ptr() for name, p in loss.named_parameters()}
    assert not UPDATES[algorithm].supports(loss)
    with pytest.raises(ConfigError, match="by the loss and an optimiser"):
        fused(loss)
    assert {name: p.data_ptr() for name, p in loss.named_parameters()} == before


@pytest.mark.parametrize("on", ["network", "parameter"])
@pytest.mark.parametrize("algorithm", UPDATES)
def test_a_hook_that_comes_after_the_update_is_refused(algorithm, on):
    loss = _replaced(algorithm)
    update = fused(loss)
    if on == "network":
        loss.qvalue_network.register_forward_hook(lambda *_: None)
    else:
        next(loss.parameters()).register_hook(torch.zeros_like)
    with pytest.raises(ConfigError, match=r"hook on a network or a parameter: .* fused=False"):
        update.prepare(make_transitions(8, OBS, ACT))


@pytest.mark.parametrize("algorithm", UPDATES)
def test_a_supported_loss_is_that_of_our_networks(algorithm):
    assert UPDATES[algorithm].supports(_replaced(algorithm))


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
