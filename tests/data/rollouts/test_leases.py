"""Leases of rollouts in the ring: what is acquired stays, and is given back once."""

from __future__ import annotations

from tests.support.rollouts import make_rollout, values
from torchrl_unilab.data import RolloutRingStorage


def test_what_an_interrupt_kept_from_the_caller_is_among_the_leases(storage):
    storage.write(make_rollout(1))
    storage.acquire()  # the result is lost
    (lease,) = storage.leases
    storage.release(lease)
    assert storage.leases == []
    assert storage.read_count == 1


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
