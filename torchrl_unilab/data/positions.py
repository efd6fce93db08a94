"""Converts an index of a storage to positions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from torchrl_unilab.errors import PositionError

MASKS = (torch.bool, torch.uint8, bool, np.bool_, np.uint8)
"""What a mask is made of; uint8, too, as in torch."""


def is_single(index: Any) -> bool:
    """Return whether an index asks for one item, without a batch dimension.

    Raises:
        PositionError: `index` is a mask of no dimension, or one number that is no integer.
    """
    if isinstance(index, (torch.Tensor, np.ndarray)):
        # Torch takes a mask of no dimension for all items, with one dimension more.
        if not index.ndim and (index.dtype in MASKS or "int" not in str(index.dtype)):
            raise _not_positions(str(index.dtype))
        return not index.ndim
    return isinstance(index, (int, np.integer)) and not isinstance(index, bool)


def batch_shape(index: Any) -> tuple[int, ...] | None:
    """Return the shape of an index of two or more dimensions; None for any other, and for masks."""
    if isinstance(index, list) and index and isinstance(index[0], (Sequence, np.ndarray)):
        index = _as_tensor(index)
    if not isinstance(index, (torch.Tensor, np.ndarray)) or index.ndim < 2:
        return None
    return None if index.dtype in MASKS else tuple(index.shape)


def flat_positions(index: Any, length: int) -> torch.Tensor:
    """Return an index as positions, int64 on the CPU, flat.

    Args:
        index: A slice, range, list, tuple, array or tensor of positions; a list, array or
            tensor of bool or uint8 is a mask. A tuple of one is what is in it; ``...`` is all.
        length: How many items there are, for a slice or a mask. Other positions, negative ones
            too, stay as they are.

    Raises:
        PositionError: A mask is of another shape, or positions are no integers.

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
    if index is ...:
        index = slice(None)
    if isinstance(index, slice):
        return torch.from_numpy(np.arange(*index.indices(length), dtype=np.int64))
    found = index if isinstance(index, torch.Tensor) else _as_tensor(index)
    if found.dtype in MASKS:
        if found.shape != (length,):
            raise PositionError(
                f"mask of shape {list(found.shape)} (expected [{length}], one flag per item). Make "
                "it as long as the storage."
            )
        found = found.nonzero()
    elif found.is_floating_point() or found.is_complex():
        raise _not_positions(str(found.dtype))
    return found.reshape(-1).to(device="cpu", dtype=torch.int64)


def _as_tensor(index: Any) -> torch.Tensor:
    """Return positions, or a mask, given as an array or an iterable, as a tensor."""
    if isinstance(index, np.ndarray):
        return torch.from_numpy(index)
    if not isinstance(index, Iterable):
        raise _not_positions(type(index).__name__)
    try:
        found = torch.as_tensor(list(index), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_positions(f"{type(index).__name__}: {error}") from error
    return found if found.numel() else found.long()  # of an empty list: floating-point


def _not_positions(what: str) -> PositionError:
    return PositionError(
        f"positions of {what} (expected integers or a mask of all items). Pass int64 positions, or "
        "a bool mask."
    )


def is_run(positions: torch.Tensor, first: int, capacity: int) -> bool:
    """Return whether positions, int64 [n], count up from `first`, modulo `capacity`."""
    run = torch.arange(first, first + len(positions), device="cpu")
    return torch.equal(positions, run.remainder_(capacity) if int(run[-1]) >= capacity else run)


def last_of_each(positions: torch.Tensor) -> torch.Tensor:
    """Return, in order, the index of each distinct position's last occurrence, int64 [n].

    Examples:
        >>> last_of_each(torch.tensor([3, 1, 3, 2]))
        tensor([1, 2, 3])
    """
    _, from_the_end = np.unique(positions.numpy()[::-1], return_index=True)
    return torch.from_numpy(len(positions) - 1 - from_the_end).sort().values


def is_mask(index: Any) -> bool:
    """Return whether an index is a mask, with a flag for each item."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return index.dtype in MASKS
    return isinstance(index, list) and bool(index) and type(index[0]) in MASKS


def wrap_negative(positions: torch.Tensor, length: int) -> torch.Tensor:
    """Replace negative positions, which count from the end, by those from the start.

    Args:
        positions: Positions of rows, int64 [n].
        length: How many rows there are.

    Raises:
        PositionError: There is no such row.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.data.positions import wrap_negative
        >>> wrap_negative(torch.tensor([2, -1]), 5)
        tensor([2, 4])
    """
    low = int(positions.min()) if len(positions) else 0
    if low < 0:
        check_range(low, low, length, "row", "written")
        positions = positions.where(positions >= 0, positions + length)
    return positions


def check_range(low: int, high: int, length: int, what: str, state: str) -> None:
    """Refuse positions from `low` to `high`, negative ones counted from the end.

    Raises:
        PositionError: A position is out of range: `length` items, each a `what`, are `state`.
    """
    if low < -length or high >= length:
        at = low if low < -length else high
        raise PositionError(
            f"no {what} {at}: {length} are {state} (expected at least {max(-at, at + 1)}). "
            "Write first."
        )
