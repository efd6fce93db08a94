"""Critics of states, and of states and actions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, set_skip_existing
from torch import nn

from torchrl_unilab.modules.mlp import checked_widths, layer_widths, relu_mlp, tanh_mlp
from torchrl_unilab.modules.normalizer import NormalizedNetwork, ObservationNormalizer


class StateValue(NormalizedNetwork):
    """Reads an observation, writes ``state_value``, [..., 1], from a network."""

    out_keys = ("state_value",)

    @set_skip_existing(None)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``state_value``."""
        return tensordict.set("state_value", self.output(tensordict))


class QValue(TensorDictModuleBase):
    """Reads an observation and an action, writes ``state_action_value``, [..., 1].

    Refers to its normaliser without containing it: TorchRL's losses clone a critic's buffers, for
    each critic and each target, and the clones would keep old statistics. So `to` and
    `state_dict` of the critic leave the normaliser out: call those of the normaliser itself, or of
    the actor that contains it.

    Args:
        in_key: Where the observation is.
        normalizer: Normalises observations.
        net: Observation and action, one after the other, to one value.
    """

    out_keys = ("state_action_value",)

    def __init__(self, in_key: str, normalizer: nn.Module | None, net: nn.Module) -> None:
        super().__init__()
        self.in_keys = (in_key, "action")
        normalizer = nn.Identity() if normalizer is None else normalizer
        self._reference = (normalizer,)  # in a tuple, where `nn.Module` does not look
        self.net = net

    @property
    def normalizer(self) -> nn.Module:
        """What normalises observations; not a part of this module."""
        return self._reference[0]

    @set_skip_existing(None)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``state_action_value``."""
        observation, action = (tensordict.get(key) for key in self.in_keys)
        x = torch.cat([self.normalizer(observation), action], dim=-1)
        return tensordict.set("state_action_value", self.net(x))


def make_critic(
    observation_size: int,
    *,
    in_key: str = "observation",
    normalizer: ObservationNormalizer | None = None,
    hidden: Sequence[int] = (64, 64),
) -> StateValue:
    """Return a critic: an observation under `in_key` to ``state_value``, [..., 1].

    Args:
        observation_size: Length of the observation vector.
        in_key: Where the observation is; a critic may see more than the actor.
        normalizer: Normalises observations; None leaves them as they are.
        hidden: Widths of the tanh layers.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules import make_critic
        >>> make_critic(3)(TensorDict(observation=torch.zeros(5, 3)))["state_value"].shape
        torch.Size([5, 1])
    """
    net = tanh_mlp(layer_widths(observation_size, hidden, 1), last_gain=1.0)
    return StateValue(in_key, normalizer, net)


def make_q_value(
    observation_size: int,
    action_size: int,
    *,
    in_key: str = "observation",
    normalizer: ObservationNormalizer | None = None,
    hidden: Sequence[int] = (256, 256),
    layer_norm: bool = False,
) -> QValue:
    """Return a critic: observation and action to ``state_action_value``, [..., 1].

    Args:
        observation_size: Length of the observation vector.
        action_size: Length of the action vector.
        in_key: Where the observation is; a critic may see more than the actor.
        normalizer: Normalises observations; the critic refers to it and does not contain it.
        hidden: Widths of the relu layers.
        layer_norm: Whether to normalise what goes into each relu.

    Raises:
        ConfigError: A size is not positive.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules import make_q_value
        >>> critic = make_q_value(3, 1)
        >>> batch = TensorDict(observation=torch.zeros(5, 3), action=torch.zeros(5, 1))
        >>> critic(batch)["state_action_value"].shape
        torch.Size([5, 1])
    """
    inputs = sum(checked_widths([observation_size, action_size]))
    net = relu_mlp(layer_widths(inputs, hidden, 1), layer_norm=layer_norm)
    return QValue(in_key, normalizer, net)
