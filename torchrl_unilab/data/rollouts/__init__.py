"""Rollouts between processes: a shared ring as storage, writer and sampler of TorchRL."""

from torchrl_unilab.data.rollouts.buffer import (
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingWriter,
)
from torchrl_unilab.data.rollouts.storage import RolloutRingStorage

__all__ = ["RolloutReplayBuffer", "RolloutRingSampler", "RolloutRingStorage", "RolloutRingWriter"]
