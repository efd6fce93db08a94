"""A run's summary, which `resume_run` reads, with versions and a picture of the curve."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_unilab.trainers.evaluation import Evaluation
from torchrl_unilab.trainers.runs.directory import write_whole

_FILE = "summary.json"
_version = functools.cache(importlib.metadata.version)  # whose files are long


def package_versions() -> dict[str, str]:
    """Return the versions of what a run's figures depend on."""
    names = ("torchrl-unilab", "torchrl", "tensordict", "torch", "mujoco", "gymnasium")
    return {name: _version(name) for name in names}


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a run's summary, and a picture of its curve, into its directory."""
    # JSON has neither infinity (the rate of a phase that took no time) nor NaN.
    known = json.loads(json.dumps(summary), parse_constant=lambda _: None)
    write_whole(path / _FILE, json.dumps(known, allow_nan=False))
    title = f"{summary['env']}, {summary['algo'].upper()}, seed {summary['seed']}"
    plot_returns(path / "returns.png", title, summary["curve"], summary["evaluations"])


def summarised_frames(path: Path) -> int:
    """Return the frames that the summary of a complete run states; 0 without a readable one."""
    try:
        found = json.loads((path / _FILE).read_text())
        return 0 if found["interrupted"] else int(found["frames"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return 0


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
