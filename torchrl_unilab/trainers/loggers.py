"""One logger that writes to several, and how much of what was logged a trainer keeps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from torchrl.record.loggers import Logger

__all__ = ["FanOutLogger", "newest_values"]

KEPT = 100


def newest_values() -> defaultdict[str, deque[Any]]:
    """Return what a trainer is to keep logged values in: the last 100 of each key.

    TorchRL's trainers keep all, for hooks that read the last, and so grow as long as they run.
    """
    return defaultdict(partial(deque, maxlen=KEPT))


class FanOutLogger(Logger):
    """Passes everything on to each of its loggers.

    Args:
        loggers: Where to write, at least one.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = list(loggers)
        super().__init__(exp_name=self.loggers[0].exp_name, log_dir=self.loggers[0].log_dir)

    def _create_experiment(self) -> None:
        return None

    def log_scalar(self, name: str, value: float, step: int | None = None, **kwargs: Any) -> None:
        """Log a scalar."""
        for logger in self.loggers:
            logger.log_scalar(name, value, step=step)

    def log_video(self, name: str, video: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log a video."""
        for logger in self.loggers:
            logger.log_video(name, video, step=step, **kwargs)

    def log_hparams(self, cfg: Any) -> None:
        """Log settings."""
        for logger in self.loggers:
            logger.log_hparams(cfg)

    def log_histogram(self, name: str, data: Sequence[Any], **kwargs: Any) -> None:
        """Log a histogram."""
        for logger in self.loggers:
            logger.log_histogram(name, data, **kwargs)

    def __repr__(self) -> str:
        return f"FanOutLogger({self.loggers})"
