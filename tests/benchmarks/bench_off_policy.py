"""SAC and TD3 of ours at work: updates per second while collecting.

``python -m tests.benchmarks.bench_off_policy [--rounds 3] [--seconds 20]``
``python -m tests.benchmarks.bench_off_policy --busy 0 1 2``

**Rates.** Updates of 256 rows, two layers of 256, on all cores. *plain* is the same
mathematics in plain PyTorch (`tests.benchmarks.plain_offpolicy`) on one batch, without
replay and without collecting: the limit. *ours* is `OffPolicyTrainer` beside a collector with
physics, at the task's settings and at one update per frame; *stock* is TorchRL's parts
(`tests.benchmarks.stock_sac`), which collect in the learner's process. They take turns; what
comes before the first update does not count.

**Busy.** Rates of our SAC beside so many programs that never wait, by ``learner_threads``, and
compiled with two.

Their returns against seconds are in `tests.benchmarks.bench_peers`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl._utils import logger as torchrl_logger

from tests.benchmarks import stock_sac
from tests.benchmarks.bench_off_policy_update import ACTION, OBSERVATION, plain_update
from tests.benchmarks.beside import neighbours
from tests.support.off_policy import make_transitions
from tests.support.off_policy_training import off_policy_trainer
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.limits import available_cores
from torchrl_unilab.trainers import OffPolicyConfig

TASK = "HalfCheetah-v5"
COMPILED = {"compile": True, "matmul_dtype": "auto"}
ONE_PER_FRAME = {"num_envs": 4, "updates_per_step": 4, "learning_starts": 250}


class Watch:
    """Tells when so many seconds have passed since the first update.

    Args:
        seconds: How many.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began: float | None = None

    @property
    def learnt(self) -> float:
        """Seconds since the first update."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def __call__(self, updates: int) -> bool:
        """Whether it is over."""
        if updates and self._began is None:
            self._began = time.perf_counter()
        return self.learnt >= self._seconds


def run_ours(config: OffPolicyConfig, seed: int, seconds: float) -> float:
    """Train for so long from the first update on; return updates per second."""
    watch = Watch(seconds)
    create = partial(MujocoBatchEnv, TASK, num_envs=config.num_envs, num_threads=available_cores())
    trainer = off_policy_trainer(10**9, create, inline=False, seed=seed, **vars(config))
    measured: list[float] = []

    def look(batch: TensorDictBase | None = None) -> None:
        if watch(trainer.updates) and not measured:
            measured.append(trainer.updates / watch.learnt)  # before workers end
            trainer.request_stop("the time is up")

    trainer.register_op("post_steps", look)
    try:
        trainer.train()
        return measured[0]
    finally:
        trainer.close()
        trainer.collector.shutdown()


def run_stock(seed: int, seconds: float) -> float:
    """Train stock SAC as `run_ours` does ours."""
    watch = Watch(seconds)
    return stock_sac.train(
        TASK, seed=seed, threads=available_cores(), stop=lambda frames, updates: watch(updates)
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
        print(f"{algorithm}, {way}: {value:.1f} updates/s", flush=True)

    for turn in range(rounds):
        note("SAC", "stock TorchRL", run_stock(turn, seconds))
        for algorithm, (learner, tensors) in plain.items():
            rate = run_plain(plain_step(algorithm, learner, tensors), seconds / 3)
            note(algorithm, "plain PyTorch, no collecting", rate)
            for name, overrides in settings.items():
                config = OffPolicyConfig.for_task(
                    TASK, "sac" if algorithm == "SAC" else "td3", **overrides
                )
                note(algorithm, f"ours, {name}", run_ours(config, turn, seconds))
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
                    measured[way].append(run_ours(config, turn, seconds))
        frames = config.frames_per_tick / config.updates_per_step
        medians = {way: statistics.median(found) for way, found in measured.items()}
        for way, rate in medians.items():
            figures = f"{rate:.0f} | {rate * frames:.0f} | {rate / medians['one thread']:.2f}x"
            print(f"| {count} | {way} | {figures} |", flush=True)


def main() -> None:
    """Print rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--busy", type=int, nargs="+", help="rates beside so many busy programs")
    options = parser.parse_args()
    torchrl_logger.setLevel("ERROR")
    if options.busy is not None:
        beside(options.busy, options.rounds, options.seconds)
    else:
        rates(options.rounds, options.seconds)


if __name__ == "__main__":
    main()
