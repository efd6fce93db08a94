"""Collectors that Ctrl-C left in the midst of a request, and that go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from tests.support.acting import make_policy
from tests.support.collecting import CountingEnv
from tests.support.interrupts import each_interrupt
from tests.support.processes import DEADLINE, live_children
from torchrl_unilab.collectors import (
    APPOCollector,
    ReplayCollector,
    replay,
    rollouts,
    service,
    worker,
)
from torchrl_unilab.runtime.workers import WorkerGroup

WORKERS = 3
TICKS = 6
BATCH = 8
SETTINGS: dict[str, Any] = {"lockstep": True, "seed": 100, "timeout": DEADLINE}


def _replay() -> ReplayCollector:
    return ReplayCollector(
        [CountingEnv] * WORKERS,
        make_policy(0.0),
        capacity=512,
        frames_per_batch=BATCH * WORKERS,
        total_frames=BATCH * WORKERS * TICKS,
        **SETTINGS,
    )


def _appo() -> APPOCollector:
    return APPOCollector(
        [CountingEnv] * WORKERS,
        make_policy(0.0),
        frames_per_batch=BATCH,
        total_frames=BATCH * WORKERS * TICKS,
        **SETTINGS,
    )


class _Interrupt:
    """Has Ctrl-C fall once around a call for the second worker of a group.

    Args:
        group: Of workers.
        call: The call.
        after: The newest request then.
        late: Whether Ctrl-C falls after the call, whose result is lost.
    """

    def __init__(self, group: WorkerGroup, call: str, after: str, late: bool) -> None:
        self.newest, self.call, self.after, self.fallen, self.count = "", call, after, False, 0
        self.late = late
        self.real = {name: getattr(group, name) for name in ("send", "receive", "ask")}
        for name in self.real:
            setattr(group, name, lambda *args, name=name, **kw: self._called(name, *args, **kw))

    def _called(self, name: str, *args: Any, **kw: Any) -> Any:
        if name == self.call and self.newest == self.after and not self.fallen:
            self.count += 1
            if self.count == 2:
                self.fallen = True
                if self.late:
                    self.real[name](*args, **kw)
                raise KeyboardInterrupt
        if name in ("send", "ask"):
            self.newest = args[1]
        return self.real[name](*args, **kw)


def _batches(collector: Any) -> Iterator[Any]:
    """All batches, of as many iterators as it takes."""
    whole = False
    while not whole:
        with contextlib.suppress(KeyboardInterrupt):
            yield from collector
            whole = True


LATE = pytest.mark.parametrize("late", [False, True], ids=["before", "after"])


def _rows(collector: ReplayCollector) -> TensorDictBase:
    """The rows of all ticks; the state of the collector is asked for in between."""
    for tick, _ in enumerate(_batches(collector)):
        if tick == 2:
            with contextlib.suppress(KeyboardInterrupt):
                collector.state_dict()
    storage = collector.storage
    assert collector.metrics().frames == len(storage) == collector.state_dict()["frames"]
    return storage.get(torch.arange(len(storage))).clone()


def _rollouts(collector: APPOCollector) -> list[TensorDictBase]:
    """All rollouts; the state of the collector is asked for within a round."""
    rollouts = []
    for rollout in _batches(collector):
        rollouts.append(rollout)
        if len(rollouts) == WORKERS + 1:
            assert len(collector.state_dict()["waiting"]) == WORKERS - 1
    assert collector.metrics().frames == TICKS * WORKERS * BATCH
    return rollouts


@pytest.fixture(scope="module")
def rows() -> TensorDictBase:
    """Rows of a collector that was not interrupted."""
    with _replay() as collector:
        return _rows(collector)


@pytest.fixture(scope="module")
def uninterrupted() -> list[TensorDictBase]:
    """Rollouts of a collector that was not interrupted."""
    with _appo() as collector:
        return _rollouts(collector)


@LATE
@pytest.mark.parametrize(
    ("call", "after"), [("send", "collect"), ("receive", "collect"), ("ask", "state")]
)
def test_a_replay_collector_continues_as_one_that_was_not_interrupted(rows, call, after, late):
    with _replay() as collector:
        fault = _Interrupt(collector._team.group, call, after, late)
        found = _rows(collector)
    assert fault.fallen
    assert len(found) == TICKS * BATCH * WORKERS
    assert (found == rows).all()
    assert not live_children()


@LATE
@pytest.mark.parametrize("call", ["send", "receive"])
def test_rounds_in_lockstep_are_whole_though_one_was_interrupted(uninterrupted, call, late):
    with _appo() as collector:
        fault = _Interrupt(collector._team.group, call, "collect", late)
        found = _rollouts(collector)
    assert fault.fallen
    assert len(found) == TICKS * WORKERS
    assert all((one == other).all() for one, other in zip(uninterrupted, found, strict=True))
    assert not live_children()


def _follows(rows: TensorDictBase) -> bool:
    """Whether each row's next observation is that of its own episode and step."""
    now, then = rows["observation"], rows["next", "observation"]
    return torch.equal(now + torch.tensor([0.0, 1.0, -1.0]), then)


TICK = 4  # frames, which are two steps
INLINE: dict[str, Any] = {"frames_per_batch": TICK, "inline": True, "timeout": DEADLINE}


def test_rollouts_of_an_inline_collector_are_whole_after_ctrl_c_anywhere_in_a_tick():
    with APPOCollector(CountingEnv, make_policy(0.0), **INLINE) as collector:
        for interrupt in each_interrupt(service, rollouts, worker, least=100, step=3):
            ticks = iter(collector)  # kept: Python 3.12 traces the end of a generator, too
            interrupt.during(partial(next, ticks))
            assert _follows(next(iter(collector)))
            assert not collector.storage.leases


def test_rows_of_an_inline_collector_are_whole_after_ctrl_c_anywhere_in_a_tick():
    with ReplayCollector(CountingEnv, make_policy(0.0), capacity=TICK, **INLINE) as collector:
        for interrupt in each_interrupt(service, replay, worker, least=100, step=3):
            before, come = collector.storage.ptr, collector._team.ticks
            ticks = iter(collector)  # kept: Python 3.12 traces the end of a generator, too
            interrupt.during(partial(next, ticks))
            next(iter(collector))
            assert _follows(collector.storage.get(torch.arange(TICK)))
            assert collector.storage.ptr - before == TICK * (collector._team.ticks - come)
