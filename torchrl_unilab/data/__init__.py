"""Rollouts between processes in shared memory, as parts of TorchRL's replay buffers."""

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
    "RolloutLease",
    "RolloutPool",
    "RolloutReplayBuffer",
    "RolloutRingCheckpointer",
    "RolloutRingSampler",
    "RolloutRingStorage",
    "RolloutRingWriter",
]
