"""Experience between processes in shared memory, as parts of TorchRL's replay buffers."""

from torchrl_unilab.data.packed_replay import PackedReplayStorage
from torchrl_unilab.data.packed_writer import PackedReplayWriter
from torchrl_unilab.data.pipeline.pipeline import (
    DoubleBufferReplayPipeline,
    ReplayPipeline,
    ReplayTickMetadata,
)
from torchrl_unilab.data.pipeline.source import ReplaySnapshot, ReplaySource
from torchrl_unilab.data.rollout_buffer import (
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingWriter,
)
from torchrl_unilab.data.rollout_pool import RolloutPool
from torchrl_unilab.data.rollout_ring import (
    RolloutLease,
    RolloutRingCheckpointer,
    RolloutRingStorage,
)

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
