"""What a run writes to be read: logs while it trains, a picture and versions at its end.

`Run` calls these; a resumed run removes from its logs what was logged after its checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from torchrl.record.loggers.csv import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger

__all__ = ["RunLogger", "cut_logs", "package_versions", "plot_returns", "run_logger"]


def run_logger(path: Path, closing: contextlib.ExitStack, resumed_at: int | None) -> RunLogger:
    """Return the logger of a run: CSV and TensorBoard files.

    Args:
        path: The run's directory.
        closing: Closes the TensorBoard file, and with it a thread.
        resumed_at: Frames at the checkpoint that the run is resumed from; later logs are removed.
    """
    if resumed_at is not None:
        cut_logs(path / "logs", resumed_at)
    board = TensorboardLogger("tensorboard", log_dir=str(path))
    if resumed_at is not None:
        board.experiment.purge_step = resumed_at + 1  # for the file that is opened next
        board.experiment.close()

    def close(kind: type[BaseException] | None, *_: object) -> None:
        # After another error, that a full disk refuses the last words says nothing new.
        with contextlib.suppress(*([OSError] if kind else [])):
            board.experiment.close()

    closing.push(close)
    return RunLogger(path, board)


def cut_logs(directory: Path, frames: int) -> None:
    """Remove from scalars in CSV files what was logged after so many frames.

    Args:
        directory: Of TorchRL's `CSVLogger`; may be absent.
        frames: Rows "step,value" of later steps go.
    """
    for path in directory.rglob("*.csv"):
        lines = path.read_text().splitlines(keepends=True)
        # A process that was killed may have left half a line at the end.
        kept = [line for line in lines if line.endswith("\n") and int(line.split(",")[0]) <= frames]
        if kept != lines:
            draft = path.with_name(f".{path.name}")
            draft.write_text("".join(kept))
            draft.replace(path)


class RunLogger(CSVLogger):
    """TorchRL's `CSVLogger` that writes scalars to a TensorBoard file, too.

    Args:
        path: The run's directory.
        board: The TensorBoard file.
    """

    def __init__(self, path: Path, board: TensorboardLogger) -> None:
        super().__init__("logs", log_dir=str(path))
        self._board = board

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Log a scalar."""
        super().log_scalar(name, value, step)
        self._board.log_scalar(name, value, step=step)


def package_versions() -> dict[str, str]:
    """Return the versions of what a run's figures depend on."""
    names = ("torchrl-unilab", "torchrl", "tensordict", "torch", "mujoco", "gymnasium")
    return {name: importlib.metadata.version(name) for name in names}


def plot_returns(path: Path, title: str, curve: Sequence[tuple[float, int, float]]) -> None:
    """Write a picture of the return against seconds and against frames.

    Args:
        path: Where to write; the suffix chooses the format.
        title: Above the picture.
        curve: (seconds, frames, mean return).
    """
    # Imported here: it takes a second, and neither workers nor `--help` draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    returns = [point[2] for point in curve]
    for axis, column, label in zip(axes, (0, 1), ("seconds", "frames"), strict=True):
        axis.plot([point[column] for point in curve], returns)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean return of the last 64 episodes")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
