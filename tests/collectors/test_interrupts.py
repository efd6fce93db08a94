"""Collectors that Ctrl-C left in the midst of a request, and that go on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.support.acting import make_policy
from tests.support.collecting import CountingEnv
from tests.support.processes import DEADLINE, live_children
from torchrl_unilab.collectors import ReplayCollector

WORKERS = 2
FRAMES = 8 * WORKERS


def _collector(**settings: Any) -> ReplayCollector:
    return ReplayCollector(
        [CountingEnv] * WORKERS,
        make_policy(0.0),
        capacity=512,
        frames_per_batch=FRAMES,
        seed=100,
        timeout=DEADLINE,
        **settings,
    )


def _interrupt(collector: ReplayCollector, monkeypatch: pytest.MonkeyPatch, kind: str) -> list[str]:
    """Have Ctrl-C fall once after the first request of a kind, before its answer is read."""
    group, fallen = collector._running(), []
    send, receive = group.send, group.receive
    last = [""]

    def sent(worker: int, *request: Any) -> None:
        send(worker, *request)
        last[0] = request[0]

    def interrupted(worker: int, timeout: float | None = None) -> Any:
        if last[0] == kind and not fallen:
            fallen.append(kind)
            raise KeyboardInterrupt
        return receive(worker, timeout)

    monkeypatch.setattr(group, "send", sent)
    monkeypatch.setattr(group, "receive", interrupted)
    return fallen


@pytest.mark.parametrize("kind", ["collect", "write", "state"])
def test_a_collector_interrupted_before_an_answer_goes_on_as_one_that_was_not(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, rows, states = 6, [], []
    for interrupt in (False, True):
        with _collector(lockstep=True, total_frames=ticks * FRAMES) as collector:
            fallen = _interrupt(collector, monkeypatch, kind) if interrupt else []
            batches = iter(collector)
            for tick in range(ticks):
                try:
                    next(batches)
                except KeyboardInterrupt:
                    batches = iter(collector)
                    next(batches)
                if tick == 2:
                    with contextlib.suppress(KeyboardInterrupt):
                        collector.state_dict()
            assert next(batches, "the end") == "the end"
            assert fallen == ([kind] if interrupt else [])
            storage = collector.storage
            assert collector.metrics().frames == len(storage) == ticks * FRAMES
            rows.append(storage.get(torch.arange(len(storage))).clone())
            states.append(collector.state_dict()["frames"])
    assert states == [ticks * FRAMES] * 2
    assert (rows[0] == rows[1]).all()
    assert not live_children()
