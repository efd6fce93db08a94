"""Calls of the package's own functions on its three ways: one publish, one rollout, one tick.

``python -m tests.benchmarks.walks [--list]``

Each way is walked a few times and many times, in learner and worker, with `sys.setprofile` in
both; the difference, per walk, is what one walk costs. What only starts, ends or evaluates a run
cancels out, and so does what the environment does, which is none of the package's. Functions that
are called at least once per walk are on the way; ``--list`` names them.

- publish: `update_policy_weights_` of a collector, to the worker's policy at its next rollout.
- rollout: a lock-step APPO run, from the worker's environment to the minibatch step.
- transition: a SAC run in lock-step with its worker, one frame and one update per tick.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import multiprocessing.util
import os
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torchrl.collectors import MultiSyncCollector
from torchrl.envs import EnvBase

import torchrl_unilab
from tests.support.acting import StillEnv, make_policy
from tests.support.collecting import CountingEnv
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, train_appo, train_off_policy
from torchrl_unilab.weight_update import UniLabShmScheme

PACKAGE = Path(torchrl_unilab.__file__).parent
FEW, MANY = 40, 140
Walk = Callable[[int, Path], None]


class Profile:
    """Counts calls of the package's functions in this process, by file and name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Profile:
        threading.setprofile(self._count)
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name[0] != "<" and code.co_filename.startswith(str(PACKAGE)):
            file = Path(code.co_filename).relative_to(PACKAGE)
            self.calls[f"{file}:{code.co_firstlineno} {code.co_name}"] += 1


def watched(create_env: Callable[[], EnvBase], directory: Path) -> EnvBase:
    """Make an environment, and count the calls of the worker process that makes it."""
    if mp.parent_process() is not None:
        profile = Profile()
        profile.__enter__()

        def dump() -> None:
            (directory / f"{os.getpid()}.json").write_text(json.dumps(profile.calls))

        multiprocessing.util.Finalize(None, dump, exitpriority=100)
    return create_env()


def publish(count: int, directory: Path) -> None:
    """Publish once before each rollout of one frame."""
    collector = MultiSyncCollector(
        [partial(watched, StillEnv, directory)],
        make_policy(),
        frames_per_batch=1,
        total_frames=-1,
        weight_sync_schemes={"policy": UniLabShmScheme()},
    )
    batches = iter(collector)
    for _ in range(count):
        collector.update_policy_weights_()
        next(batches)
    collector.shutdown()


def rollout(count: int, directory: Path) -> None:
    """Train by APPO for some rollouts of one worker, one minibatch each."""
    config = APPOConfig(
        num_envs=2, num_steps=2, epochs=1, minibatches=1, hidden=(8,), lockstep=True
    )
    train_appo(
        "Counting",
        frames=4 * count,
        run_dir=directory / "run",
        config=config,
        create_env=partial(watched, partial(CountingEnv, (2,)), directory),
        progress_bar=False,
        eval_episodes=1,
        announce=lambda _: None,
    )


def transition(count: int, directory: Path) -> None:
    """Train by SAC for some ticks of one frame and one update."""
    config = OffPolicyConfig(
        "sac",
        num_envs=1,
        batch_size=4,
        updates_per_step=1,
        env_steps_per_sync=1,
        learning_starts=4,
        policy_frequency=1,
        replay_buffer_n=256,
        hidden=(8,),
        sync_collection=False,
    )
    train_off_policy(
        "Counting",
        frames=count,
        run_dir=directory / "run",
        config=config,
        create_env=partial(watched, partial(CountingEnv, (1,)), directory),
        progress_bar=False,
        eval_episodes=1,
        announce=lambda _: None,
    )


def calls_of(walk: Walk, count: int) -> Counter[str]:
    """Calls of learner and workers while a way is walked `count` times."""
    with tempfile.TemporaryDirectory() as name, Profile() as profile:
        walk(count, Path(name))
        for file in Path(name).glob("*.json"):
            profile.calls.update(json.loads(file.read_text()))
    return profile.calls


def main() -> None:
    """Walk each way and print what it costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the functions on each way")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| way | calls | functions | files |\n|---|---:|---:|---:|")
    for walk in (publish, rollout, transition):
        grown = calls_of(walk, MANY)
        grown.subtract(calls_of(walk, FEW))
        times = MANY - FEW
        on_way = {name: count / times for name, count in grown.items() if count >= 0.9 * times}
        files = {name.partition(":")[0] for name in on_way}
        print(f"| {walk.__name__} | {sum(on_way.values()):.0f} | {len(on_way)} | {len(files)} |")
        if options.list:
            for name, count in sorted(on_way.items()):
                print(f"    {count:5.1f} {name}")


if __name__ == "__main__":
    main()
