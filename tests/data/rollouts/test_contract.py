"""What a storage of TorchRL promises for items, the ring promises for rollouts."""

from __future__ import annotations

import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement

from tests.support.processes import DEADLINE, receive, spawned
from tests.support.rollouts import extend_items, make_rollout, stack, values
from torchrl_unilab.data import RolloutRingSampler, RolloutRingStorage, RolloutRingWriter

SLOTS = 4


def stock(cls=ReplayBuffer, **settings) -> ReplayBuffer:
    sampler = SamplerWithoutReplacement(shuffle=False, drop_last=True)
    return cls(storage=LazyTensorStorage(SLOTS), sampler=sampler, batch_size=2, **settings)


def ours(cls=ReplayBuffer, writers=1, **settings) -> ReplayBuffer:
    return cls(
        storage=RolloutRingStorage(SLOTS, example=make_rollout(), writers=writers),
        sampler=RolloutRingSampler(),
        writer=RolloutRingWriter(),
        batch_size=2,
        **settings,
    )


@pytest.fixture(params=[ReplayBuffer, TensorDictReplayBuffer])
def compare(request):
    """Runs the same calls on a buffer of each kind; returns what both answered."""

    def compare(script, **settings):
        expected = script(stock(request.param, **settings))
        buffer = ours(request.param, **settings)
        assert script(buffer) == expected
        buffer.storage.close()
        return expected

    return compare


def test_extend_returns_as_many_indices_which_read_what_was_written(compare):
    def script(buffer):
        index = buffer.extend(stack(1, 2, 3))
        return type(index), index.dtype, index.tolist(), values(buffer[index])

    assert compare(script)[2:] == ([0, 1, 2], [1, 2, 3])


@pytest.mark.filterwarnings("ignore:Using `add.*` with a TensorDict")
def test_add_returns_the_index_of_one(compare):
    def script(buffer):
        return [
            (index, type(index), int(buffer[index]["action"][0, 0]))
            for index in (buffer.add(make_rollout(value)) for value in (1, 2))
        ]

    assert compare(script) == [(0, int, 1), (1, int, 2)]


def test_length_and_write_count_follow_what_is_written_and_overwritten(compare):
    def script(buffer):
        counts = [(len(buffer), buffer.write_count, buffer.storage._is_full)]
        for _ in range(3):
            buffer.extend(stack(1, 2))
            counts.append((len(buffer), buffer.write_count, buffer.storage._is_full))
        return counts, buffer.stats()

    assert compare(script)[0][-1] == (SLOTS, 6, True)


def test_samples_are_the_rollouts_in_order_with_batch_and_device(compare):
    def script(buffer):
        buffer.extend(stack(1, 2, 3, 4))
        samples = [buffer.sample(), buffer.sample()]
        return [
            (values(s), s.batch_size, s.device, s.is_locked, sorted(s.keys(True, True), key=str))
            for s in samples
        ]

    assert [sample[0] for sample in compare(script)] == [[1, 2], [3, 4]]


def test_return_info_has_the_index(compare):
    def script(buffer):
        buffer.extend(stack(1, 2, 3))
        sample, info = buffer.sample(return_info=True)
        return values(sample), info["index"].tolist(), info["index"].dtype

    assert compare(script)[:2] == ([1, 2], [0, 1])


def test_an_iteration_ends_and_the_next_sees_what_was_written_since(compare):
    def script(buffer):
        epochs = []
        for first in (1, 5):
            buffer.extend(stack(*range(first, first + SLOTS)))
            epochs.append([values(batch) for batch in buffer])
        return epochs, buffer.sampler.ran_out

    assert compare(script) == ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], True)


def test_next_ends_as_iteration_does(compare):
    def script(buffer):
        buffer.extend(stack(1, 2, 3, 4))
        return [
            batch if batch is None else values(batch) for batch in (buffer.next() for _ in range(3))
        ]

    assert compare(script) == [[1, 2], [3, 4], None]


def test_prefetched_batches_are_the_same(compare):
    def script(buffer):
        buffer.extend(stack(1, 2, 3, 4))
        first = [values(batch) for batch in buffer]
        buffer.extend(stack(5, 6, 7, 8))
        return first, [values(batch) for batch in buffer]

    assert compare(script, prefetch=1) == ([[1, 2], [3, 4]], [[5, 6], [7, 8]])


def test_transforms_are_applied_on_the_way_out(compare):
    def double(data):
        return data.set("action", data["action"] * 2)

    def script(buffer):
        buffer.append_transform(double)
        buffer.extend(stack(1, 2, 3))
        return buffer.sample()["action"][:, 0, 0].tolist(), buffer[-1]["action"][0, 0].item()

    assert compare(script) == ([2, 4], 6)


def test_inverse_transforms_are_applied_on_the_way_in(compare):
    def triple(data):
        return data.set("action", data["action"] * 3)

    def script(buffer):
        buffer.append_transform(triple, invert=True)
        buffer.extend(stack(1, 2))
        return buffer.sample()["action"][:, 0, 0].tolist()

    assert compare(script) == [3, 6]


def test_empty_leaves_nothing(compare):
    def script(buffer):
        buffer.extend(stack(1, 2, 3))
        buffer.empty()
        after = len(buffer), buffer.write_count
        buffer.extend(stack(4, 5))
        return after, len(buffer), buffer.write_count, values(buffer.sample())

    assert compare(script) == ((0, 0), 2, 2, [4, 5])


def test_can_sample_says_whether_a_batch_is_there(compare):
    def script(buffer):
        answers = []
        for _ in range(2):
            answers.append(buffer.can_sample())
            buffer.extend(stack(1))
        return [*answers, buffer.can_sample()]

    assert compare(script) == [False, False, True]


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_a_checkpoint_brings_back_what_was_unread_and_the_count(compare, way, tmp_path):
    made = []

    def script(buffer):
        make = ours if isinstance(buffer.storage, RolloutRingStorage) else stock
        fresh = make(type(buffer))
        made.append(fresh)
        buffer.extend(stack(1, 2, 3))
        if way == "state_dict":
            fresh.load_state_dict(buffer.state_dict())
        else:
            path = tmp_path / type(buffer.storage).__name__
            buffer.dumps(path)
            fresh.loads(path)
        restored = len(fresh), fresh.write_count, values(fresh[:])
        fresh.extend(stack(4))
        return restored, len(fresh), fresh.write_count, values(fresh.sample()), len(buffer)

    assert compare(script) == ((3, 3, [1, 2, 3]), 4, 4, [1, 2], 3)
    made[1].storage.close()


def test_a_spawned_process_extends_the_same_buffer():
    def script(buffer):
        buffer.share()
        buffer.extend(stack(1))  # TorchRL's own needs content before it can be shared
        with spawned(extend_items, buffer, 2, 2) as (process, pipe):
            count = receive(pipe)
            process.join(DEADLINE)
        return count, buffer.write_count, len(buffer), values(buffer[:])

    mine = ours(writers=2)
    assert script(mine) == script(stock()) == (3, 3, 3, [1, 2, 3])
    mine.storage.close()


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        [0, 2],
        slice(1, None),
        range(2),
        torch.tensor([2, 0]),
        torch.tensor(1),
        torch.tensor([True, False, True]),
        slice(0, 0),
        ...,
    ],
    ids=str,
)
def test_a_storage_is_read_by_any_index_without_consuming(storage, index):
    def read(storage):
        storage.set(range(3), stack(1, 2, 3))
        return storage.get(index), len(storage)

    expected, length = read(LazyTensorStorage(SLOTS))
    found, unread = read(storage)
    assert (found.batch_size, unread) == (expected.batch_size, length)
    assert (found == expected).all()
    found.zero_()  # a copy
    assert values(storage.get(slice(None))) == [1, 2, 3]
