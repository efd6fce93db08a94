"""Snapshots as others see them: of tensors, which `torch.load` takes as it is, not of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings and lists with tensors in place of arrays, which share memory.

    Examples:
        >>> import numpy as np
        >>> from torchrl_unilab.envs.snapshots import as_tensors
        >>> as_tensors({"elapsed": [np.zeros(2), 3]})
        {'elapsed': [tensor([0., 0.], dtype=torch.float64), 3]}
    """
    return {key: _replaced(part, np.ndarray, torch.from_numpy) for key, part in state.items()}


def as_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings and lists with arrays in place of tensors, which share memory."""
    return {key: _replaced(part, torch.Tensor, torch.Tensor.numpy) for key, part in state.items()}


def _replaced(part: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(part, Mapping):
        return {key: _replaced(value, kind, convert) for key, value in part.items()}
    if isinstance(part, list):
        return [_replaced(value, kind, convert) for value in part]
    return convert(part) if isinstance(part, kind) else part
