"""APPO's Gaussian actor, and the base of the actors that act without a distribution.

`FusedAPPOUpdate` writes out the gradients of `GaussianParameters`; collectors act by
`GaussianActor`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import skip_existing
from torch import nn
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import ProbabilisticActor

from torchrl_unilab.checks import as_number
from torchrl_unilab.modules.mlp import layer_widths, tanh_mlp
from torchrl_unilab.modules.normalizer import NormalizedNetwork, ObservationNormalizer

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_NOISELESS = (ExplorationType.DETERMINISTIC, ExplorationType.MEAN, ExplorationType.MODE)


class GaussianParameters(NormalizedNetwork):
    """Reads an observation; writes ``loc`` from a network, and a ``scale`` that no state changes.

    Args:
        in_key: Where the observation is.
        normalizer: Normalises observations.
        net: Maps an observation to one value per dimension of the action.
        size: Length of an action.
        log_std: Initial logarithm of the scale.
    """

    out_keys = ("loc", "scale")

    def __init__(
        self, in_key: str, normalizer: nn.Module | None, net: nn.Module, size: int, log_std: float
    ) -> None:
        super().__init__(in_key, normalizer, net)
        self.log_std = nn.Parameter(torch.full((size,), float(log_std)))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loc`` and ``scale``, [..., action size]."""
        loc = self.output(tensordict)
        tensordict.set("loc", loc)
        return tensordict.set("scale", self.log_std.exp().expand_as(loc))


class DiagonalNormal(torch.distributions.Independent):  # type: ignore[type-arg]
    """Independent normal distributions over the last axis.

    TorchRL's `IndependentNormal` without its mappings and checks of the parameters, which
    cost as much as the rest of a small minibatch's log probability.

    Args:
        loc: Means, [..., n].
        scale: Standard deviations, positive, [..., n].
    """

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        normal = torch.distributions.Normal(loc, scale, validate_args=False)
        super().__init__(normal, 1)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """Return the log probability, [...]; that of no values, too, which torch cannot shape."""
        log_prob: torch.Tensor = self.base_dist.log_prob(value).sum(-1)
        return log_prob

    deterministic_sample = torch.distributions.Independent.mean
    """The mean, which TorchRL takes to act without exploration."""


class DirectActor(ProbabilisticActor, abc.ABC):
    """A probabilistic actor that acts without building a distribution.

    Without gradients, and sampling or taking the one action without exploration, it computes
    the action in a handful of operations; in all other cases it is the
    `torchrl.modules.ProbabilisticActor` that it inherits from, with equal results (but for noise
    that follows the step before, see `GaussianActor`).
    """

    def forward(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Write ``loc``, ``scale`` and ``action``, [..., n], for a TensorDict."""
        kind = exploration_type() or self.default_interaction_type
        explore = kind == ExplorationType.RANDOM
        plain_call = len(args) == 1 and isinstance(args[0], TensorDictBase) and not kwargs
        slow = torch.is_grad_enabled() or skip_existing()
        if slow or not plain_call or not (explore or kind in _NOISELESS):
            return super().forward(*args, **kwargs)
        return self._act(self.module[0](args[0]), explore)

    @abc.abstractmethod
    def _act(self, tensordict: TensorDictBase, explore: bool) -> TensorDictBase:
        """Write the action, given ``loc`` and ``scale``."""


class GaussianActor(DirectActor):
    """A Gaussian policy, which writes ``action_log_prob``, [...], too.

    Args:
        parameters: Writes ``loc`` and ``scale``.
        noise_correlation: How far an environment's deviation from the mean follows the one
            before it, from 0 to below 1: sampled without gradients, noise is a first-order
            autoregressive process (the idea of Hollenstein et al. 2024, arXiv 2312.11091). Each
            sample alone is standard normal, and ``action_log_prob`` is of it alone. It
            continues over the ends of episodes, so each environment needs an actor of its own.

    Raises:
        ConfigError: `noise_correlation` is out of its range.
    """

    def __init__(self, parameters: GaussianParameters, noise_correlation: float = 0.0) -> None:
        remedy = "Leave it out for noise that follows nothing."
        as_number("noise_correlation", noise_correlation, remedy, "[0, 1)")
        super().__init__(
            parameters,
            in_keys=["loc", "scale"],
            distribution_class=DiagonalNormal,
            return_log_prob=True,
            log_prob_key="action_log_prob",  # also where TorchRL would have another default
        )
        self.noise_correlation = noise_correlation
        self._noise: torch.Tensor | None = None  # neither parameter nor buffer: not published

    def snapshot(self) -> torch.Tensor | None:
        """Return the last noise, [..., n], for a checkpoint of a worker; None if not needed."""
        return self._noise

    def restore(self, snapshot: torch.Tensor | None) -> None:
        """Continue after the noise that `snapshot` returned; None: begin anew."""
        self._noise = snapshot

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        """Return standard normal noise, [..., n]."""
        noise, correlation = torch.randn_like(like), self.noise_correlation
        if correlation:
            last = self._noise
            if last is not None and (last.shape, last.device) == (noise.shape, noise.device):
                noise.mul_(math.sqrt(1.0 - correlation**2)).add_(last, alpha=correlation)
            self._noise = noise
        return noise

    def _act(self, tensordict: TensorDictBase, explore: bool) -> TensorDictBase:
        loc, log_std = tensordict.get("loc"), self.module[0].log_std
        volume = log_std.sum() + HALF_LOG_2PI * log_std.shape[0]
        if explore:
            noise = self._draw(loc)
            tensordict.set("action", torch.addcmul(loc, noise, tensordict.get("scale")))
            log_prob = noise.square().sum(-1).mul_(-0.5).sub_(volume)
        else:
            tensordict.set("action", loc.clone())
            log_prob = (-volume).expand(loc.shape[:-1]).clone()
        return tensordict.set("action_log_prob", log_prob)


def make_actor(
    observation_size: int,
    action_size: int,
    *,
    in_key: str = "observation",
    normalizer: ObservationNormalizer | None = None,
    hidden: Sequence[int] = (64, 64),
    log_std: float = -1.0,
    noise_correlation: float = 0.0,
) -> GaussianActor:
    """Return a Gaussian actor, whose action and log probability follow an observation.

    Args:
        observation_size: Length of the observation vector.
        action_size: Length of the action vector.
        in_key: Where the observation is.
        normalizer: Normalises observations; part of the actor, so it is published with it.
        hidden: Widths of the tanh layers.
        log_std: Initial logarithm of the standard deviation; 0 in APPO's settings.
        noise_correlation: See `GaussianActor`.

    Raises:
        ConfigError: A size is not positive, or a number is out of its range.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules import make_actor
        >>> batch = make_actor(3, 2)(TensorDict(observation=torch.zeros(5, 3), batch_size=[5]))
        >>> batch["action"].shape, batch["action_log_prob"].shape
        (torch.Size([5, 2]), torch.Size([5]))
    """
    as_number("log_std", log_std, "Leave it out for the default.")
    net = tanh_mlp(layer_widths(observation_size, hidden, action_size), last_gain=0.01)
    parameters = GaussianParameters(in_key, normalizer, net, action_size, log_std)
    return GaussianActor(parameters, noise_correlation)
