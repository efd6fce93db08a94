"""A replay source whose rows say which row they are, and that a test can stop and break."""

from __future__ import annotations

import threading
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase

from tests.support.bounds import DEADLINE
from torchrl_unilab.data import DoubleBufferReplayPipeline
from torchrl_unilab.data.replay.gather import ReplaySnapshot

COUNT = 64
CAPACITY = 512
make_pipeline = partial(DoubleBufferReplayPipeline, sample_count=COUNT)


class Table:
    """Rows; `gate` holds up sampling, `broken` makes it fail."""

    def __init__(self, rows: int = CAPACITY) -> None:
        self.rows = self._make(CAPACITY)
        self.written = 0
        self.batches = 0
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.counted = threading.Event()
        self.sampling = threading.Event()
        self.add(rows)

    @staticmethod
    def _make(count: int) -> TensorDict:
        numbers, flags = torch.zeros(count, 8), torch.zeros(count, 1, dtype=torch.uint8)
        fields = {
            "observation": numbers[:, :4],
            "next": {"observation": numbers[:, 4:], "done": flags.view(torch.bool)},
        }
        return TensorDict(fields, [count])

    def add(self, count: int) -> None:
        """Write rows, each everywhere its own number."""
        for row in range(self.written, self.written + count):
            self.rows["observation"][row % CAPACITY] = row
            self.rows["next", "observation"][row % CAPACITY] = row
            self.rows["next", "done"][row % CAPACITY] = bool(row % 2)
        self.written += count

    def snapshot(self) -> ReplaySnapshot:
        self.counted.set()
        return ReplaySnapshot(self.written, min(self.written, CAPACITY))

    def empty_batch(self, count: int, *, pin_memory: bool = False) -> TensorDict:
        self.batches += 1
        return self._make(count)

    def sample(
        self, count: int, *, seed: int, snapshot: ReplaySnapshot, out: TensorDict
    ) -> TensorDict:
        self.sampling.set()
        assert self.gate.wait(DEADLINE)
        if self.broken:
            raise LookupError("these rows cannot be read")
        generator = torch.Generator().manual_seed(seed)
        return out.update_(self.rows[torch.randint(snapshot.size, (count,), generator=generator)])


def drawn(seed: int, size: int = CAPACITY, count: int = COUNT) -> list[int]:
    """The rows of a batch of the first `size`, with repetitions."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[int] = torch.randint(size, (count,), generator=generator).tolist()
    return rows


def rows_of(batch: TensorDictBase) -> list[int]:
    """Which rows a batch holds, each of which must be whole."""
    rows = batch["observation"][:, 0].clone()
    assert bool((batch["observation"] == rows[:, None]).all()), "a mixed row"
    assert bool((batch["next", "observation"] == rows[:, None]).all()), "a mixed row"
    assert bool((batch["next", "done"][:, 0] == rows % 2).all()), "a mixed row"
    return rows.int().tolist()
