"""Multi-layer perceptrons of the two structures that the fused updates know.

Tanh layers with orthogonal weights for APPO, relu layers as PyTorch initialises them for SAC
and TD3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from torch import nn

from torchrl_unilab.checks import as_instance, as_integer
from torchrl_unilab.limits import check_memory


def checked_widths(sizes: Sequence[int]) -> list[int]:
    """Return widths of layers; refuse those that are not positive integers, or fit no memory."""
    remedy = "Use 64, for example, or leave `hidden` empty for a linear network."
    widths = [as_integer("width of a network", size, remedy) for size in sizes]
    weights = sum(n_in * n_out for n_in, n_out in itertools.pairwise(widths))
    check_memory(f"network of widths {widths}", 4 * weights, remedy)
    return widths


def layer_widths(inputs: int, hidden: Iterable[int], outputs: int) -> list[int]:
    """Return the widths of a network; refuse `hidden` that are not several, such as 64."""
    remedy = "List the width of each layer, as in (64, 64)."
    return [inputs, *as_instance("hidden", hidden, Iterable, remedy), outputs]


def tanh_mlp(sizes: Sequence[int], *, last_gain: float) -> nn.Sequential:
    """Return linear layers with tanh between them, with orthogonal weights and zero biases.

    Args:
        sizes: Widths from input to output, at least two.
        last_gain: Scale of the output layer's weights.

    Raises:
        ConfigError: A width is not positive.

    Examples:
        >>> from torchrl_unilab.modules.mlp import tanh_mlp
        >>> [type(layer).__name__ for layer in tanh_mlp([3, 8, 1], last_gain=1.0)]
        ['Linear', 'Tanh', 'Linear']
    """
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(checked_widths(sizes)):
        linear = nn.Linear(n_in, n_out)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    nn.init.orthogonal_(linear.weight, last_gain)
    return nn.Sequential(*layers[:-1])


def relu_mlp(sizes: Sequence[int], *, layer_norm: bool = False) -> nn.Sequential:
    """Return linear layers with relu between them, as PyTorch initialises them.

    Args:
        sizes: Widths from input to output, at least two.
        layer_norm: Whether to normalise what goes into each relu.

    Raises:
        ConfigError: A width is not positive.

    Examples:
        >>> from torchrl_unilab.modules.mlp import relu_mlp
        >>> [type(layer).__name__ for layer in relu_mlp([3, 8, 1])]
        ['Linear', 'ReLU', 'Linear']
    """
    sizes = checked_widths(sizes)
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes[:-1]):
        layers.append(nn.Linear(n_in, n_out))
        if layer_norm:
            layers.append(nn.LayerNorm(n_out))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))
