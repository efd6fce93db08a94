"""A ring beside a serial oracle, over any order of what its parties do."""

from __future__ import annotations

import contextlib
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rings import attach, make_ring, stamp, stamped


class Oracle:
    """What a ring does, in deques."""

    def __init__(self, slots: int, writers: int, overflow: str) -> None:
        homes = range(0, slots * writers, slots)
        self.free = [deque(range(first, first + slots)) for first in homes]
        self.ready: list[tuple[int, int, int]] = []  # slot, writer, sequence; oldest first
        self.claimed: list[int | None] = [None] * writers
        self.written, self.dropped, self.read, self.skipped = ([0] * writers for _ in range(4))
        self.overwrites = overflow == "overwrite"

    def claim(self, writer: int) -> int | None:
        if self.claimed[writer] is None:
            own = [rollout for rollout in self.ready if rollout[1] == writer]
            if self.free[writer]:
                self.claimed[writer] = self.free[writer].popleft()
            elif self.overwrites and own:
                self.ready.remove(own[0])
                self.claimed[writer] = own[0][0]
                self.dropped[writer] += 1
        return self.claimed[writer]

    def commit(self, writer: int) -> int:
        self.written[writer] += 1
        self.ready.append((self.claimed[writer], writer, self.written[writer]))
        self.claimed[writer] = None
        return self.written[writer]

    def abandon(self, writer: int) -> None:
        if self.claimed[writer] is not None:
            self.free[writer].append(self.claimed[writer])
            self.claimed[writer] = None

    def acquire(self) -> tuple[int, int, int] | None:
        return self.ready.pop(0) if self.ready else None

    def release(self, taken: tuple[int, int, int], read: bool) -> None:
        slot, writer, _ = taken
        self.free[writer].append(slot)
        (self.read if read else self.skipped)[writer] += 1


KINDS = ["claim", "write", "write", "commit", "abandon", "acquire", "release", "skip"]
ACTIONS = st.tuples(st.sampled_from(KINDS), st.integers(0, 2))


@pytest.mark.parametrize("overflow", ["overwrite", "block"])
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 3), st.lists(ACTIONS, max_size=40))
def test_a_ring_does_what_a_serial_oracle_does(overflow, slots, writers, actions):
    oracle = Oracle(slots, writers, overflow)
    leases: list[tuple[object, tuple[int, int, int]]] = []
    with contextlib.ExitStack() as stack:
        new = make_ring(elements=2, slots=slots, writers=writers, overflow=overflow)
        ring = stack.enter_context(new)
        ends = [stack.enter_context(attach(ring)) for _ in range(writers)]
        for writer, end in enumerate(ends):
            assert end.become_writer(writer) == writer
        for action, which in actions:
            writer = which % writers
            end = ends[writer]
            if action in ("claim", "write"):
                assert end.claim(timeout=0) == oracle.claim(writer)
            if action in ("write", "commit"):
                if (slot := oracle.claimed[writer]) is not None:
                    for key, value in stamped(writer, oracle.written[writer] + 1, 2).items():
                        end.views[slot][key].copy_(value)
                    assert end.commit() == oracle.commit(writer)
                else:
                    with pytest.raises(RuntimeError, match="no slot is claimed"):
                        end.commit()
            elif action == "abandon":
                end.abandon()
                oracle.abandon(writer)
            elif action == "acquire":
                lease, taken = ring.acquire(), oracle.acquire()
                assert (lease and (lease.slot, lease.writer)) == (taken and taken[:2])
                if lease is not None:
                    leases.append((lease, taken))
            elif action in ("release", "skip") and leases:
                lease, taken = leases.pop(which % len(leases))
                assert stamp(lease.views) == taken[1:]
                ring.release(lease, read=action == "release")
                oracle.release(taken, action == "release")
            assert ring.available() == len(oracle.ready)
            assert [lease.slot for lease in ring.leases] == [taken[0] for _, taken in leases]
            counts = (ring.written, ring.dropped, ring.read, ring.skipped)
            expected = (oracle.written, oracle.dropped, oracle.read, oracle.skipped)
            assert counts == tuple(map(tuple, expected))
