"""The race: our APPO, a plain synchronous PPO loop, and stock TorchRL PPO, on the same cores.

``python -m tests.benchmarks.bench_race [--tasks HalfCheetah-v5 ...] [--seeds 5] [--no-stock]``

Runs take turns, seed by seed, each in a process of its own, and stop at their task's
return. The plain loop (`tests.benchmarks.plain`) has our networks, settings and mathematics,
and physics on all cores while it collects; it is the limit of what a synchronous loop can do.
Stock PPO (`tests.benchmarks.stock_ppo`) is TorchRL's own parts with usual settings. The
clock of each starts when its set-up is done and the first rollout begins. A run that does
not arrive counts with the time limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.limits import available_cores

Curve = list[tuple[float, int, float]]

TARGETS = {"HalfCheetah-v5": 3000.0, "Hopper-v5": 1500.0, "Walker2d-v5": 2000.0}
LIMITS = {"HalfCheetah-v5": 60.0, "Hopper-v5": 120.0, "Walker2d-v5": 120.0}
STEPS = (1000.0, 3000.0, 5000.0)
OURS, PLAIN, STOCK = "unilab APPO", "plain PPO", "stock PPO"


def run_ours(task: str, seed: int, seconds: float, target: float) -> Curve:
    """One run of ours; its curve."""
    from torchrl_unilab.trainers import train_appo

    with tempfile.TemporaryDirectory() as directory:
        summary = train_appo(
            task,
            frames=100_000_000,
            seed=seed,
            run_dir=Path(directory) / "run",
            stop_at=target,
            max_seconds=seconds,
            eval_episodes=1,
            progress_bar=False,
        )
    return [tuple(point) for point in summary["curve"]]


def run_plain(task: str, seed: int, seconds: float, target: float) -> Curve:
    """One run of the plain loop; its curve."""
    from tests.benchmarks.plain import train

    config = APPOConfig.for_task(task)
    return train(
        task,
        config=config,
        seed=seed,
        seconds=seconds,
        threshold=target,
        physics_threads=available_cores(),
    )


def run_stock(task: str, seed: int, seconds: float, target: float) -> Curve:
    """One run of TorchRL's PPO; its curve."""
    from tests.benchmarks.stock_ppo import train

    return train(task, seed=seed, seconds=seconds, threads=available_cores())


RUNS: dict[str, Callable[[str, int, float, float], Curve]] = {
    OURS: run_ours,
    PLAIN: run_plain,
    STOCK: run_stock,
}


def in_process(way: str, task: str, seed: int, seconds: float, target: float) -> Curve:
    """Run one way in a process of its own."""
    arguments = ["--one", way, task, str(seed), str(seconds), str(target)]
    command = [sys.executable, "-m", "tests.benchmarks.bench_race", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{way} on {task}, seed {seed}:\n{done.stdout}\n{done.stderr}")
    curve: Curve = [tuple(point) for point in json.loads(done.stdout.splitlines()[-1])]
    return curve


def arrival(curve: Curve, target: float) -> float | None:
    """Seconds until the curve first reaches `target`."""
    return next((seconds for seconds, _, value in curve if value >= target), None)


def cell(seconds: float | None) -> str:
    """A time as a table shows it."""
    return "-" if seconds is None else f"{seconds:.1f}"


def race(task: str, seeds: Sequence[int]) -> dict[str, list[Curve]]:
    """Run ours and the plain loop in turns; print each seed and the medians."""
    target, limit = TARGETS[task], LIMITS[task]
    curves: dict[str, list[Curve]] = {OURS: [], PLAIN: []}
    steps = [step for step in (*STEPS, target) if step <= target]
    steps = sorted(set(steps))
    print(f"\n**{task}**, to {target:g}, at most {limit:g} s\n", flush=True)
    heads = "".join(f" s to {step:g} |" for step in steps)
    print(f"| way | seed |{heads} frames | frames/s |")
    print("|---|---:|" + "---:|" * (len(steps) + 2))
    for seed in seeds:
        # Whoever begins has the cooler machine: take turns at that too.
        for way in (OURS, PLAIN) if seed % 2 else (PLAIN, OURS):
            curve = in_process(way, task, seed, limit, target)
            curves[way].append(curve)
            times = "".join(f" {cell(arrival(curve, step))} |" for step in steps)
            seconds, frames, _ = curve[-1]
            print(f"| {way} | {seed} |{times} {frames:,} | {frames / seconds:,.0f} |", flush=True)
    medians = {}
    for way, runs in curves.items():
        reached = [arrival(curve, target) for curve in runs]
        medians[way] = statistics.median(limit if t is None else t for t in reached)
        arrived = sum(t is not None for t in reached)
        print(f"\n{way}: median {medians[way]:.1f} s, {arrived} of {len(runs)} arrived")
    print(f"\nratio of medians {medians[OURS] / medians[PLAIN]:.2f}", flush=True)
    return curves


def race_stock(task: str, seeds: Sequence[int], seconds: float) -> None:
    """Give stock PPO its time; then see when ours had its best return."""
    print(f"\n**{task}**, to the best return of {STOCK} in {seconds:g} s\n")
    print("| seed | best return of stock | its second | frames/s | second of ours | faster |")
    print("|---:|---:|---:|---:|---:|---:|")
    for seed in seeds:
        stock = in_process(STOCK, task, seed, seconds, float("inf"))
        best_seconds, _, best = max(stock, key=lambda point: point[2])
        ours = arrival(in_process(OURS, task, seed, seconds, best), best)
        fps = stock[-1][1] / stock[-1][0]
        faster = "-" if ours is None else f"{best_seconds / ours:.0f}x"
        print(
            f"| {seed} | {best:.0f} | {best_seconds:.0f} | {fps:,.0f} | {cell(ours)} | {faster} |",
            flush=True,
        )


def plot(path: Path, curves: dict[str, dict[str, list[Curve]]]) -> None:
    """Draw every run's return against seconds, one panel per task."""
    figure = Figure(figsize=(4.2 * len(curves), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axis, (task, ways) in zip(panels, curves.items(), strict=True):
        for color, (way, runs) in zip(("tab:blue", "tab:orange"), ways.items(), strict=True):
            for i, curve in enumerate(runs):
                seconds, returns = [p[0] for p in curve], [p[2] for p in curve]
                axis.plot(seconds, returns, color=color, alpha=0.7, label=None if i else way)
        axis.axhline(TARGETS[task], color="grey", linewidth=0.8, linestyle=":")
        axis.set(title=task, xlabel="seconds")
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("mean return of the last 64 episodes")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run one process of the race, or all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--stock-seconds", type=float, default=120.0)
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--plot", type=Path, default=Path("race.png"))
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, task, seed, seconds, target = options.one
        curve = RUNS[way](task, int(seed), float(seconds), float(target))
        print(json.dumps([[float(s), int(f), float(r)] for s, f, r in curve]))
        return
    print(f"{available_cores()} cores")
    seeds = range(options.seeds)
    plot(options.plot, {task: race(task, seeds) for task in options.tasks})
    print(f"\nwrote {options.plot}")
    for task in [] if options.no_stock else options.tasks:
        race_stock(task, range(1), options.stock_seconds)


if __name__ == "__main__":
    main()
