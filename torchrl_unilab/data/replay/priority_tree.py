"""Priorities of rows, with their sum and their minimum, by blocks. Pure.

Blocks are reduced, and blocks of blocks, until a few thousand numbers are left: a batch takes a
few array operations per level. Priorities that were set take effect at the next query, which
reduces each block above them once. Reductions are computed anew, never corrected, so rounding
errors do not add up. `PackedPrioritizedSampler` calls it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_BITS = 4
BLOCK = 1 << _BITS
"""Numbers of a block: wider blocks cost a batch more sums, narrower ones make the top longer."""
TOP = 16_384
"""Numbers that are left to sum up for each batch, at most."""
_UNREDUCED = 1000
"""Batches of priorities that are set, at most, before blocks are reduced."""


class PriorityTree:
    """Priorities of rows; 0 for a row that has none, which `find` never returns.

    Args:
        capacity: Rows.
        dtype: Dtype of returned priorities; they are stored as float64.

    Examples:
        >>> import torch
        >>> tree = PriorityTree(4, torch.float32)
        >>> tree[torch.tensor([0, 2])] = torch.tensor([1.0, 3.0])
        >>> tree.minimum(), tree.find(torch.tensor([0.2, 0.3]).double())
        (1.0, tensor([0, 2]))
    """

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        self._dtype, self._capacity = dtype, capacity
        shapes: list[tuple[int, int]] = []
        while capacity > TOP:
            capacity = -(-capacity // BLOCK)
            shapes.append((capacity, BLOCK))
        shapes.append((1, capacity))
        self._sums = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes]
        self._minima = [torch.full_like(sums, math.inf) for sums in self._sums[1:]]
        self._unreduced: list[torch.Tensor] = []  # blocks with priorities set since the last update

    def __setitem__(self, index: torch.Tensor, value: Any) -> None:
        """Set the priorities of rows [n] to values [n] or one."""
        self._sums[0].view(-1)[index] = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        self._unreduced.append(index.bitwise_right_shift(_BITS))  # a copy: callers may change it
        if len(self._unreduced) > _UNREDUCED:  # bounds memory in a process that never samples
            self._update()

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        """Return the priorities of rows [n]."""
        return self._sums[0].view(-1).index_select(0, index).to(self._dtype)

    @property
    def values(self) -> torch.Tensor:
        """The priorities of all rows, float64 [capacity]."""
        return self._sums[0].view(-1)[: self._capacity]

    def minimum(self) -> float:
        """Return the lowest priority of the rows that have one; infinity if none has."""
        self._update()
        return float(self._minima[-1].amin() if self._minima else _minimum_of(self._sums[0]))

    def find(self, share: torch.Tensor) -> torch.Tensor:
        """Return the first row at which the running sum exceeds each share of the total, int64 [n].

        Args:
            share: From 0 to below 1, float64 [n].
        """
        self._update()
        *blocks, values = self._sums
        sums = values.cumsum(1)
        mass = share * sums[:, -1:]  # below the total, however it is rounded
        at = child = torch.searchsorted(sums, mass, right=True)
        for level in reversed(blocks):
            mass = (mass - sums.gather(1, child) + values.gather(1, child)).clamp_(min=0.0)
            values = level.index_select(0, at.view(-1))
            sums = values.cumsum(1)
            # Below the block's sum, whatever was rounded on the way: only values above 0 are found.
            most = sums[:, -1:].nextafter(mass.new_zeros(()))
            mass = torch.minimum(mass.view(-1, 1), most)
            child = torch.searchsorted(sums, mass, right=True)
            at = at.view(-1, 1).mul_(BLOCK).add_(child)
        return at.view(-1)

    def _update(self) -> None:
        """Reduce the blocks of priorities that were set."""
        if not self._unreduced:
            return
        at = torch.cat(self._unreduced)
        self._unreduced = []
        for i, minima in enumerate(self._minima):
            count = len(self._sums[i])
            if len(at) >= count:  # repeated blocks cost less than a sort that removes them
                at = torch.arange(count, device="cpu")
            blocks = self._sums[i].index_select(0, at)
            self._sums[i + 1].view(-1)[at] = blocks.sum(-1)
            minima.view(-1)[at] = (
                self._minima[i - 1].index_select(0, at).amin(-1) if i else _minimum_of(blocks)
            )
            at = at.bitwise_right_shift(_BITS)


def _minimum_of(priorities: torch.Tensor) -> torch.Tensor:
    """Return the lowest priority above 0 of each block [n, w], as [n]; infinity without any."""
    return priorities.masked_fill(priorities == 0.0, math.inf).amin(-1)
