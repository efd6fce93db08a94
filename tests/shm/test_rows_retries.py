"""Batches of rows of which some are overwritten while they are read, more than once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.segment import SharedSegment


@pytest.fixture
def rows() -> Iterator[SharedRows]:
    """Eight rows that hold their numbers."""
    with SharedSegment(SharedRows.nbytes([1], 1, 8)) as segment:
        rows = SharedRows(segment, [1], 1, 8, timeout=10.0)
        _append(rows, 8)
        yield rows


def _append(rows: SharedRows, count: int) -> None:
    head = rows.window().heads[0]
    rows.append([torch.arange(head, head + count, dtype=torch.int32).unsqueeze(1)])


def _gather(rows: SharedRows, batch: torch.Tensor, counts: list[int], copied: list[list[int]]):
    """Copies rows, and notes their positions; then a writer appends as many as `counts` says."""

    def gather(places: torch.Tensor | None, positions: torch.Tensor, _: tuple[int, ...]) -> None:
        copied.append(positions.tolist())
        batch[slice(None) if places is None else places] = rows.blocks[0][positions, 0]
        if counts:
            _append(rows, counts.pop(0))

    return gather


def test_only_rows_that_are_overwritten_are_drawn_again_and_each_comes_to_its_own_place(rows):
    batch, drawn = torch.zeros(4, dtype=torch.int32), [torch.tensor([7, 2]), torch.tensor([5])]
    gather = _gather(rows, batch, [2, 1], copied := [])
    rows.read(rows.window(), torch.tensor([6, 7, 0, 1]), gather, lambda _: drawn.pop(0))
    assert (batch.tolist(), copied) == ([6, 7, 7, 5], [[6, 7, 0, 1], [7, 2], [5]])


def test_only_positions_that_are_overwritten_are_read_again_and_each_comes_to_its_own_place(rows):
    batch = torch.zeros(3, dtype=torch.int32)
    rows.read_at(torch.tensor([5, 1, 0]), _gather(rows, batch, [2, 7], copied := []))
    assert (batch.tolist(), copied) == ([5, 9, 16], [[5, 1, 0], [1, 0], [0]])
