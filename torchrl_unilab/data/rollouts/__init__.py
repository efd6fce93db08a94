"""Rollouts between processes: a shared ring as storage, writer and sampler of TorchRL."""

from torchrl_unilab.data.rollouts.buffer import (
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingWriter,
)
from torchrl_unilab.data.rollouts.checkpoint import RolloutRingCheckpointer
from torchrl_unilab.data.rollouts.shared import RolloutLease
from torchrl_unilab.data.rollouts.storage import RolloutRingStorage

__all__ = [
    "RolloutLease",
    "RolloutReplayBuffer",
    "RolloutRingCheckpointer",
    "RolloutRingSampler",
    "RolloutRingStorage",
    "RolloutRingWriter",
]
