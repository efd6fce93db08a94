from __future__ import annotations

import os
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import psutil
import pytest

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import PublishWeights, hooks
from torchrl_unilab.trainers.hooks import BusyTime, CollectorTime


def test_weights_are_published_every_nth_batch():
    collector = Mock()
    hook = PublishWeights(collector, every=3)
    for _ in range(7):
        hook()
    assert collector.update_policy_weights_.call_count == 2
    restored = PublishWeights(collector, every=3)
    restored.load_state_dict(hook.state_dict())
    for _ in range(2):
        restored()
    assert collector.update_policy_weights_.call_count == 3


def test_publishing_never_is_refused():
    with pytest.raises(ConfigError, match="every 0 batches"):
        PublishWeights(None, every=0)


class _Processes:
    """Stands for `psutil.Process`: processor seconds by process id; others have ended."""

    seconds: ClassVar[dict[int, float]] = {}

    def __init__(self, pid: int) -> None:
        if pid not in self.seconds:
            raise psutil.NoSuchProcess(pid)
        self.pid = pid

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.seconds[self.pid], system=0.0)


def _measured(times: CollectorTime) -> list[float]:
    """Processor seconds of each collector since `start`."""
    return [now - before for before, now in zip(times._before, times._total(), strict=True)]


@pytest.fixture
def seconds(monkeypatch) -> dict[int, float]:
    """Processor seconds by process id; those of ids that are not in it have ended."""
    seconds: dict[int, float] = {}
    monkeypatch.setattr(_Processes, "seconds", seconds)
    monkeypatch.setattr(psutil, "Process", _Processes)
    return seconds


def test_a_collector_that_has_ended_keeps_the_time_seen_last(seconds):
    seconds[1] = 5.0
    times = CollectorTime(SimpleNamespace(pids=[1]))
    times.start()
    seconds[1] = 8.0
    times.sample()

    del seconds[1]

    assert _measured(times) == [3.0]


def test_the_time_of_a_collector_and_of_its_replacement_is_summed(seconds):
    seconds |= {1: 5.0, 2: 7.0}
    collector = SimpleNamespace(pids=[1])
    times = CollectorTime(collector)
    times.start()
    seconds[1] = 6.0
    times.sample()

    collector.pids = [2]

    assert _measured(times) == [1.0 + 7.0]


def test_a_collector_that_ended_before_the_start_has_no_time(seconds):
    times = CollectorTime(SimpleNamespace(pids=[1]))
    times.start()
    times.sample()
    assert times.busy == [0.0]


def test_this_process_is_busy():
    times = CollectorTime(SimpleNamespace(pids=[os.getpid()]))
    times.start()
    sum(range(2_000_000))
    times.sample()
    assert times.busy[0] > 0


def test_a_learner_that_waits_three_of_four_seconds_is_busy_for_a_quarter(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(hooks, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    busy = BusyTime()
    busy.arrived(None)
    clock.now = 1.0
    busy.finished(None)
    clock.now = 4.0
    busy.arrived(None)
    assert (busy.waited, busy.busy) == (3.0, 0.25)
