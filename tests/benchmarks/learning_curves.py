"""Learning curves of our APPO: mean and spread over seeds, per task.

``python -m tests.benchmarks.learning_curves [--frames 500000] [--seeds 5] [--plot curves.png]``

Every run is shown; nothing is left out. Returns are of the exploring policy, the mean of the
last 64 episodes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
GRID = 200


def run(task: str, seed: int, frames: int) -> dict[str, object]:
    """One run through the command line; its summary."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        command = ["train", "appo", "--env", task, "--frames", str(frames), "--seed", str(seed)]
        command += ["--run-dir", str(path), "--no-progress"]
        subprocess.run([sys.executable, "-m", "torchrl_unilab", *command], check=True)
        summary: dict[str, object] = json.loads((path / "summary.json").read_text())
    return summary


def main() -> None:
    """Run all, print a table and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--frames", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path, default=Path("runs/curves.png"))
    options = parser.parse_args()
    figure = Figure(figsize=(4.2 * len(options.tasks), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(options.tasks), squeeze=False)[0]
    rows = []
    for axis, task in zip(panels, options.tasks, strict=True):
        summaries = [run(task, seed, options.frames) for seed in range(options.seeds)]
        curves = [np.array(summary["curve"]) for summary in summaries]
        start = max(curve[0, 1] for curve in curves)
        frames = np.linspace(start, options.frames, GRID)
        returns = np.stack([np.interp(frames, curve[:, 1], curve[:, 2]) for curve in curves])
        for single in returns:
            axis.plot(frames, single, color="tab:blue", alpha=0.25, linewidth=0.8)
        mean, deviation = returns.mean(axis=0), returns.std(axis=0)
        axis.plot(frames, mean, color="tab:blue", label=f"mean of {options.seeds} seeds")
        axis.fill_between(frames, mean - deviation, mean + deviation, color="tab:blue", alpha=0.2)
        axis.set(title=task, xlabel="frames")
        axis.grid(alpha=0.3)
        finals = returns[:, -1]
        seeds = ", ".join(f"{final:,.0f}" for final in finals)
        greedy = ", ".join(f"{summary['eval_return']:,.0f}" for summary in summaries)
        rows.append(f"| {task} | {finals.mean():,.0f} ± {finals.std():,.0f} | {seeds} | {greedy} |")
    panels[0].set_ylabel("mean return of the last 64 episodes")
    panels[0].legend()
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.plot, dpi=110)
    print(f"\n{options.frames:,} frames, {options.seeds} seeds\n")
    print("| task | final return, mean ± deviation | each seed | deterministic, each seed |")
    print("|---|---:|---|---|")
    print("\n".join(rows))
    print(f"\nwrote {options.plot}")


if __name__ == "__main__":
    main()
