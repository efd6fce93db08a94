"""Experience between processes in shared memory, as parts of TorchRL's replay buffers."""

from torchrl_unilab.data.packed_replay import PackedReplayStorage
from torchrl_unilab.data.packed_writer import PackedReplayWriter
from torchrl_unilab.data.packers import (
    PackerLink,
    ProcessPacker,
    ReplayPacker,
    ReplaySnapshot,
    ReplaySource,
)
from torchrl_unilab.data.pipelines import (
    DoubleBufferReplayPipeline,
    ReplayPipeline,
    ReplayTickMetadata,
)
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
from torchrl_unilab.data.transfer import (
    CPUTransfer,
    CUDATransfer,
    PortableTransfer,
    TransferBackend,
    make_transfer,
)

__all__ = [
    "CPUTransfer",
    "CUDATransfer",
    "DoubleBufferReplayPipeline",
    "PackedReplayStorage",
    "PackedReplayWriter",
    "PackerLink",
    "PortableTransfer",
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
    "TransferBackend",
    "make_transfer",
]
