"""Shared memory: segments, words, layouts, the seqlock and the ring. Imports no torchrl."""

from torchrl_unilab.shm.layout import BlockLayout, Field
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.seqlock import Snapshot, SnapshotCell
from torchrl_unilab.shm.words import SharedWords, is_weakly_ordered

__all__ = [
    "BlockLayout",
    "Field",
    "RolloutRing",
    "SharedSegment",
    "SharedWords",
    "Snapshot",
    "SnapshotCell",
    "is_weakly_ordered",
]
