"""What is refused at a storage's surface says what it is, and stock checkpoints load."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, RoundRobinWriter, SamplerWithoutReplacement

from tests.support.checkpoints import BOTH_WAYS
from tests.support.rollouts import make_rollout, stack
from tests.support.transitions import replay_of, same, transitions
from torchrl_unilab.data import (
    PackedReplayStorage,
    PackedReplayWriter,
    RolloutRingSampler,
    RolloutRingStorage,
    RolloutRingWriter,
)
from torchrl_unilab.errors import (
    ConfigError,
    LayoutDtypeError,
    LayoutKeyError,
    LayoutShapeError,
    UniLabError,
)

STOCK = pytest.mark.parametrize("stock", [LazyTensorStorage, LazyMemmapStorage])
WRITERS = pytest.mark.parametrize("writer", [PackedReplayWriter, RoundRobinWriter])


def stock_buffer(rows: int, stock: type = LazyTensorStorage, capacity: int = 8) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=stock(capacity), batch_size=2)
    for row in transitions(rows).split(3):
        buffer.extend(row)
    return buffer


def packed_buffer(writer: type = PackedReplayWriter, capacity: int = 8) -> ReplayBuffer:
    return ReplayBuffer(storage=PackedReplayStorage(capacity), writer=writer(), batch_size=2)


# Checkpoints of stock storages


@BOTH_WAYS
@STOCK
@WRITERS
@pytest.mark.parametrize(("rows", "capacity"), [(5, 8), (8, 8), (11, 8), (11, 20)])
def test_a_stock_checkpoint_loads_at_the_same_positions(
    load, stock, writer, rows, capacity, tmp_path
):
    saved, buffer = stock_buffer(rows, stock), packed_buffer(writer, capacity)

    load(saved, buffer, tmp_path)

    assert len(buffer) == len(saved)
    assert same(buffer[:], saved[:])


def test_a_stock_state_dict_loads_from_a_file(tmp_path):
    saved, buffer = stock_buffer(5), packed_buffer()
    torch.save(saved.state_dict(), tmp_path / "state.pt")

    buffer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))

    assert same(buffer[:], saved[:])


def test_a_stock_checkpoint_replaces_the_rows_that_were_there(tmp_path):
    saved, buffer = stock_buffer(5), packed_buffer()
    buffer.extend(transitions(7, seed=1))
    saved.dumps(tmp_path)

    buffer.loads(tmp_path)

    assert same(buffer[:], saved[:])


@BOTH_WAYS
def test_more_stock_rows_than_fit_are_refused_by_both_numbers(load, tmp_path):
    with replay_of(transitions(2, seed=1), 4) as storage:
        with pytest.raises(UniLabError, match=r"cannot load 5 rows.*4"):
            load(stock_buffer(5).storage, storage, tmp_path)
        assert same(storage[:], transitions(2, seed=1))


@BOTH_WAYS
def test_stock_rows_of_other_keys_are_refused_and_leave_what_is_there(load, tmp_path):
    saved = ReplayBuffer(storage=LazyTensorStorage(8))
    saved.extend(TensorDict({"pixels": torch.ones(3, 2)}, [3]))
    with replay_of(transitions(2, seed=1), 8) as storage:
        with pytest.raises(LayoutKeyError, match="pixels"):
            load(saved.storage, storage, tmp_path)
        assert same(storage[:], transitions(2, seed=1))


@BOTH_WAYS
def test_a_stock_checkpoint_of_plain_tensors_is_named(load, tmp_path):
    saved = ReplayBuffer(storage=LazyTensorStorage(8))
    saved.extend(torch.ones(3, 2))
    with (
        PackedReplayStorage(8) as storage,
        pytest.raises(UniLabError, match=r"plain tensors \(expected .*TensorDict"),
    ):
        load(saved.storage, storage, tmp_path)


@BOTH_WAYS
def test_a_stock_checkpoint_for_a_ring_says_what_it_is_and_how_to_convert(load, tmp_path):
    with (
        RolloutRingStorage(4) as storage,
        pytest.raises(UniLabError, match=r"checkpoint of another storage.*Load .* extend"),
    ):
        load(stock_buffer(3).storage, storage, tmp_path)


@pytest.mark.parametrize("cls", [PackedReplayStorage, RolloutRingStorage])
def test_a_folder_without_a_checkpoint_is_named(cls, tmp_path):
    with cls(4) as storage, pytest.raises(FileNotFoundError, match=tmp_path.name):
        storage.loads(tmp_path / "nothing")


# What is no TensorDict


NO_ROWS = pytest.mark.parametrize(
    "data", [torch.ones(3, 2), [torch.ones(2), torch.ones(2)], {"a": torch.ones(3)}]
)


@NO_ROWS
@pytest.mark.parametrize("known", [True, False])
def test_what_is_no_tensordict_is_no_rows(data, known):
    buffer = packed_buffer()
    if known:
        buffer.extend(transitions(3))
    with buffer.storage as storage:
        kind = type(data[0] if isinstance(data, list) else data).__name__
        for write in (
            lambda: buffer.extend(data),
            lambda: storage.append(data),
            lambda: storage.add(data),
            lambda: storage.set(slice(0, 3), data),
            lambda: storage.set([0, 1, 2], data, set_cursor=False),
        ):
            with pytest.raises(LayoutDtypeError, match=rf"{kind}.*\(expected a TensorDict"):
                write()


@NO_ROWS
@pytest.mark.parametrize("known", [True, False])
def test_what_is_no_tensordict_is_no_rollout(data, known):
    with RolloutRingStorage(4, example=make_rollout() if known else None) as storage:
        writer = RolloutRingWriter()
        writer.register_storage(storage)
        kind = type(data[0] if isinstance(data, list) else data).__name__
        with pytest.raises(LayoutDtypeError, match=rf"{kind} \(expected a TensorDict"):
            writer.extend(data)


@pytest.mark.parametrize("cls", [PackedReplayStorage, RolloutRingStorage])
def test_an_example_that_is_no_tensordict_is_named(cls):
    with pytest.raises(LayoutDtypeError, match=r"Tensor \(expected a TensorDict"):
        cls(4, example=torch.ones(3))


# Rollouts of another kind


@pytest.mark.parametrize("lazy", [False, True])
def test_a_rollout_of_another_length_is_answered_with_advice_about_rollouts(lazy):
    other = TensorDict.lazy_stack(list(make_rollout().unbind(1))[:-1], 1)
    storage = RolloutRingStorage(4, example=make_rollout())
    with storage, pytest.raises(LayoutShapeError) as caught:
        storage.write_all(other if lazy else other.contiguous())
    assert not {"model", "scheme", "Publish"} & set(str(caught.value).replace(",", "").split())


# Samplers of rollouts


@pytest.mark.parametrize("sampler", [None, RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_sampler_that_would_leave_rollouts_unread_is_refused_by_name(cls, sampler, later):
    with RolloutRingStorage(4, example=make_rollout()) as storage:
        first = RolloutRingSampler() if later else sampler and sampler()
        buffer = cls(storage=storage, sampler=first, writer=RolloutRingWriter(), batch_size=1)
        if later:
            buffer.set_sampler((sampler or RandomSampler)())
        buffer.extend(stack(1, 2))

        name = (sampler or RandomSampler).__name__
        with pytest.raises(ConfigError, match=rf"{name} \(expected a RolloutRingSampler"):
            buffer.sample()


def test_a_buffer_that_only_writes_rollouts_needs_no_sampler():
    with RolloutRingStorage(4, example=make_rollout()) as storage:
        buffer = ReplayBuffer(storage=storage, writer=RolloutRingWriter(), batch_size=1)

        assert buffer.extend(make_rollout(1)).tolist() == [0]
