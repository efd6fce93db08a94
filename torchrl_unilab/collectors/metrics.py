"""Collector metrics in shared memory: one seqlock snapshot per worker.

A worker publishes its counters and its last 64 episodes after each rollout; the learner reads
the newest snapshots when it logs. Neither side blocks, and a snapshot is never torn.

The service of a worker publishes; `WorkerCollector.metrics` reads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchrl_unilab.owner import Owner
from torchrl_unilab.shm import BlockLayout, SnapshotCell

PHASES = ("physics", "policy", "write", "wait")
"""Where a worker's time goes: environment, policy, filling the slot, waiting for one."""

WINDOW = 64
_COUNTS = ("frames", "trajectories", "ticks", "episodes")


@dataclass(frozen=True)
class CollectorMetrics:
    """Totals of all workers, and means over their last 64 episodes, the same number of each.

    Attributes:
        frames: Frames collected, the dropped ones among them.
        episodes: Episodes finished.
        episode_return: Mean return; NaN before the first episode ends.
        episode_length: Mean length in steps; NaN before the first.
        timeout_rate: Share of episodes that a time limit ended; NaN before the first.
        termination_rate: Share that a terminal state ended; NaN before the first.
        seconds: Seconds per phase, of `PHASES`, over all workers.
        values: Means over workers of their further metrics, by name; NaN before the first.
        next_trajectory: A trajectory id after all that were given.
    """

    frames: int
    episodes: int
    episode_return: float
    episode_length: float
    timeout_rate: float
    termination_rate: float
    seconds: dict[str, float]
    values: dict[str, float] = field(default_factory=dict)
    next_trajectory: int = 0

    @property
    def fps(self) -> dict[str, float]:
        """Frames per second spent in each phase, over all workers."""
        return {
            phase: self.frames / seconds if seconds else float("inf")
            for phase, seconds in self.seconds.items()
        }


class PhaseClock:
    """Seconds that a worker spends in each of `PHASES`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()

    def start(self) -> None:
        """Begin to measure; the time since the last `to` belongs to no phase."""
        self._since = time.perf_counter()

    def to(self, phase: str) -> None:
        """Count the time since the last call as `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._since
        self._since = now


class EpisodeLog:
    """Follows the episodes of one worker's environments through its rollouts.

    Args:
        num_envs: Environments.

    Attributes:
        episodes: Episodes finished so far.
        last: The last 64, oldest overwritten, [64, 3]: return, length, 1 if terminated.

    Examples:
        >>> log = EpisodeLog(1)
        >>> no, yes = np.zeros((1, 2), bool), np.array([[False, True]])
        >>> log.add(np.ones((1, 2)), done=yes, terminated=no)
        >>> log.last[0].tolist()
        [2.0, 2.0, 0.0]
    """

    def __init__(self, num_envs: int) -> None:
        self.episodes = 0
        self.last: NDArray[np.float64] = np.zeros((WINDOW, 3))
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)
        self._may_be_cut = np.zeros(num_envs, dtype=bool)

    def restart(self, *, staggered: bool = False) -> None:
        """Forget the episodes that have not ended: all environments were reset.

        Args:
            staggered: Whether the episodes that start have time limits of their own: one that
                its limit ends was cut, and does not count.
        """
        self._may_be_cut[:] = staggered
        self._returns[:] = 0.0
        self._lengths[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of episodes, ended or not."""
        return {
            "episodes": self.episodes,
            "last": torch.tensor(self.last, device="cpu"),
            "returns": torch.tensor(self._returns, device="cpu"),
            "lengths": torch.tensor(self._lengths, device="cpu"),
            "may_be_cut": torch.tensor(self._may_be_cut, device="cpu"),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.episodes = state_dict["episodes"]
        self.last[...] = state_dict["last"].numpy()
        self._returns[...] = state_dict["returns"].numpy()
        self._lengths[...] = state_dict["lengths"].numpy()
        self._may_be_cut[...] = state_dict["may_be_cut"].numpy()

    def add(
        self, reward: NDArray[np.floating], done: NDArray[np.bool_], terminated: NDArray[np.bool_]
    ) -> None:
        """Count a rollout: arrays of shape [num_envs, num_steps]."""
        begun = np.zeros_like(self._lengths)  # steps of this rollout in episodes that have ended
        for step, env in np.argwhere(done.T):
            own = reward[env, begun[env] : step + 1]
            total = self._returns[env] + own.sum(dtype=np.float64)
            length = self._lengths[env] + len(own)
            if terminated[env, step] or not self._may_be_cut[env]:
                self.last[self.episodes % WINDOW] = total, length, terminated[env, step]
                self.episodes += 1
            self._returns[env] = self._lengths[env] = 0
            self._may_be_cut[env] = False
            begun[env] = step + 1
        # Each episode's rewards are summed apart: one that is not finite spoils no other return.
        open_steps = np.arange(reward.shape[1]) >= begun[:, None]
        self._returns += reward.sum(axis=1, dtype=np.float64, where=open_steps)
        self._lengths += reward.shape[1] - begun


class SharedMetrics(Owner):
    """The newest metrics of each worker.

    Pickle it to the workers: they publish to the same shared memory.

    Args:
        num_workers: Number of workers.
        names: Further metrics that workers publish, a reward's terms for instance.

    Attributes:
        names: These.

    Examples:
        >>> metrics = SharedMetrics(2, names=["reward/forward"])
        >>> for worker, forward in enumerate((1.0, 2.0)):
        ...     values = {"reward/forward": forward}
        ...     metrics.publish(worker, 10, 0, EpisodeLog(1), PhaseClock(), values=values)
        >>> metrics.total().values
        {'reward/forward': 1.5}
        >>> metrics.close()
    """

    def __init__(self, num_workers: int, *, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        initial = _initial(len(self.names))
        self._cells = [SnapshotCell(initial) for _ in range(num_workers)]

    @staticmethod
    def nbytes(num_workers: int, names: int = 0) -> int:
        """Return the bytes of shared memory, of one segment per worker."""
        return num_workers * SnapshotCell.nbytes(BlockLayout.of(_initial(names)))

    def publish(
        self,
        worker: int,
        frames: int,
        trajectories: int,
        log: EpisodeLog,
        clock: PhaseClock,
        *,
        ticks: int = 0,
        values: Mapping[str, float] | None = None,
    ) -> None:
        """Replace the snapshot of `worker`. Does not block.

        Args:
            worker: Number of the worker.
            frames: Frames collected.
            trajectories: Id of the next trajectory.
            log: Episodes.
            clock: Seconds per phase.
            ticks: The last tick completed.
            values: Further metrics by name, NaN for those of `names` that are missing; other
                names are ignored.
        """
        values = {} if values is None else values
        counts = [frames, trajectories, ticks, log.episodes]
        further = [values.get(name, math.nan) for name in self.names]
        self._cells[worker].publish(
            [
                torch.tensor(counts, device="cpu"),
                torch.tensor(list(clock.seconds.values()), dtype=torch.float64, device="cpu"),
                torch.from_numpy(log.last),
                torch.tensor(further, dtype=torch.float64, device="cpu"),
            ]
        )

    def snapshot(self, worker: int) -> dict[str, torch.Tensor]:
        """Return the newest snapshot of `worker`; its replacement resumes from it."""
        newest = self._cells[worker].newest()[1]
        return newest | dict(zip(_COUNTS, newest["counts"], strict=True))

    def total(self) -> CollectorMetrics:
        """Return sums over all workers, and means over their last episodes."""
        parts = [self.snapshot(worker) for worker in range(len(self._cells))]
        share = max(1, WINDOW // len(parts))  # of the window, per worker
        rows = []
        for part in parts:
            episodes = int(part["episodes"])
            newest = np.arange(episodes - min(share, episodes), episodes) % WINDOW
            rows.append(part["last"].numpy()[newest])
        last = np.concatenate(rows)
        mean = last.mean(axis=0) if len(last) else np.full(3, np.nan)
        # Lists: with so few numbers Python is faster than torch.
        seconds = zip(*(part["seconds"].tolist() for part in parts), strict=True)
        values = zip(*(part["values"].tolist() for part in parts), strict=True)
        return CollectorMetrics(
            frames=sum(int(part["frames"]) for part in parts),
            episodes=sum(int(part["episodes"]) for part in parts),
            episode_return=float(mean[0]),
            episode_length=float(mean[1]),
            timeout_rate=float(1.0 - mean[2]),
            termination_rate=float(mean[2]),
            seconds=dict(zip(PHASES, map(sum, seconds), strict=True)),
            values=dict(zip(self.names, map(_mean_of_known, values), strict=True)),
            next_trajectory=max(int(part["trajectories"]) for part in parts),
        )

    def close(self) -> None:
        """Close the shared memory. Idempotent."""
        for cell in self._cells:
            cell.close()


def _mean_of_known(numbers: Iterable[float]) -> float:
    known = [number for number in numbers if not math.isnan(number)]
    return sum(known) / len(known) if known else math.nan


def _initial(names: int) -> dict[str, torch.Tensor]:
    return {
        "counts": torch.zeros(len(_COUNTS), dtype=torch.int64, device="cpu"),
        "seconds": torch.zeros(len(PHASES), dtype=torch.float64, device="cpu"),
        "last": torch.zeros(WINDOW, 3, dtype=torch.float64, device="cpu"),
        "values": torch.full((names,), torch.nan, dtype=torch.float64, device="cpu"),
    }
