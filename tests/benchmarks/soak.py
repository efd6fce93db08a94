"""Whole runs for a while: memory, descriptors, threads stay flat, and counters add up.

``python -m tests.benchmarks.soak --minutes 10``: APPO for half of the time, then SAC.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import psutil

from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.collectors.base import WorkerCollector
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, train_appo, train_off_policy

ENV = "HalfCheetah-v5"
WARM_UP = 0.5
"""Share of a run after which nothing is to grow any more; the first episodes have ended by then,
whose metrics open their files."""
ALLOWED = 1.0
"""Percent by which resident memory may grow after the warm-up."""
CONFIGS: dict[str, APPOConfig | OffPolicyConfig] = {
    "appo": APPOConfig.for_task(ENV),
    # A replay that is full within seconds: its pages become resident as they are written.
    "sac": OffPolicyConfig.for_task(
        ENV, replay_buffer_n=100, learning_starts=50, hidden=(64, 64), learner_threads=1
    ),
}


@dataclass(frozen=True)
class Sample:
    """What a run takes at a moment.

    Attributes:
        learner: Resident bytes of the learner.
        workers: Resident bytes of its workers.
        descriptors: Open files of all of them.
        threads: Threads of all of them.
        shared: Bytes of shared memory that they hold, each segment once.
    """

    learner: int
    workers: int
    descriptors: int
    threads: int
    shared: int


def take_sample() -> Sample:
    """Return what this process and its children take now."""
    learner = psutil.Process()
    workers = learner.children(recursive=True)
    all_ = [learner, *workers]
    return Sample(
        learner=learner.memory_info().rss,
        workers=sum(process.memory_info().rss for process in workers),
        descriptors=sum(process.num_fds() for process in all_),
        threads=sum(process.num_threads() for process in all_),
        shared=sum(segments([process.pid for process in all_]).values()),
    )


def segments(pids: Sequence[int]) -> dict[tuple[int, int], int]:
    """Device and inode of each shared segment that is open in processes, to its bytes."""
    found = {}
    for pid in pids:
        directory = f"/proc/{pid}/fd"
        with contextlib.suppress(FileNotFoundError):  # the process has ended meanwhile
            for name in os.listdir(directory):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    path = f"{directory}/{name}"
                    if "unilab" in os.readlink(path):
                        status = os.stat(path)
                        found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


class Sampler:
    """Samples once a second while a collector is at work.

    Attributes:
        samples: So far.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(1.0):
            try:
                self.samples.append(take_sample())
            except psutil.NoSuchProcess:  # one ends: so does the run
                continue

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def count(collector: WorkerCollector) -> dict[str, int]:
    """Return where the frames of a collector are, once its workers have paused."""
    if isinstance(collector, APPOCollector):
        collector._team.run_ahead(False)
        collector.state_dict()  # answered between rollouts
        each, ring = collector.frames_per_batch, collector.storage
        return {
            "collected": collector.metrics().frames,
            "written": ring.write_count * each,
            "taken": collector._frames,
            "dropped": collector.dropped * each,
            "stale": collector.stale * each,
            "waiting": len(ring) * each,
        }
    come = collector.state_dict()["come"]
    return {
        "collected": collector.metrics().frames,
        "written": collector.storage.ptr,
        "taken": collector._frames,
        "waiting": come * collector.frames_per_batch,
    }


def soak(algorithm: str, seconds: float) -> bool:
    """Run an algorithm and print what became of memory and counters; return if all is well."""
    sampler = Sampler()
    counted: dict[str, int] = {}
    shutdown = WorkerCollector.shutdown

    def count_and_shut_down(collector: WorkerCollector, *args: Any, **kwargs: Any) -> None:
        if not counted and collector.pids:  # and not one of before, which is let go of
            sampler.stop()
            counted.update(count(collector))
        shutdown(collector, *args, **kwargs)

    setattr(WorkerCollector, "shutdown", count_and_shut_down)  # noqa: B010
    began = time.monotonic()
    sampler.start()
    try:
        with tempfile.TemporaryDirectory() as directory:
            train: Callable[..., dict[str, Any]] = (
                train_appo if algorithm == "appo" else train_off_policy
            )
            summary = train(
                ENV,
                frames=10**12,
                run_dir=f"{directory}/run",
                config=CONFIGS[algorithm],
                max_seconds=seconds,
                checkpoint_interval=200_000 if algorithm == "appo" else 10_000,
                progress_bar=False,
                eval_episodes=1,
            )
    finally:
        setattr(WorkerCollector, "shutdown", shutdown)  # noqa: B010
        sampler.stop()
    print(f"{algorithm}, {ENV}: {time.monotonic() - began:.0f} s, {summary['frames']} frames")
    flat = report(sampler.samples)
    print("counters: " + ", ".join(f"{name} {number}" for name, number in counted.items()))
    gone = sum(counted[name] for name in counted if name not in ("collected", "written"))
    exact = counted["collected"] == counted["written"] == gone
    exact = exact and counted["taken"] == summary["frames"]
    print(f"they {'add' if exact else 'do NOT add'} up\n", flush=True)
    return flat and exact


def report(samples: Sequence[Sample]) -> bool:
    """Print what samples say of the time after the warm-up; return whether all is flat."""
    after = samples[int(WARM_UP * len(samples)) :]
    part = max(1, len(after) // 5)
    flat = True
    print(f"{len(samples)} samples; after the warm-up, first fifth to last fifth (medians):")
    for field in fields(Sample):
        values = [getattr(sample, field.name) for sample in after]
        first, last = (statistics.median(part) for part in (values[:part], values[-part:]))
        growth = 100 * (last / first - 1) if first else 0.0
        memory = field.name in ("learner", "workers", "shared")
        good = growth < ALLOWED if field.name in ("learner", "workers") else last == first
        shown = [f"{value / 2**20:.1f} MiB" if memory else f"{value:g}" for value in (first, last)]
        print(
            f"  {field.name:12} {shown[0]:>12} -> {shown[1]:>12}  {growth:+.2f}%"
            f"{'' if good else '  NOT flat'}"
        )
        flat = flat and good
    return flat


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both; return 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of both runs together")
    options = parser.parse_args(arguments)
    results = [soak(name, 30.0 * options.minutes) for name in CONFIGS]
    return int(not all(results))


if __name__ == "__main__":
    raise SystemExit(main())
