"""A Gaussian actor and a critic, as TorchRL modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import ProbabilisticActor

from torchrl_unilab.modules.normalizer import ObservationNormalizer

__all__ = [
    "DiagonalNormal",
    "GaussianActor",
    "GaussianParameters",
    "StateValue",
    "make_actor",
    "make_critic",
]

HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
_DIRECT = (
    ExplorationType.RANDOM,
    ExplorationType.DETERMINISTIC,
    ExplorationType.MEAN,
    ExplorationType.MODE,
)


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
    """Reads an observation, writes ``loc`` from a network and ``scale`` free of the state.

    Does what a ``TensorDictModule`` around a function would, without its dispatch, which
    costs as much as a small network's forward pass.
    """

    out_keys = ("loc", "scale")

    def __init__(
        self, in_key: str, normalizer: nn.Module, net: nn.Module, size: int, log_std: float
    ) -> None:
        super().__init__()
        self.in_keys = (in_key,)
        self.normalizer = normalizer
        self.net = net
        self.log_std = nn.Parameter(torch.full((size,), log_std))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loc`` and ``scale``, [..., action size]."""
        loc = self.net(self.normalizer(tensordict.get(self.in_keys[0])))
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


class GaussianActor(ProbabilisticActor):
    """A Gaussian policy that acts without building a distribution.

    Without gradients, and sampling or taking the mean, it computes action and log
    probability in a handful of operations; in all other cases it is the
    `torchrl.modules.ProbabilisticActor` that it inherits from, with equal results.

    Args:
        parameters: Writes ``loc`` and ``scale``.
    """

    def __init__(self, parameters: GaussianParameters) -> None:
        super().__init__(
            parameters,
            in_keys=["loc", "scale"],
            distribution_class=DiagonalNormal,
            return_log_prob=True,
        )

    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Write ``loc``, ``scale``, ``action`` [..., n] and ``action_log_prob`` [...]."""
        how = exploration_type()
        if args or kwargs or torch.is_grad_enabled() or how not in _DIRECT:
            out: TensorDictBase = super().forward(tensordict, *args, **kwargs)
            return out
        parameters = self.module[0]
        tensordict = parameters(tensordict)
        loc, scale = tensordict.get("loc"), tensordict.get("scale")
        log_std = parameters.log_std
        volume = log_std.sum() + HALF_LOG_TAU * log_std.shape[0]
        if how == ExplorationType.RANDOM:
            noise = torch.randn_like(loc)
            tensordict.set("action", torch.addcmul(loc, noise, scale))
            log_prob = noise.square_().sum(-1).mul_(-0.5).sub_(volume)
        else:
            tensordict.set("action", loc.clone())
            log_prob = (-volume).expand(loc.shape[:-1]).clone()
        return tensordict.set("action_log_prob", log_prob)


class StateValue(TensorDictModuleBase):
    """Reads an observation, writes ``state_value``, [..., 1], from a network."""

    out_keys = ("state_value",)

    def __init__(self, in_key: str, normalizer: nn.Module, net: nn.Module) -> None:
        super().__init__()
        self.in_keys = (in_key,)
        self.normalizer = normalizer
        self.net = net

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``state_value``."""
        value = self.net(self.normalizer(tensordict.get(self.in_keys[0])))
        return tensordict.set("state_value", value)


def make_actor(
    observation_size: int,
    action_size: int,
    *,
    in_key: str = "observation",
    normalizer: ObservationNormalizer | None = None,
    hidden: Sequence[int] = (64, 64),
    log_std: float = -1.0,
) -> GaussianActor:
    """Return a Gaussian actor, whose action and log probability follow an observation.

    Args:
        observation_size: Length of the observation vector.
        action_size: Length of the action vector.
        in_key: Where the observation is.
        normalizer: Normalises observations; part of the actor, so it is published with it.
        hidden: Widths of the tanh layers.
        log_std: Initial logarithm of the standard deviation.
    """
    net = _mlp([observation_size, *hidden, action_size], last_gain=0.01)
    return GaussianActor(
        GaussianParameters(in_key, normalizer or nn.Identity(), net, action_size, log_std)
    )


def make_critic(
    observation_size: int,
    *,
    in_key: str = "observation",
    normalizer: ObservationNormalizer | None = None,
    hidden: Sequence[int] = (64, 64),
) -> StateValue:
    """Return a critic: an observation under `in_key` to ``state_value``, [..., 1]."""
    net = _mlp([observation_size, *hidden, 1], last_gain=1.0)
    return StateValue(in_key, normalizer or nn.Identity(), net)
