"""Rows that a replay pipeline samples from: any object with these three methods.

The same draw of the same rows gives the same batch. `PackedReplayStorage` is one;
`DoubleBufferReplayPipeline` calls it.
"""

from __future__ import annotations

from typing import Protocol

from tensordict import TensorDictBase

from torchrl_unilab.data.replay.gather import ReplaySnapshot

__all__ = ["ReplaySource"]


class ReplaySource(Protocol):
    """Rows to sample from, as `PackedReplayStorage` has them."""

    def snapshot(self) -> ReplaySnapshot:
        """Return what there is to sample from now."""

    def empty_batch(self, count: int, *, pin_memory: bool = False) -> TensorDictBase:
        """Make memory for a batch [count]: views of few blocks, which hold nothing else."""

    def sample(
        self,
        count: int,
        *,
        seed: int,
        snapshot: ReplaySnapshot | None = None,
        out: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Return whole rows, [count], in `out` if given; the same for the same arguments."""
