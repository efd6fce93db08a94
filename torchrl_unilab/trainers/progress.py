"""Hooks that act on the learning curve: they end a run in time, or say how far it is.

`Run` registers them after the trainer's reports, which keep the curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tensordict import TensorDictBase

from torchrl_unilab.trainers.hooks import Hook
from torchrl_unilab.trainers.reports import LearningCurve

__all__ = ["ProgressLines", "StopWhen"]


class StopWhen(Hook):
    """Ends training once a return is reached or the time is up.

    Args:
        returns: The trainer's learning curve.
        stop_at: Mean return at which to stop.
        max_seconds: Seconds since training began after which to stop.
    """

    name = "stop_when"
    stages: ClassVar[Mapping[str, str]] = {"pre_steps_log": "__call__"}

    def __init__(
        self,
        returns: LearningCurve,
        *,
        stop_at: float | None = None,
        max_seconds: float | None = None,
    ) -> None:
        self.returns = returns
        self.stop_at = stop_at
        self.max_seconds = max_seconds

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        """Look at the curve; ask the trainer to stop after this batch if it is time."""
        assert self._trainer is not None, "register comes first"
        if self.stop_at is not None and self.returns.mean >= self.stop_at:
            self._trainer.request_stop(f"return {self.returns.mean:g} reached")
        elif self.max_seconds is not None and self.returns.seconds >= self.max_seconds:
            self._trainer.request_stop(f"{self.returns.seconds:g} seconds are over")
        return {}


class ProgressLines(Hook):
    """Says how far training is, line by line, where no progress bar can be drawn.

    Args:
        returns: The trainer's learning curve.
        tell: Takes a line.
        every: Seconds between lines.
    """

    name = "progress_lines"
    stages: ClassVar[Mapping[str, str]] = {"pre_steps_log": "__call__"}

    def __init__(
        self, returns: LearningCurve, tell: Callable[[str], None], every: float = 10.0
    ) -> None:
        self.returns = returns
        self.tell = tell
        self.every = every
        self._told = returns.seconds

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        """Tell, if it is time."""
        assert self._trainer is not None, "register comes first"
        seconds, frames = self.returns.seconds, self._trainer.collected_frames
        if seconds - self._told >= self.every:
            self._told = seconds
            mean, total = self.returns.mean, self._trainer.total_frames
            left = seconds * max(0, total - frames) / frames
            reached = "no episode has ended" if math.isnan(mean) else f"return {mean:.1f}"
            self.tell(
                f"{frames:,} of {total:,} frames, {frames / seconds:,.0f} frames/s, {reached}, "
                f"{left:.0f} s left"
            )
        return {}
