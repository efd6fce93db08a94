"""A replay that another thread closes in mid-call, or whose first write Ctrl-C cuts short."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from tests.support.interrupts import each_interrupt
from tests.support.transitions import replay_of, transitions
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.data.replay import shared
from torchrl_unilab.data.schema import TensorSchema
from torchrl_unilab.errors import SegmentClosedError
from torchrl_unilab.shm.rows import SharedRows


@pytest.mark.parametrize(
    "use",
    [
        lambda storage: storage.append(transitions(1)),
        lambda storage: storage.sample(1),
        lambda storage: storage.get(torch.tensor([0])),
        lambda storage: storage.get(slice(None)),
        lambda storage: storage.read_since(()),
    ],
    ids=["append", "sample", "get", "views", "read_since"],
)
def test_a_replay_that_another_thread_closes_meanwhile_says_so(use, monkeypatch):
    storage = replay_of(transitions(3), 10)
    rows = storage.rows

    def closed_since(_: PackedReplayStorage) -> SharedRows:
        storage.close()
        return rows

    monkeypatch.setattr(PackedReplayStorage, "rows", property(closed_since))
    monkeypatch.setattr(PackedReplayStorage, "initialized", property(closed_since))

    with pytest.raises(SegmentClosedError, match="closed"):
        use(storage)


def test_after_an_interrupt_in_the_first_write_a_copy_has_the_same_rows():
    schema = TensorSchema.of(transitions(1)[0])
    for interrupt in each_interrupt(shared):
        with PackedReplayStorage(10) as storage:
            interrupt.during(partial(storage.initialize, schema))
            storage.append(transitions(1))

            copy.copy(storage).append(transitions(2))

            assert len(storage) == 3
