"""Rollouts of several writers are read in the order in which they were committed."""

from __future__ import annotations

from tests.support.rings import attach, make_ring, read, write


def test_a_slot_that_is_being_filled_again_brings_its_writer_before_no_other():
    with make_ring(elements=2, slots=2, writers=2) as ring, attach(ring) as other:
        ring.become_writer(0)
        other.become_writer(1)
        assert write(ring)
        assert read(ring) == (0, 1)
        assert write(other)
        assert write(ring)
        ring.claim()  # the slot that was read
        assert [read(ring), read(ring)] == [(1, 1), (0, 2)]
