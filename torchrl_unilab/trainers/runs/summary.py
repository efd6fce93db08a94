"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["plot_returns"]


def plot_returns(path: Path, title: str, curve: Sequence[tuple[float, int, float]]) -> None:
    """Write a picture of the return against seconds and against frames.

    Args:
        path: Where to write; the suffix chooses the format.
        title: Above the picture.
        curve: (seconds, frames, mean return).
    """
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
