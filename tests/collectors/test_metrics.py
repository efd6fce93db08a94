from __future__ import annotations

import math
import time
from contextlib import closing
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import DEADLINE, receive, spawned
from torchrl_unilab.collectors import metrics
from torchrl_unilab.collectors.metrics import PHASES, WINDOW, EpisodeLog, PhaseClock, SharedMetrics
from torchrl_unilab.errors import SegmentClosedError


def _brute_force(rewards, done, terminated) -> list[tuple[float, int, bool]]:
    """Finished episodes, (return, length, terminated), in the order of their ends."""
    envs = rewards.shape[0]
    total, length, finished = [0.0] * envs, [0] * envs, []
    for step in range(rewards.shape[1]):
        for env in range(envs):
            total[env] += float(rewards[env, step])
            length[env] += 1
            if done[env, step]:
                finished.append((total[env], length[env], bool(terminated[env, step])))
                total[env], length[env] = 0.0, 0
    return finished


@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.floats(0.0, 1.0),
    st.integers(0, 10_000),
)
def test_episodes_equal_a_loop_over_environments_and_steps(envs, cuts, ends, seed):
    rng = np.random.default_rng(seed)
    shape = (envs, sum(cuts))
    rewards = rng.integers(-8, 9, shape) / 4.0  # sums are exact
    done = rng.random(shape) < ends
    terminated = done & (rng.random(shape) < 0.5)
    expected = _brute_force(rewards, done, terminated)
    log, start = EpisodeLog(envs), 0
    for steps in cuts:
        part = np.s_[:, start : start + steps]
        log.add(rewards[part], done[part], terminated[part])
        start += steps
    assert log.episodes == len(expected)
    found = [
        tuple(log.last[i % WINDOW]) for i in range(max(0, log.episodes - WINDOW), log.episodes)
    ]
    assert found == expected[-WINDOW:]


def test_a_staggered_first_episode_counts_only_if_a_terminal_state_ends_it():
    log = EpisodeLog(2)
    log.restart(staggered=True)
    done = np.array([[0, 1, 0, 1], [0, 1, 0, 0]], dtype=bool)
    terminated = np.array([[0, 0, 0, 0], [0, 1, 0, 0]], dtype=bool)
    log.add(np.ones((2, 4)), done, terminated)
    assert log.last[: log.episodes].tolist() == [[2.0, 2.0, 1.0], [2.0, 2.0, 0.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_spoils_the_return_of_its_own_episode_alone(bad):
    log = EpisodeLog(1)
    rewards = np.array([[bad, 1.0, 2.0, 3.0]])
    done = np.array([[1, 0, 1, 0]], dtype=bool)
    log.add(rewards, done, done)
    log.add(rewards[:, 1:], done[:, :3], done[:, :3])
    assert log.last[: log.episodes, 0].tolist() == [pytest.approx(bad, nan_ok=True), 3.0, 4.0, 5.0]


def test_a_log_that_was_saved_knows_which_first_episodes_are_open():
    saved, log = EpisodeLog(2), EpisodeLog(2)
    saved.restart(staggered=True)
    no, ends = np.zeros((2, 1), dtype=bool), np.array([[True], [False]])
    saved.add(np.ones((2, 1)), ends, no)
    log.load_state_dict(saved.state_dict())
    log.add(np.ones((2, 1)), ~no, no)
    assert log.last[: log.episodes].tolist() == [[1.0, 1.0, 0.0]]


def test_what_happens_after_a_log_was_saved_is_not_in_what_was_saved():
    saved, log = EpisodeLog(1), EpisodeLog(1)
    no, step = np.zeros((1, 1), dtype=bool), np.ones((1, 1))
    saved.add(step, no, no)
    state = saved.state_dict()
    saved.add(step, no, no)
    log.load_state_dict(state)
    log.add(step, ~no, no)
    assert log.last[: log.episodes].tolist() == [[2.0, 2.0, 0.0]]


def test_returns_are_summed_in_more_digits_than_rewards_have():
    rewards = np.full((1, 3), 1.0, dtype=np.float32)
    rewards[0, 0] = 2**24
    no, ends = np.zeros((1, 3), dtype=bool), np.array([[False, False, True]])
    log = EpisodeLog(1)
    log.add(rewards, ends, no)  # ends in the rollout
    log.add(rewards, no, no)
    log.add(rewards, ends, no)  # in the one after
    assert log.last[: log.episodes, 0].tolist() == [2**24 + 2, 2 * (2**24 + 2)]


def test_a_reset_forgets_the_returns_and_lengths_of_episodes_that_have_not_ended():
    log = EpisodeLog(1)
    log.restart(staggered=True)
    no, ends = np.zeros((1, 2), dtype=bool), np.array([[False, True]])
    log.add(np.full((1, 2), 5.0), no, no)
    log.restart()
    log.add(np.ones((1, 2)), ends, no)
    assert log.last[: log.episodes].tolist() == [[2.0, 2.0, 0.0]]


def _log(returns: list[float], *, terminated: bool) -> EpisodeLog:
    log = EpisodeLog(1)
    rewards = np.array([returns])
    ends = np.ones_like(rewards, dtype=bool)
    log.add(rewards, ends, ends & terminated)
    return log


def _clock(*seconds: float) -> PhaseClock:
    clock = PhaseClock()
    clock.seconds = dict(zip(PHASES, seconds, strict=True))
    return clock


def test_before_the_first_episode_there_is_no_mean():
    with closing(SharedMetrics(2)) as latest:
        read = latest.total()
        assert (read.frames, read.episodes) == (0, 0)
        assert math.isnan(read.episode_return)
        assert math.isnan(read.timeout_rate)
        assert read.fps["physics"] == math.inf
        latest.close()


def test_metrics_of_workers_are_summed_and_the_newest_count():
    with closing(SharedMetrics(2)) as latest:
        latest.publish(0, 10, 0, _log([9.0], terminated=False), _clock(1, 1, 1, 1))
        latest.publish(0, 40, 0, _log([1.0, 2.0], terminated=False), _clock(2, 1, 0.5, 0))
        latest.publish(1, 60, 0, _log([6.0], terminated=True), _clock(3, 1, 0.5, 0))
        read = latest.total()
        assert (read.frames, read.episodes) == (100, 3)
        assert (read.episode_return, read.episode_length) == (3.0, 1.0)
        assert read.timeout_rate == pytest.approx(2 / 3)
        assert read.termination_rate == pytest.approx(1 / 3)
        assert read.seconds == {"physics": 5.0, "policy": 2.0, "write": 1.0, "wait": 0.0}
        assert read.fps == {"physics": 20.0, "policy": 50.0, "write": 100.0, "wait": math.inf}


def test_other_metrics_of_workers_are_read_by_name_as_means():
    with closing(SharedMetrics(3, names=["reward/forward", "reward/alive"])) as latest:
        told = EpisodeLog(1), PhaseClock()
        latest.publish(0, 0, 0, *told, values={"reward/forward": 1.0, "reward/alive": 4.0})
        latest.publish(1, 0, 0, *told, values={"reward/forward": 2.0})

        values = latest.total().values

        assert values == {"reward/forward": 1.5, "reward/alive": 4.0}


def test_a_metric_that_was_not_named_is_left_out():
    with closing(SharedMetrics(1, names=["reward/forward"])) as latest:
        values = {"reward/alive": 1.0, "reward/forward": 2.0}

        latest.publish(0, 1, 0, EpisodeLog(1), PhaseClock(), values=values)

        assert latest.total().values == {"reward/forward": 2.0}


def test_the_means_are_over_the_last_64_episodes_of_all_workers_in_equal_shares():
    with closing(SharedMetrics(2)) as latest:
        early, late = [100.0] * 200, [float(i) for i in range(32)]
        latest.publish(0, 0, 0, _log([*early, *late], terminated=False), _clock(0, 0, 0, 0))
        latest.publish(1, 0, 0, _log([*early, *[5.0] * 32], terminated=True), _clock(0, 0, 0, 0))
        read = latest.total()
        assert read.episodes == 464
        assert read.episode_return == pytest.approx((sum(late) + 160.0) / 64)
        assert read.timeout_rate == 0.5


def test_of_more_workers_than_the_window_has_episodes_each_counts_with_its_last():
    with closing(SharedMetrics(WINDOW + 1)) as latest:
        for worker in range(WINDOW + 1):
            latest.publish(worker, 0, 0, _log([9.0, 2.0], terminated=False), PhaseClock())
        assert latest.total().episode_return == 2.0


def test_the_next_trajectory_comes_after_those_of_all_workers():
    with closing(SharedMetrics(2)) as latest:
        for worker, trajectory in enumerate((12, 7)):
            latest.publish(worker, 0, trajectory, EpisodeLog(1), PhaseClock())
        assert latest.total().next_trajectory == 12


def test_metrics_that_were_closed_are_neither_published_nor_read():
    latest = SharedMetrics(2)
    latest.close()
    with pytest.raises(SegmentClosedError):
        latest.publish(1, 0, 0, EpisodeLog(1), PhaseClock())
    with pytest.raises(SegmentClosedError):
        latest.total()


def test_time_before_the_start_is_of_no_phase(monkeypatch):
    times = iter([0.0, 100.0, 101.0, 103.0])
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    clock = PhaseClock()
    clock.start()
    clock.to("physics")
    clock.to("policy")
    assert clock.seconds == {"physics": 1.0, "policy": 2.0, "write": 0.0, "wait": 0.0}


def test_time_between_phases_is_counted_once():
    clock = PhaseClock()
    began = time.perf_counter()
    clock.start()
    clock.to("physics")
    clock.to("policy")
    clock.to("physics")
    assert 0.0 < sum(clock.seconds.values()) <= time.perf_counter() - began
    assert clock.seconds["write"] == clock.seconds["wait"] == 0.0


def _put_for_ever(pipe: Connection, latest: SharedMetrics) -> None:
    """Put words whose parts agree with each other."""
    log, clock = EpisodeLog(1), PhaseClock()
    pipe.send("ready")
    count = 0
    while not pipe.poll():
        count += 1
        log.episodes = count
        log.last[:] = count
        clock.seconds = dict.fromkeys(PHASES, float(count))
        latest.publish(0, count, 0, log, clock)
    pipe.send(count)


def test_a_reader_sees_whole_words_of_a_worker_that_never_waits():
    latest = SharedMetrics(1)
    with spawned(_put_for_ever, latest) as (_, pipe):
        receive(pipe)
        until, seen = time.monotonic() + DEADLINE, set()
        while len(seen) < 20:
            assert time.monotonic() < until, "the worker does not go on"
            read = latest.total()
            if read.frames:
                assert set(read.seconds.values()) == {float(read.frames)}
                assert (read.episodes, read.episode_return) == (read.frames, read.frames)
            seen.add(read.frames)
        pipe.send("stop")
        # Nobody read what was put meanwhile, and nobody had to.
        assert receive(pipe) >= max(seen)
    latest.close()
