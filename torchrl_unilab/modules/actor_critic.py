"""A Gaussian actor and a critic, as TorchRL modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.modules import ProbabilisticActor

from torchrl_unilab.modules.normalizer import ObservationNormalizer

__all__ = ["DiagonalNormal", "GaussianParameters", "StateValue", "make_actor", "make_critic"]


def _mlp(sizes: Sequence[int], last_gain: float) -> nn.Sequential:
    """Tanh layers with orthogonal weights; `last_gain` scales the output layer."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        linear = nn.Linear(n_in, n_out)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    layers.pop()
    output = layers[-1]
    assert isinstance(output, nn.Linear)
    nn.init.orthogonal_(output.weight, last_gain)
    return nn.Sequential(*layers)


class GaussianParameters(TensorDictModuleBase):
    """Reads ``observation``, writes ``loc`` from a network and ``scale`` free of the state.

    Does what a ``TensorDictModule`` around a function would, without its dispatch, which
    costs as much as a small network's forward pass.
    """

    in_keys = ("observation",)
    out_keys = ("loc", "scale")

    def __init__(self, normalizer: nn.Module, net: nn.Module, size: int, log_std: float) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.net = net
        self.log_std = nn.Parameter(torch.full((size,), log_std))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loc`` and ``scale``, [..., action size]."""
        loc = self.net(self.normalizer(tensordict.get("observation")))
        tensordict.set("loc", loc)
        return tensordict.set("scale", self.log_std.exp().expand_as(loc))


class DiagonalNormal(torch.distributions.Independent[torch.distributions.Normal]):
    """Independent normal distributions over the last axis.

    TorchRL's `IndependentNormal` without its mappings and checks of the parameters, which
    cost as much as the rest of a small minibatch's log probability.

    Args:
        loc: Means, [..., n].
        scale: Standard deviations, positive, [..., n].
    """

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        normal = torch.distributions.Normal(loc, scale, validate_args=False)
        super().__init__(normal, 1, validate_args=False)

    @property
    def deterministic_sample(self) -> torch.Tensor:
        """The mean, which TorchRL takes to act without exploration."""
        return self.mean


class StateValue(TensorDictModuleBase):
    """Reads ``observation``, writes ``state_value``, [..., 1], from a network."""

    in_keys = ("observation",)
    out_keys = ("state_value",)

    def __init__(self, normalizer: nn.Module, net: nn.Module) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.net = net

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``state_value``."""
        value = self.net(self.normalizer(tensordict.get("observation")))
        return tensordict.set("state_value", value)


def make_actor(
    observation_size: int,
    action_size: int,
    *,
    normalizer: ObservationNormalizer | None = None,
    hidden: Sequence[int] = (64, 64),
    log_std: float = -1.0,
) -> ProbabilisticActor:
    """Return a Gaussian actor, whose action and log probability follow ``observation``.

    Args:
        observation_size: Length of the observation vector.
        action_size: Length of the action vector.
        normalizer: Normalises observations; part of the actor, so it is published with it.
        hidden: Widths of the tanh layers.
        log_std: Initial logarithm of the standard deviation.
    """
    net = _mlp([observation_size, *hidden, action_size], last_gain=0.01)
    return ProbabilisticActor(
        GaussianParameters(normalizer or nn.Identity(), net, action_size, log_std),
        in_keys=["loc", "scale"],
        distribution_class=DiagonalNormal,
        return_log_prob=True,
    )


def make_critic(
    observation_size: int,
    *,
    normalizer: ObservationNormalizer | None = None,
    hidden: Sequence[int] = (64, 64),
) -> StateValue:
    """Return a critic: ``observation`` to ``state_value``, [..., 1]."""
    net = _mlp([observation_size, *hidden, 1], last_gain=1.0)
    return StateValue(normalizer or nn.Identity(), net)
