"""Collectors that replace workers they lose, and go on."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.support.acting import make_policy, set_action
from tests.support.collecting import BREAKING, CountingEnv, GatedEnv, HitEnv
from tests.support.processes import DEADLINE, live_children, wait_for
from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.data import PackedReplayWriter
from torchrl_unilab.errors import ConfigError, WorkerError
from torchrl_unilab.runtime import trace

ENVS, STEPS = 2, 4
FRAMES = ENVS * STEPS
FAULTS = ["SIGKILL", "SIGSTOP", "raise"]
MOSTLY = ["SIGKILL", *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS[1:])]
VERSION = ("next", "policy_version")
IDS = ("collector", "traj_ids")


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Collectors to shut down."""
    collectors: list[Any] = []
    yield collectors
    for collector in collectors:
        collector.shutdown()
    assert not live_children()


def _appo(opened: list[Any], factories: list[Any], **settings: Any) -> APPOCollector:
    settings = {"restart_workers": 1, "seed": 100, "timeout": DEADLINE, **settings}
    opened.append(APPOCollector(factories, make_policy(0.0), frames_per_batch=FRAMES, **settings))
    collector: APPOCollector = opened[-1]
    return collector


def _replay(opened: list[Any], factories: list[Any], **settings: Any) -> ReplayCollector:
    settings = {"restart_workers": 1, "seed": 100, "timeout": DEADLINE, **settings}
    opened.append(
        ReplayCollector(
            factories,
            make_policy(0.0),
            capacity=512,
            frames_per_batch=ENVS * STEPS * len(factories),
            **settings,
        )
    )
    collector: ReplayCollector = opened[-1]
    return collector


def _hit(tmp_path: Path, fault: str, at: int = 10) -> list[Any]:
    """Environments of two workers, of which the second is hit in its third rollout."""
    return [CountingEnv, partial(HitEnv, tmp_path / "mark", at, fault)]


def _end(collector: APPOCollector | ReplayCollector, *workers: int) -> None:
    """Kill workers and wait until they are dead."""
    processes = [psutil.Process(collector.pids[worker]) for worker in workers]
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(DEADLINE)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_free_running_collector_goes_on_with_a_worker_in_place_of_one_it_lost(
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


@pytest.mark.parametrize("fault", MOSTLY)
def test_in_lockstep_a_round_is_whole_though_a_worker_was_lost_in_it(fault, opened, tmp_path):
    collector = _appo(opened, _hit(tmp_path, fault), lockstep=True, total_frames=FRAMES * 12)
    seen = []
    for rollout in collector:
        seen.append(rollout)
        set_action(collector.policy, float(len(seen) // 2))
        collector.update_policy_weights_()
    assert len(seen) == 12
    assert collector.restarts == 1
    assert collector.storage.written == (6, 6)
    assert collector.metrics().frames == FRAMES * 12
    # All act with the weights of their round, also who came in its midst.
    actions = [float(rollout["action"].unique()) for rollout in seen]
    assert actions == [float(i // 2) for i in range(12)]


def test_a_worker_lost_after_its_rollout_of_a_round_is_not_asked_for_another(
    opened, tmp_path, monkeypatch
):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    factories = [partial(GatedEnv, gate, STEPS + 2), CountingEnv]
    collector = _appo(opened, factories, lockstep=True)
    batches = iter(collector)
    for _ in range(2):
        next(batches)
    group = collector._running()
    collect, send, sent = collector._collect, group.send, []

    def collect_and_lose(*how: Any) -> None:
        collect(*how)
        wait_for(lambda: collector.storage.written[1] == 2)
        _end(collector, 1)
        gate.write_bytes(b"")

    def noted(worker: int, *request: Any) -> None:
        sent.append((worker, request[0]))
        send(worker, *request)

    monkeypatch.setattr(group, "send", noted)
    with monkeypatch.context() as patch:
        patch.setattr(collector, "_collect", collect_and_lose)
        next(batches)
    next(batches)
    assert sent == [(0, "collect"), (1, "collect"), (1, "seed"), (1, "succeed")]
    assert collector.restarts == 1
    for _ in range(2):
        collector.update_policy_weights_()
        versions = [int(next(batches)[VERSION][0, 0]) for _ in range(2)]
        assert versions == [collector.scheme.version] * 2
    assert collector.storage.written == (4, 4)


@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
@pytest.mark.parametrize("fault", MOSTLY)
def test_a_replay_gets_all_rows_of_each_tick_though_a_worker_was_lost(
    fault, lockstep, opened, tmp_path
):
    collector = _replay(opened, _hit(tmp_path, fault), lockstep=lockstep)
    ticks = 6
    for _ in zip(range(ticks), collector, strict=False):
        pass
    assert collector.restarts == 1
    collector._settle()
    rows = collector.storage.get(torch.arange(collector.storage.size))
    frames = 2 * FRAMES * (ticks if lockstep else ticks + 1)
    assert len(rows) == collector.metrics().frames == frames
    # Each row is whole, and the next of its own observation.
    now, then = rows["observation"], rows["next", "observation"]
    assert torch.equal(now[:, 0], then[:, 0])
    assert torch.equal(now[:, 1] + 1, then[:, 1])
    assert torch.equal(now[:, 2] - 1, then[:, 2])


def test_rows_in_turn_are_collected_again_if_their_worker_is_lost_before_it_writes(
    opened, monkeypatch
):
    collector = _replay(opened, [CountingEnv] * 2, lockstep=True)
    batches = iter(collector)
    next(batches)
    group = collector._running()
    send, asked = group.send, []

    def send_and_lose(worker: int, *request: Any) -> None:
        if request == ("write",):
            asked.append(worker)
            if asked == [0]:
                _end(collector, 1)
        send(worker, *request)

    monkeypatch.setattr(group, "send", send_and_lose)
    next(batches)
    assert collector.restarts == 1
    assert collector.storage.size == collector.metrics().frames == 4 * FRAMES
    next(batches)
    assert collector.storage.size == 6 * FRAMES


def test_an_idle_worker_that_is_lost_is_replaced_when_it_is_asked(opened):
    collector = _replay(opened, [CountingEnv] * 2, lockstep=True, restart_workers=3)
    batches = iter(collector)
    next(batches)
    _end(collector, 0)
    states = collector.state_dict()["workers"]
    assert [state["frames"] for state in states] == [FRAMES, FRAMES]
    _end(collector, 1)
    next(batches)
    assert collector.storage.size == 4 * FRAMES
    _end(collector, 0)
    collector.set_seed(7)
    next(batches)
    assert collector.restarts == 3
    assert collector.metrics().frames == 6 * FRAMES


@pytest.mark.parametrize("fault", MOSTLY)
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
    batches = iter(collector)
    next(batches)
    wait_for(lambda: collector._frames_of(1) == 2 * FRAMES)
    _end(collector, 1)
    replace = collector._replace

    def replace_and_go_on(lost: WorkerError) -> set[int]:
        replaced = replace(lost)
        gate.write_bytes(b"")
        return replaced

    monkeypatch.setattr(collector, "_replace", replace_and_go_on)
    next(batches)
    collector._settle()
    assert collector.restarts == 1
    assert collector.storage.ptr == collector.metrics().frames == 3 * 2 * FRAMES


def test_in_lockstep_a_rollout_that_went_with_one_worker_is_not_charged_to_another(
    opened, tmp_path, monkeypatch
):
    hit = partial(HitEnv, tmp_path / "mark", STEPS + 2, "put")
    collector = _appo(opened, [CountingEnv, hit], lockstep=True, restart_workers=4)
    batches = iter(collector)
    writers = [int(next(batches)[IDS].flatten()[0]) % 2 for _ in range(2)]
    collect, process = collector._collect, psutil.Process(collector.pids[1])

    def collect_and_lose(*how: Any) -> None:
        collect(*how)
        process.wait(DEADLINE)  # its rollout is counted and lost
        wait_for(lambda: collector.storage.written == (2, 2))
        _end(collector, 0)  # its is there

    with monkeypatch.context() as patch:
        patch.setattr(collector, "_collect", collect_and_lose)
        writers.append(int(next(batches)[IDS].flatten()[0]) % 2)
    writers += [int(next(batches)[IDS].flatten()[0]) % 2 for _ in range(3)]
    assert writers == [0, 1] * 3
    assert collector.restarts == 2


def test_two_workers_lost_at_once_are_two_losses(opened):
    collector = _appo(opened, [CountingEnv] * 2, restart_workers=2)
    batches = iter(collector)
    next(batches)
    _end(collector, 0, 1)
    for _ in range(10):
        next(batches)
    assert collector.restarts == 2


def test_a_buffer_on_the_memory_does_not_go_to_the_worker_that_takes_a_place(opened):
    collector = _replay(opened, [CountingEnv] * 2)
    batches = iter(collector)
    next(batches)
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

    monkeypatch.setattr(collector._running(), "_start", none_left)
    _end(collector, 0)
    with pytest.raises(OSError, match="Too many open files"):
        deque(batches, maxlen=0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_interrupt_while_a_worker_is_replaced_leaves_a_collector_that_goes_on(
    opened, monkeypatch
):
    collector = _replay(opened, [CountingEnv] * 2, restart_workers=3)
    batches = iter(collector)
    next(batches)
    group = collector._running()
    ask = group.ask

    def interrupted(worker: int, *request: Any, **kwargs: Any) -> Any:
        if request[0] == "succeed":
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
        batches = iter(collector)
        next(batches)
    finally:
        trace.stop()
    _end(collector, 0)
    for _ in range(10):
        next(batches)
    assert collector.restarts == 1


def test_one_loss_too_many_is_an_error_that_names_its_cause(opened):
    collector = _appo(opened, [CountingEnv] * 2)
    batches = iter(collector)
    next(batches)
    _end(collector, 0)
    for _ in range(4):
        next(batches)
    assert collector.restarts == 1
    _end(collector, 1)
    with pytest.raises(WorkerError, match=r"collector 1, .* was ended by SIGKILL"):
        deque(batches, maxlen=0)


def _breaks_again(mark: Path) -> CountingEnv:
    """Cannot be made a second time by a worker."""
    if mark.exists():
        raise FileNotFoundError("the robot is gone")
    return CountingEnv()


def test_a_worker_that_fails_while_it_takes_a_place_counts_and_is_named(opened, tmp_path):
    mark = tmp_path / "mark"
    collector = _appo(opened, [partial(_breaks_again, mark)], restart_workers=3)
    batches = iter(collector)
    next(batches)
    mark.touch()
    _end(collector, 0)
    with pytest.raises(WorkerError, match="FileNotFoundError: the robot is gone"):
        deque(batches, maxlen=0)
    assert collector.restarts == 3


def test_a_fault_of_the_policy_itself_ends_the_run_after_so_many_restarts(opened):
    collector = _appo(opened, [CountingEnv] * 2, restart_workers=2)
    set_action(collector.policy, BREAKING * 2)
    collector.update_policy_weights_()
    with pytest.raises(WorkerError, match="ArithmeticError: the physics exploded"):
        deque(collector, maxlen=0)
    assert collector.restarts == 2


def test_a_replacement_goes_on_after_random_actions_and_does_not_repeat_them(opened):
    collector = _replay(opened, [CountingEnv], lockstep=True, init_random_frames=2 * FRAMES)
    batches = iter(collector)
    for _ in range(2):
        next(batches)
    _end(collector, 0)
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


def test_less_than_no_restarts_are_refused():
    with pytest.raises(ConfigError, match=r"restart_workers: -1 \(expected at least 0\)"):
        APPOCollector(CountingEnv, make_policy(), frames_per_batch=FRAMES, restart_workers=-1)
