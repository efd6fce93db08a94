"""Sums, or minima, of values by blocks, of blocks by larger ones, up to one of all. Pure.

Blocks are wide, so that a batch takes a few array operations per level. Values that were set
count when something is asked: then each block above them is reduced once. The reductions are
taken anew, never corrected, so errors do not add up. `PackedPrioritizedSampler` calls it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import torch

BLOCK = 32


class ReductionTree:
    """What TorchRL's `PrioritizedSampler` asks of its segment trees, which are compiled.

    Args:
        capacity: How many values.
        dtype: Of values that are returned; float64 is kept.
        reduce: Which reduction. Values that were never set are neutral.

    Examples:
        >>> import torch
        >>> tree = ReductionTree(4, torch.float32, "sum")
        >>> tree[torch.tensor([0, 2])] = torch.tensor([1.0, 3.0])
        >>> tree.query(0, 4), tree.scan_lower_bound(torch.tensor([0.5, 1.5]))
        (4.0, tensor([0, 2]))
    """

    def __init__(self, capacity: int, dtype: torch.dtype, reduce: Literal["sum", "min"]) -> None:
        self._dtype = dtype
        self._reduce = reduce
        neutral = 0.0 if reduce == "sum" else math.inf
        self._levels: list[torch.Tensor] = []
        count = capacity
        while count > 1 or not self._levels:
            count = -(-count // BLOCK)
            self._levels.append(
                torch.full((count, BLOCK), neutral, dtype=torch.float64, device="cpu")
            )
        self._unreduced: list[torch.Tensor] = []  # positions that were set since

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set the values at positions, [n] or one, to values [n] or one."""
        at = torch.as_tensor(index, device="cpu").reshape(-1)
        self._levels[0].view(-1)[at] = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        self._unreduced.append(at)

    def __getitem__(self, index: torch.Tensor | int) -> Any:
        """Return the values at positions [n], or one as a float."""
        values = self._levels[0].view(-1)
        if isinstance(index, int):
            return float(values[index])
        return values.index_select(0, index).to(self._dtype)

    def query(self, start: int, end: int) -> float:
        """Return the reduction of the values from `start` to before `end`, of one at least."""
        self._update()
        parts = []
        for level in self._levels:
            values = level.view(-1)
            first, last = -(-start // BLOCK), end // BLOCK  # of whole blocks
            if first >= last or level is self._levels[-1]:
                parts.append(values[start:end])
                break
            parts += [values[start : first * BLOCK], values[last * BLOCK : end]]
            start, end = first, last
        return float(self._over(torch.cat(parts)))

    def scan_lower_bound(self, mass: torch.Tensor) -> torch.Tensor:
        """Return for each mass where the tree's sum up to there exceeds it, int64 [n].

        Args:
            mass: At least 0, and below the sum of all, [n].
        """
        self._update()
        mass = mass.to(torch.float64).unsqueeze(1)
        at = torch.zeros(len(mass), dtype=torch.int64, device="cpu")
        for level in reversed(self._levels):
            values = level.index_select(0, at)
            sums = values.cumsum(1)
            # Below the block's sum, whatever was rounded on the way: only values above 0 are found.
            mass = torch.minimum(mass, sums[:, -1:].nextafter(mass.new_zeros(())))
            child = torch.searchsorted(sums, mass, right=True)
            mass = mass - sums.gather(1, child) + values.gather(1, child)
            at = at.mul_(BLOCK).add_(child.squeeze(1))
        return at

    def _over(self, values: torch.Tensor) -> torch.Tensor:
        return values.sum(-1) if self._reduce == "sum" else values.amin(-1)

    def _update(self) -> None:
        """Reduce the blocks of values that were set."""
        if not self._unreduced:
            return
        at = torch.cat(self._unreduced)
        self._unreduced = []
        for below, above in itertools.pairwise(self._levels):
            at, values = at // BLOCK, above.view(-1)
            if len(at) < len(below):  # some of them more than once, which costs less than a sort
                values[at] = self._over(below.index_select(0, at))
            else:
                values[: len(below)] = self._over(below)
