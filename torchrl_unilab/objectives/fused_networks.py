"""Relu networks with their gradients written out, and Adam over one flat tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_unilab.objectives.fused_adam import fused_adam

__all__ = ["FlatAdam", "ReluNetwork", "flatten", "is_relu_mlp"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make tensors views of one flat tensor, which is returned.

    They keep their identities and values; their memory moves.

    Example:
        >>> parts = [torch.zeros(2), torch.ones(1, 1)]
        >>> flat = flatten(parts)
        >>> _ = flat.add_(1.0)
        >>> parts[1].item()
        2.0
    """
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    for tensor, value in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.data = value.view(tensor.shape)
    return flat


class FlatAdam:
    """Adam that takes one operation for all parameters.

    The parameters and their gradients become views of two tensors.

    Args:
        parameters: What it steps.
        lr: Learning rate.

    Attributes:
        flat: The parameters' values.
        optimizer: Adam over the one tensor, to be checkpointed; its first parameter group's
            settings hold for each step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        self.flat = flatten(parameters)
        self._grad = torch.zeros_like(self.flat)
        gradients = self._grad.split([parameter.numel() for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.view(parameter.shape)
        self._parameter = nn.Parameter(self.flat)
        self._parameter.grad = self._grad
        self.optimizer = torch.optim.Adam([self._parameter], lr=lr, fused=True)
        self.optimizer.state[self._parameter] = {
            "step": torch.zeros((), device=self.flat.device),
            "exp_avg": torch.zeros_like(self._grad),
            "exp_avg_sq": torch.zeros_like(self._grad),
        }

    def step(self) -> None:
        """Take a step of the optimiser."""
        fused_adam(self.optimizer, self._parameter, self._grad)


@dataclass
class _Affine:
    """What a layer multiplies by and adds, with the gradients' memory where it learns."""

    weight: torch.Tensor
    bias: torch.Tensor
    weight_grad: torch.Tensor | None
    bias_grad: torch.Tensor | None
    eps: float = 0.0


class ReluNetwork:
    """Forward and backward pass of k networks of one shape, by batched products.

    Reads parameters, and writes gradients, where they are. The parameters that are given
    are [k, ...], or, if `stacked` is false, those of one network.

    Args:
        net: The structure, which `is_relu_mlp` accepts.
        parameters: Its parameters, nested as in the module.
        stacked: Whether they have a leading dimension of k.
        first: Take the first of the k networks alone.
    """

    def __init__(
        self,
        net: nn.Sequential,
        parameters: TensorDictBase,
        *,
        stacked: bool,
        first: bool = False,
    ) -> None:
        def batched(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            tensor = tensor.detach() if stacked else tensor.detach().unsqueeze(0)
            return tensor[:1] if first else tensor

        # Per layer the linear part and the normalisation before its relu.
        self._layers: list[tuple[_Affine, _Affine | None]] = []
        for name, module in net.named_children():
            if isinstance(module, nn.ReLU):
                continue
            weight, bias = (parameters.get((name, key)) for key in ("weight", "bias"))
            tensors = [batched(t) for t in (weight, bias, weight.grad, bias.grad)]
            values, shift, slopes, shift_grad = tensors
            assert values is not None
            assert shift is not None
            if isinstance(module, nn.LayerNorm):
                norm = _Affine(values, shift, slopes, shift_grad, module.eps)
                self._layers[-1] = (self._layers[-1][0], norm)
                continue
            shift = shift.unsqueeze(1)
            shift_grad = None if shift_grad is None else shift_grad.unsqueeze(1)
            self._layers.append((_Affine(values, shift, slopes, shift_grad), None))
        self._k = len(self._layers[0][0].weight)
        # What `backward` needs of the last `forward`, per layer: its input, and what its
        # normalisation read and found.
        self._inputs: list[torch.Tensor] = []
        self._normed: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs, [k, n, out], for inputs all of them read, [n, in]."""
        x = x.expand(self._k, *x.shape)
        self._inputs, self._normed = [], []
        *hidden, (output, _) = self._layers
        for linear, norm in hidden:
            self._inputs.append(x)
            x = torch.baddbmm(linear.bias, x, linear.weight.transpose(1, 2))
            if norm is not None:
                x = self._normalize(x, norm)
            x = x.relu_()
        self._inputs.append(x)
        return torch.baddbmm(output.bias, x, output.weight.transpose(1, 2))

    def backward(self, gradient: torch.Tensor) -> None:
        """Write the parameters' gradients, given the outputs', [k, n, out]."""
        for i, dy in self._descend(gradient):
            linear = self._layers[i][0]
            torch.bmm(dy.transpose(1, 2), self._inputs[i], out=linear.weight_grad)
            torch.sum(dy, 1, keepdim=True, out=linear.bias_grad)

    def backward_to_input(self, gradient: torch.Tensor, start: int) -> torch.Tensor:
        """Return the gradient of the inputs from `start` on, [n, in - start]; no others."""
        for i, dy in self._descend(gradient, learn=False):
            if i == 0:
                return torch.bmm(dy, self._layers[0][0].weight[:, :, start:]).sum(0)
        raise AssertionError("a network has a first layer")

    def _descend(
        self, gradient: torch.Tensor, *, learn: bool = True
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the gradient of each linear layer's outputs, [k, n, out], last layer first."""
        for i in range(len(self._layers) - 1, -1, -1):
            yield i, gradient
            if i == 0:
                return
            gradient = torch.bmm(gradient, self._layers[i][0].weight)
            gradient = torch.ops.aten.threshold_backward.grad_input(
                gradient, self._inputs[i], 0, grad_input=gradient
            )
            norm = self._layers[i - 1][1]
            if norm is not None:
                gradient = self._normalize_backward(gradient, norm, self._normed[i - 1], learn)

    def _normalize(self, x: torch.Tensor, norm: _Affine) -> torch.Tensor:
        out, seen = torch.empty_like(x), []
        for j in range(self._k):
            y, mean, rstd = torch.native_layer_norm(
                x[j], x.shape[-1:], norm.weight[j], norm.bias[j], norm.eps
            )
            out[j] = y
            seen.append((x[j], mean, rstd))
        self._normed.append(seen)
        return out

    def _normalize_backward(
        self,
        gradient: torch.Tensor,
        norm: _Affine,
        seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        learn: bool,
    ) -> torch.Tensor:
        out = torch.empty_like(gradient)
        for j, (x, mean, rstd) in enumerate(seen):
            dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
                gradient[j],
                x,
                x.shape[-1:],
                mean,
                rstd,
                norm.weight[j],
                norm.bias[j],
                [True, learn, learn],
            )
            out[j] = dx
            if learn:
                assert norm.weight_grad is not None
                assert norm.bias_grad is not None
                norm.weight_grad[j] = dweight
                norm.bias_grad[j] = dbias
        return out


def is_relu_mlp(net: nn.Module, size: int) -> bool:
    """Return whether it is as `relu_mlp` makes it, and ends in `size` units.

    Linear layers with biases; between them relu, with or without a `nn.LayerNorm` of a
    linear layer's outputs before it.
    """
    if type(net) is not nn.Sequential or not len(net):
        return False
    before: nn.Module | None = None
    width = 0
    for layer in net:
        if type(layer) is nn.Linear:
            fits = type(before) in (nn.ReLU, type(None)) and layer.bias is not None
            width = layer.out_features
        elif type(layer) is nn.LayerNorm:
            fits = type(before) is nn.Linear and layer.normalized_shape == (width,)
            fits = fits and layer.elementwise_affine and layer.bias is not None
        else:
            fits = type(layer) is nn.ReLU and type(before) in (nn.Linear, nn.LayerNorm)
        if not fits:
            return False
        before = layer
    return type(before) is nn.Linear and width == size
