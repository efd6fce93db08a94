"""Experience between processes in shared memory, as parts of TorchRL's replay buffers."""

from torchrl_unilab.data.pipeline.pipeline import DoubleBufferReplayPipeline, ReplayTickMetadata
from torchrl_unilab.data.pipeline.protocols import ReplayPipeline
from torchrl_unilab.data.replay.priorities import PackedPrioritizedSampler
from torchrl_unilab.data.replay.slices import PackedSliceSampler
from torchrl_unilab.data.replay.storage import PackedReplayStorage
from torchrl_unilab.data.replay.writer import PackedReplayWriter
from torchrl_unilab.data.rollouts.buffer import (
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingWriter,
)
from torchrl_unilab.data.rollouts.pool import RolloutPool
from torchrl_unilab.data.rollouts.storage import RolloutRingStorage

__all__ = [
    "DoubleBufferReplayPipeline",
    "PackedPrioritizedSampler",
    "PackedReplayStorage",
    "PackedReplayWriter",
    "PackedSliceSampler",
    "ReplayPipeline",
    "ReplayTickMetadata",
    "RolloutPool",
    "RolloutReplayBuffer",
    "RolloutRingSampler",
    "RolloutRingStorage",
    "RolloutRingWriter",
]
