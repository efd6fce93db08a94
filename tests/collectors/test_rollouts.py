from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import Mock

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvCreator, TransformedEnv, VecNorm
from torchrl.envs.utils import ExplorationType

from tests.support.acting import actions, make_policy, set_action
from tests.support.bounds import DEADLINE, PROMPT
from tests.support.collecting import (
    BREAKING,
    CountingEnv,
    GatedEnv,
    actor,
    env_for_parents_only,
    gym_env,
    parallel_env,
    state_env,
    transformed_env,
)
from tests.support.processes import wait_for
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.collectors import base as base_module
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import (
    ConfigError,
    SegmentClosedError,
    UsageError,
    WaitTimeoutError,
    WorkerError,
)
from torchrl_unilab.modules import make_actor
from torchrl_unilab.runtime.workers import WorkerGroup
from torchrl_unilab.weight_update import UniLabShmScheme

ENVS, STEPS = 2, 4
FRAMES = ENVS * STEPS
VERSION = ("next", "policy_version")
IDS = ("collector", "traj_ids")


def _collector(policy, create_env=CountingEnv, **kwargs) -> APPOCollector:
    settings = {"frames_per_batch": FRAMES, "seed": 100, "timeout": DEADLINE}
    return APPOCollector(create_env, policy, **{**settings, **kwargs})


@pytest.fixture(scope="module")
def kept() -> Iterator[Callable[..., APPOCollector]]:
    """Collectors that several tests use, by their settings; made again if one was shut down."""
    collectors: dict[str, APPOCollector] = {}

    def get(**settings: object) -> APPOCollector:
        name = str(settings)
        if name not in collectors or collectors[name]._team.stopped:
            collectors[name] = _collector(make_policy(0.0), **settings)
        return collectors[name]

    yield get
    for collector in collectors.values():
        collector.shutdown()


@pytest.fixture
def free(kept) -> APPOCollector:
    """Two workers that collect ahead."""
    return kept(num_collectors=2)


@pytest.fixture
def lone(kept) -> APPOCollector:
    """One worker that collects ahead."""
    return kept()


@pytest.fixture
def pair(kept) -> APPOCollector:
    """Two workers in lockstep."""
    return kept(num_collectors=2, lockstep=True)


@pytest.fixture
def inline() -> Iterator[APPOCollector]:
    collector = _collector(make_policy(0.0), inline=True)
    yield collector
    collector.shutdown()


def _publish(collector: APPOCollector, value: float) -> int:
    """Let actions be `value`; return the version."""
    set_action(collector.policy, value)
    collector.update_policy_weights_()
    return collector.scheme.version


def _publish_itself(collector: APPOCollector) -> int:
    """Let actions be the number of the version."""
    return _publish(collector, float(collector.scheme.version + 1))


def _writer(rollout: TensorDictBase) -> int:
    [writer] = (rollout[IDS] % 2).unique().tolist()
    return writer


def _data(rollout: TensorDictBase) -> TensorDictBase:
    """What does not count on from earlier rollouts."""
    return rollout.exclude(VERSION, IDS)


# In this process


def test_rollouts_come_in_torchrls_form_until_the_frames_are_there(inline):
    inline.total_frames = 3 * FRAMES - 1
    assert len(inline) == 3
    rollouts = list(inline)
    assert len(rollouts) == 3
    assert rollouts[0].batch_size == (ENVS, STEPS)
    assert set(rollouts[0].keys(True, True)) == {
        "observation",
        "action",
        "done",
        "terminated",
        "truncated",
        ("next", "observation"),
        ("next", "reward"),
        ("next", "done"),
        ("next", "terminated"),
        ("next", "truncated"),
        VERSION,
        IDS,
    }
    together = torch.cat(rollouts, 1)
    assert together["observation"][0, :, 1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert list(inline) == []
    assert (inline.dropped, inline.stale, inline.pids) == (0, 0, [])
    assert repr(inline) == "APPOCollector(num_workers=1, frames_per_batch=8, lockstep=True)"


def test_metrics_follow_the_rollouts(inline):
    inline.total_frames = 6 * FRAMES
    together = torch.cat(list(inline), 1)
    metrics = inline.metrics()
    assert metrics.frames == together.numel()
    assert metrics.episodes == together["next", "done"].sum() == 4 + 4
    assert metrics.episode_length == 5.5
    assert metrics.timeout_rate == 1.0
    drawn = together["observation"][together["next", "done"].squeeze(-1)][:, 0]
    lengths = torch.tensor([5.0] * 4 + [6.0] * 4)
    assert metrics.episode_return == pytest.approx((drawn * lengths).mean().item())
    inline.reset()
    inline.total_frames += FRAMES
    assert (next(iter(inline))["observation"][:, 0, 1] == 0).all()
    assert inline.metrics().episodes == 8


@pytest.mark.parametrize(
    ("create_env", "shape", "keys"),
    [
        (state_env, (2, 4), {("critic", "state"), ("next", "critic", "state")}),
        (transformed_env, (4, 2), {"step_count", "episode_reward", ("next", "critic", "state")}),
        (gym_env, (8,), {"observation"}),
    ],
)
def test_any_environments_keys_travel(create_env, shape, keys):
    collector = _collector(actor(), create_env, inline=True, total_frames=2 * FRAMES)
    for rollout in collector:
        assert rollout.batch_size == shape
        assert keys | {"action_log_prob", VERSION} <= set(rollout.keys(True, True))
    if ("critic", "state") in keys:
        expected = rollout["next", "observation"] * 10
        assert torch.equal(rollout["next", "critic", "state"], expected)
    collector.shutdown()


def test_a_worker_may_have_processes_of_its_own():
    collector = _collector(actor(), parallel_env, total_frames=2 * FRAMES)
    rollouts = list(collector)
    assert [rollout.batch_size for rollout in rollouts] == [(2, 4)] * 2
    assert collector.metrics().frames >= 2 * FRAMES
    collector.shutdown()


def test_seeds_are_repeatable_and_the_process_keeps_its_own_randomness():
    policy = actor()
    rollouts = []
    for own, seed in enumerate((1, 1, 2)):
        before = torch.manual_seed(own).get_state()
        collector = _collector(policy, inline=True, seed=seed, total_frames=3 * FRAMES)
        rollouts.append(torch.stack(list(collector)))
        collector.shutdown()
        assert torch.equal(torch.get_rng_state(), before)
    assert (rollouts[0] == rollouts[1]).all()
    assert not (rollouts[0]["action"] == rollouts[2]["action"]).any()
    assert not (rollouts[0]["observation"][..., 0] == rollouts[2]["observation"][..., 0]).any()


def test_a_collector_without_a_seed_takes_another_one_each_time():
    collectors = [_collector(make_policy(), inline=True, seed=None) for _ in range(2)]
    first, second = (next(iter(collector))["observation"] for collector in collectors)
    assert not torch.equal(first, second)
    for collector in collectors:
        collector.shutdown()


BAD = {
    "frames": ({"frames_per_batch": 7}, r"a multiple of 2, 1 worker\(s\) with 2 env"),
    "no frames": ({"frames_per_batch": 0}, "frames_per_batch: 0"),
    "no workers": ({"num_collectors": 0}, r"num_collectors: 0 \(expected an integer of at least 1"),
    "half a worker": ({"num_collectors": 0.5}, r"num_collectors: 0.5 \(expected an integer"),
    "frames that are no integer": ({"frames_per_batch": 8.0}, "frames_per_batch: 8.0"),
    "no functions": ({"create_env": []}, "0 environment functions"),
    "no environment": ({"create_env": lambda: 3}, r"create_env: it returned int \(expected an env"),
    "no function": ({"create_env": [3]}, r"create_env: int \(expected a function that makes an"),
    "another number": ({"create_env": [CountingEnv], "num_collectors": 2}, "1 environment func"),
    "no scheme of ours": ({"weight_sync_schemes": {"policy": object()}}, "UniLabShmScheme"),
    "no policy": ({"weight_sync_schemes": {"value": UniLabShmScheme()}}, "weight_sync_schemes"),
    "two inline": ({"inline": True, "num_collectors": 2}, "Use lockstep=True"),
    "few slots": ({"lockstep": True, "num_collectors": 3, "slots": 2}, "one per worker"),
    "no slots": ({"slots": 0}, "slots"),
    "negative lag": ({"max_policy_lag": -1}, "max_policy_lag: -1"),
    "overflow": ({"overflow": "spill"}, "overflow"),
    "restarts": ({"restart_workers": -1}, r"restart_workers: -1 \(expected an integer of at"),
    "half a restart": ({"restart_workers": 1.5}, r"restart_workers: 1.5 \(expected an integer"),
    "no number of frames": ({"total_frames": float("nan")}, "total_frames: nan .expected an int"),
    "half a seed": ({"seed": 1.5}, "seed: 1.5 .expected an integer of at least 0"),
    "too large a seed": (
        {"seed": 2**64},
        f"seed: {2**64} .expected an integer of 0 to {2**63 - 1}",
    ),
    "no threads": ({"num_threads": 0}, "num_threads: 0 .expected an integer"),
    "no place": ({"worker_idx": -1}, "worker_idx: -1 .expected an integer of at least 0"),
    "no time": ({"timeout": float("nan")}, "timeout: nan .expected seconds of at least 0"),
    "a switch of slots": ({"slots": True, "inline": True}, "slots: True .expected an integer"),
    "a switch of lag": ({"max_policy_lag": True}, "max_policy_lag: True .expected an integer"),
    "lockstep": ({"restart_workers": 1, "lockstep": True}, r"restart_workers: 1 .*0 in lock-step"),
    "inline": ({"restart_workers": 1, "inline": True}, r"restart_workers: 1 .*0 in lock-step"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_any_process_starts(case, monkeypatch):
    settings, match = BAD[case]
    monkeypatch.setattr(base_module, "WorkerGroup", pytest.fail)
    with pytest.raises(ConfigError, match=match):
        _collector(make_policy(), **settings)


def test_after_shutdown_everything_is_refused_but_another_shutdown(inline):
    batches = iter(inline)
    next(batches)
    state, storage = inline.state_dict(), inline.storage
    inline.shutdown()
    inline.shutdown()
    with pytest.raises(SegmentClosedError):
        storage.acquire()
    for use in (
        lambda: next(batches),
        lambda: next(iter(inline)),
        lambda: inline.set_seed(1),
        inline.reset,
        inline.metrics,
        inline.state_dict,
        lambda: inline.load_state_dict(state),
        lambda: inline.storage,
        lambda: inline.dropped,
        inline.update_policy_weights_,
    ):
        with pytest.raises(SegmentClosedError, match="Build a new one"):
            use()


def test_what_the_environment_raises_in_this_process_reaches_the_caller(inline):
    batches = iter(inline)
    next(batches)
    _publish(inline, 2 * BREAKING)
    with pytest.raises(ArithmeticError, match="exploded"):
        next(batches)


# In lockstep


def test_environments_of_different_workers_have_different_seeds(pair):
    assert pair.set_seed(50) == 54
    batches = iter(pair)
    expected = [np.random.default_rng(50 + i).random() for i in range(4)]
    starts = [next(batches)["observation"][:, 0] for _ in range(2)]
    assert torch.cat(starts)[:, 0].tolist() == pytest.approx(expected)
    assert (torch.cat(starts)[:, 1] == 0).all()
    pair.set_seed(60, static_seed=True)
    first, second = (next(batches)["observation"][:, 0] for _ in range(2))
    assert torch.equal(first, second)


def test_in_lockstep_rollouts_come_in_the_workers_order_with_exactly_what_was_published(pair):
    batches = iter(pair)
    for _ in range(4):
        version = _publish_itself(pair)
        for worker in range(2):
            rollout = next(batches)
            assert _writer(rollout) == worker
            assert rollout[VERSION].unique().tolist() == [version]
            assert actions(rollout) == {float(version)}


def _run(collector: APPOCollector, rounds: int = 4) -> list[TensorDictBase]:
    """Rollouts of the same seed and weights, published between rounds."""
    batches, rollouts = iter(collector), []
    collector.set_seed(7)
    for round_ in range(rounds):
        _publish(collector, round_ / 4)
        rollouts += [next(batches) for _ in range(collector.num_workers)]
    return rollouts


def test_lockstep_is_repeatable_bit_for_bit_and_equal_to_the_serial_collector(pair, inline):
    once, again, serial = _run(pair), _run(pair), _run(inline)
    assert all((_data(a) == _data(b)).all() for a, b in zip(once, again, strict=True))
    assert all((_data(a) == _data(b)).all() for a, b in zip(once[::2], serial, strict=True))
    assert not (once[0]["observation"] == once[1]["observation"])[..., 0].any()


def test_an_iteration_that_was_broken_off_within_a_round_goes_on(pair):
    pair.set_seed(3)
    order = [_writer(rollout) for rollout, _ in zip(pair, range(3), strict=False)]
    order += [_writer(rollout) for rollout, _ in zip(pair, range(4), strict=False)]
    # A rollout that zip took and threw away is the fourth.
    assert order == [0, 1, 0, 0, 1, 0, 1]


def test_borrowed_rollouts_are_given_back_when_an_iteration_is_broken_off(pair, monkeypatch):
    monkeypatch.setattr(pair, "use_buffers", True)
    batches = iter(pair)
    first = next(batches)
    before = first.clone()
    assert first.is_locked
    slots = {first["action"].data_ptr()} | {next(batches)["action"].data_ptr() for _ in range(5)}
    assert len(slots) == 2
    assert not (before == first).all()
    batches.close()
    rollouts = [rollout for rollout, _ in zip(pair, range(8), strict=False)]
    assert len(rollouts) == 8
    monkeypatch.setattr(pair, "use_buffers", False)
    batches = iter(pair)
    copy = next(batches)
    before = copy.clone()
    for _ in range(4):
        next(batches)
    assert (copy == before).all()


def test_a_state_with_rollouts_of_another_length_is_refused(pair):
    state = pair.state_dict()
    state["waiting"] = [((ENVS, STEPS + 1), {})]
    with pytest.raises(ConfigError, match=r"rollouts of \(2, 5\) \(expected \(2, 4\)\)"):
        pair.load_state_dict(state)


@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_what_waits_of_a_round_is_restored_whatever_the_environments_batch(batch):
    env = partial(CountingEnv, batch)
    with _collector(make_policy(0.0), [env, env], lockstep=True) as collector:
        batches = iter(collector)
        while not (state := collector.state_dict())["waiting"]:
            next(batches)
        collector.load_state_dict(state)
        assert next(batches).batch_size == (*batch, FRAMES // max(1, math.prod(batch)))


def test_a_state_restores_frames_and_noise(pair):
    batches = iter(pair)
    while not (state := pair.state_dict())["waiting"]:  # the other of a round of two
        next(batches)
    frames, totals = state["frames"], [worker["frames"] for worker in state["workers"]]
    next(batches)
    for _ in range(2):
        pair.load_state_dict(state)
        lag = pair.scheme.version + 1 - next(batches)[VERSION].max()
        assert lag == state["version"] - state["waiting"][0][1]["next"]["policy_version"].max()
    pair.load_state_dict(state)
    assert pair.state_dict()["frames"] == frames
    assert [worker["frames"] for worker in pair.state_dict()["workers"]] == totals
    with pytest.raises(ValueError, match="state of 1 workers"):
        pair.load_state_dict({**state, "workers": state["workers"][:1]})


# Ahead of the learner


def test_rollouts_of_all_workers_come_without_gaps_and_in_order(free):
    last: dict[int, TensorDictBase] = {}
    for count, rollout in enumerate(free):
        writer = _writer(rollout)
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
    _publish(free, 0.5)
    tensors = [*free.policy.parameters(), *free.policy.buffers()]
    assert not any(tensor.is_shared() for tensor in tensors)
    assert [p.data_ptr() for p in free.policy.parameters()] == pointers
    assert all(p.requires_grad for p in free.policy.parameters())


def test_with_default_slots_a_rollout_is_at_most_one_version_behind(lone):
    batches = iter(lone)
    next(batches)  # began before what follows
    behind = set()
    for _ in range(20):
        version = _publish_itself(lone)
        rollout = next(batches)
        [acted] = rollout[VERSION].unique().tolist()
        assert actions(rollout) == {float(acted)}
        assert acted in (version - 1, version)
        behind.add(version - acted)
    assert behind <= {0, 1}


def test_what_starts_after_a_publish_acts_with_it(lone):
    batches = iter(lone)
    next(batches)
    version = _publish_itself(lone)
    next(batches)  # may have begun before; its slot is free from here on
    assert next(batches)[VERSION].unique().tolist() == [version]


def test_rollouts_that_are_too_far_behind_are_dropped_counted_and_replaced(lone, monkeypatch):
    monkeypatch.setattr(lone, "max_policy_lag", 0)
    batches = iter(lone)
    _publish_itself(lone)
    next(batches)
    for _ in range(4):
        wait_for(lambda: len(lone.storage) == 1)
        version, stale = _publish_itself(lone), lone.stale
        assert next(batches)[VERSION].unique().tolist() == [version]
        assert lone.stale == stale + 1
    monkeypatch.setattr(lone, "max_policy_lag", 1)
    wait_for(lambda: len(lone.storage) == 1)
    version, stale = _publish_itself(lone), lone.stale
    assert next(batches)[VERSION].unique().tolist() == [version - 1]
    assert lone.stale == stale


def test_no_rollout_in_time_is_an_error_that_says_so(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # which nobody opens: the first rollout does not end
    with (
        _collector(make_policy(), partial(GatedEnv, gate, 2), timeout=0.2) as collector,
        pytest.raises(WaitTimeoutError, match=r"no rollout within 0\.2 s"),
    ):
        next(iter(collector))


def test_workers_have_time_to_close_environments_unless_they_may_hang(monkeypatch):
    given, stop = [], WorkerGroup.stop

    def noting(group: WorkerGroup, timeout: float) -> None:
        given.append(timeout)
        stop(group, timeout)

    monkeypatch.setattr(WorkerGroup, "stop", noting)
    collector = _collector(actor())
    monkeypatch.setattr(collector, "iterator", _raising)
    with pytest.raises(RuntimeError, match="no rollout"):
        next(iter(collector))
    collector.shutdown()
    assert given == [2.0, 10.0]


def _raising() -> Iterator[TensorDictBase]:
    raise RuntimeError("no rollout")
    yield


def test_a_worker_whose_environment_raises_surfaces_with_its_traceback(lone):
    pids, batches = lone.pids, iter(lone)
    next(batches)
    _publish(lone, 2 * BREAKING)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)collector 0, .*in _step.*the physics exploded"):
        list(batches)
    assert time.monotonic() - began < PROMPT
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_overwriting_drops_the_oldest_counts_them_and_brings_the_newest():
    collector = _collector(make_policy(0.0), slots=2, overflow="overwrite", total_frames=100_000)
    try:
        batches = iter(collector)
        next(batches)
        wait_for(lambda: collector.dropped >= 10)
        version = _publish_itself(collector)
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
    finally:
        collector.shutdown()


def test_a_lease_that_an_interrupt_kept_from_the_collector_is_the_next_batch():
    collector = _collector(make_policy(0.0))
    try:
        batches = iter(collector)
        next(batches)
        kept_back = collector.storage.acquire(DEADLINE).rollout.clone()

        assert (next(batches) == kept_back).all()
        assert (next(batches)["observation"] != kept_back["observation"]).any()
    finally:
        collector.shutdown()


def test_a_worker_whose_environment_cannot_be_made_is_an_error():
    with pytest.raises(WorkerError, match="FileNotFoundError: no such robot"):
        _collector(make_policy(), env_for_parents_only)
    with pytest.raises(ZeroDivisionError):
        _collector(make_policy(), lambda: 1 // 0)


def _drain_slowly(collector: APPOCollector, batches: Iterator[TensorDictBase]) -> None:
    """Take rollouts so that there always is one."""
    began = time.monotonic()
    while time.monotonic() - began < PROMPT:
        wait_for(lambda: len(collector.storage) > 0)
        next(batches)


def test_a_killed_worker_surfaces_while_others_go_on_and_all_ends(free):
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
    collector = _collector(make_policy(), inline=True)
    next(iter(collector))
    del collector
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps, cloudpickle.dumps])
def test_a_collector_is_neither_copied_nor_pickled_and_goes_on(take, inline):
    with pytest.raises(UsageError, match=r"cannot copy or pickle APPOCollector: .* state_dict\(\)"):
        take(inline)
    gc.collect()  # what was left of a copy ended the workers
    assert next(iter(inline)).batch_size.numel() == FRAMES


# Other devices, further metrics


def _pendulum(steps: int | None = None) -> MujocoBatchEnv:
    return MujocoBatchEnv("InvertedPendulum-v5", ENVS, num_threads=1, max_episode_steps=steps)


# "cpu:0" is another name of the processor, which is told from "cpu" as an accelerator is.
@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("inline", [True, False])
def test_a_policy_on_another_device_acts_as_on_the_processor(device, inline):
    policy, batches = make_actor(4, 1), []
    for policy_device in ("cpu", device):
        deterministic = {"exploration_type": ExplorationType.DETERMINISTIC, "inline": inline}
        collector = _collector(
            policy, _pendulum, policy_device=policy_device, lockstep=True, **deterministic
        )
        with collector:
            torch.nn.init.constant_(policy.module[0].net[-1].bias, 0.25)
            collector.update_policy_weights_()
            batches.append(next(iter(collector)).clone())
    for key in ("action", ("next", "observation"), VERSION):
        assert torch.equal(*(batch[key] for batch in batches))
        assert batches[1][key].device == torch.device("cpu")


@pytest.mark.parametrize("inline", [True, False])
def test_what_workers_measure_is_among_the_metrics(inline):
    def limit(env: MujocoBatchEnv) -> dict[str, float]:
        return {"limit": env.max_episode_steps}

    cases = ({}, {"reward_survive": 1.0}), ({"measure": limit}, {"limit": 1000.0})
    for measure, expected in cases:
        collector = _collector(make_actor(4, 1), _pendulum, inline=inline, **measure)
        with collector:
            next(iter(collector))
            wait_for(lambda started=collector: started.metrics().frames > 0)
            assert collector.metrics().values == expected


def _named(env: MujocoBatchEnv) -> dict[str, float]:
    return {"both": 1.0, str(env.max_episode_steps): 2.0}


def test_what_the_first_worker_does_not_measure_is_left_out():
    envs = [partial(_pendulum, steps) for steps in (5, 7)]
    with _collector(make_actor(4, 1), envs, measure=_named) as collector:
        for _ in collector:  # either worker may be the first
            if not math.isnan(collector.metrics().values["5"]):
                break
        assert collector.metrics().values == {"both": 1.0, "5": 2.0}


class Agents(CountingEnv):
    """`CountingEnv` with a reward each for two agents: a third and two thirds."""

    def __init__(self) -> None:
        super().__init__()
        shape = self.batch_size
        inner = Composite(reward=Unbounded((*shape, 2, 1)), shape=shape)
        self.reward_spec = Composite(agents=inner, shape=shape)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        share = torch.tensor([[1.0], [2.0]]) / 3.0
        out["agents"] = TensorDict(reward=out.pop("reward").unsqueeze(-1) * share, batch_size=ENVS)
        return out


def test_returns_are_sums_over_all_rewards_of_an_environment():
    def mean_return(create_env) -> float:
        collector = _collector(make_policy(0.0), create_env, total_frames=64, inline=True)
        for _ in collector:
            found = collector.metrics().episode_return
        collector.shutdown()
        return found

    assert mean_return(Agents) == pytest.approx(mean_return(CountingEnv))


@pytest.mark.filterwarnings("ignore:Support of VecNormV2:UserWarning")
def test_an_inline_collector_begins_with_an_environment_that_has_learnt_nothing():
    def make() -> TransformedEnv:
        return TransformedEnv(CountingEnv(), VecNorm(in_keys=["observation"], new_api=True))

    def first(**mode: bool) -> torch.Tensor:
        with _collector(make_policy(0.0), make, total_frames=FRAMES, **mode) as collector:
            return next(iter(collector))["observation"].clone()

    assert first(inline=True).equal(first(lockstep=True))


def test_an_inline_collector_leaves_open_the_one_environment_that_its_function_has():
    env = CountingEnv()
    env.is_closed = False  # TorchRL says so of what has not been stepped
    with _collector(make_policy(0.0), lambda: env, total_frames=FRAMES, inline=True) as collector:
        assert not env.is_closed
        assert len(list(collector)) == 1


@pytest.mark.filterwarnings("ignore:This class is to be deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:VecNorm was.*initialized:UserWarning")
def test_workers_share_what_an_environment_creator_shares():
    def make() -> TransformedEnv:
        return TransformedEnv(CountingEnv(), VecNorm(in_keys=["observation"], new_api=False))

    def counted() -> float:
        with contextlib.closing(create()) as env:
            return float(env.state_dict()["_extra_state"]["observation_count"].sum())

    create = EnvCreator(make)
    before = counted()
    collector = _collector(make_policy(0.0), create, total_frames=2 * FRAMES)
    assert len(list(collector)) == 2
    collector.shutdown()
    assert counted() - before > 2 * FRAMES  # what the worker's process saw


def test_a_request_waits_as_long_as_a_worker_lives(monkeypatch):
    ask, waited = WorkerGroup.ask, []

    def recorded(group, worker, *request, timeout=0.0):
        waited.append(timeout)
        return ask(group, worker, *request, timeout=timeout)

    monkeypatch.setattr(WorkerGroup, "ask", recorded)
    collector = _collector(make_policy(0.0), timeout=None, total_frames=FRAMES)
    assert len(list(collector)) == 1
    collector.state_dict()
    collector.shutdown()
    assert set(waited) == {None}


@pytest.mark.parametrize("mode", [{"inline": True}, {"lockstep": True}, {}])
def test_a_rollout_whose_slot_an_interrupt_kept_is_yielded_and_counted_once(mode, monkeypatch):
    with _collector(actor(), total_frames=2 * FRAMES, **mode) as collector:
        with monkeypatch.context() as patch:
            patch.setattr(collector.storage, "release", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                next(iter(collector))
        assert len([*collector]) == 2
