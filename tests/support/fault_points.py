"""Where a whole run can be hit by a fault."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torchrl.envs import EnvBase, Transform, TransformedEnv

from torchrl_unilab.collectors.worker import RolloutWorker
from torchrl_unilab.data import DoubleBufferReplayPipeline, RolloutRingStorage
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.modules.gaussian import GaussianActor
from torchrl_unilab.modules.squashed import SquashedGaussianActor
from torchrl_unilab.runtime.workers import WorkerGroup
from torchrl_unilab.shm import SnapshotCell, seqlock
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.shards import Parts
from torchrl_unilab.trainers import APPOConfig, APPOTrainer, OffPolicyConfig, OffPolicyTrainer
from torchrl_unilab.trainers.runs.loggers import RunLogger

Algorithm = Literal["appo", "sac"]
Victim = Literal["collector", "learner"]
Strike = Callable[[], None]

ENV = "InvertedPendulum-v5"
CONFIGS: dict[str, APPOConfig | OffPolicyConfig] = {
    "appo": APPOConfig(num_envs=4, num_steps=8, epochs=1, hidden=(8,), physics_threads=1),
    "sac": OffPolicyConfig(
        "sac",
        num_envs=4,
        replay_buffer_n=100,
        batch_size=16,
        learning_starts=8,
        updates_per_step=1,
        hidden=(8,),
        physics_threads=1,
        learner_threads=1,
    ),
}


@dataclass(frozen=True)
class Cell:
    """One run and its fault.

    Attributes:
        fault: A signal's name, or ``"raise"``.
        restarts: How many collectors may be replaced. If any may, there are two, of which the
            first to come to the point is hit.
    """

    algorithm: Algorithm
    phase: str
    fault: str
    victim: Victim
    restarts: int = 0

    def __str__(self) -> str:
        name = f"{self.algorithm}-{self.phase}-{self.fault}-{self.victim}"
        return f"{name}-restarts" if self.restarts else name

    @property
    def config(self) -> APPOConfig | OffPolicyConfig:
        """The run's settings."""
        config, collectors = CONFIGS[self.algorithm], 2 if self.restarts else 1
        return replace(config, num_collectors=collectors, restart_workers=self.restarts)


def _before(owner: Any, name: str, nth: int, strike: Strike) -> None:
    """Have a process hit at the nth call of something, before it does anything."""
    original = getattr(owner, name)
    calls = itertools.count(1)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            strike()
        return original(*args, **kwargs)

    setattr(owner, name, hooked)


def _half_a_publish(strike: Strike) -> None:
    """Have a process hit when it has written its third snapshot and not announced it."""
    publish = SnapshotCell.publish
    calls = itertools.count(1)

    def half(cell: SnapshotCell, *args: Any, **kwargs: Any) -> int:
        if next(calls) == 3:
            _before(seqlock, "fence", 2, strike)
        return publish(cell, *args, **kwargs)

    SnapshotCell.publish = half  # type: ignore[method-assign]


def _half_a_write(strike: Strike) -> None:
    """Have a process hit when it has written half of its rows, the fifth time."""
    fill = SharedRows.fill
    calls = itertools.count(1)

    def half(rows: SharedRows, shard: int, number: int, parts: Parts) -> None:
        if next(calls) == 5:
            fill(rows, shard, number, [words[: len(words) // 2] for words in parts])
            strike()
        fill(rows, shard, number, parts)

    setattr(SharedRows, "fill", half)  # noqa: B010


def _second_checkpoint(strike: Strike, run_dir: Path) -> None:
    """Have a process hit when the second checkpoint's files are written and not yet safe."""
    fsync, checkpoints = os.fsync, run_dir / "checkpoint"
    struck: list[bool] = []

    def hooked(descriptor: int) -> None:
        if not struck and checkpoints.is_dir() and len(os.listdir(checkpoints)) == 2:
            struck.append(True)
            strike()
        fsync(descriptor)

    setattr(os, "fsync", hooked)  # noqa: B010


def _start_of_workers(strike: Strike) -> None:
    """Have the learner hit when its collector is started and not yet ready."""
    _before(WorkerGroup, "_receive", 1, strike)


_ACTORS = {"appo": GaussianActor, "sac": SquashedGaussianActor}
_TRAINERS = {"appo": APPOTrainer, "sac": OffPolicyTrainer}


def install(cell: Cell, strike: Strike, run_dir: Path) -> None:
    """Have the process that this is called in hit at a cell's point."""
    appo = cell.algorithm == "appo"
    points: dict[tuple[str, Victim], Callable[[], None]] = {
        # Before the collector says that it is ready; the learner waits for that.
        ("start-up", "collector"): partial(_before, RolloutWorker, "__init__", 1, strike),
        ("start-up", "learner"): partial(_start_of_workers, strike),
        # The collector steps; the learner updates meanwhile.
        ("physics", "collector"): partial(_before, MujocoBatchEnv, "_step", 21, strike),
        ("physics", "learner"): partial(_before, _TRAINERS[cell.algorithm], "_learn", 3, strike),
        # A slot is claimed and not committed, a row half written; or either is being read.
        ("write", "collector"): (
            partial(_before, RolloutRingStorage, "commit", 3, strike)
            if appo
            else partial(_half_a_write, strike)
        ),
        ("write", "learner"): (
            partial(_before, RolloutRingStorage, "release", 3, strike)
            if appo
            else partial(_before, DoubleBufferReplayPipeline, "sample_large_batch", 3, strike)
        ),
        # Weights are written and not announced; or applied, and that not told.
        ("publish", "collector"): partial(_before, SnapshotCell, "report_applied", 3, strike),
        ("publish", "learner"): partial(_half_a_publish, strike),
        # The collector is asked for its state; the learner has written files.
        ("checkpoint", "collector"): partial(_before, RolloutWorker, "state_dict", 1, strike),
        ("checkpoint", "learner"): partial(_second_checkpoint, strike, run_dir),
        ("shutdown", "collector"): partial(_before, RolloutWorker, "close", 1, strike),
        ("shutdown", "learner"): partial(_before, WorkerGroup, "stop", 1, strike),
        # Where people's own code runs.
        ("policy", "collector"): partial(_before, _ACTORS[cell.algorithm], "forward", 21, strike),
        ("transform", "collector"): partial(_before, _Transform, "_step", 21, strike),
        ("logger", "learner"): partial(_before, RunLogger, "log_scalar", 3, strike),
    }
    points[cell.phase, cell.victim]()


class _Transform(Transform):
    """Changes nothing."""


def transformed_env() -> EnvBase:
    return TransformedEnv(MujocoBatchEnv(ENV, num_envs=4, num_threads=1), _Transform())
