"""What writer, sampler and buffer of a ring add to the storage's own calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RoundRobinWriter, TensorDictRoundRobinWriter

from tests.support.rollouts import make_rollout, stack, values
from torchrl_unilab.data import (
    RolloutPool,
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingStorage,
    RolloutRingWriter,
)
from torchrl_unilab.errors import ConfigError, UsageError, WaitTimeoutError


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


def test_what_an_iteration_that_was_left_has_fetched_comes_in_the_next(storage):
    buffer = RolloutReplayBuffer(storage=storage, batch_size=1, prefetch=2)
    buffer.extend(stack(1, 2, 3))
    seen = values(next(iter(buffer)))
    buffer.synchronize()
    assert sorted(seen + [value for batch in buffer for value in values(batch)]) == [1, 2, 3]
    assert [*buffer] == []


@pytest.mark.parametrize(("settings", "count"), [({}, 0), ({"empty_write_count": False}, 2)])
def test_an_emptied_buffer_has_not_run_out_and_keeps_its_count_if_asked_to(
    storage, settings, count
):
    buffer = RolloutReplayBuffer(storage=storage, batch_size=1)
    buffer.extend(stack(1, 2))
    assert len([*buffer]) == 2
    buffer.empty(**settings)
    assert (len(buffer), buffer.write_count, buffer.sampler.ran_out) == (0, count, False)
    assert storage.read_count == count


def test_an_iteration_without_a_batch_size_is_refused_as_by_a_stock_buffer(storage):
    with pytest.raises(RuntimeError, match="Batch_size was not specified"):
        next(iter(RolloutReplayBuffer(storage=storage)))


def test_a_rollout_that_is_leased_while_a_buffer_is_emptied_still_counts(storage):
    buffer = RolloutReplayBuffer(storage=storage, batch_size=1)
    buffer.extend(stack(1, 2))
    lease = storage.acquire()
    buffer.empty()
    assert (buffer.write_count, storage.read_count, len(buffer)) == (1, 0, 0)
    storage.release(lease)
    assert (buffer.write_count, storage.read_count) == (1, 1)


def _empty(storage: RolloutRingStorage) -> None:
    storage.write(make_rollout(1))
    storage._empty()


def _load(storage: RolloutRingStorage) -> None:
    with RolloutRingStorage(1, example=make_rollout()) as other:
        other.write(make_rollout(1))
        storage.load_state_dict(other.state_dict())
    storage.release(storage.acquire())


@pytest.mark.parametrize("leave", [_empty, _load])
def test_a_reader_waits_without_end_for_the_writer_that_emptying_or_loading_left(
    storage, leave, monkeypatch
):
    def comes_late(*_: object) -> Iterator[None]:
        yield  # the reader looks who is left
        storage.write(make_rollout(2))
        yield

    leave(storage)
    monkeypatch.setattr("torchrl_unilab.shm.ring.waits", comes_late)
    assert storage.wait(None)


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer, RolloutReplayBuffer])
@pytest.mark.parametrize(
    "change",
    [
        lambda buffer, value: buffer.set_("action", value),
        lambda buffer, value: buffer.set_at_("action", value[:1], slice(1)),
        lambda buffer, value: buffer.update_({"action": value}),
    ],
    ids=["set_", "set_at_", "update_"],
)
def test_unread_rollouts_are_not_changed_in_place_and_the_caller_is_told(storage, cls, change):
    parts = {} if cls is RolloutReplayBuffer else {"writer": RolloutRingWriter()}
    buffer = cls(storage=storage, batch_size=1, **parts)
    buffer.extend(stack(1, 2))
    with pytest.raises(UsageError, match="cannot change unread rollouts"):
        change(buffer, torch.zeros_like(buffer["action"]))
    assert values(buffer[:]) == [1, 2]


@pytest.mark.parametrize("index", ["action", ("next", "done"), 0, slice(2), (slice(None), 0)])
def test_assignment_to_a_rollout_buffer_is_refused_by_key_as_by_position(storage, index):
    buffer = RolloutReplayBuffer(storage=storage, batch_size=1)
    buffer.extend(stack(1, 2))
    with pytest.raises(UsageError, match="cannot replace rollout"):
        buffer[index] = buffer[index]


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_a_writer_that_takes_environments_for_items_is_refused_by_name(storage, writer):
    buffer = ReplayBuffer(storage=storage, writer=writer(), batch_size=1)
    message = rf"by a {writer.__name__} \(expected a RolloutRingWriter"
    for data in (make_rollout(1), stack(1, 2)):
        with pytest.raises(ConfigError, match=message):
            buffer.extend(data)
    assert len(storage) == 0


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_rollouts_of_a_dtype_that_torch_cannot_add_are_read_and_pooled(dtype):
    pixels = torch.arange(6, dtype=torch.float32).to(dtype).view(2, 3)
    rollout, pool, other = (
        TensorDict(pixels=pixels, batch_size=[2, 3]),
        RolloutPool(1),
        RolloutPool(1),
    )
    with RolloutRingStorage(2, example=rollout) as storage:
        storage.write(rollout)
        pool.add(storage[0])
    other.load_state_dict(pool.state_dict())
    assert torch.equal(other.data["pixels"].t().float(), pixels.float())
