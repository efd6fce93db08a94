"""Ours beside other libraries: one task, the same cores, the same clock.

``python -m tests.benchmarks.bench_peers [--tasks Hopper-v5] [--seeds 0] [--seconds 100]
[--frames 300000]``

Each run is a process of its own and begins at a cold shell: imports, compilers and workers count
(TorchRL's PPO has its seconds after that). Runs take turns. Peers have their own published settings
and live in environments of their own below ``.venv-peers``, which the first run makes. Records are
written as JSON lines; the table has each run, and the seconds to returns that others publish after
a million frames.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks import stock_ppo
from tests.benchmarks.bench_race import arrival, cell
from tests.benchmarks.learn import RESULTS, append_record, machine, thin
from tests.benchmarks.peer_homes import SCRIPTS, python_of

FRAMES = 1_000_000
STEPS = {
    "HalfCheetah-v5": (1000.0, 3000.0, 5000.0),
    "Hopper-v5": (1000.0, 2000.0, 3000.0),
    "Walker2d-v5": (1000.0, 2000.0, 3000.0),
    "Ant-v5": (1000.0, 2000.0, 3000.0),
    "Humanoid-v5": (1000.0, 2000.0, 5000.0),
    "Swimmer-v5": (50.0, 100.0, 300.0),
}
"""Returns that runs are timed to."""

COMPILED = ("--compile", "--matmul-dtype", "auto")
OURS: dict[str, tuple[str, ...]] = {
    "unilab appo": ("appo",),
    "unilab sac": ("sac",),
    "unilab td3": ("td3",),
    "unilab sac, compiled": ("sac", *COMPILED),
    "unilab td3, compiled": ("td3", *COMPILED),
}
"""First arguments of ours."""

STOCK, STOCK_SAC = "TorchRL ppo", "TorchRL sac, AsyncBatchedCollector"
PEERS: dict[str, tuple[str, ...]] = {
    "rl_games ppo, EnvPool": ("rl_games", "rl_games_ppo.py"),
    "SB3 ppo": ("baselines", "stable_baselines.py", "stable_baselines3", "ppo"),
    "SB3 sac": ("baselines", "stable_baselines.py", "stable_baselines3", "sac"),
    "SBX ppo": ("baselines", "stable_baselines.py", "sbx", "ppo"),
    "SBX sac": ("baselines", "stable_baselines.py", "sbx", "sac"),
    "SBX td3": ("baselines", "stable_baselines.py", "sbx", "td3"),
}
"""Peers' environments, scripts and first arguments."""
ALL = (*OURS, STOCK, STOCK_SAC, *PEERS)
TRAIN = """
import os, sys, time
from torchrl_unilab.__main__ import run
from torchrl_unilab.fork_server import start_fork_server
start_fork_server()
left = float(sys.argv[1]) - time.monotonic() + float(os.environ["STARTED"])
sys.argv[1:] = ["train", *sys.argv[2:], "--max-seconds", str(left)]
sys.exit(run())
"""
"""``torchrl-unilab train``, whose imports count among its seconds."""


def command_of(
    peer: str, task: str, seed: int, seconds: float, frames: int, directory: Path
) -> list[str]:
    """Return what runs a peer, or one of ours as a user does."""
    if peer in OURS:
        options = {
            "--env": task,
            "--seed": seed,
            "--frames": frames,
            "--eval-episodes": 1,
            "--run-dir": directory / "run",
        }
        words = [str(word) for option in options.items() for word in option]
        return [sys.executable, "-c", TRAIN, str(seconds), *OURS[peer], *words]
    if peer == STOCK:
        race = [sys.executable, "-m", "tests.benchmarks.bench_race", "--one", "stock PPO"]
        return [*race, task, str(seed), str(seconds), "inf"]
    if peer == STOCK_SAC:
        return [sys.executable, "-m", "tests.benchmarks.stock_sac", task, str(seed), str(seconds)]
    home, script, *first = PEERS[peer]
    run = [task, str(seed), str(seconds), str(frames)]
    return [python_of(home), str(SCRIPTS / script), *first, *run]


def read(peer: str, output: str, directory: Path, wall: float) -> dict[str, Any]:
    """Return frames, seconds, updates and curve of a run; seconds count from the cold shell."""
    if peer in (*PEERS, STOCK_SAC):
        record: dict[str, Any] = json.loads(output.splitlines()[-1])
        return record
    if peer == STOCK:
        curve = json.loads(output.splitlines()[-1])
        seconds, frames, _ = curve[-1]
        curve = [point for point in curve if not math.isnan(point[2])]
        updates = frames // stock_ppo.MINIBATCH * stock_ppo.EPOCHS
    else:
        summary = json.loads((directory / "run" / "summary.json").read_text())
        curve, seconds, frames = summary["curve"], summary["seconds"], summary["frames"]
        updates = summary["optim_steps"]
    lost = wall - seconds  # what came before and what came after, which counts against these
    curve = [(at + lost, n, mean) for at, n, mean in curve]
    return {"frames": frames, "seconds": wall, "optim_steps": updates, "curve": curve}


class Usage(threading.Thread):
    """Watches a process and all below it, once a second.

    Attributes:
        peak: Most bytes of memory; what processes share counts once.
        seconds: Processor time of each process, by its id.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak, self.seconds = 0, dict[int, float]()
        self._process, self._ended = psutil.Process(pid), threading.Event()

    def run(self) -> None:
        """Look until the end."""
        while not self._ended.wait(1.0):
            with contextlib.suppress(psutil.Error):  # one has ended meanwhile
                used = 0
                for process in [self._process, *self._process.children(recursive=True)]:
                    used += process.memory_full_info().pss
                    times = process.cpu_times()
                    self.seconds[process.pid] = times.user + times.system
                self.peak = max(self.peak, used)

    def stop(self) -> None:
        """End it."""
        self._ended.set()
        self.join()


def run(peer: str, task: str, seed: int, seconds: float, frames: int) -> dict[str, Any]:
    """Run a peer once and return its record.

    Raises:
        RuntimeError: It failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as name:
        command = command_of(peer, task, seed, seconds, frames, Path(name))
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            env=os.environ | {"STARTED": str(started), "TORCHINDUCTOR_CACHE_DIR": f"{name}/cache"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        usage = Usage(process.pid)
        usage.start()
        output, said = process.communicate()
        wall = time.monotonic() - started
        usage.stop()
        if process.returncode:
            raise RuntimeError(f"{peer} on {task}, seed {seed}:\n{output}\n{said[-2000:]}")
        record = read(peer, output, Path(name), wall)
    return {
        "peer": peer,
        "task": task,
        "seed": seed,
        **record,
        "cpu_seconds": sum(usage.seconds.values()),
        "peak_bytes": usage.peak,
        "curve": thin(record["curve"], 200),
        "machine": machine(),
    }


def line(record: dict[str, Any]) -> str:
    """A run as a row of the table."""
    curve, seconds = record["curve"], record["seconds"]
    frames, updates = record["frames"] / seconds, record["optim_steps"] / seconds
    mean = f"{curve[-1][2]:,.0f}" if curve else "-"
    reached = " | ".join(cell(arrival(curve, step)) for step in STEPS[record["task"]])
    return (
        f"| {record['peer']} | {record['seed']} | {mean} | {reached} "
        f"| {frames:,.0f} | {updates:,.0f} | {record['cpu_seconds'] / seconds:.1f} "
        f"| {record['peak_bytes'] / 1e6:,.0f} |"
    )


def main() -> None:
    """Run all and print the tables as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tasks", nargs="+", default=["HalfCheetah-v5", "Hopper-v5"], choices=STEPS
    )
    parser.add_argument("--peers", nargs="+", default=list(ALL), choices=ALL)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--frames", type=int, default=FRAMES, help="at most; not of TorchRL's")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers" / "peers.jsonl")
    options = parser.parse_args()
    busy = int(os.environ.get("BUSY", "0"))  # programs beside, by `tests.benchmarks.beside`
    for peer in options.peers:
        if peer in PEERS:
            python_of(PEERS[peer][0])
    for task in options.tasks:
        steps = "".join(f" s to {step:g} |" for step in STEPS[task])
        print(f"\n**{task}**, {options.seconds:g} s each, {busy} busy programs beside\n")
        print(f"| | seed | return |{steps} frames/s | updates/s | cores | MB |")
        print("|---|---:|---:|" + "---:|" * (len(STEPS[task]) + 4), flush=True)
        for seed in options.seeds:
            for peer in options.peers:
                try:
                    record = run(peer, task, seed, options.seconds, options.frames)
                except RuntimeError as error:  # the others still run
                    print(error, file=sys.stderr)
                    continue
                record["busy"] = busy
                append_record(options.out, record)
                print(line(record), flush=True)


if __name__ == "__main__":
    main()
