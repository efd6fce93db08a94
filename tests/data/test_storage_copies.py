"""Copies of storages: deep ones have memory apart, shallow and spawned ones share it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, RoundRobinWriter, TensorDictReplayBuffer

from tests.support.rollouts import make_rollout, stack
from tests.support.transitions import steps, transitions
from torchrl_unilab.data import (
    PackedReplayStorage,
    PackedReplayWriter,
    RolloutReplayBuffer,
    RolloutRingSampler,
    RolloutRingStorage,
    RolloutRingWriter,
)
from torchrl_unilab.errors import SegmentError


def replay(cls: type[ReplayBuffer] = ReplayBuffer) -> ReplayBuffer:
    return cls(storage=PackedReplayStorage(8), writer=PackedReplayWriter(), batch_size=2)


def rollouts(cls: type[ReplayBuffer] = ReplayBuffer) -> ReplayBuffer:
    parts = {"sampler": RolloutRingSampler(), "writer": RolloutRingWriter()}
    if cls is RolloutReplayBuffer:
        parts = {}
    return cls(storage=RolloutRingStorage(4, example=make_rollout()), batch_size=1, **parts)


MAKERS = {
    "replay": replay,
    "tensordict-replay": lambda: replay(TensorDictReplayBuffer),
    "rollouts": rollouts,
    "rollout-buffer": lambda: rollouts(RolloutReplayBuffer),
}


def data(buffer: ReplayBuffer) -> TensorDict:
    """Two items for a buffer."""
    if isinstance(buffer.storage, PackedReplayStorage):
        return transitions(2)
    return stack(1, 2)


@pytest.fixture(params=list(MAKERS))
def buffer(request: pytest.FixtureRequest) -> Iterator[ReplayBuffer]:
    made = MAKERS[request.param]()
    made.extend(data(made))
    yield made
    made.storage.close()


@pytest.fixture
def twin(buffer: ReplayBuffer) -> Iterator[ReplayBuffer]:
    made = copy.deepcopy(buffer)
    yield made
    made.storage.close()


def test_a_deep_copy_holds_what_its_original_holds(buffer, twin):
    assert len(twin) == 2
    assert (twin[:] == buffer[:]).all()


def test_emptying_a_deep_copy_leaves_the_original_full(buffer, twin):
    twin.empty()

    assert (len(twin), len(buffer)) == (0, 2)


def test_what_is_written_to_the_original_does_not_reach_a_deep_copy(buffer, twin):
    buffer.extend(data(buffer))

    assert (len(buffer), len(twin)) == (4, 2)


def test_a_deep_copy_outlives_its_original(buffer, twin):
    buffer.storage.close()

    assert twin.extend(data(twin)).tolist() == [2, 3]


def test_a_deep_copy_of_a_buffer_is_what_its_storage_is_attached_to(twin):
    assert twin.storage._attached_entities == [twin]


def test_a_deep_copy_samples_alike(buffer, twin):
    torch.manual_seed(3)
    expected = buffer.sample()
    torch.manual_seed(3)

    assert (twin.sample() == expected).all()


def test_a_deep_copy_knows_which_rows_were_overwritten():
    writer = RoundRobinWriter(track_generations=True)
    buffer = ReplayBuffer(storage=PackedReplayStorage(8), writer=writer, batch_size=2)
    for _ in range(5):
        index = buffer.extend(transitions(2))

    twin = copy.deepcopy(buffer)

    assert twin.writer.generations_of(index).tolist() == [1, 1]
    buffer.extend(transitions(8))
    assert twin.writer.generations_of(index).tolist() == [1, 1]


@pytest.mark.parametrize(
    "make",
    [lambda: PackedReplayStorage(8), lambda: RolloutRingStorage(4)],
    ids=["replay", "rollouts"],
)
def test_a_storage_that_knows_no_items_is_copied_as_one(make):
    with make() as storage, copy.deepcopy(storage) as other:
        assert not other.initialized


def test_a_deep_copy_has_the_settings_of_its_original():
    with PackedReplayStorage(8, n_step=3, gamma=0.5, writers=1) as storage:
        for step in steps(2, 3):
            storage.add(step)
        with copy.deepcopy(storage) as other:
            assert (other.max_size, other.n_step, other.gamma, other.writers) == (8, 3, 0.5, 1)
            assert (other.sample(4, seed=1) == storage.sample(4, seed=1)).all()


def test_a_deep_copy_of_a_ring_has_the_settings_of_its_original():
    with (
        RolloutRingStorage(3, writers=2, overflow="block", timeout=0.5) as storage,
        copy.deepcopy(storage) as other,
    ):
        assert (other.slots, other.writers, other.overflow, other.timeout) == (3, 2, "block", 0.5)


def test_a_shallow_copy_shares_its_originals_memory(buffer):
    other = copy.copy(buffer.storage)

    assert len(other) == len(buffer) == 2
    buffer.empty()
    assert len(other) == 0


@pytest.mark.parametrize("of", ["buffer", "storage"])
def test_pickling_is_refused_outside_of_spawning_and_names_dumps(buffer, of):
    item = buffer if of == "buffer" else buffer.storage

    with pytest.raises(SegmentError, match=r"cannot copy or pickle .*Storage.*dumps"):
        pickle.dumps(item)
