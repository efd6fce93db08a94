"""Transitions in shared memory, one packed row each, for TorchRL's replay buffers."""

from torchrl_unilab.data.replay.priorities import PackedPrioritizedSampler
from torchrl_unilab.data.replay.slices import PackedSliceSampler
from torchrl_unilab.data.replay.storage import PackedReplayStorage
from torchrl_unilab.data.replay.writer import PackedReplayWriter

__all__ = [
    "PackedPrioritizedSampler",
    "PackedReplayStorage",
    "PackedReplayWriter",
    "PackedSliceSampler",
]
