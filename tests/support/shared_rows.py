"""Shared rows whose words are their numbers, so that a row with two values is mixed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.segment import SharedSegment

WIDTHS = (3, 1)


@contextlib.contextmanager
def make_rows(
    shard_rows: int = 8,
    shards: int = 1,
    timeout: float = 10.0,
    holding: int = 0,
    widths: Sequence[int] = WIDTHS,
) -> Iterator[SharedRows]:
    """Shards to each of which so many rows have been written."""
    with SharedSegment(SharedRows.nbytes(widths, shards, shard_rows)) as segment:
        rows = SharedRows(segment, widths, shards, shard_rows, timeout)
        for shard in range(shards):
            for first in range(0, holding, shard_rows):
                put(rows, min(holding - first, shard_rows), shard)
        yield rows


def again(rows: SharedRows, timeout: float = 10.0) -> SharedRows:
    """The same rows as another process or thread has them."""
    return SharedRows(rows.segment, rows.widths, rows.shards, rows.shard_rows, timeout)


def numbered(first: int, count: int, widths: Sequence[int] = WIDTHS) -> tuple[torch.Tensor, ...]:
    """Parts of rows whose words are their numbers."""
    words = torch.arange(first, first + count, dtype=torch.int32).unsqueeze(1)
    return words.repeat(1, sum(widths)).split([*widths], 1)


def put(rows: SharedRows, count: int, shard: int = 0, step: int = 0) -> int:
    """Append rows that hold their numbers, of steps of so many rows."""
    rows._shard, rows._shard_pid = shard, os.getpid()
    parts = numbered(0, count, rows.widths)

    def prepare(shard: int, head: int) -> None:
        for words in parts:
            words.add_(head)
        if step:
            rows.note_steps(shard, step)

    return rows.append(parts, prepare)


class Batch:
    """Where rows are gathered to; after each of the first times something happens to them."""

    def __init__(self, rows: SharedRows, count: int, *meanwhile: Callable[[], object]) -> None:
        self.blocks, self.meanwhile = rows.blocks, [*meanwhile]
        self.words = torch.full((count, sum(rows.widths)), -1, dtype=torch.int32)
        self.calls: list[list[int]] = []

    def __call__(
        self, places: torch.Tensor | None, positions: torch.Tensor, heads: tuple[int, ...]
    ) -> None:
        """Copy rows."""
        at = slice(None) if places is None else places
        found = [block.index_select(0, positions) for block in self.blocks]
        self.words[at] = torch.cat(found, 1)
        self.calls.append(positions.tolist())
        if self.meanwhile:
            self.meanwhile.pop(0)()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the rows, which are whole."""
        assert (self.words == self.words[:, :1]).all(), self.words
        return self.words[:, 0].tolist()


def read_at(rows: SharedRows, positions: list[int]) -> list[int]:
    """The numbers of the rows at positions."""
    batch = Batch(rows, len(positions))
    rows.read_at(torch.tensor(positions), batch)
    return batch.numbers


def read_all(rows: SharedRows) -> list[list[int]]:
    """Numbers of all readable rows of each shard; all are whole and the ones they should be."""
    window, found = rows.window(), []
    for shard, (floor, head) in enumerate(zip(*window, strict=True)):
        number = torch.arange(floor, head)
        batch = Batch(rows, len(number))
        rows.read(window, number * rows.shards + shard, batch, pytest.fail)
        assert batch.numbers == number.tolist() or rows.revision >> 48
        found.append(batch.numbers)
    return found
