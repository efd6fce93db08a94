"""Leases of rollouts in the ring: what is acquired stays, and is given back once."""

from __future__ import annotations

from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from tests.support.processes import receive, spawned
from tests.support.rollouts import make_rollout, stack, values
from torchrl_unilab.data import RolloutRingStorage
from torchrl_unilab.errors import ConfigError, SegmentClosedError, UsageError, WaitTimeoutError


def test_what_an_interrupt_kept_from_the_caller_is_among_the_leases(storage):
    storage.write(make_rollout(1))
    storage.acquire()  # the result is lost
    (lease,) = storage.leases
    storage.release(lease)
    assert storage.leases == []
    assert storage.read_count == 1


@pytest.mark.parametrize("kind", ["NoneType", "TensorDict"])
def test_what_is_no_lease_is_refused_and_the_slot_stays_held(storage, kind):
    storage.write(make_rollout(1))
    with storage.acquire() as rollout:
        with pytest.raises(ConfigError, match=rf"{kind} \(expected RolloutLease\)"):
            storage.release({"NoneType": None, "TensorDict": rollout}[kind])
        assert len(storage.leases) == 1


def test_a_lease_releases_itself_at_the_end_of_a_block(storage):
    storage.write(make_rollout(4))
    with storage.acquire() as rollout:
        assert values(rollout.unsqueeze(0)) == [4]
    assert storage.read_count == 1


def test_acquiring_all_keeps_what_was_acquired_and_takes_what_is_held_unread_or_in_the_ring():
    with RolloutRingStorage(3, example=make_rollout()) as storage:
        for value in (1, 2, 3):
            storage.write(make_rollout(value))
        first = storage.acquire()
        assert storage.wait(0.0)  # holds the second

        leases = storage.acquire_all()

        assert leases[0] is first
        assert [values(lease.rollout.unsqueeze(0))[0] for lease in leases] == [1, 2, 3]
        assert storage.leases == leases
        assert len(storage) == 0


def test_rollouts_held_unread_are_acquired_in_the_order_in_which_they_came(storage):
    storage.write_all(stack(1, 2, 3))
    _ = storage[1]  # holds the first two
    acquired = [storage.acquire().rollout for _ in range(3)]
    assert [*map(int, (rollout["action"].max() for rollout in acquired))] == [1, 2, 3]


def test_the_timeout_of_a_claim_overrides_the_storages(storage, monkeypatch):
    waited = []
    monkeypatch.setattr(storage.ring, "claim", waited.append)
    for timeout in (0.0, 1.5, None):
        storage.claim(timeout)
    assert waited == [0.0, 1.5, storage.timeout]


def test_a_rollout_in_a_slot_that_was_acquired_before_is_unread():
    with RolloutRingStorage(1, example=make_rollout()) as storage:
        storage.write(make_rollout(1))
        storage.release(storage.acquire())
        storage.write(make_rollout(2))
        assert storage.wait(0.0)
        assert (len(storage), storage.leases) == (1, [])
        assert values(storage[:]) == [2]


def test_a_draw_of_several_rollouts_waits_no_longer_than_its_timeout(storage, monkeypatch):
    storage.write_all(stack(1, 2))
    acquire, waited, now = storage.ring.acquire, [], iter([0.0, 1.0, 4.0, 9.0])
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("torchrl_unilab.data.rollouts.shared.time", clock)
    monkeypatch.setattr("torchrl_unilab.waits.time", clock)
    monkeypatch.setattr(storage.ring, "acquire", lambda left: waited.append(left) or acquire())
    with pytest.raises(WaitTimeoutError, match="2 are unread"):
        storage.draw(3, timeout=5.0)
    assert waited[:3] == [4.0, 1.0, 0.0]


def test_a_timeout_that_is_no_number_is_refused(storage):
    for wait in (storage.acquire, storage.wait):
        with pytest.raises(ConfigError, match=r"^timeout: '2' \(expected seconds, or None\)"):
            wait("2")


def test_a_draw_that_would_wait_for_rollouts_of_unknown_form_is_refused():
    with RolloutRingStorage(2) as storage, pytest.raises(UsageError, match="to be known"):
        storage.draw(1, timeout=5.0)


def test_no_tensor_but_the_drawn_one_takes_rollouts_out(storage):
    storage.write_all(stack(1, 2))
    drawn = storage.draw(1)
    assert (values(storage.get(drawn.clone())), len(storage)) == ([1], 2)
    assert (values(storage.get(drawn)), len(storage)) == ([1], 1)


def _write(pipe: Connection, storage: RolloutRingStorage) -> None:
    storage.write(make_rollout(2))
    pipe.send("written")
    pipe.recv()


def test_a_storage_that_goes_to_another_process_leaves_leases_where_they_are(storage):
    storage.write(make_rollout(1))
    lease = storage.acquire()
    place = lease.rollout["observation"].data_ptr()
    storage.ring.resign(replaced=True)
    with spawned(_write, storage) as (_, pipe):
        receive(pipe)
        assert lease.rollout["observation"].data_ptr() == place
        assert values(storage[:]) == [2]
        pipe.send("end")


def test_a_storage_that_was_closed_before_its_first_rollout_takes_no_memory():
    storage = RolloutRingStorage(2)
    storage.close()
    with pytest.raises(SegmentClosedError):
        storage.write(make_rollout())
    assert not storage.initialized
