"""A replay whose rows say which row they are, and that a test can stop and break."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tests.support.bounds import DEADLINE
from torchrl_unilab.data import DoubleBufferReplayPipeline, PackedReplayStorage
from torchrl_unilab.data.replay.gather import ReplaySnapshot

COUNT = 64
CAPACITY = 512
make_pipeline = partial(DoubleBufferReplayPipeline, sample_count=COUNT)


class Table(PackedReplayStorage):
    """Rows; `gate` holds up sampling, `broken` makes it fail."""

    def __init__(self, rows: int = CAPACITY) -> None:
        super().__init__(CAPACITY)
        self.batches, self.broken = 0, False
        self.gate, self.counted, self.sampling = (threading.Event() for _ in range(3))
        self.gate.set()
        self.write(rows)

    def write(self, count: int) -> None:
        """Write rows, each everywhere its own number."""
        number = torch.arange(self.ptr, self.ptr + count).unsqueeze(1)
        seen = number.float().expand(count, 4)
        after = {"observation": seen, "done": number % 2 == 1}
        self.append(TensorDict({"observation": seen, "next": after}, [count]))

    def snapshot(self) -> ReplaySnapshot:
        self.counted.set()
        return super().snapshot()

    def empty_batch(self, count: int, *, pin_memory: bool = False) -> TensorDict:
        self.batches += 1
        return super().empty_batch(count, pin_memory=pin_memory)

    def sample(self, count: int, **draw: Any) -> TensorDictBase:
        self.sampling.set()
        assert self.gate.wait(DEADLINE)
        if self.broken:
            raise LookupError("these rows cannot be read")
        return super().sample(count, **draw)


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
