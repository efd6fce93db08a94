"""Measured returns of tasks, and the time that it took to reach them.

The command ``tasks`` shows them. ``make learning-page`` prints entries from recorded runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchmarkResult:
    """A return that every measured seed reached in training, with the task's own settings.

    Attributes:
        task: The task.
        algorithm: The algorithm.
        mean_return: Mean of the last 64 episodes, with noise.
        seconds: Of training until then on two cores, median of the seeds.
        frames: Collected until then, median of the seeds.
        seeds: How many runs.
    """

    task: str
    algorithm: str
    mean_return: float
    seconds: float
    frames: int
    seeds: int

    def __str__(self) -> str:
        """Return it in words.

        Examples:
            >>> print(BenchmarkResult("Hopper-v5", "appo", 2609, 53, 901000, 5))
            appo 2,609 after 53 s, 901,000 frames (5 seeds)
        """
        return (
            f"{self.algorithm} {self.mean_return:,g} after {self.seconds:,.0f} s, "
            f"{self.frames:,} frames ({self.seeds} seed{'s' if self.seeds > 1 else ''})"
        )


RESULTS: tuple[BenchmarkResult, ...] = (
    BenchmarkResult("Ant-v5", "appo", 3258, 129, 1_169_408, 5),
    BenchmarkResult("Ant-v5", "sac", 2069, 2644, 300_000, 3),
    BenchmarkResult("Ant-v5", "td3", 1120, 1967, 300_000, 3),
    BenchmarkResult("HalfCheetah-v5", "appo", 5819, 27, 1_232_896, 5),
    BenchmarkResult("HalfCheetah-v5", "sac", 5819, 955, 160_400, 3),
    BenchmarkResult("HalfCheetah-v5", "td3", 5810, 1281, 300_000, 3),
    BenchmarkResult("Hopper-v5", "appo", 3542, 112, 849_920, 5),
    BenchmarkResult("Hopper-v5", "sac", 2609, 2556, 610_240, 5),
    BenchmarkResult("Hopper-v5", "td3", 1873, 1193, 300_000, 3),
    BenchmarkResult("Humanoid-v5", "appo", 5489, 448, 1_246_208, 5),
    BenchmarkResult("Humanoid-v5", "sac", 3000, 2001, 183_168, 3),
    BenchmarkResult("Humanoid-v5", "td3", 787, 479, 162_832, 3),
    BenchmarkResult("HumanoidStandup-v5", "appo", 64317, 384, 1_000_448, 5),
    BenchmarkResult("InvertedDoublePendulum-v5", "appo", 9212, 59, 300_032, 5),
    BenchmarkResult("InvertedPendulum-v5", "appo", 1000, 7, 72_704, 10),
    BenchmarkResult("Pusher-v5", "appo", -36, 213, 1_000_448, 5),
    BenchmarkResult("QuadrupedWalk", "appo", 500, 19, 272_384, 5),
    BenchmarkResult("Reacher-v5", "appo", -6, 183, 1_000_448, 5),
    BenchmarkResult("Swimmer-v5", "appo", 282, 102, 262_144, 5),
    BenchmarkResult("Swimmer-v5", "sac", 282, 612, 179_664, 3),
    BenchmarkResult("Swimmer-v5", "td3", 282, 442, 131_520, 3),
    BenchmarkResult("Walker2d-v5", "appo", 3863, 161, 849_920, 5),
    BenchmarkResult("Walker2d-v5", "sac", 3863, 1100, 178_032, 3),
    BenchmarkResult("Walker2d-v5", "td3", 3863, 995, 389_936, 5),
)
"""Measured figures only. APPO's on Ant and HalfCheetah are of 1,500,000 frames, alone on
two cores of an AMD EPYC, Hopper's of 2,000,000 on an Intel that was busy. Two runs at a time shared
two cores for Humanoid, InvertedDoublePendulum, Pusher, Reacher, Swimmer, and SAC: alone each takes
less. Humanoid, HumanoidStandup, Walker2d by APPO, TD3, and SAC on Ant and Hopper ran beside test
suites or three other runs: alone they take far less. QuadrupedWalk, and TD3 on Ant, had one core
each."""


def results_for_task(task: str) -> list[BenchmarkResult]:
    """Return the measurements of a task, the recommended one first.

    That is the fastest within a tenth of the highest return; the others follow by return.
    """
    entries = [entry for entry in RESULTS if entry.task == task]
    entries.sort(key=lambda entry: (-entry.mean_return, entry.seconds))
    highest = entries[0].mean_return if entries else 0.0
    close = [entry for entry in entries if entry.mean_return >= highest - 0.1 * abs(highest)]
    first = min(close, key=lambda entry: entry.seconds, default=None)
    return sorted(entries, key=lambda entry: entry is not first)
