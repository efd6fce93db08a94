"""Experience between processes in shared memory, as parts of TorchRL's replay buffers."""

from torchrl_unilab.data.packed_replay import PackedReplayStorage, ReplaySnapshot
from torchrl_unilab.data.packed_writer import PackedReplayWriter
from torchrl_unilab.data.packers import ProcessPacker, ReplayPacker, ReplaySource
from torchrl_unilab.data.pipelines import (
    DoubleBufferReplayPipeline,
    ReplayPipeline,
    ReplayTickMetadata,
)
from torchrl_unilab.data.rollout_pool import RolloutPool
from torchrl_unilab.data.rollout_ring import (
    RolloutLease,
    RolloutReplayBuffer,
    RolloutRingCheckpointer,
    RolloutRingSampler,
    RolloutRingStorage,
    RolloutRingWriter,
)

__all__ = [
    "DoubleBufferReplayPipeline",
    "PackedReplayStorage",
    "PackedReplayWriter",
    "ProcessPacker",
    "ReplayPacker",
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
