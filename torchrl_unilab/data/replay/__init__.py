"""Transitions in shared memory, one packed row each: TorchRL's storage, writer, checkpointer."""

from torchrl_unilab.data.replay.storage import PackedReplayStorage
from torchrl_unilab.data.replay.writer import PackedReplayWriter

__all__ = ["PackedReplayStorage", "PackedReplayWriter"]
