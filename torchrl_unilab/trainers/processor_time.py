"""What collectors' processes take of the processors."""

from __future__ import annotations

import contextlib
import time

import psutil

from torchrl_unilab.collectors.base import WorkerCollector

__all__ = ["CollectorTime"]


class CollectorTime:
    """Processor time of the collectors' processes per second since training began.

    Args:
        collector: Whose.

    Attributes:
        busy: One share per collector; above 1 if several threads step physics.
    """

    def __init__(self, collector: WorkerCollector) -> None:
        self._collector = collector
        self._processes = [_process(pid) for pid in collector.pids]
        self._started = 0.0
        self._before: list[float] = []
        self._gone = [0.0] * len(self._processes)  # of those that were replaced
        self._last = [0.0] * len(self._processes)
        self.busy: list[float] = []

    def start(self) -> None:
        """Begin to count: training begins."""
        self._started = time.perf_counter()
        self._before = self._now()

    def sample(self) -> None:
        """Set `busy` to what it is now."""
        elapsed = time.perf_counter() - self._started
        now = self._now()
        self.busy = [(b - a) / elapsed for a, b in zip(self._before, now, strict=True)]

    def _now(self) -> list[float]:
        """Seconds of each; of one that has ended, which others will tell, those seen last."""
        for i, pid in enumerate(self._collector.pids):
            process = self._processes[i]
            if process is None or process.pid != pid:
                self._gone[i] += self._last[i]
                self._processes[i], self._last[i] = _process(pid), 0.0
        self._last = [
            _cpu_seconds(process, last)
            for process, last in zip(self._processes, self._last, strict=True)
        ]
        return [gone + last for gone, last in zip(self._gone, self._last, strict=True)]


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def _cpu_seconds(process: psutil.Process | None, otherwise: float) -> float:
    if process is None:
        return otherwise
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return otherwise
    return float(times.user + times.system)
