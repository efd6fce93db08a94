"""The slots of an `APPOCollector`'s ring, what waits in them of a round, and what is lent."""

from __future__ import annotations

import pytest
import torch

from tests.support.acting import begun, make_policy
from tests.support.collecting import FRAMES, IDS, appo_collector, data_of
from tests.support.processes import wait_for
from torchrl_unilab.collectors.rollouts import RingSink
from torchrl_unilab.errors import SegmentClosedError, WaitTimeoutError


def test_the_metrics_count_a_rollout_before_the_learner_has_it(inline, monkeypatch):
    service, unread = inline._team.service, []
    publish = service.publish
    monkeypatch.setattr(
        service, "publish", lambda tick: (unread.append(len(inline.storage)), publish(tick))
    )
    next(iter(inline))
    assert unread == [0]
    assert inline.metrics().frames == FRAMES


def test_the_last_rollout_that_was_lent_is_given_back_in_the_end(inline, monkeypatch):
    monkeypatch.setattr(inline, "use_buffers", True)
    inline.total_frames = 2 * FRAMES
    assert len(list(inline)) == 2
    assert inline.storage.leases == []
    assert inline.storage.read_count == 2


def test_a_rollout_that_is_lent_is_not_said_to_wait_and_does_not_come_again(inline, monkeypatch):
    monkeypatch.setattr(inline, "use_buffers", True)
    batches = iter(inline)
    lent = next(batches).clone()
    assert inline.state_dict()["waiting"] == []
    assert (next(batches)["observation"] != lent["observation"]).any()


def test_a_tick_without_room_is_an_error_and_is_taken_when_there_is_some(inline, monkeypatch):
    before = next(iter(inline)).clone()
    with monkeypatch.context() as patch:
        patch.setattr(RingSink, "collect", lambda *_: False)
        with pytest.raises(WaitTimeoutError, match="tick 2: no slot was freed in time"):
            next(iter(inline))
    after = next(iter(inline))
    assert after.numel() == FRAMES
    assert torch.equal(after[IDS][:, 0], before[IDS][:, -1])  # the episodes go on


def test_workers_pause_once_all_frames_have_come_and_continue_for_more():
    settings = {"overflow": "overwrite", "total_frames": 2 * FRAMES}
    with appo_collector(make_policy(0.0), **settings) as collector:
        assert len(list(collector)) == 2
        counts = [
            worker["frames"] for _ in range(20) for worker in collector.state_dict()["workers"]
        ]
        assert len({*counts}) == 1
        collector.total_frames = 6 * FRAMES
        assert len(list(collector)) == 4


def test_slots_are_shared_out_evenly_and_rounded_up():
    with appo_collector(make_policy(0.0), num_collectors=2, slots=3) as collector:
        assert (collector.storage.slots, collector.storage.max_size) == (2, 4)


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, 1),
        ({"use_buffers": True}, 2),
        ({"use_buffers": True, "slots": 2}, 1),
        ({"use_buffers": True, "lockstep": True}, 1),
    ],
)
def test_where_a_rollout_is_lent_its_worker_has_another_slot(settings, slots):
    with appo_collector(make_policy(0.0), num_collectors=2, **settings) as collector:
        assert collector.storage.slots == slots


def test_in_lockstep_workers_wait_for_slots_whatever_the_overflow():
    with appo_collector(make_policy(0.0), inline=True, overflow="overwrite") as collector:
        assert collector.storage.overflow == "block"


def test_the_occupancy_is_the_share_of_slots_with_unread_rollouts():
    with appo_collector(make_policy(0.0), slots=2) as collector:
        next(iter(collector))
        wait_for(lambda: len(collector.storage) == 2)
        assert collector.status()["ring_occupancy"] == 1.0


def test_dropped_rollouts_of_all_workers_are_counted():
    settings = {"num_collectors": 2, "overflow": "overwrite", "total_frames": 100_000}
    with appo_collector(make_policy(0.0), **settings) as collector:
        batches = begun(collector)
        wait_for(lambda: all(collector.storage.dropped))
        collector.total_frames = 0
        assert list(batches) == []  # and the workers pause
        assert collector.dropped == collector.status()["dropped"] == sum(collector.storage.dropped)


def test_a_lent_rollout_whose_release_was_interrupted_is_not_released_again(inline, monkeypatch):
    monkeypatch.setattr(inline, "use_buffers", True)
    batches, release = iter(inline), inline.storage.release
    next(batches)

    def interrupted(lease: object) -> None:
        release(lease)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(inline.storage, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    assert next(iter(inline)).numel() == FRAMES


def test_what_waits_of_a_round_is_restored_in_its_order_and_then_a_round_begins():
    with appo_collector(make_policy(0.0), num_collectors=3, lockstep=True) as collector:
        batches = begun(collector)
        collector.stale = 7
        state = collector.state_dict()
        expected = [next(batches).clone() for _ in range(2)]
        for _ in range(4):  # in the slots that the state's rollouts were in
            next(batches)
        collector.stale = 0

        collector.load_state_dict(state)

        for workers in (False, True):
            assert len(collector.state_dict(workers=workers)["waiting"]) == 2
        assert collector.stale == 7
        found = [next(batches) for _ in range(5)]
        for one, other in zip(expected, found, strict=False):
            assert (data_of(one) == data_of(other)).all()
        assert [int(rollout[IDS][0, 0] % 3) for rollout in found] == [1, 2, 0, 1, 2]
        collector.load_state_dict(state)
        collector.shutdown()
        with pytest.raises(SegmentClosedError):
            next(batches)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_the_dimension_of_time_has_its_name(use_buffers):
    with appo_collector(make_policy(0.0), inline=True, use_buffers=use_buffers) as collector:
        collector.total_frames = 3 * FRAMES  # the ring's slots come round
        for rollout in collector:
            assert rollout.names == rollout["next"].names == [None, "time"]
