"""What a run writes to be read: logs while it trains, a picture and versions at its end.

`Run` calls these; a resumed run removes from its logs what was logged after its checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger
from torchrl.record.loggers.csv import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from torchrl.record.loggers.utils import get_logger

from torchrl_unilab.configs.file import CONFIG_FILE, read_config
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers.evaluation import Evaluation


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


def check_run_dir(path: Path) -> None:
    """Refuse a directory for a new run that is not empty, or cannot be made; a ConfigError.

    A run that was killed while it wrote its first file has left a draft of it.
    """
    if path.exists() and (
        not path.is_dir() or any(entry.name != f".{CONFIG_FILE}" for entry in path.iterdir())
    ):
        found, way = "a file", ""
        if path.is_dir():
            found, way = "not empty", ", or continue the run in it: --resume, or resume_run"
        raise ConfigError(
            f"run directory {path}: it is {found} (expected a new or empty directory). "
            f"Choose another{way}."
        )
    parent = next(parent for parent in (path, *path.parents) if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(
            f"run directory {path}: cannot be made in {parent} (expected a directory that "
            "may be written to). Choose another."
        )


def check_same_run(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to start a run again in the directory of another one; a ConfigError."""
    said = read_config(path / CONFIG_FILE)
    asked = {key: settings[key] for key in ("env", "algo", "seed")}
    found = {key: said.get(key) for key in asked}
    if found != asked:
        raise ConfigError(
            f"run directory {path}: it is of a run with {found} (expected {asked}). Choose another."
        )


@contextlib.contextmanager
def run_dir_held(path: Path) -> Iterator[None]:
    """Keep other runs out of a run directory, made if needed, by a lock that ends with the process.

    Raises:
        ConfigError: Another run has it, or it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run directory {path}: cannot be made, {error.strerror} (expected a directory that "
            "may be written to). Choose another."
        ) from error
    if not os.access(path, os.W_OK):
        raise ConfigError(
            f"run directory {path}: it is read-only (expected one that may be written to). Choose "
            "another, or copy the run."
        )
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run directory {path}: another run writes to it (expected none). Wait until it "
                "has ended, or end it, or choose another directory."
            ) from error
        yield
    finally:
        os.close(descriptor)


def run_logger(
    path: Path, names: Sequence[str], closing: contextlib.ExitStack, resumed_at: int | None
) -> RunLogger:
    """Return what logs to TorchRL's loggers of these names in a run's directory.

    Of a run that is resumed, what the files have of frames after `resumed_at` is removed. At the
    end of `closing` the loggers close, and with them their threads.
    """
    if resumed_at is not None:
        cut_logs(path / "logs", resumed_at)
    logger = RunLogger(path, [_logger(name, path, resumed_at) for name in names])

    def close(kind: type[BaseException] | None, *_: object) -> None:
        # After another error, that a full disk refuses the last words says nothing new.
        with contextlib.suppress(*([OSError] if kind else [])):
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


def cut_logs(directory: Path, frames: int) -> None:
    """Remove what TorchRL's `CSVLogger` logged, as "step,value", after so many frames."""
    for path in directory.rglob("*.csv"):
        # A process that was killed may have left half a line at the end, a lost disk anything.
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= frames]
        if kept != lines:
            write_whole(path, "".join(kept))


def _step_of(line: str) -> float:
    step = line.split(",")[0]
    return int(step) if step.isdecimal() else math.inf


def write_whole(path: Path, text: str) -> None:
    """Write a file whole, or leave it as it was: also on a full disk, or if this is killed."""
    draft = path.with_name(f".{path.name}")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


class _CSVLogger(CSVLogger):
    """TorchRL's, whose files stay open for as long as something refers to it."""

    def close(self, timeout: float | None = None) -> None:
        """Close the files; what is logged later opens them again. Idempotent."""
        while self.experiment.files:
            self.experiment.files.popitem()[1].close()


class RunLogger(Logger):
    """Passes what a run logs, scalars and settings, on to several of TorchRL's loggers.

    Args:
        path: The run's directory.
        loggers: The loggers.
    """

    def __init__(self, path: Path, loggers: Sequence[Logger]) -> None:
        self.loggers = loggers
        super().__init__("logs", str(path))

    def _create_experiment(self) -> None:
        """Make nothing: each logger has its own."""

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Log a scalar."""
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


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of what a run's figures depend on."""
    names = ("torchrl-unilab", "torchrl", "tensordict", "torch", "mujoco", "gymnasium")
    return {name: importlib.metadata.version(name) for name in names}


def plot_returns(
    path: Path,
    title: str,
    curve: Sequence[tuple[float, int, float]],
    evaluations: Sequence[Evaluation] = (),
) -> None:
    """Write a picture of the return against seconds and against frames.

    The curve is (seconds, frames, mean return); the path's suffix chooses the format.
    """
    # Imported here: it takes a second, and neither workers nor `--help` draw.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6))
    margins = {"left": 0.09, "right": 0.97, "bottom": 0.15, "top": 0.88, "wspace": 0.08}
    axes = figure.subplots(1, 2, sharey=True, gridspec_kw=margins)  # a layout solver is slow
    returns = [point[2] for point in curve]
    for axis, column, label in zip(axes, (0, 1), ("seconds", "frames"), strict=True):
        axis.plot([point[column] for point in curve], returns)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    if evaluations:
        points = [(one.frames, one.mean_return) for one in evaluations]
        axes[1].plot(*zip(*points, strict=True), "o-", label="without exploration")
        axes[1].legend()
    axes[0].set_ylabel("mean return of the last 64 episodes")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
