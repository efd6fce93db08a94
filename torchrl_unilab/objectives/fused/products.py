"""The matrix products of k linear layers of one shape, forward and backward.

`BatchedProducts` works everywhere. `OneDNNProducts` is for AMD's processors from Zen 5 on: MKL, by
which PyTorch multiplies float32 matrices, uses half of their vectors' width, oneDNN all of it.
`ReluNetwork` multiplies its hidden layers by what `products_for` chooses.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch

_NARROW = 32
_ZEN_5 = 26
"""AMD's `cpu family` in /proc/cpuinfo; Zen 4 is 25."""


class BatchedProducts:
    """Products of k layers at once, in any dtype on any device."""

    def affine(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, relu: bool = False
    ) -> torch.Tensor:
        """Return ``x W^T + b``, or its positive part, [k, n, out].

        Args:
            x: Inputs, [k, n, in].
            weight: [k, out, in].
            bias: [k, 1, out].
            relu: Return the positive part.
        """
        if torch.compiler.is_dynamo_compiling():  # adds and clamps in one pass
            out = torch.bmm(x, weight.transpose(1, 2)) + bias
        else:
            out = torch.baddbmm(bias, x, weight.transpose(1, 2))
        return out.relu_() if relu else out

    def by_input(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the inputs' gradient, [k, n, in], for the outputs', [k, n, out]."""
        if weight.shape[1] == 1:
            return gradient * weight
        if _is_narrow(weight):
            return torch.bmm(weight.transpose(1, 2), gradient.transpose(1, 2)).transpose(1, 2)
        return torch.bmm(gradient, weight)

    def by_weight(self, gradient: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the weights' gradient to `out`, [k, out, in], which may have another dtype."""
        if _is_narrow(x):
            out.copy_(torch.bmm(x.transpose(1, 2), gradient).transpose(1, 2))
        elif gradient.dtype == out.dtype:
            torch.bmm(gradient.transpose(1, 2), x, out=out)
        else:
            out.copy_(torch.bmm(gradient.transpose(1, 2), x))


def _is_narrow(matrices: torch.Tensor) -> bool:
    """Return whether a product with so few columns takes up to four times its transpose's time."""
    return matrices.shape[2] < _NARROW and matrices.is_cpu


class OneDNNProducts(BatchedProducts):
    """Products of one layer by oneDNN, on the CPU: k is 1.

    oneDNN has ``x W^T`` for linear layers; the gradients are the same of transposed views.
    """

    def affine(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, relu: bool = False
    ) -> torch.Tensor:
        """See `BatchedProducts.affine`. oneDNN's own relu would make 0 of NaN."""
        out = _times(x[0], weight[0], bias[0, 0]).unsqueeze(0)
        return out.relu_() if relu else out

    def by_input(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `BatchedProducts.by_input`."""
        if _is_narrow(weight):
            return super().by_input(gradient, weight)
        return _times(gradient[0], weight[0].t()).unsqueeze(0)

    def by_weight(self, gradient: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `BatchedProducts.by_weight`."""
        if _is_narrow(x):
            super().by_weight(gradient, x, out)
        else:
            out[0].copy_(_times(gradient[0].t(), x[0].t()))


def _times(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    out: torch.Tensor
    if torch.compiler.is_dynamo_compiling():  # not `is_compiling`, which is true for all threads
        out = _opaque_times(x, weight)
        return out if bias is None else out + bias
    out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@torch.library.custom_op("torchrl_unilab::onednn_times", mutates_args=(), device_types="cpu")
def _opaque_times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x W^T`` for the compiler, which itself uses oneDNN only for constant weights."""
    return _times(x, weight)


@_opaque_times.register_fake
def _shape_of_times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(x), len(weight))


def products_for(weight: torch.Tensor, dtype: torch.dtype | None = None) -> BatchedProducts:
    """Return the faster products for weights like this one, multiplied in `dtype`.

    The processor decides, not a measurement: the same run has the same numbers again.
    """
    dtype = dtype or weight.dtype
    if weight.device.type == "cpu" and dtype == torch.float32 and _mkl_is_slow():
        return OneDNNProducts()
    return BatchedProducts()


@functools.cache
def _mkl_is_slow(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether MKL leaves half of this processor's vector units idle, and oneDNN exists."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not (wide and torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    family = re.search(r"cpu family\s*: (\d+)", text)
    return "AuthenticAMD" in text and family is not None and int(family[1]) >= _ZEN_5
