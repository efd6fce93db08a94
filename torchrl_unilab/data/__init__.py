"""Experience between processes in shared memory, as parts of TorchRL's replay buffers."""

from torchrl_unilab.data.pipeline.pipeline import DoubleBufferReplayPipeline, ReplayTickMetadata
from torchrl_unilab.data.pipeline.protocols import ReplayPipeline, ReplaySource
from torchrl_unilab.data.replay import PackedReplayStorage, PackedReplayWriter, ReplaySnapshot
from torchrl_unilab.data.rollouts import (
    RolloutLease,
    RolloutReplayBuffer,
    RolloutRingCheckpointer,
    RolloutRingSampler,
    RolloutRingStorage,
    RolloutRingWriter,
)
from torchrl_unilab.data.rollouts.pool import RolloutPool

__all__ = [
    "DoubleBufferReplayPipeline",
    "PackedReplayStorage",
    "PackedReplayWriter",
    "ReplayPipeline",
    "ReplaySnapshot",
    "ReplaySource",
    "ReplayTickMetadata",
    "RolloutLease",
    "RolloutPool",
    "RolloutReplayBuffer",
    "RolloutRingCheckpointer",
    "RolloutRingSampler",
    "RolloutRingStorage",
    "RolloutRingWriter",
]
