"""A replay source whose rows say which row they are, and that a test can stop and break."""

from __future__ import annotations

import threading
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tests.support.bounds import DEADLINE
from torchrl_unilab.data.pipeline.packer import ReplaySnapshot

COUNT = 64
CAPACITY = 512


class Table:
    """Rows in shared memory; `gate` holds up sampling, `broken` makes it fail."""

    def __init__(self, rows: int = CAPACITY) -> None:
        self.rows = self._make(CAPACITY, shared=True)
        self.written = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.batches = 0
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.counted = threading.Event()
        self.sampling = threading.Event()
        self.add(rows)

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows, "written": self.written, "broken": self.broken}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Table.__init__(self, 0)
        self.__dict__.update(state)

    @staticmethod
    def _make(count: int, *, shared: bool) -> TensorDict:
        numbers, flags = torch.zeros(count, 8), torch.zeros(count, 1, dtype=torch.uint8)
        if shared:
            numbers.share_memory_()
            flags.share_memory_()
        fields = {
            "observation": numbers[:, :4],
            "next": {"observation": numbers[:, 4:], "done": flags.view(torch.bool)},
        }
        return TensorDict(fields, [count])

    def add(self, count: int) -> None:
        """Write rows, each everywhere its own number."""
        start = int(self.written)
        for row in range(start, start + count):
            self.rows["observation"][row % CAPACITY] = row
            self.rows["next", "observation"][row % CAPACITY] = row
            self.rows["next", "done"][row % CAPACITY] = bool(row % 2)
        self.written += count

    def snapshot(self) -> ReplaySnapshot:
        self.counted.set()
        written = int(self.written)
        return ReplaySnapshot(written, min(written, CAPACITY))

    def empty_batch(
        self, count: int, *, pin_memory: bool = False, shared: bool = False
    ) -> TensorDict:
        self.batches += 1
        return self._make(count, shared=shared)

    def sample(
        self,
        count: int,
        *,
        seed: int,
        snapshot: ReplaySnapshot | None = None,
        out: TensorDictBase | None = None,
    ) -> TensorDictBase:
        self.sampling.set()
        assert self.gate.wait(DEADLINE)
        if self.broken:
            raise LookupError("these rows cannot be read")
        assert snapshot is not None
        assert out is not None
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
