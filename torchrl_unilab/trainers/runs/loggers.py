"""TorchRL's loggers of a run, and the removal of what was logged after its checkpoint."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger
from torchrl.record.loggers.csv import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from torchrl.record.loggers.utils import get_logger

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.limits import files_to_open
from torchrl_unilab.trainers.runs.directory import write_whole


def check_loggers(names: Sequence[str]) -> None:
    """Refuse loggers whose package is not installed.

    Raises:
        ConfigError: Says how to install them.
    """
    missing = [n for n in names if n != "csv" and not _is_installed(n)]
    if missing:
        raise ConfigError(
            f"logger: no package {', '.join(missing)} (expected installed packages). "
            f"pip install {' '.join(missing)}."
        )


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a directory has none


def run_logger(
    path: Path, names: Sequence[str], closing: contextlib.ExitStack, resumed_at: int | None
) -> RunLogger:
    """Return what logs to TorchRL's loggers of these names in a run's directory.

    Of a run that is resumed, what the files have of frames after `resumed_at` is removed. At the
    end of `closing` the loggers close, and with them their threads.
    """
    logged = {} if resumed_at is None else cut_logs(path / "logs", resumed_at)
    logger = RunLogger(path, [_logger(name, path, resumed_at) for name in names], logged)

    def close(kind: type[BaseException] | None, *_: object) -> None:
        # After another error, a full disk is not worth a second one.
        suppressed = [OSError] if kind else []
        with contextlib.suppress(*suppressed):
            logger.close()

    closing.push(close)
    return logger


def _logger(name: str, path: Path, resumed_at: int | None) -> Logger:
    if name == "csv":
        return _CSVLogger("logs", log_dir=str(path))
    if name != "tensorboard":
        return get_logger(name, str(path), path.name)
    board = TensorboardLogger("tensorboard", log_dir=str(path))
    if resumed_at is not None:
        board.experiment.purge_step = resumed_at + 1  # for the file that is opened next
        board.experiment.close()
    return board


def cut_logs(directory: Path, frames: int) -> dict[str, float]:
    """Remove what TorchRL's `CSVLogger` logged, as "step,value", after so many frames.

    Returns:
        The last step that is left of each scalar.
    """
    last, scalars = {}, directory / "scalars"
    for path in scalars.rglob("*.csv"):
        # A process that was killed may have left half a line at the end, a lost disk anything.
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= frames]
        if kept != lines:
            write_whole(path, "".join(kept))
        if kept:
            last[path.relative_to(scalars).with_suffix("").as_posix()] = _step_of(kept[-1])
    return last


def _step_of(line: str) -> float:
    step = line.split(",")[0]
    return int(step) if step.isdecimal() else math.inf


class _CSVLogger(CSVLogger):
    """TorchRL's, whose files stay open for as long as something refers to it."""

    def close(self, timeout: float | None = None) -> None:
        """Close the files; what is logged later opens them again. Idempotent."""
        while self.experiment.files:
            self.experiment.files.popitem()[1].close()


class RunLogger(Logger):
    """Passes what a run logs, scalars and settings, on to several of TorchRL's loggers.

    A scalar is logged once per step: a resumed run that collects nothing logs its end again.

    Args:
        path: The run's directory.
        loggers: The loggers.
        logged: The last step that they have of each scalar; changed in place.
    """

    def __init__(self, path: Path, loggers: Sequence[Logger], logged: dict[str, float]) -> None:
        self.loggers, self._logged = loggers, logged
        super().__init__("logs", str(path))

    def _create_experiment(self) -> None:
        """Make nothing: each logger has its own."""

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Log a scalar, unless the last of its name is of the same step.

        Raises:
            ConfigError: This process may open no more files.
        """
        if step is None or self._logged.get(name) != step:
            self._logged[name] = math.nan if step is None else step
            with files_to_open("logs", "one for each scalar", "set logger without csv"):
                for logger in self.loggers:
                    logger.log_scalar(name, value, step=step)

    def log_hparams(self, cfg: Mapping[str, Any]) -> None:
        """Log settings: numbers, flags and texts as they are, others as text."""
        plain = {
            k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in cfg.items()
        }
        for logger in self.loggers:
            logger.log_hparams(plain)

    def close(self, timeout: float | None = None) -> None:
        """Close the loggers. Idempotent."""
        for logger in self.loggers:
            logger.close()

    def __repr__(self) -> str:
        return f"RunLogger({self.loggers})"
