"""Actors whose actions a tanh keeps within bounds: SAC's Gaussian and TD3's point.

An action is ``center + reach * tanh(u)``, whatever writes ``u``. `FusedSACUpdate` and
`FusedTD3Update` write out the gradients of the two heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import set_skip_existing
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import TanhNormal

from torchrl_unilab.checks import as_integer
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules.gaussian import DirectActor
from torchrl_unilab.modules.mlp import layer_widths, relu_mlp
from torchrl_unilab.modules.normalizer import NormalizedNetwork, ObservationNormalizer


def squash(x: torch.Tensor) -> torch.Tensor:
    """Return tanh, kept off -1 and 1 by the dtype's resolution, as `TanhNormal` does.

    So that an action can be mapped back. ``x`` is overwritten.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.modules.squashed import squash
        >>> squash(torch.tensor([0.0, 100.0])).tolist()
        [0.0, 0.9999...]
    """
    limit = 1.0 - torch.finfo(x.dtype).resolution
    return x.tanh_().clamp_(-limit, limit)


class SquashedNormal(TanhNormal):
    """TorchRL's `TanhNormal`, with one action for all exploration types but RANDOM.

    A squashed Gaussian's mean and mode have no closed form: `TanhNormal` estimates the mean from
    samples, and refuses the mode. SAC acts by the squashed mean of the Gaussian, and so does this.
    """

    mean = mode = TanhNormal.deterministic_sample
    """The squashed mean of the Gaussian, not the mean or mode of the squashed Gaussian."""


def _check_bounds(head: SquashedNetwork, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Refuse a state of other bounds than the distribution, and the spec, were made with."""
    own = torch.stack([head.center, head.reach])
    found = [state[key] for key in (f"{prefix}center", f"{prefix}reach") if key in state]
    known = len(found) == 2 and not own.is_meta
    alike = known and found[0].shape == own[0].shape
    if known and not (alike and torch.allclose(torch.stack(found).to(own), own)):
        (center, reach), (own_center, own_reach) = found, own
        raise ConfigError(
            f"state of an actor with actions of {(center - reach).tolist()} to "
            f"{(center + reach).tolist()} (expected {(own_center - own_reach).tolist()} to "
            f"{(own_center + own_reach).tolist()}). Make the actor with the state's bounds."
        )


class SquashedNetwork(NormalizedNetwork):
    """Base of the heads, which holds the actions' bounds.

    Args:
        in_key: Where the observation is.
        normalizer: Normalises observations.
        net: Observation to what the head needs.
        low: Lowest actions, [n].
        high: Highest actions, [n].
    """

    center: torch.Tensor
    reach: torch.Tensor

    def __init__(
        self,
        in_key: str,
        normalizer: nn.Module | None,
        net: nn.Module,
        low: torch.Tensor,
        high: torch.Tensor,
    ) -> None:
        super().__init__(in_key, normalizer, net)
        center, reach = high / 2 + low / 2, (high - low) / 2
        digits = torch.finfo(center.dtype)
        digit = digits.eps * torch.maximum(center.abs(), reach).clamp(min=digits.tiny / digits.eps)
        # A sum may be rounded beyond a bound by its last digit: shrink the reach until none is.
        while (beyond := (center + reach > high) | (center - reach < low)).any():
            reach = torch.where(beyond, (reach - digit).clamp(min=0.0), reach)
        self.register_buffer("center", center)
        self.register_buffer("reach", reach)
        self.register_load_state_dict_pre_hook(_check_bounds)


class SquashedGaussianParameters(SquashedNetwork):
    """Reads an observation, writes ``loc`` and ``scale`` of a Gaussian before its tanh.

    The network's second half of outputs, ``r``, sets the scale within soft bounds, which
    leave it a gradient everywhere::

        log scale = low + (high - low) * (tanh(r) + 1) / 2

    Args:
        *head: As for `SquashedNetwork`; the network has two outputs per dimension of the action.
        log_std_bounds: Bounds of the scale's logarithm.
    """

    out_keys = ("loc", "scale")

    def __init__(self, *head: Any, log_std_bounds: tuple[float, float]) -> None:
        super().__init__(*head)
        self.log_std_bounds = log_std_bounds

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loc`` and ``scale``, [..., action size]."""
        loc, raw = self.output(tensordict).chunk(2, dim=-1)
        low, high = self.log_std_bounds
        tensordict.set("loc", loc)
        return tensordict.set("scale", (low + (high - low) / 2 * (raw.tanh() + 1.0)).exp())


class SquashedGaussianActor(DirectActor):
    """A tanh-squashed Gaussian policy.

    Args:
        parameters: Writes ``loc`` and ``scale``.
        low: Lowest actions, [n], as the parameters have them.
        high: Highest actions, [n], as the parameters have them.
    """

    def __init__(
        self, parameters: SquashedGaussianParameters, low: torch.Tensor, high: torch.Tensor
    ) -> None:
        super().__init__(
            parameters,
            in_keys=["loc", "scale"],
            spec=Bounded(low, high, shape=low.shape, dtype=low.dtype, device=low.device),
            distribution_class=SquashedNormal,
            distribution_kwargs={"low": low, "high": high},
        )

    def _act(self, tensordict: TensorDictBase, explore: bool) -> TensorDictBase:
        head, loc = self.module[0], tensordict.get("loc")
        if explore:
            u = torch.addcmul(loc, torch.randn_like(loc), tensordict.get("scale"))
        else:
            u = loc.clone()
        return tensordict.set("action", torch.addcmul(head.center, squash(u), head.reach))


class SquashedDeterministicActor(SquashedNetwork):
    """A deterministic policy within bounds: ``action = center + reach * tanh(net)``."""

    out_keys = ("action",)

    @set_skip_existing(None)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, [..., n]."""
        u = self.output(tensordict)
        return tensordict.set("action", torch.addcmul(self.center, u.tanh(), self.reach))


def make_sac_actor(
    observation_size: int,
    action_size: int,
    *,
    low: float | torch.Tensor = -1.0,
    high: float | torch.Tensor = 1.0,
    in_key: str = "observation",
    normalizer: ObservationNormalizer | None = None,
    hidden: Sequence[int] = (256, 256),
    layer_norm: bool = False,
    log_std_bounds: tuple[float, float] = (-5.0, 2.0),
) -> SquashedGaussianActor:
    """Return SAC's actor: a Gaussian, squashed by tanh into bounds (arXiv 1812.05905, app. C).

    Args:
        observation_size: Length of the observation vector.
        action_size: Length of the action vector.
        low: Lowest action, one number or one per dimension, [action_size].
        high: Highest action, likewise.
        in_key: Where the observation is.
        normalizer: Normalises observations; part of the actor, so it is published with it.
            TorchRL's losses keep copies: in a loop of your own call
            `torchrl_unilab.objectives.targets.sync_normalizers` before each update.
        hidden: Widths of the relu layers.
        layer_norm: Whether to normalise what goes into each relu.
        log_std_bounds: Soft bounds of the standard deviation's logarithm, before the tanh.

    Raises:
        ConfigError: A size or a pair of bounds cannot work.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules import make_sac_actor
        >>> actor = make_sac_actor(3, 2, low=torch.tensor([-1.0, 0.0]), high=2.0)
        >>> actor(TensorDict(observation=torch.zeros(5, 3), batch_size=[5]))["action"].shape
        torch.Size([5, 2])
    """
    if not -math.inf < log_std_bounds[0] < log_std_bounds[1] < math.inf:
        raise ConfigError(
            f"log_std_bounds: {log_std_bounds} (expected a lower and a higher finite number). "
            "Leave it out for the default."
        )
    lowest, highest = _bounds(low, high, action_size)
    net = relu_mlp(layer_widths(observation_size, hidden, 2 * action_size), layer_norm=layer_norm)
    parameters = SquashedGaussianParameters(
        in_key, normalizer, net, lowest, highest, log_std_bounds=log_std_bounds
    )
    return SquashedGaussianActor(parameters, lowest, highest)


def make_td3_actor(
    observation_size: int,
    action_size: int,
    *,
    low: float | torch.Tensor = -1.0,
    high: float | torch.Tensor = 1.0,
    in_key: str = "observation",
    normalizer: ObservationNormalizer | None = None,
    hidden: Sequence[int] = (256, 256),
    layer_norm: bool = False,
) -> SquashedDeterministicActor:
    """Return TD3's actor: an action within bounds, without noise (arXiv 1802.09477).

    Args:
        observation_size: Length of the observation vector.
        action_size: Length of the action vector.
        low: Lowest action, one number or one per dimension, [action_size].
        high: Highest action, likewise.
        in_key: Where the observation is.
        normalizer: Normalises observations; part of the actor, so it is published with it.
            TorchRL's losses keep copies: in a loop of your own call
            `torchrl_unilab.objectives.targets.sync_normalizers` before each update.
        hidden: Widths of the relu layers.
        layer_norm: Whether to normalise what goes into each relu.

    Raises:
        ConfigError: A size or a pair of bounds cannot work.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules import make_td3_actor
        >>> actor = make_td3_actor(3, 2, low=0.0, high=2.0)
        >>> batch = actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))
        >>> bool((batch["action"] > 0.0).all())
        True
    """
    lowest, highest = _bounds(low, high, action_size)
    net = relu_mlp(layer_widths(observation_size, hidden, action_size), layer_norm=layer_norm)
    return SquashedDeterministicActor(in_key, normalizer, net, lowest, highest)


def _bounds(
    low: float | torch.Tensor, high: float | torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bounds as tensors of their own, [size]; refuse those that leave no room."""
    size = as_integer("size of actions", size, "Give the length of their vector.")
    # Bounds have values also where a network is made on the meta device, to be loaded later.
    device = "cpu" if torch.empty(0).device.type == "meta" else None
    dtype = torch.get_default_dtype()
    bounds = [torch.as_tensor(bound, dtype=dtype, device=device) for bound in (low, high)]
    fit = all(bound.shape in ((), (size,)) for bound in bounds)
    reach = bounds[1] - bounds[0] if fit else bounds[0].new_zeros(1)
    if not (reach.isfinite() & (reach > 0)).all():
        raise ConfigError(
            f"action bounds: low {low}, high {high} (expected low < high in all dimensions, each a "
            f"finite number or {size} of them, and a finite difference). Take the action spec's."
        )
    lowest, highest = (bound.expand(size).clone() for bound in bounds)
    return lowest, highest
