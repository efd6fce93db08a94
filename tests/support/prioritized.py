"""Buffers that sample by priority."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer, Writer

from torchrl_unilab.data import PackedPrioritizedSampler, PackedReplayStorage

CAPACITY = 16
ALPHA, BETA = 0.7, 0.5


def numbered_rows(count: int, first: int = 0) -> TensorDict:
    """Rows that name their own number."""
    return TensorDict(x=torch.arange(first, first + count).float(), batch_size=[count])


def prioritized_buffer(
    storage: PackedReplayStorage,
    count: int = 4096,
    writer: Writer | None = None,
    rows: int = 0,
    **options,
) -> TensorDictReplayBuffer:
    """A buffer of so many numbered rows, that samples `count` of them."""
    buffer = TensorDictReplayBuffer(
        storage=storage,
        sampler=PackedPrioritizedSampler(CAPACITY, ALPHA, BETA, **options),
        writer=writer,
        batch_size=count,
        priority_key="td_error",
    )
    if rows:
        buffer.extend(numbered_rows(rows))
    return buffer


def written_by_others(storage: PackedReplayStorage, rows: TensorDict) -> torch.Tensor:
    """Write rows of which no buffer is told, as of those of another process."""
    return storage.append(rows)


def raw_priorities(buffer: TensorDictReplayBuffer) -> list[float]:
    """The priorities that rows have, rounded."""
    values = buffer.sampler._sum_tree.values[: len(buffer)]
    return [round(raw, 4) for raw in values.pow(1 / ALPHA).tolist()]
