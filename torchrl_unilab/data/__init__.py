"""Experience between processes in shared memory, as parts of TorchRL's replay buffers."""

from torchrl_unilab.data.pipeline.pipeline import DoubleBufferReplayPipeline, ReplayTickMetadata
from torchrl_unilab.data.pipeline.protocols import ReplayPipeline
from torchrl_unilab.data.replay import (
    PackedPrioritizedSampler,
    PackedReplayStorage,
    PackedReplayWriter,
    PackedSliceSampler,
)
from torchrl_unilab.data.rollouts import (
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingStorage,
    RolloutRingWriter,
)
from torchrl_unilab.data.rollouts.pool import RolloutPool

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
