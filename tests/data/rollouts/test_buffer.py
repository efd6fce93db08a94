"""What writer, sampler and buffer of a ring add to the storage's own calls."""

from __future__ import annotations

import pytest

from tests.support.rollouts import make_rollout, stack
from torchrl_unilab.data import (
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingStorage,
    RolloutRingWriter,
)
from torchrl_unilab.errors import WaitTimeoutError


def test_positions_of_what_another_process_took_meanwhile_are_not_negative(storage, monkeypatch):
    writer = RolloutRingWriter()
    writer.register_storage(storage)
    monkeypatch.setattr(RolloutRingStorage, "__len__", lambda _: 0)
    assert writer.add(make_rollout(1)) == 0
    assert writer.extend(stack(2, 3)).tolist() == [0, 0]


def test_a_sampler_knows_how_many_batches_are_left_to_prefetch(storage):
    storage.write_all(stack(1, 2, 3, 4))
    sampler = RolloutRingSampler()
    index, _ = sampler.sample(storage, 1)
    assert index.tolist() == [0]
    assert (sampler._remaining_batches, sampler.ran_out) == (3, False)


def test_an_iteration_whose_sampler_waits_ends_by_its_timeout_alone(storage):
    sampler = RolloutRingSampler(timeout=0.01)
    buffer = RolloutReplayBuffer(storage=storage, sampler=sampler, batch_size=1)
    with pytest.raises(WaitTimeoutError, match="0 are unread"):
        next(iter(buffer))


@pytest.mark.parametrize(("settings", "count"), [({}, 0), ({"empty_write_count": False}, 2)])
def test_an_emptied_buffer_has_not_run_out_and_keeps_its_count_if_told_to(storage, settings, count):
    buffer = RolloutReplayBuffer(storage=storage, batch_size=1)
    buffer.extend(stack(1, 2))
    assert len([*buffer]) == 2
    buffer.empty(**settings)
    assert (len(buffer), buffer.write_count, buffer.sampler.ran_out) == (0, count, False)


def test_an_iteration_without_a_batch_size_is_refused_as_by_a_stock_buffer(storage):
    with pytest.raises(RuntimeError, match="Batch_size was not specified"):
        next(iter(RolloutReplayBuffer(storage=storage)))
