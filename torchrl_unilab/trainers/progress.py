"""Early stopping, and progress lines where no bar can be drawn.

`Run` registers the hooks after the trainer's reports, which keep the curve in
``trainer.returns``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from torchrl_unilab.trainers.reports import LearningCurve


def stop_reason(
    returns: LearningCurve, stop_at: float | None = None, max_seconds: float | None = None
) -> str | None:
    """Return the reason why training stops, in words; None if it continues.

    Args:
        returns: How far it is.
        stop_at: Mean return at which to stop.
        max_seconds: Seconds since training began after which to stop.
    """
    if stop_at is not None and returns.mean >= stop_at:
        return f"return {returns.mean:g} reached"
    if max_seconds is not None and returns.seconds >= max_seconds:
        return f"{max_seconds:g} seconds are over"
    return None


def stop_when(trainer: Trainer, stop_at: float | None, max_seconds: float | None) -> None:
    """End training once a return is reached or the time is up, as `stop_reason` says."""

    def check(batch: TensorDictBase | None) -> None:
        if reason := stop_reason(trainer.returns, stop_at, max_seconds):
            trainer.request_stop(reason)

    trainer.register_op("pre_steps_log", check)


def on_terminal() -> bool:
    """Return whether standard error is a terminal: a script may have put anything there."""
    return bool(getattr(sys.stderr, "isatty", bool)())


def can_draw() -> bool:
    """Return whether a progress bar can be drawn: in a terminal, or in a notebook."""
    shell = sys.modules.get("IPython")
    return on_terminal() or (shell is not None and shell.get_ipython() is not None)


def log_progress(trainer: Trainer, log: Callable[[str], None], every: float = 10.0) -> None:
    """Say how far training is, line by line, where no progress bar can be drawn.

    Rate and time left are those of the frames since the line before: a run that learns is slower
    than its first frames, which act at random. A line comes after `every` seconds.
    """
    last_seconds, last_frames = trainer.returns.seconds, trainer.collected_frames

    def report(batch: TensorDictBase | None) -> None:
        nonlocal last_seconds, last_frames
        mean, seconds = trainer.returns.mean, trainer.returns.seconds
        if seconds - last_seconds < every:
            return
        frames, total = trainer.collected_frames, trainer.total_frames
        rate = (frames - last_frames) / (seconds - last_seconds)
        last_seconds, last_frames = seconds, frames
        left = max(0, total - frames) / rate if rate else math.inf
        result = "no episode has ended" if math.isnan(mean) else f"return {mean:.1f}"
        log(f"{frames:,} of {total:,} frames, {rate:,.0f} frames/s, {result}, {left:.0f} s left")

    trainer.register_op("pre_steps_log", report)
