"""`APPOCollector` whose workers collect ahead of the learner, fail, and end."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

import cloudpickle
import psutil
import pytest
import torch
from tensordict import TensorDictBase

from tests.support.acting import actions, begun, make_policy
from tests.support.bounds import DEADLINE, PROMPT
from tests.support.collecting import (
    BREAKING,
    ENVS,
    FRAMES,
    IDS,
    STEPS,
    VERSION,
    CountingEnv,
    GatedEnv,
    actor,
    appo_collector,
    env_for_parents_only,
    publish,
    publish_itself,
    writer_of,
)
from tests.support.processes import live_children, wait_for
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.errors import UsageError, WaitTimeoutError, WorkerError
from torchrl_unilab.weight_update import UniLabShmScheme


def test_rollouts_of_all_workers_come_without_gaps_and_in_order(free):
    last: dict[int, TensorDictBase] = {}
    for count, rollout in enumerate(free):
        writer = writer_of(rollout)
        if writer in last:
            before = last[writer][:, -1]
            going = ~before["next", "done"].squeeze(-1)
            assert torch.equal(
                before["next", "observation"][going], rollout["observation"][:, 0][going]
            )
            assert torch.equal(before[IDS][going], rollout[IDS][:, 0][going])
        last[writer] = rollout
        if count >= 12 and len(last) == 2:
            break
        assert count < 1000, "one worker never comes"
    assert free.dropped == 0
    assert len(set(free.pids)) == 2


def test_state_seed_and_reset_do_not_wait_for_the_learner(free):
    batches = iter(free)
    next(batches)
    began = time.monotonic()
    state = free.state_dict()
    free.load_state_dict(state)
    assert free.set_seed(5) == 9
    free.reset()
    assert time.monotonic() - began < PROMPT
    assert len(state["workers"]) == 2
    assert next(batches).batch_size == (ENVS, STEPS)


def test_making_a_collector_and_publishing_leave_the_learners_parameters_alone(free):
    pointers = [p.data_ptr() for p in free.policy.parameters()]
    publish(free, 0.5)
    tensors = [*free.policy.parameters(), *free.policy.buffers()]
    assert not any(tensor.is_shared() for tensor in tensors)
    assert [p.data_ptr() for p in free.policy.parameters()] == pointers
    assert all(p.requires_grad for p in free.policy.parameters())


def test_with_default_slots_a_rollout_is_at_most_one_version_behind(lone):
    batches = iter(lone)
    next(batches)  # began before what follows
    behind = set()
    for _ in range(20):
        version = publish_itself(lone)
        rollout = next(batches)
        [acted] = rollout[VERSION].unique().tolist()
        assert actions(rollout) == {float(acted)}
        assert acted in (version - 1, version)
        behind.add(version - acted)
    assert behind <= {0, 1}


def test_what_starts_after_a_publish_acts_with_it(lone):
    batches = iter(lone)
    next(batches)
    version = publish_itself(lone)
    next(batches)  # may have begun before; its slot is free from here on
    assert next(batches)[VERSION].unique().tolist() == [version]


def test_rollouts_that_are_too_far_behind_are_dropped_counted_and_replaced(lone, monkeypatch):
    monkeypatch.setattr(lone, "max_policy_lag", 0)
    batches = iter(lone)
    publish_itself(lone)
    next(batches)
    for _ in range(4):
        wait_for(lambda: len(lone.storage) == 1)
        version, stale = publish_itself(lone), lone.stale
        assert next(batches)[VERSION].unique().tolist() == [version]
        assert lone.stale == stale + 1
    monkeypatch.setattr(lone, "max_policy_lag", 1)
    wait_for(lambda: len(lone.storage) == 1)
    version, stale = publish_itself(lone), lone.stale
    assert next(batches)[VERSION].unique().tolist() == [version - 1]
    assert lone.stale == stale


def test_no_rollout_in_time_is_an_error_that_says_so(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # which nobody opens: the first rollout does not end
    with (
        appo_collector(make_policy(), partial(GatedEnv, gate, 2), timeout=0.2) as collector,
        pytest.raises(WaitTimeoutError, match=r"no rollout within 0\.2 s"),
    ):
        next(iter(collector))


def test_workers_have_time_to_close_environments_unless_they_may_hang(monkeypatch):
    collector = appo_collector(actor())
    group = collector._team.group  # not those of collectors that are deleted meanwhile
    stop = Mock(side_effect=group.stop)
    monkeypatch.setattr(group, "stop", stop)
    monkeypatch.setattr(collector, "iterator", _raising)
    with pytest.raises(RuntimeError, match="no rollout"):
        next(iter(collector))
    collector.shutdown()
    assert stop.call_args_list == [call(2.0), call(10.0)]


class _Open(CountingEnv):
    """Leaves a file of the process that closed it."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.is_closed = False  # TorchRL says so of what has been stepped
        self._directory = directory

    def close(self, **settings: bool) -> None:
        (self._directory / str(os.getpid())).touch()
        super().close(**settings)


def test_workers_that_end_close_their_environments(tmp_path):
    with appo_collector(make_policy(0.0), partial(_Open, tmp_path), num_collectors=2) as collector:
        pids = {*map(str, collector.pids)}
    assert pids <= {path.name for path in tmp_path.iterdir()}


def _raising() -> Iterator[TensorDictBase]:
    raise RuntimeError("no rollout")
    yield


def test_a_worker_whose_environment_raises_surfaces_with_its_traceback(lone):
    pids, batches = lone.pids, iter(lone)
    next(batches)
    publish(lone, 2 * BREAKING)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)collector 0, .*in _step.*the physics exploded"):
        list(batches)
    assert time.monotonic() - began < PROMPT
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_overwriting_drops_the_oldest_counts_them_and_brings_the_newest():
    with appo_collector(
        make_policy(0.0), slots=2, overflow="overwrite", total_frames=100_000
    ) as collector:
        batches = begun(collector)
        wait_for(lambda: collector.dropped >= 10)
        version = publish_itself(collector)
        dropped = collector.dropped
        wait_for(lambda: collector.dropped >= dropped + 4)
        rollout = next(batches)
        assert rollout[VERSION].unique().tolist() == [version]
        assert (rollout[IDS] > 4).all()  # the first ones are long gone
        collector.total_frames = 0
        assert list(batches) == []
        collector.state_dict()  # answered after the request to pause
        storage = collector.storage
        assert storage.read_count == 2
        assert storage.write_count == 2 + collector.dropped + len(storage)
        assert collector.metrics().frames == storage.write_count * FRAMES


def test_a_lease_that_an_interrupt_kept_from_the_collector_is_the_next_batch():
    with appo_collector(make_policy(0.0)) as collector:
        batches = begun(collector)
        kept_back = collector.storage.acquire(DEADLINE).rollout.clone()

        assert (next(batches) == kept_back).all()
        assert (next(batches)["observation"] != kept_back["observation"]).any()


def test_a_worker_whose_environment_cannot_be_made_is_an_error():
    with pytest.raises(WorkerError, match="FileNotFoundError: no such robot"):
        appo_collector(make_policy(), env_for_parents_only)
    with pytest.raises(ZeroDivisionError):
        appo_collector(make_policy(), lambda: 1 // 0)


def test_workers_end_at_once_where_what_comes_after_their_start_fails(monkeypatch):
    monkeypatch.setattr(UniLabShmScheme, "connect", Mock(side_effect=OSError("no memory")))
    others = {*live_children()}
    with pytest.raises(OSError, match="no memory") as held:
        appo_collector(make_policy())
    assert {*live_children()} <= others
    assert held.traceback  # with what was made of the collector


def _drain_slowly(collector: APPOCollector, batches: Iterator[TensorDictBase]) -> None:
    """Take rollouts so that there always is one."""
    began = time.monotonic()
    while time.monotonic() - began < PROMPT:
        wait_for(lambda: len(collector.storage) > 0)
        next(batches)


def test_a_killed_worker_surfaces_while_others_continue_and_all_ends(free):
    pids, batches = free.pids, iter(free)
    next(batches)
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"collector 1, process \d+, was ended by SIGKILL"):
        _drain_slowly(free, batches)
    assert time.monotonic() - began < PROMPT
    assert not any(psutil.pid_exists(pid) for pid in pids)
    free.shutdown()


def test_what_is_left_of_a_collector_goes_with_it():
    descriptors = len(os.listdir("/proc/self/fd"))
    collector = appo_collector(make_policy(), inline=True)
    next(iter(collector))
    del collector
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps, cloudpickle.dumps])
def test_a_collector_is_neither_copied_nor_pickled_and_continues(take, inline):
    with pytest.raises(UsageError, match=r"cannot copy or pickle APPOCollector: .* state_dict\(\)"):
        take(inline)
    gc.collect()  # what was left of a copy ended the workers
    assert next(iter(inline)).batch_size.numel() == FRAMES
