"""What an index of a storage means, as positions. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["check_range", "flat_positions", "is_single"]


def is_single(index: Any) -> bool:
    """Whether an index asks for one item, without a batch dimension."""
    return isinstance(index, int) or (
        isinstance(index, (torch.Tensor, np.ndarray)) and not index.ndim
    )


def flat_positions(index: Any, length: int) -> torch.Tensor:
    """Return an index as positions, int64 on the CPU, flat.

    Args:
        index: A slice, range, list, tuple, array or tensor of positions; a list, array or
            tensor of bool is a mask. A tuple of one is what is in it.
        length: How many items there are, for a slice. Other positions, negative ones too, stay
            as they are.

    Examples:
        >>> flat_positions(slice(-2, None), 5), flat_positions([0, -1], 5)
        (tensor([3, 4]), tensor([ 0, -1]))
        >>> flat_positions([True, False, True], 3)
        tensor([0, 2])
    """
    if type(index) is torch.Tensor and index.dtype is torch.int64:
        return index if index.ndim == 1 and index.is_cpu else index.reshape(-1).cpu()
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, slice):
        start, stop, step = index.indices(length)
        return (
            torch.arange(start, max(start, stop), step)
            if step > 0
            else torch.tensor(range(start, stop, step), dtype=torch.int64)
        )
    if isinstance(index, np.ndarray):
        index = torch.from_numpy(index)
    elif not isinstance(index, torch.Tensor):
        index = torch.as_tensor(list(index))
    if index.dtype is torch.bool:
        index = index.nonzero()
    flat: torch.Tensor = index.reshape(-1).to(device="cpu", dtype=torch.int64)
    return flat


def check_range(low: int, high: int, length: int, what: str, state: str) -> None:
    """Refuse positions from `low` to `high`, negative ones counted from the end.

    Args:
        low: The lowest position.
        high: The highest one.
        length: How many items there are.
        what: What an item is.
        state: What items that are there are.

    Raises:
        IndexError: There is no such item.
    """
    if low < -length or high >= length:
        raise IndexError(
            f"no {what} {low if low < -length else high}: {length} are {state} (expected "
            f"{-length} to {length - 1}). Write first."
        )
