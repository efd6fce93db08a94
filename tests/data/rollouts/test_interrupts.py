"""An interrupt at any point of a call on the storage leaves each rollout unread, leased or read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.support.interrupts import each_interrupt
from tests.support.rollouts import make_rollout, values
from torchrl_unilab.data import RolloutRingStorage
from torchrl_unilab.data.rollouts import shared
from torchrl_unilab.data.rollouts import storage as storage_module
from torchrl_unilab.shm import ring, tokens

MODULES = (shared, storage_module, ring, tokens)
Call = Callable[[RolloutRingStorage], object]


def held(storage: RolloutRingStorage) -> list[int]:
    """The rollouts that are leased, then those that are unread."""
    leased = [value for lease in storage.leases for value in values(lease.rollout.unsqueeze(0))]
    return leased + values(storage[:])


@pytest.mark.parametrize(
    "call",
    [
        RolloutRingStorage.acquire,
        RolloutRingStorage.acquire_all,
        RolloutRingStorage.wait,
        RolloutRingStorage.state_dict,
        lambda storage: storage.get(1),
        lambda storage: storage.draw(2, newest=True),
        lambda storage: storage.release(storage.acquire()),
        lambda storage: storage.get(storage.draw(1, newest=True)),
    ],
    ids=["acquire", "acquire_all", "wait", "state_dict", "get", "draw", "release", "sample"],
)
def test_an_interrupted_call_of_the_reader_loses_and_doubles_no_rollout(call: Call):
    for interrupt in each_interrupt(*MODULES):
        with RolloutRingStorage(3, example=make_rollout()) as storage:
            storage.write_all([make_rollout(value) for value in (1, 2, 3)])
            storage.wait(0.0)
            interrupt.during(partial(call, storage))

            found = held(storage)

            gone = storage.read_count + sum(storage.skipped)
            assert found == [1, 2, 3][gone:]
            for lease in storage.acquire_all():
                storage.release(lease)
            assert storage.write_count == storage.read_count + sum(storage.skipped)


def test_positions_that_were_drawn_are_void_once_an_interrupted_acquire_took_one():
    for interrupt in each_interrupt(*MODULES):
        with RolloutRingStorage(3, example=make_rollout()) as storage:
            storage.write_all([make_rollout(value) for value in (1, 2, 3)])
            drawn = storage.draw(1)
            interrupt.during(storage.acquire)

            leased = len(storage.leases)

            assert values(storage.get(drawn)) == [1 + leased]
            assert storage.read_count in ((0,) if leased else (0, 1))
