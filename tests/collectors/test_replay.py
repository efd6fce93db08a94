from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential

from tests.support.acting import begun, make_policy, set_action
from tests.support.bounds import DEADLINE
from tests.support.collecting import CountingEnv, HitEnv, state_env
from tests.support.processes import live_children
from torchrl_unilab.collectors import ReplayCollector
from torchrl_unilab.data import PackedSliceSampler
from torchrl_unilab.errors import ConfigError, SegmentClosedError, WorkerError
from torchrl_unilab.modules import PerEnvNoise

ENVS, CAPACITY = 2, 64


def _collector(policy=None, create_env=CountingEnv, **kwargs) -> ReplayCollector:
    settings = {"capacity": CAPACITY, "frames_per_batch": ENVS, "seed": 100, "timeout": DEADLINE}
    return ReplayCollector(create_env, policy or make_policy(0.0), **{**settings, **kwargs})


def _ticks(collector: ReplayCollector, count: int) -> None:
    for _, tick in zip(range(count), collector, strict=False):
        assert tick is None


def _rows(collector: ReplayCollector) -> TensorDictBase:
    storage = collector.storage
    return storage.get(torch.arange(storage.size)).clone()


def _equal(a: TensorDictBase, b: TensorDictBase) -> bool:
    return bool((a == b).all())


@pytest.fixture
def inline() -> Iterator[ReplayCollector]:
    collector = _collector(inline=True)
    yield collector
    collector.shutdown()


def test_a_tick_adds_the_rows_it_says_and_total_frames_end_the_collection():
    with _collector(inline=True, frames_per_batch=6, total_frames=18) as collector:
        sizes = [collector.storage.size for _ in collector]
        assert sizes == [6, 12, 18]
        assert collector.getattr_rb("write_count") == 18


def test_rows_are_transitions_with_true_final_observations(inline):
    _ticks(inline, 12)
    rows = _rows(inline)
    drawn, steps, left = rows["observation"].unbind(-1)
    after = rows["next", "observation"]
    assert torch.equal(after[:, 0], drawn)  # the episode's own, also where it ends
    assert torch.equal(after[:, 1], steps + 1)
    assert torch.equal(after[:, 2], left - 1)
    assert torch.equal(rows["next", "done"].squeeze(-1), left == 1)
    assert torch.equal(rows["next", "reward"].squeeze(-1), drawn)
    assert rows["next", "truncated"].any()
    assert not rows["next", "terminated"].any()


def test_the_metrics_count_rows_that_are_there(inline, monkeypatch):
    service, rows = inline._team.service, []
    publish = service.publish
    monkeypatch.setattr(
        service, "publish", lambda tick: (rows.append(inline.storage.size), publish(tick))
    )
    _ticks(inline, 2)
    assert rows == [ENVS, 2 * ENVS]


def test_workers_count_the_time_that_they_wait_for_requests():
    with _collector(lockstep=True) as collector:
        _ticks(collector, 2)
        assert collector.metrics().seconds["wait"] > 0.0


def _reload(collector: ReplayCollector) -> None:
    collector.load_state_dict(collector.state_dict())  # this environment starts anew


@pytest.mark.parametrize(
    "cut", [ReplayCollector.reset, lambda collector: collector.set_seed(7), _reload]
)
def test_slices_end_where_an_episode_is_cut_short(cut):
    with _collector(inline=True, frames_per_batch=6 * ENVS) as collector:
        for _ in range(5):
            _ticks(collector, 1)
            cut(collector)
        sampler = PackedSliceSampler(slice_len=3, strict_length=False)
        (positions,), marks = sampler.sample(collector.storage, 300)
        drawn, steps, _ = collector.storage[positions]["observation"].unbind(-1)
        within = ~marks["next", "truncated"].squeeze(1)[:-1]
        assert within.any()
        assert (drawn.diff()[within] == 0).all()
        assert (steps.diff()[within] == 1).all()


def test_a_replay_holds_what_critics_alone_may_see():
    with _collector(inline=True, create_env=state_env) as collector:
        _ticks(collector, 3)
        rows = _rows(collector)
        assert torch.equal(rows["critic", "state"], rows["observation"] * 10.0)
        assert torch.equal(rows["next", "critic", "state"], rows["next", "observation"] * 10.0)


def test_a_worker_in_lockstep_writes_what_an_inline_collector_writes():
    with_noise = {"explore": add_noise, "init_random_frames": 6}
    both = {"inline": True, **with_noise}, {"lockstep": True, **with_noise}
    with _collector(**both[0]) as one, _collector(**both[1]) as other:
        for collector in (one, other):
            for tick, _ in zip(range(10), collector, strict=False):
                set_action(collector.policy, tick / 10)
                collector.update_policy_weights_()
        assert _equal(_rows(one), _rows(other))


def add_noise(policy: TensorDictModuleBase) -> TensorDictModuleBase:
    noise = PerEnvNoise(-1.0, 1.0, std_min=0.1, std_max=0.5, init_key=None)
    return TensorDictSequential(policy, noise)


def test_workers_collect_one_tick_ahead_and_no_further():
    with _collector(num_collectors=2, frames_per_batch=2 * ENVS) as collector:
        for tick, _ in zip(range(1, 6), collector, strict=False):
            until = time.monotonic() + DEADLINE
            while collector.storage.ptr < 4 * (tick + 1):  # without being asked again
                assert time.monotonic() < until
            collector.state_dict()  # is answered when all that was asked for is done
            assert collector.storage.ptr == 4 * (tick + 1)
            assert collector.getattr_rb("write_count") == 4 * tick


def test_after_the_last_tick_no_other_is_asked_for():
    with _collector(total_frames=3 * ENVS) as collector:
        assert len(list(collector)) == 3
        collector.state_dict()  # is answered when all that was asked for is done
        assert collector.storage.ptr == 3 * ENVS


def test_a_tick_that_had_come_and_was_not_yielded_is_the_first_after_a_load():
    with _collector() as ahead:
        next(iter(ahead))
        state = ahead.state_dict()
    with _collector(inline=True) as collector:
        collector.load_state_dict(state)
        sizes = [collector.storage.size for _ in zip(range(2), collector, strict=False)]
    assert sizes == [0, ENVS]  # rows are the replay's to save


def test_a_tick_in_lockstep_acts_with_what_was_published_before_it(inline):
    for tick, _ in zip(range(6), inline, strict=False):
        actions = _rows(inline)["action"][-ENVS:]
        assert torch.equal(actions, torch.full((ENVS, 1), tick / 10))
        set_action(inline.policy, (tick + 1) / 10)
        inline.update_policy_weights_()


def test_first_frames_are_random_within_bounds_and_then_the_policy_acts():
    with _collector(make_policy(0.5), inline=True, init_random_frames=10) as collector:
        _ticks(collector, 8)
        actions = _rows(collector)["action"]
        assert actions[:10].abs().max() <= 1.0
        assert len(actions[:10].unique()) == 10
        assert (actions[10:] == 0.5).all()


def test_first_frames_are_random_where_workers_share_them_unevenly():
    with _collector(
        make_policy(0.5),
        num_collectors=2,
        frames_per_batch=2 * ENVS,
        init_random_frames=5,
        lockstep=True,
    ) as collector:
        _ticks(collector, 4)
        assert (_rows(collector)["action"] != 0.5).sum() == 2 * 2 * ENVS  # of two ticks


def test_exploration_noise_of_each_environment_survives_weight_updates():
    with _collector(inline=True, explore=add_noise) as collector:
        noise = collector._team.service.rollouts.policy[1]
        _ticks(collector, 1)
        before = noise.std.clone()
        set_action(collector.policy, 0.25)
        collector.update_policy_weights_()
        _ticks(collector, 20)
        assert torch.equal(noise.std, before)
        actions = _rows(collector)["action"][ENVS:].squeeze(-1)
        assert len(actions.unique()) > 20
        assert abs(actions.mean() - 0.25) < 0.25


def test_a_tick_that_failed_in_this_process_is_taken_when_it_is_asked_for_again(tmp_path):
    make_env = partial(HitEnv, tmp_path / "mark", 3, "raise")
    with _collector(inline=True, create_env=make_env) as collector:
        with pytest.raises(ArithmeticError, match="exploded"):
            _ticks(collector, 3)
        _ticks(collector, 1)
        assert collector.storage.size == collector.metrics().frames == 3 * ENVS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frames_per_batch": 3}, "multiple of 2"),
        ({"frames_per_batch": 2, "num_collectors": 2}, "multiple of 4"),
        ({"init_random_frames": -1}, "init_random_frames"),
        ({"init_random_frames": 40.5}, "init_random_frames"),
        ({"replay": {"max_size": 9}}, r"replay: \{'max_size': 9\} \(expected settings by name wit"),
        ({"replay": {"writers": 1, "n_step": 2}}, r"replay: .* \(expected settings by name wit"),
        ({"replay": "x"}, r"replay: 'x' \(expected settings by name"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        _collector(**settings)


def test_two_workers_in_lockstep_write_their_rows_in_their_order():
    collector = _collector(num_collectors=2, frames_per_batch=4 * ENVS, lockstep=True, capacity=480)
    _ticks(collector, 60)
    steps = _rows(collector)["observation"][:, 1].reshape(60, 2, 2, ENVS)
    drawn = _rows(collector)["observation"][:, 0].reshape(60, 2, 2, ENVS)
    going = steps[1:] > steps[:-1]
    assert going.any()
    assert torch.equal(drawn[1:][going], drawn[:-1][going])  # each place is one environment's
    collector.shutdown()


def test_a_collector_that_lost_a_worker_keeps_the_rows_until_it_is_shut_down():
    collector = _collector(num_collectors=2, frames_per_batch=2 * ENVS)
    batches = begun(collector)
    os.kill(collector.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        list(batches)
    assert not live_children()
    assert collector.storage.size >= 2 * ENVS
    for use in (collector.state_dict, partial(collector.set_seed, 1)):
        with pytest.raises(SegmentClosedError, match=r"all ended when one was lost .*workers=Fal"):
            use()
    state = collector.state_dict(workers=False)
    assert (state["workers"], state["come"]) == (None, 0)  # what was begun has not come
    collector.shutdown()


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_loop_that_another_thread_ends_by_shutdown_says_so(lockstep):
    collector = _collector(lockstep=lockstep)
    begun, raised = threading.Event(), []

    def loop() -> None:
        try:
            for _ in collector:
                begun.set()
        except SegmentClosedError as error:
            raised.append(str(error))

    thread = threading.Thread(target=loop)
    thread.start()
    assert begun.wait(DEADLINE)
    collector.shutdown()
    thread.join(DEADLINE)
    assert len(raised) == 1
    assert "Build a new one" in raised[0]


def test_what_trainers_ask_of_the_replay_is_over_all_learners(inline):
    _ticks(inline, 3)
    assert inline.getattr_rb("batch_size") is None
    inline.learners, inline.batch_size = 2, 8
    assert inline.getattr_rb("write_count") == 2 * 3 * ENVS
    assert inline.getattr_rb("batch_size") == 16
    assert inline.status() == {"replay_size": 3 * ENVS, "restarts": 0}
    with pytest.raises(AttributeError, match=r"'sampler' of the replay .*Read it from `storage`"):
        inline.getattr_rb("sampler")


def test_what_a_monitor_asks_for_is_known():
    with _collector(inline=True, total_frames=4) as collector:
        assert len(list(collector)) == 2
        collector.update_policy_weights_()
        assert collector.get_policy_version() == collector.policy_version == 1
        stats = collector.stats()
    assert (stats["batches"], stats["frames"], stats["policy_version"]) == (2, 4, 1)


def test_frames_alone_are_restored_where_the_workers_states_were_lost():
    with _collector(inline=True, init_random_frames=8) as collector:
        collector.load_state_dict({"workers": None, "frames": 12, "come": 0})
        _ticks(collector, 1)
        assert collector.getattr_rb("write_count") == 12 + ENVS
        assert len(_rows(collector)["action"].unique()) == 1  # no more at random


def test_metrics_continue_from_a_state_that_was_loaded():
    with _collector(inline=True) as saved:
        _ticks(saved, 4)
        state, before = saved.state_dict(), saved.metrics()
    with _collector(inline=True) as collector:
        collector.load_state_dict(state)
        after = collector.metrics()
    assert (after.frames, after.seconds) == (before.frames, before.seconds)


@pytest.mark.parametrize(
    "workers", [{"inline": True}, {"num_collectors": 2, "lockstep": True}], ids=["one", "two"]
)
def test_frames_per_second_and_trajectories_continue_where_the_workers_states_were_lost(workers):
    workers["frames_per_batch"] = ENVS * workers.get("num_collectors", 1)
    with _collector(**workers) as lost:
        _ticks(lost, 4)
        state, before = lost.state_dict(workers=False), lost.metrics()
    with _collector(**workers) as collector:
        collector.load_state_dict(state)
        after = collector.metrics()
        _ticks(collector, 1)
        ids = _rows(collector)["collector", "traj_ids"]
    assert ids.min() >= before.next_trajectory > 0
    assert after.frames == before.frames == 4 * workers["frames_per_batch"]
    assert after.fps == pytest.approx(before.fps)
