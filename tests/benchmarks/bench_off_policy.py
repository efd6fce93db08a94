"""SAC and TD3 of ours at work: updates per second while collecting, return against seconds.

``python -m tests.benchmarks.bench_off_policy [--rounds 3] [--seconds 20]``
``python -m tests.benchmarks.bench_off_policy --busy 0 1 2``
``python -m tests.benchmarks.bench_off_policy --race [--seeds 1] [--marks 60 120 300]``

**Rates.** Updates of 256 rows, two layers of 256, on all cores. *plain* is the same
mathematics in plain PyTorch (`tests.benchmarks.plain_offpolicy`) on one batch, without
replay and without collecting: the limit. *ours* is `OffPolicyTrainer` beside a collector with
physics, at the task's settings and at one update per frame; *stock* is TorchRL's parts
(`tests.benchmarks.stock_sac`), which collect in the learner's process. They take turns; what
comes before the first update does not count.

**Busy.** Rates of our SAC beside so many programs that never wait, by ``learner_threads``, and
compiled with two.

**Race.** Ours and stock SAC take turns, each in a process of its own. At each mark the clock
stops and the policy as it is plays 8 episodes without exploration.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl._utils import logger as torchrl_logger

from tests.benchmarks import stock_sac
from tests.benchmarks.bench_off_policy_update import ACTION, OBSERVATION, plain_update
from tests.benchmarks.beside import neighbours
from tests.support.off_policy import make_transitions
from torchrl_unilab.collectors import ReplayCollector
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.limits import available_cores
from torchrl_unilab.trainers import OffPolicyConfig, OffPolicyTrainer, evaluate
from torchrl_unilab.trainers.runs.builders import build_learner
from torchrl_unilab.weight_update import UniLabShmScheme

TASK = "HalfCheetah-v5"
EPISODES = 8
COMPILED = {"compile": True, "matmul_dtype": "auto"}
ONE_PER_FRAME = {"num_envs": 4, "updates_per_step": 4, "learning_starts": 250}


class Marks:
    """Evaluates a policy when its training has come to certain seconds.

    Args:
        seconds: When, in ascending order.
        learning: How many seconds are to pass after the first update.

    Attributes:
        reached: (Seconds, frames, mean return) at the marks that were reached.
        paused: Seconds that evaluations took.
    """

    def __init__(self, seconds: Sequence[float], learning: float = 0.0) -> None:
        self._left = list(seconds)
        self._learning = learning
        self._learns_since: float | None = None
        self._began = time.perf_counter()
        self.reached: list[tuple[float, int, float]] = []
        self.paused = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return time.perf_counter() - self._began - self.paused

    @property
    def learnt(self) -> float:
        """Seconds since the first update."""
        return 0.0 if self._learns_since is None else self.seconds - self._learns_since

    def __call__(self, actor: TensorDictModuleBase, frames: int, updates: int) -> bool:
        """Look at the clock, evaluate if it is time; return whether it is over."""
        seconds = self.seconds
        if updates and self._learns_since is None:
            self._learns_since = seconds
        if self._left and seconds >= self._left[0]:
            began = time.perf_counter()
            del self._left[0]
            env = MujocoBatchEnv(TASK, num_envs=EPISODES, num_threads=available_cores())
            env.set_seed(1000)
            self.reached.append((seconds, frames, float(evaluate(env, actor).mean())))
            env.close()
            self.paused += time.perf_counter() - began
        return not self._left and self.learnt >= self._learning


def run_ours(config: OffPolicyConfig, seed: int, marks: Marks) -> float:
    """Train until the marks say that it is over; return updates per second."""
    torch.manual_seed(seed)
    create = partial(MujocoBatchEnv, TASK, num_envs=config.num_envs, num_threads=available_cores())
    env = create()
    learner = build_learner(env, config)
    env.close()
    scheme = UniLabShmScheme()
    collector = ReplayCollector(
        create,
        learner.actor,
        capacity=config.capacity,
        frames_per_batch=config.frames_per_tick,
        total_frames=-1,
        init_random_frames=config.init_random_frames,
        weight_sync_schemes={"policy": scheme},
        lockstep=config.sync_collection,
        seed=seed,
    )
    trainer = OffPolicyTrainer(
        collector=collector,
        loss_module=learner.loss,
        total_frames=10**9,
        config=config,
        normalizers=learner.normalizers,
        scheme=scheme,
        progress_bar=False,
    )

    def look(batch: TensorDictBase | None = None) -> None:
        if marks(learner.actor, trainer.collected_frames, trainer.updates):
            trainer.request_stop("the time is up")

    trainer.register_op("post_steps", look)
    try:
        trainer.train()
        return trainer.updates / marks.learnt
    finally:
        trainer.close()
        collector.shutdown()


def run_stock(seed: int, marks: Marks) -> float:
    """Train stock SAC as `run_ours` does ours."""
    return stock_sac.train(
        TASK, seed=seed, threads=available_cores(), stop=marks, clock=lambda: marks.seconds
    )


def plain_step(algorithm: str, learner: Any, batch: Any) -> Callable[[], object]:
    """What takes an update of plain PyTorch; TD3's policy learns in each second one, as in ours."""
    if algorithm == "SAC":
        return partial(learner.update, batch)
    policy = itertools.cycle([True, False])
    return lambda: learner.update(batch, update_policy=next(policy))


def run_plain(step: Callable[[], object], seconds: float) -> float:
    """Updates per second of plain PyTorch."""
    torch.set_num_threads(available_cores())
    began, done, first = time.perf_counter(), 0, 1.0
    while (now := time.perf_counter() - began) < seconds + first:
        step()
        done += now >= first
    return done / seconds


def rates(rounds: int, seconds: float) -> None:
    """Print updates per second of all."""
    batch = make_transitions(256, OBSERVATION, ACTION)
    plain = {name: plain_update(name, batch) for name in ("SAC", "TD3")}
    settings = {
        "at the task's settings": {},
        "one update per frame": ONE_PER_FRAME,
        "at the task's settings, compiled, bfloat16 if it can": COMPILED,
    }
    measured: dict[tuple[str, str], list[float]] = {}

    def note(algorithm: str, way: str, value: float) -> None:
        measured.setdefault((algorithm, way), []).append(value)

    for turn in range(rounds):
        note("SAC", "stock TorchRL", run_stock(turn, Marks([], seconds)))
        for algorithm, (learner, tensors) in plain.items():
            rate = run_plain(plain_step(algorithm, learner, tensors), seconds / 3)
            note(algorithm, "plain PyTorch, no collecting", rate)
            for name, overrides in settings.items():
                config = OffPolicyConfig.for_task(
                    TASK, "sac" if algorithm == "SAC" else "td3", **overrides
                )
                note(algorithm, f"ours, {name}", run_ours(config, turn, Marks([], seconds)))
    print(f"{available_cores()} cores, median of {rounds}\n")
    print("| algorithm | way | updates/s | of plain | of stock SAC |")
    print("|---|---|---:|---:|---:|")
    medians = {key: statistics.median(values) for key, values in measured.items()}
    stock = medians["SAC", "stock TorchRL"]
    for (algorithm, way), value in sorted(medians.items()):
        of_plain = value / medians[algorithm, "plain PyTorch, no collecting"]
        print(f"| {algorithm} | {way} | {value:.0f} | {of_plain:.2f}x | {value / stock:.2f}x |")


def beside(counts: Sequence[int], rounds: int, seconds: float) -> None:
    """Print rates beside busy programs, by the learner's threads."""
    print(f"{TASK}, {available_cores()} cores, SAC at the task's settings, median of {rounds}\n")
    print("| busy programs | learner | updates/s | frames/s | of one thread |")
    print("|---:|---|---:|---:|---:|")
    for count in counts:
        ways: dict[str, dict[str, Any]] = {
            "one thread": {"learner_threads": 1},
            "two threads": {"learner_threads": 2},
            "two, compiled": {"learner_threads": 2, "compile": True},
            "two, compiled, bfloat16 if it can": {"learner_threads": 2, **COMPILED},
        }
        measured: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds):
            for way, settings in ways.items():
                config = OffPolicyConfig.for_task(TASK, "sac", **settings)
                with neighbours(count):
                    measured[way].append(run_ours(config, turn, Marks([], seconds)))
        frames = config.frames_per_tick / config.updates_per_step
        medians = {way: statistics.median(found) for way, found in measured.items()}
        for way, rate in medians.items():
            figures = f"{rate:.0f} | {rate * frames:.0f} | {rate / medians['one thread']:.2f}x"
            print(f"| {count} | {way} | {figures} |", flush=True)


COLORS = {"ours SAC": "tab:blue", "ours TD3": "tab:green", "stock SAC": "tab:red"}


def run_one(way: str, seed: int, marks: Sequence[float]) -> list[tuple[float, int, float]]:
    """One run of the race: what it reached at the marks."""
    watch = Marks(marks)
    if way == "stock SAC":
        run_stock(seed, watch)
    else:
        algorithm = "sac" if way == "ours SAC" else "td3"
        run_ours(OffPolicyConfig.for_task(TASK, algorithm), seed, watch)
    return watch.reached


def race(ways: Sequence[str], seeds: int, marks: Sequence[float], path: Path) -> None:
    """Run all in turns; print what they reached."""
    print(f"{TASK}, {available_cores()} cores: return without exploration (frames)\n")
    print("| way | seed | " + " | ".join(f"{mark:g} s" for mark in marks) + " |")
    print("|---|---:|" + "---:|" * len(marks))
    curves: dict[str, list[list[tuple[float, int, float]]]] = {way: [] for way in ways}
    for seed in range(seeds):
        for way in ways:
            command = [sys.executable, "-m", "tests.benchmarks.bench_off_policy", "--one", way]
            command += ["--seeds", str(seed), "--marks", *map(str, marks)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{way}, seed {seed}:\n{done.stdout}\n{done.stderr}")
            reached = [tuple(point) for point in json.loads(done.stdout.splitlines()[-1])]
            curves[way].append(reached)
            cells = " | ".join(f"{value:,.0f} ({frames:,})" for _, frames, value in reached)
            print(f"| {way} | {seed} | {cells} |", flush=True)
    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for way, runs in curves.items():
        color = COLORS[way]
        for i, run in enumerate(runs):
            label = None if i else way
            axis.plot([p[0] for p in run], [p[2] for p in run], "o-", color=color, label=label)
    axis.set(title=TASK, xlabel="seconds", ylabel="return without exploration")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print rates, or race."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--busy", type=int, nargs="+", help="rates beside so many busy programs")
    parser.add_argument("--race", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--marks", type=float, nargs="+", default=[30.0, 60.0, 120.0, 300.0])
    parser.add_argument("--ways", nargs="+", default=list(COLORS), choices=COLORS)
    parser.add_argument("--plot", type=Path, default=Path("off_policy.png"))
    parser.add_argument("--one", choices=COLORS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torchrl_logger.setLevel("ERROR")
    if options.one:
        print(json.dumps(run_one(options.one, options.seeds, options.marks)))
    elif options.busy is not None:
        beside(options.busy, options.rounds, options.seconds)
    elif options.race:
        race(options.ways, options.seeds, options.marks, options.plot)
    else:
        rates(options.rounds, options.seconds)


if __name__ == "__main__":
    main()
