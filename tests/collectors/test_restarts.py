"""Collectors that replace workers they lose, and go on."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.support.acting import begun, make_policy
from tests.support.collecting import FRAMES, IDS, STEPS, VERSION, CountingEnv, GatedEnv, HitEnv
from tests.support.processes import DEADLINE, live_children, wait_for
from torchrl_unilab.collectors import APPOCollector, ReplayCollector, team
from torchrl_unilab.data import PackedReplayWriter
from torchrl_unilab.errors import WorkerError
from torchrl_unilab.runtime import trace

SLOW = ("SIGSTOP", "raise")
FAULTS = ["SIGKILL", *(pytest.param(fault, marks=pytest.mark.slow) for fault in SLOW)]


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Collectors to shut down."""
    collectors: list[Any] = []
    yield collectors
    for collector in collectors:
        collector.shutdown()
    assert not live_children()


def _open(opened: list[Any], kind: type, factories: list[Any], **settings: Any) -> Any:
    settings = {"restart_workers": 1, "seed": 100, "timeout": DEADLINE, **settings}
    opened.append(kind(factories, make_policy(0.0), **settings))
    return opened[-1]


def _appo(opened: list[Any], factories: list[Any], **settings: Any) -> APPOCollector:
    return _open(opened, APPOCollector, factories, frames_per_batch=FRAMES, **settings)


def _replay(opened: list[Any], factories: list[Any], **settings: Any) -> ReplayCollector:
    size = {"capacity": 512, "frames_per_batch": FRAMES * len(factories)}
    return _open(opened, ReplayCollector, factories, **size, **settings)


def _hit(tmp_path: Path, fault: str, at: int = 10) -> list[Any]:
    """Environments of two workers, of which the second is hit in its third rollout."""
    return [CountingEnv, partial(HitEnv, tmp_path / "mark", at, fault)]


def _end(collector: APPOCollector | ReplayCollector, *workers: int) -> None:
    """Kill workers and wait until they are dead, as their collector will be told."""
    assert collector._team is not None
    processes = [collector._team.group._workers[worker].process for worker in workers]
    for process in processes:
        process.kill()
    for process in processes:
        assert wait_readable([process.sentinel], DEADLINE)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_free_running_collector_continues_with_a_worker_in_place_of_one_it_lost(
    fault, opened, tmp_path
):
    collector = _appo(opened, _hit(tmp_path, fault), slots=4)
    before = collector.pids
    drawn: dict[int, set[float]] = {}
    since: list[int] = []  # versions of rollouts since then
    for rollout in collector:
        numbers = rollout["observation"][..., 0].flatten().tolist()
        for episode, number in zip(rollout[IDS].flatten().tolist(), numbers, strict=True):
            drawn.setdefault(episode, set()).add(number)
        if collector.restarts:
            since.append(int(rollout[VERSION][0, 0]))
            if len(since) > 20 and collector.storage.written[1] > 5:
                break
        else:
            collector.update_policy_weights_()
    assert collector.restarts == collector.status()["restarts"] == 1
    assert collector.pids[0] == before[0]
    assert collector.pids[1] != before[1]
    # No two episodes have an id in common, also not one of the lost worker and one of the new.
    assert [numbers for numbers in drawn.values() if len(numbers) != 1] == []
    assert set(since[10:]) == {collector.scheme.version}  # the new one has the newest weights
    # What was told of is what was written, to a frame: the rollout in the making counts nowhere.
    wait_for(lambda: collector.metrics().frames == FRAMES * sum(collector.storage.written))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_replay_gets_all_rows_of_each_tick_though_a_worker_was_lost(fault, opened, tmp_path):
    collector = _replay(opened, _hit(tmp_path, fault))
    ticks = 6
    for _ in zip(range(ticks), collector, strict=False):
        pass
    assert collector.restarts == 1
    collector._finish_tick()
    rows = collector.storage.get(torch.arange(collector.storage.size))
    frames = 2 * FRAMES * (ticks + 1)
    assert len(rows) == collector.metrics().frames == frames
    # Each row is whole, and the next of its own observation.
    now, then = rows["observation"], rows["next", "observation"]
    assert torch.equal(now[:, 0], then[:, 0])
    assert torch.equal(now[:, 1] + 1, then[:, 1])
    assert torch.equal(now[:, 2] - 1, then[:, 2])


def test_an_idle_worker_that_is_lost_is_replaced_when_it_is_asked(opened):
    collector = _replay(opened, [CountingEnv] * 2, restart_workers=3)
    batches = begun(collector)
    collector._finish_tick()
    _end(collector, 0)
    states = collector.state_dict()["workers"]
    assert [state["frames"] for state in states] == [2 * FRAMES] * 2
    _end(collector, 1)
    next(batches)
    collector._finish_tick()
    assert collector.storage.size == 6 * FRAMES
    _end(collector, 0)
    collector.set_seed(7)
    next(batches)
    collector._finish_tick()
    assert collector.restarts == 3
    assert collector.metrics().frames == 8 * FRAMES


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_is_lost_when_it_is_asked_answers_when_it_is_replaced(
    fault, opened, tmp_path
):
    collector = _replay(opened, _hit(tmp_path, fault, at=0))
    batches = iter(collector)
    for _ in range(2):
        next(batches)
    states = collector.state_dict()["workers"]
    assert [state["frames"] for state in states] == [3 * FRAMES, 3 * FRAMES]
    next(batches)
    assert collector.restarts == 1


def test_a_tick_that_was_done_and_not_heard_of_is_not_taken_again(opened, tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    collector = _replay(opened, [partial(GatedEnv, gate, STEPS + 2), CountingEnv])
    batches = begun(collector)
    wait_for(lambda: int(collector._metrics.snapshot(1)["frames"]) == 2 * FRAMES)
    _end(collector, 1)
    renew = collector._team._start_replacement

    def renew_and_open(worker: int) -> None:
        renew(worker)
        gate.write_bytes(b"")

    monkeypatch.setattr(collector._team, "_start_replacement", renew_and_open)
    next(batches)
    collector._finish_tick()
    assert collector.restarts == 1
    assert collector.storage.ptr == collector.metrics().frames == 3 * 2 * FRAMES


def test_two_workers_lost_at_once_are_two_losses_and_each_is_reported(opened, monkeypatch):
    monkeypatch.setattr(team.torchrl_logger, "warning", warned := Mock())
    collector = _appo(opened, [CountingEnv] * 2, restart_workers=2)
    batches = begun(collector)
    _end(collector, 0, 1)
    for _ in range(10):
        next(batches)
    assert collector.restarts == 2
    told = "\n".join(str(one.args[0]) for one in warned.call_args_list)
    for count in (1, 2):
        assert re.search(rf"Collector [01] is replaced \({count} of 2 times\)\. .*SIGKILL", told)


def test_each_replacement_starts_from_further_seeds_of_its_run(opened, monkeypatch):
    seeds: list[tuple[int, int]] = []
    for first in (100, 7):
        collector = _replay(opened, [CountingEnv], restart_workers=2, seed=first)
        batches, ask = iter(collector), collector._team.group.ask

        def noted(worker: int, *request: Any, ask: Any = ask, **settings: Any) -> Any:
            if request[0] == "seed":
                seeds.append(request[1:])
            return ask(worker, *request, **settings)

        monkeypatch.setattr(collector._team.group, "ask", noted)
        for _ in range(2):
            next(batches)
            _end(collector, 0)
        next(batches)
    assert [len({*of_all}) for of_all in zip(*seeds, strict=True)] == [4, 4]
    assert max(of_env for of_env, _ in seeds) < 2**31  # environments count on from theirs


def test_a_buffer_on_the_memory_does_not_go_to_the_worker_that_takes_a_place(opened):
    collector = _replay(opened, [CountingEnv] * 2)
    batches = begun(collector)
    buffer = TensorDictReplayBuffer(
        storage=collector.storage,
        writer=PackedReplayWriter(),
        batch_size=8,
        collate_fn=lambda rows: rows,  # cannot be pickled
    )
    _end(collector, 0)
    for _ in range(3):
        next(batches)
    assert collector.restarts == 1
    assert len(buffer.sample()) == 8


def test_an_error_of_starting_a_worker_is_the_one_that_surfaces_and_all_end(opened, monkeypatch):
    collector = _appo(opened, [CountingEnv] * 3)
    pids, batches = collector.pids, iter(collector)
    next(batches)

    def none_left(index: int) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(collector._team.group, "_start", none_left)
    _end(collector, 0)
    with pytest.raises(OSError, match="Too many open files"):
        deque(batches, maxlen=0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_interrupt_while_a_worker_is_replaced_leaves_a_collector_that_continues(
    opened, monkeypatch
):
    collector = _replay(opened, [CountingEnv] * 2, restart_workers=3)
    batches = begun(collector)
    group = collector._team.group
    ask = group.ask

    def interrupted(worker: int, *request: Any, **kwargs: Any) -> Any:
        if request[0] == "resume":
            raise KeyboardInterrupt
        return ask(worker, *request, **kwargs)

    _end(collector, 0)
    with monkeypatch.context() as patch:
        patch.setattr(group, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            deque(batches, maxlen=0)
    batches = iter(collector)
    for _ in range(4):
        next(batches)
    assert collector.restarts == 2


def test_a_worker_is_replaced_though_the_trace_has_ended_that_it_would_join(opened, tmp_path):
    trace.start(tmp_path / "trace.json")
    try:
        collector = _appo(opened, [CountingEnv] * 2)
        batches = begun(collector)
    finally:
        trace.stop()
    _end(collector, 0)
    for _ in range(10):
        next(batches)
    assert collector.restarts == 1


def test_one_loss_too_many_is_an_error_that_names_its_cause(opened):
    collector = _appo(opened, [CountingEnv] * 2)
    batches = begun(collector)
    _end(collector, 0)
    for _ in range(4):
        next(batches)
    assert collector.restarts == 1
    _end(collector, 1)
    with pytest.raises(WorkerError, match=r"collector 1, .* was ended by SIGKILL"):
        deque(batches, maxlen=0)


def _breaks(mark: Path, *, once: bool = False) -> CountingEnv:
    """Cannot be made where there is a file, which the first worker removes if it is to be once."""
    if mark.exists():
        if once:
            mark.unlink()
        raise FileNotFoundError("the robot is gone")
    return CountingEnv()


def test_a_worker_that_fails_while_it_takes_a_place_counts_and_is_named(opened, tmp_path):
    mark = tmp_path / "mark"
    collector = _appo(opened, [partial(_breaks, mark)], restart_workers=3)
    batches = begun(collector)
    mark.touch()
    _end(collector, 0)
    with pytest.raises(WorkerError, match="FileNotFoundError: the robot is gone"):
        deque(batches, maxlen=0)
    assert collector.restarts == 3


def test_a_worker_lost_while_another_is_replaced_and_that_one_are_both_replaced(
    opened, monkeypatch
):
    collector = _replay(opened, [CountingEnv] * 2, restart_workers=2)
    batches = begun(collector)
    collector._finish_tick()
    group = collector._team.group
    ask = group.ask

    def losing(worker: int, *request: Any, **settings: Any) -> Any:
        if request[0] == "resume" and collector.restarts == 1:
            _end(collector, 1)
        return ask(worker, *request, **settings)

    monkeypatch.setattr(group, "ask", losing)
    _end(collector, 0)
    next(batches)
    collector._finish_tick()
    assert collector.restarts == 2
    assert collector.storage.ptr == collector.metrics().frames == 3 * 2 * FRAMES


def test_a_worker_that_takes_a_place_at_the_second_try_is_not_replaced_again(opened, tmp_path):
    mark = tmp_path / "mark"
    collector = _replay(opened, [partial(_breaks, mark, once=True)], restart_workers=3)
    batches = begun(collector)
    mark.touch()
    _end(collector, 0)
    next(batches)
    assert collector.restarts == 2


def test_a_worker_that_is_late_and_lives_on_is_not_replaced(opened, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # which nobody opens: the first rollout does not end
    collector = _replay(opened, [partial(GatedEnv, gate, 2)], timeout=0.2)
    with pytest.raises(WorkerError, match=r"collector 0, .* within 0\.2 s"):
        next(iter(collector))
    assert collector.restarts == 0


def test_a_replacement_continues_after_random_actions_and_does_not_repeat_them(opened):
    collector = _replay(opened, [CountingEnv], init_random_frames=2 * FRAMES)
    batches = begun(collector)
    collector._finish_tick()
    _end(collector, 0)
    next(batches)
    next(batches)
    actions = collector.storage.get(torch.arange(3 * FRAMES))["action"]
    assert (actions[: 2 * FRAMES] != 0.0).all()
    assert (actions[2 * FRAMES :] == 0.0).all()


def test_a_collector_is_shut_down_at_the_end_of_its_block_however_that_is_left():
    with contextlib.suppress(LookupError), _appo([], [CountingEnv] * 2) as collector:
        pids = collector.pids
        next(iter(collector))
        raise LookupError
    assert not any(psutil.pid_exists(pid) for pid in pids)
