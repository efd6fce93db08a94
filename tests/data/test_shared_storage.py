"""What both storages in shared memory do, because their base does."""

from __future__ import annotations

import inspect
import pickle
from multiprocessing import resource_tracker
from multiprocessing.context import get_spawning_popen

import numpy as np
import pytest
import torch
from torchrl.data import (
    Composite,
    LazyTensorStorage,
    MultiCategorical,
    NonTensor,
    ReplayBuffer,
    Unbounded,
)
from torchrl.data.replay_buffers.checkpointers import TensorStorageCheckpointer
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

from tests.support.interrupts import each_interrupt
from tests.support.processes import shared_mappings, spawned
from tests.support.rollouts import make_rollout
from tests.support.transitions import transitions
from torchrl_unilab.data import (
    PackedReplayStorage,
    PackedReplayWriter,
    RolloutRingStorage,
    RolloutRingWriter,
)
from torchrl_unilab.data.shared_storage import SharedStorage
from torchrl_unilab.errors import ConfigError, LayoutDtypeError, SegmentClosedError
from torchrl_unilab.shm.rows import SharedRows

KINDS = {PackedReplayStorage: PackedReplayWriter, RolloutRingStorage: RolloutRingWriter}
BOTH = pytest.mark.parametrize("cls", list(KINDS))
FIRST = torch.tensor([0])


def filled(cls: type[SharedStorage], items: int = 2) -> SharedStorage:
    storage = cls(4, writers=1 if cls is PackedReplayStorage else 2)
    if items:
        rollouts = [make_rollout(value) for value in range(items)]
        data = transitions(items) if cls is PackedReplayStorage else rollouts
        buffer_of(storage).extend(data)
    return storage


def buffer_of(storage: SharedStorage) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, writer=KINDS[type(storage)](), batch_size=1)


@BOTH
def test_other_checkpointers_and_hooks_are_refused(cls):
    with filled(cls, 0) as storage:
        own = storage.checkpointer
        with pytest.raises(ConfigError, match=f"expected {type(own).__name__}"):
            ReplayBuffer(storage=storage, checkpointer=TensorStorageCheckpointer())
        for register in (storage.register_save_hook, storage.register_load_hook):
            with pytest.raises(ConfigError, match=f"hook of a {type(own).__name__}"):
                register(lambda data, path: data)
        assert storage.checkpointer is own
        storage.checkpointer = other = type(own)()
        assert storage.checkpointer is other


@BOTH
def test_a_spec_of_more_than_tensors_is_refused(cls):
    spec = Composite(words=NonTensor(()), reward=Unbounded(()))
    with pytest.raises(LayoutDtypeError, match=r"entry 'words': NonTensorData \(expected a t"):
        cls.from_spec(spec, 5)


@BOTH
@pytest.mark.parametrize("by_name", [False, True])
def test_a_storage_of_a_spec_knows_its_items_before_any_comes(cls, by_name):
    count = Unbounded((3,), dtype=torch.int32)
    agents = Composite(speed=Unbounded((3, 2, 4)), shape=(3, 2))
    after = Composite(count=count, shape=(3,))
    kinds = MultiCategorical([2, 5], shape=(3, 2))
    spec = Composite(kinds=kinds, reward=Unbounded((3, 1)), next=after, agents=agents, shape=(3,))
    size = "max_size" if cls is PackedReplayStorage else "slots"
    args, settings = ((), {size: 5}) if by_name else ((5,), {})
    with cls.from_spec(spec, *args, **settings) as storage:
        assert (storage.initialized, storage.max_size) == (True, 5)
        buffer_of(storage).extend(torch.stack([spec.rand() for _ in range(2)]))
        assert storage[:].batch_size == (2, 3)
        assert storage[0]["next", "count"].dtype is torch.int32
        assert storage[:]["agents"].batch_size == (2, 3, 2)


@BOTH
def test_length_is_what_is_there_whatever_a_stock_writer_says(cls):
    with filled(cls, 3) as storage:
        storage._len = 1
        assert (len(storage), storage._len, storage.shape) == (3, 3, (3,))
        assert [i in storage for i in (-4, -3, 2, 3)] == [False, True, True, False]
        assert [storage.contains(np.int64(i)) for i in (-4, -3)] == [False, True]
        there = storage.contains(torch.tensor([-4, -3, 2, 3]))
        assert there.tolist() == [False, True, True, False]


@BOTH
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int64])
def test_a_tensor_of_any_integers_contains_what_it_does_of_a_stock_storage(cls, dtype):
    stock = LazyTensorStorage(4)
    stock.set(range(2), transitions(2))
    item = torch.tensor([1, 0, 2, 100, -1, -3]).to(dtype)
    with filled(cls) as storage:
        assert storage.contains(item).tolist() == stock.contains(item).tolist()
        assert [bool(storage.contains(i)) for i in item] == stock.contains(item).tolist()


@BOTH
@pytest.mark.parametrize(
    "item",
    [2.5, None, "x", [0], slice(2), np.array([0]), torch.tensor([0.0]), torch.tensor([1j])],
    ids=str,
)
def test_what_is_no_position_is_not_asked_for(cls, item):
    with filled(cls) as storage, pytest.raises(ConfigError, match=f"position in a {cls.__name__}"):
        storage.contains(item)


@BOTH
def test_what_is_written_changes_the_revision_and_what_is_read_does_not(cls):
    with filled(cls) as storage:
        before = storage._mutation_revision
        assert storage[:].batch_size[0] == 2
        assert storage._mutation_revision == before
        buffer_of(storage).extend(storage[:].clone())
        assert storage._mutation_revision > before


@BOTH
@pytest.mark.parametrize("writer", [-1, 2, 0.0, True, "0"])
def test_there_are_as_many_writers_as_were_asked_for(cls, writer):
    storage = filled(cls)
    message = f" writer: {writer!r} .expected an integer of 0 to {storage.writers - 1}"
    with storage, pytest.raises(ConfigError, match=message):
        storage.use_writer(writer)


@BOTH
def test_nothing_is_left_to_the_resource_tracker(cls, monkeypatch):
    named: set[str] = set()
    monkeypatch.setattr(resource_tracker, "register", lambda name, kind: named.add(name))
    monkeypatch.setattr(resource_tracker, "unregister", lambda name, kind: named.discard(name))
    with filled(cls, 2):
        assert named == set()


@BOTH
def test_what_goes_to_a_process_is_nothing_that_is_of_another(cls):
    with filled(cls) as storage:
        storage._rng = torch.Generator()
        state = storage._shared_state()
        assert state["_rng"] is None
        own = set(storage._process_local)
        assert own
        assert own.isdisjoint(state)
        assert {*state, *own} == {*storage.__dict__}


@BOTH
def test_a_storage_that_knows_no_items_does_not_go_to_another_process(cls):
    refused = pytest.raises(RuntimeError, match=r"cannot share .*0 of [48] .*example or a spec")
    with filled(cls, 0) as storage, refused, spawned(print, storage):
        pass
    assert get_spawning_popen() is None


@BOTH
def test_a_storage_goes_without_the_buffers_that_read_it(cls):
    with filled(cls) as storage:
        buffer = buffer_of(storage)
        other = storage.without_buffers()
        assert other._attached_entities == []
        assert storage._attached_entities[-1] is buffer
        assert len(other) == len(storage) == 2


@BOTH
def test_a_closed_storage_is_closed_once_and_refused(cls):
    storage = filled(cls)
    with storage as entered:
        assert entered is storage
        assert not storage.closed
    storage.close()
    assert storage.closed
    for use in (lambda: len(storage), lambda: storage.get(0), lambda: pickle.dumps(storage)):
        with pytest.raises(SegmentClosedError, match=f"cannot use {cls.__name__}: it is closed"):
            use()


@BOTH
def test_a_storage_closed_while_the_interpreter_ends_is_left_to_the_kernel(cls, monkeypatch):
    storage = filled(cls)
    monkeypatch.setattr(storage, "_is_ending", lambda: True)
    storage.close()
    assert not storage.closed
    assert len(storage) == 2
    monkeypatch.undo()
    storage.close()


@BOTH
def test_updates_of_what_may_have_been_replaced_are_refused(cls):
    with filled(cls) as storage:
        writer = TensorDictRoundRobinWriter(track_generations=True)
        buffer = ReplayBuffer(storage=storage, writer=writer)
        with pytest.raises(RuntimeError, match=f"not supported by {cls.__name__}"):
            buffer.update_if_present(index=FIRST, generation=FIRST, patch={})


@BOTH
def test_a_writer_has_nothing_to_save(cls, tmp_path):
    writer = KINDS[cls]()
    writer.dumps(tmp_path / "writer")
    writer.loads(tmp_path / "writer")
    writer.load_state_dict(writer.state_dict())
    assert (writer.state_dict(), list(tmp_path.iterdir())) == ({}, [])


@BOTH
def test_what_an_interrupt_kept_from_closing_is_closed_by_the_next_call(cls):
    modules = [inspect.getmodule(each) for each in (SharedStorage, cls, SharedRows)]
    for interrupt in each_interrupt(*filter(None, modules), least=3):
        storage, before = filled(cls), shared_mappings()
        interrupt.during(storage.close)
        assert storage.closed or len(storage) == 2

        storage.close()

        assert shared_mappings() == before - 1
