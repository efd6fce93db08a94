"""Shared memory: segments, words, layouts, seqlock, ring and rows. Imports no torchrl."""

from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.seqlock import SnapshotCell

__all__ = ["BlockLayout", "RolloutRing", "SharedSegment", "SnapshotCell"]
