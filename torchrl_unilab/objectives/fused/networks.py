"""Networks with their gradients written out.

`TanhNetwork` keeps samples in columns, [features, n], for APPO's small networks;
`ReluNetwork` keeps k networks side by side, [k, n, features], for critics and their targets:
the layouts are the speed. Parameters stay where they are, as views of `FlatAdam`'s memory.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.objectives.fused.products import BatchedProducts, products_for
from torchrl_unilab.objectives.fused.threads import SideExecutor, run_both

_SIZES = 16
"""Of minibatches whose memory is kept."""


def one_input(head: TensorDictModuleBase, critic: TensorDictModuleBase) -> bool:
    """Return whether actor and critic read one observation, normalised alike."""
    kinds = {type(head.normalizer), type(critic.normalizer)}
    alike = head.normalizer is critic.normalizer or kinds == {nn.Identity}
    return alike and head.in_keys[0] == critic.in_keys[0]


class TanhNetwork:
    """A tanh network's forward and backward pass, on its parameters and their gradients.

    Args:
        net: Linear layers with tanh between them, whose gradients are allocated.
    """

    def __init__(self, net: nn.Sequential) -> None:
        linears: list[Any] = [layer for layer in net if isinstance(layer, nn.Linear)]
        # Weights, biases as columns, and the gradients of both.
        self._layers: list[tuple[torch.Tensor, ...]] = []
        for linear in linears:
            weight, bias = linear.weight.detach(), linear.bias.detach().unsqueeze(1)
            self._layers.append((weight, bias, linear.weight.grad, linear.bias.grad.unsqueeze(1)))
        self._buffers: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._x = torch.empty(0)
        self._minus_one = linears[0].weight.new_tensor(-1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, [n_out, N], for `x`, [n_in, N]."""
        self._x = x
        for (weight, bias, _, _), (hidden, _) in zip(self._layers, self._hidden(), strict=False):
            # tanh(y) = 2 * sigmoid(2 * y) - 1, at half of tanh's time on a CPU.
            torch.addmm(bias, weight, x, beta=2.0, alpha=2.0, out=hidden).sigmoid_()
            x = torch.add(self._minus_one, hidden, alpha=2.0, out=hidden)
        weight, bias, _, _ = self._layers[-1]
        return torch.addmm(bias, weight, x)

    def backward(self, gradient: torch.Tensor) -> None:
        """Write the parameters' gradients, given the output's, [n_out, N]."""
        hidden = self._hidden()
        for i in range(len(hidden), -1, -1):
            weight, _, weight_grad, bias_grad = self._layers[i]
            torch.mm(gradient, (hidden[i - 1][0] if i else self._x).t(), out=weight_grad)
            torch.sum(gradient, 1, keepdim=True, out=bias_grad)
            if i:
                output, output_grad = hidden[i - 1]
                torch.mm(weight.t(), gradient, out=output_grad)
                gradient = torch.ops.aten.tanh_backward.grad_input(
                    output_grad, output, grad_input=output_grad
                )

    def _hidden(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        n = self._x.shape[1]
        if n not in self._buffers:
            if self._x.is_cpu and len(self._buffers) == _SIZES:  # on a GPU graphs use them
                del self._buffers[next(iter(self._buffers))]
            shapes = [(len(weight), n) for weight, *_ in self._layers[:-1]]
            self._buffers[n] = [(self._x.new_empty(s), self._x.new_empty(s)) for s in shapes]
        return self._buffers[n]


@dataclass
class _Affine:
    """What k layers multiply by and add, [k, ...], with the gradients' memory if they learn."""

    eps: float
    weight: torch.Tensor
    bias: torch.Tensor
    weight_grad: Any
    bias_grad: Any


Normed = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Pass(NamedTuple):
    """What `ReluNetwork.backward` needs of a forward pass, per layer."""

    inputs: list[torch.Tensor]
    """Of the linear layers, [k, n, in]."""

    normed: list[Normed]
    """Of each network, what a normalisation read, and the means and reciprocal deviations."""


Passes = list[Pass]


class ReluNetwork:
    """Forward and backward pass of k networks of one shape, by batched products.

    Reads parameters, and writes gradients, where they are.

    Args:
        net: The structure, which `is_relu_mlp` accepts.
        weights: Its parameters, detached, [k, ...], nested as in the module.
        gradients: Theirs, likewise; empty for networks that do not learn.
        products: How hidden layers multiply.
        matmul_dtype: The dtype of hidden layers' products, activations and gradients; by default
            the parameters'. With another one the layers read copies of their weights, as of
            the last `refresh`. Outputs, parameters and their gradients keep their dtype.
    """

    def __init__(
        self,
        net: nn.Module,
        weights: TensorDictBase,
        gradients: TensorDictBase,
        products: BatchedProducts,
        matmul_dtype: torch.dtype | None = None,
    ) -> None:
        # Per layer the linear part and the normalisation before its relu.
        self._layers: list[tuple[_Affine, _Affine | None]] = []
        for name, module in net.named_children():
            if isinstance(module, nn.ReLU):
                continue
            keys = (name, "weight"), (name, "bias")
            tensors: Any = (td.get(key, None) for td in (weights, gradients) for key in keys)
            affine = _Affine(getattr(module, "eps", 0.0), *tensors)
            if isinstance(module, nn.LayerNorm):
                self._layers[-1] = (self._layers[-1][0], affine)
            else:
                affine.bias = affine.bias.unsqueeze(1)  # the same for each of the n samples
                self._layers.append((affine, None))
        *hidden, (output, _) = self._layers
        self._k, self._dtype = len(output.weight), output.weight.dtype
        self._matmul_dtype = matmul_dtype if matmul_dtype and hidden else self._dtype
        self._masters: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        if self._matmul_dtype != self._dtype:
            for linear, _ in hidden:
                masters = [linear.weight, linear.bias]
                linear.weight, linear.bias = (t.to(self._matmul_dtype) for t in masters)
                self._masters += masters
                self._copies += [linear.weight, linear.bias]
        self._products = [products] * len(hidden) + [BatchedProducts()]  # one output, or a few

    def refresh(self) -> None:
        """Copy the parameters for products in another dtype than theirs."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Passes]:
        """Return the outputs, [k, n, out], for inputs all of them read, [n, in], and the pass."""
        x = x.to(self._matmul_dtype).contiguous().expand(self._k, *x.shape)
        inputs, normed = [], []
        for (linear, norm), products in zip(self._layers[:-1], self._products[:-1], strict=True):
            inputs.append(x)
            x = products.affine(x, linear.weight, linear.bias, relu=norm is None)
            if norm is not None:
                x, found = self._normalize(x.to(self._dtype), norm)
                normed.append(found)
                x = x.relu_().to(self._matmul_dtype)
        x = x.to(self._dtype)
        inputs.append(x)
        output = self._layers[-1][0]
        return self._products[-1].affine(x, output.weight, output.bias), [Pass(inputs, normed)]

    def backward(self, gradient: torch.Tensor, passes: Passes, thread: SideExecutor = None) -> None:
        """Write the parameters' gradients, given the outputs', [k, n, out].

        Args:
            gradient: Of the outputs.
            passes: From `forward`.
            thread: Not used; `ReluNetworks` takes one of its networks there.
        """
        (saved,) = passes
        for i in range(len(self._layers) - 1, -1, -1):
            linear = self._layers[i][0]
            self._products[i].by_weight(gradient, saved.inputs[i], linear.weight_grad)
            torch.sum(gradient, 1, dtype=self._dtype, out=linear.bias_grad)
            if i:
                gradient = self._descend(i, gradient, saved, learn=True)

    def backward_to_input(self, gradient: torch.Tensor, passes: Passes, start: int) -> torch.Tensor:
        """Return the gradient of the inputs from `start` on, [n, in - start]; no others."""
        (saved,) = passes
        for i in range(len(self._layers) - 1, 0, -1):
            gradient = self._descend(i, gradient, saved, learn=False)
        weight = self._layers[0][0].weight[:, :, start:].contiguous()
        by_input = self._products[0].by_input(gradient, weight)
        return by_input.sum(0, dtype=self._dtype)

    def _descend(self, i: int, gradient: torch.Tensor, saved: Pass, *, learn: bool) -> torch.Tensor:
        """Return the gradient of linear layer i - 1's outputs, given that of layer i's."""
        gradient = self._products[i].by_input(gradient, self._layers[i][0].weight)
        gradient = torch.ops.aten.threshold_backward.grad_input(
            gradient, saved.inputs[i], 0, grad_input=gradient
        )
        norm = self._layers[i - 1][1]
        if norm is not None:
            gradient = self._normalize_backward(
                gradient.to(self._dtype), norm, saved.normed[i - 1], learn
            )
        return gradient.to(self._matmul_dtype)

    def _normalize(self, x: torch.Tensor, norm: _Affine) -> tuple[torch.Tensor, Normed]:
        out, saved = torch.empty_like(x), []
        for j in range(self._k):
            own = norm.weight[j], norm.bias[j]
            out[j], mean, rstd = torch.native_layer_norm(x[j], x.shape[-1:], *own, norm.eps)
            saved.append((x[j], mean, rstd))
        return out, saved

    def _normalize_backward(
        self, gradient: torch.Tensor, norm: _Affine, saved: Normed, learn: bool
    ) -> torch.Tensor:
        out = torch.empty_like(gradient)
        for j, (x, mean, rstd) in enumerate(saved):
            own = norm.weight[j], norm.bias[j]
            out[j], dweight, dbias = torch.ops.aten.native_layer_norm_backward(
                gradient[j], x, x.shape[-1:], mean, rstd, *own, [True, learn, learn]
            )
            if learn:
                norm.weight_grad[j] = dweight
                norm.bias_grad[j] = dbias
        return out


class ReluNetworks:
    """Several `ReluNetwork` on the CPU: each finds its own tensors in the caches.

    Args:
        networks: Networks of one shape.
    """

    def __init__(self, networks: Sequence[ReluNetwork]) -> None:
        self._networks = networks

    def refresh(self) -> None:
        """See `ReluNetwork.refresh`."""
        for network in self._networks:
            network.refresh()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Passes]:
        """See `ReluNetwork.forward`; a pass for each network."""
        outputs = [network.forward(x) for network in self._networks]
        return torch.cat([y for y, _ in outputs]), [saved for _, (saved,) in outputs]

    def backward(self, gradient: torch.Tensor, passes: Passes, thread: SideExecutor = None) -> None:
        """See `ReluNetwork.backward`; a thread takes the first network meanwhile."""
        parts = zip(self._networks, gradient.split(1), passes, strict=True)
        first, *others = [partial(net.backward, own, [saved]) for net, own, saved in parts]
        run_both(thread, lambda: [run() for run in others], first)

    def backward_to_input(self, gradient: torch.Tensor, passes: Passes, start: int) -> torch.Tensor:
        """See `ReluNetwork.backward_to_input`."""
        parts = zip(self._networks, gradient.split(1), passes, strict=True)
        first, *others = [net.backward_to_input(own, [saved], start) for net, own, saved in parts]
        for other in others:
            first += other
        return first


def relu_networks(
    net: nn.Module, parameters: TensorDictBase, matmul_dtype: torch.dtype | None = None
) -> Network:
    """Return networks in the form that is fastest on their device; see `ReluNetwork`.

    The parameters are those of k networks, with a batch dimension, or of one network.
    """
    weights, gradients = parameters.detach(), parameters.grad
    gradients = weights.empty() if gradients is None else gradients
    if not parameters.batch_dims:
        weights, gradients = weights.unsqueeze(0), gradients.unsqueeze(0)
    weight = next(iter(weights.values(include_nested=True, leaves_only=True)))
    products = products_for(weight, matmul_dtype)
    if len(weight) == 1 or not weight.is_cpu:
        return ReluNetwork(net, weights, gradients, products, matmul_dtype)
    parts = zip(weights.split(1), gradients.split(1), strict=True)
    return ReluNetworks([ReluNetwork(net, *part, products, matmul_dtype) for part in parts])


Network = ReluNetwork | ReluNetworks


def is_relu_mlp(net: nn.Module, size: int) -> bool:
    """Return whether it is as `relu_mlp` makes it, and ends in `size` units.

    Linear layers with biases; between them relu, all with a `nn.LayerNorm` of the linear
    layer's outputs before it, or none.
    """
    return _is_mlp(net, "((LR)*|(LNR)*)L", size)


def is_tanh_mlp(net: nn.Module, size: int) -> bool:
    """Return whether it is as `tanh_mlp` makes it, and ends in `size` units."""
    return _is_mlp(net, "(LT)*L", size)


def are_hooked(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether modules have hooks, or parameters have hooks on their gradients."""
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in modules
    ) or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def check_hooks(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
    """Refuse hooks that came after a fused update, which calls none; a ConfigError."""
    if are_hooked(modules, parameters):
        raise ConfigError(
            "hook on a network or a parameter: registered since the update that steps them was "
            "made (expected none: it calls none). Register it before, or take fused=False."
        )


def _is_mlp(net: nn.Module, pattern: str, size: int) -> bool:
    """Return whether its layers' kinds match, all with weights and biases of their own.

    It ends in `size` units.
    """
    kinds = {nn.Linear: "L", nn.LayerNorm: "N", nn.ReLU: "R", nn.Tanh: "T"}
    layers: list[Any] = list(net) if type(net) is nn.Sequential else []
    if not re.fullmatch(pattern, "".join(kinds.get(type(layer), "?") for layer in layers)):
        return False
    return (
        bool(layers[-1].out_features == size)
        and all(  # and not what a spectral norm or a mask computes
            isinstance(layer.weight, nn.Parameter) and isinstance(layer.bias, nn.Parameter)
            for layer in layers
            if isinstance(layer, nn.Linear | nn.LayerNorm)
        )
        and all(
            norm.normalized_shape == (linear.out_features,)
            for linear, norm in itertools.pairwise(layers)
            if type(norm) is nn.LayerNorm
        )
    )
