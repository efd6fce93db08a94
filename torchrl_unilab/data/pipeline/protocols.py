"""What a learner needs of a replay pipeline.

`DoubleBufferReplayPipeline` implements it; annotate loops of your own with it.
"""

from __future__ import annotations

from typing import Protocol

from tensordict import TensorDictBase


class ReplayPipeline(Protocol):
    """What a learner needs of an object that prepares its batches, one for each tick.

    Examples:
        >>> from torchrl_unilab.data import ReplayPipeline
        >>> def next_batch(pipeline: ReplayPipeline, tick: int):
        ...     batch = pipeline.sample_large_batch(tick, 256)
        ...     pipeline.start_prepare(tick + 1, 256)  # while the learner learns
        ...     return batch
    """

    def start_prepare(
        self, tick_id: int, sample_count: int, min_snapshot_ptr: int | None = None
    ) -> bool:
        """Start to prepare a tick's batch; return whether there was anything to start."""

    def batch_ready(self, tick_id: int, sample_count: int) -> bool:
        """Return whether a tick's batch is available without waiting."""

    def wait_ready(self) -> None:
        """Wait for the batch that is being prepared, if one is."""

    def wait_until_ready(self, tick_id: int, sample_count: int) -> bool:
        """Wait for a tick's batch, which is prepared if it has not been; return true."""

    def sample_large_batch(self, tick_id: int, sample_count: int) -> TensorDictBase:
        """Return a tick's batch on the learner's device, [sample_count], to learn from.

        Until `after_tick` the same tick gets the same batch, and no other tick gets one.
        """

    def after_tick(self) -> None:
        """End the tick: the learner has queued all its work on the batch."""

    def close(self) -> None:
        """End all waiting and free the memory. Idempotent."""
