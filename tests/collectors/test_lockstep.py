"""`APPOCollector` in lockstep: collected when asked for, and repeatable."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

from tests.support.acting import actions, make_policy
from tests.support.collecting import (
    ENVS,
    FRAMES,
    STEPS,
    VERSION,
    CountingEnv,
    actor,
    appo_collector,
    data_of,
    publish,
    publish_itself,
    writer_of,
)
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.errors import ConfigError


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


def test_workers_draw_noise_of_their_own():
    with appo_collector(actor(), num_collectors=2, lockstep=True) as collector:
        batches = iter(collector)
        first, second = (
            rollout["action"] - rollout["loc"] for rollout in (next(batches), next(batches))
        )
    assert not torch.isclose(first, second).any()


def test_in_lockstep_rollouts_come_in_the_workers_order_with_exactly_what_was_published(pair):
    batches = iter(pair)
    for _ in range(4):
        version = publish_itself(pair)
        for worker in range(2):
            rollout = next(batches)
            assert writer_of(rollout) == worker
            assert rollout[VERSION].unique().tolist() == [version]
            assert actions(rollout) == {float(version)}


def test_idle_workers_act_with_what_was_published_once_they_were_asked_for_their_state(pair):
    version = publish_itself(pair)
    assert {*pair.scheme.applied_versions.values()} != {version}
    pair.state_dict()
    pair.scheme.wait_applied(timeout=0)


def test_in_lockstep_as_well_what_is_too_far_behind_is_dropped_and_counted(pair, monkeypatch):
    monkeypatch.setattr(pair, "max_policy_lag", 0)
    batches, stale = iter(pair), pair.stale
    for _ in range(2):  # the second worker's rollout began before the second publish
        version = publish_itself(pair)
        rollout = next(batches)
        assert (writer_of(rollout), rollout[VERSION].unique().tolist()) == (0, [version])
    assert pair.stale == stale + 1
    next(batches)


def _run(collector: APPOCollector, rounds: int = 4) -> list[TensorDictBase]:
    """Rollouts of the same seed and weights, published between rounds."""
    batches, rollouts = iter(collector), []
    collector.set_seed(7)
    for round_ in range(rounds):
        publish(collector, round_ / 4)
        rollouts += [next(batches) for _ in range(collector.num_workers)]
    return rollouts


def test_lockstep_is_repeatable_bit_for_bit_and_equal_to_the_serial_collector(pair, inline):
    once, again, serial = _run(pair), _run(pair), _run(inline)
    assert all((data_of(a) == data_of(b)).all() for a, b in zip(once, again, strict=True))
    assert all((data_of(a) == data_of(b)).all() for a, b in zip(once[::2], serial, strict=True))
    assert not (once[0]["observation"] == once[1]["observation"])[..., 0].any()


def test_an_iteration_that_was_broken_off_within_a_round_continues(pair):
    pair.set_seed(3)
    order = [writer_of(rollout) for rollout, _ in zip(pair, range(3), strict=False)]
    order += [writer_of(rollout) for rollout, _ in zip(pair, range(4), strict=False)]
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


def test_workers_have_their_time_to_answer_however_short_the_wait_for_data_is():
    with appo_collector(make_policy(), lockstep=True, timeout=0.0) as collector:
        assert len(collector.state_dict()["workers"]) == 1


def test_a_state_with_rollouts_of_another_length_is_refused(pair):
    state = pair.state_dict()
    state["waiting"] = [((ENVS, STEPS + 1), {})]
    with pytest.raises(ConfigError, match=r"rollouts of \(2, 5\) \(expected \(2, 4\)\)"):
        pair.load_state_dict(state)


@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_what_waits_of_a_round_is_restored_whatever_the_environments_batch(batch):
    env = partial(CountingEnv, batch)
    with appo_collector(make_policy(0.0), [env, env], lockstep=True) as collector:
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
