"""Scripts with a default device, or dtype, of their own: what is shared stays on the host.

The meta device, which holds no values, stands for an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from torchrl_unilab.data import (
    DoubleBufferReplayPipeline,
    PackedPrioritizedSampler,
    PackedReplayStorage,
    PackedReplayWriter,
    PackedSliceSampler,
    RolloutRingStorage,
)
from torchrl_unilab.weight_update import SharedObsNormStats, UniLabShmTransport

ROWS = 8


def _rows(count: int = ROWS) -> TensorDict:
    x = torch.arange(float(count), device="cpu").unsqueeze(1)
    flag = torch.zeros(count, 1, dtype=torch.bool, device="cpu")
    after = {"observation": x + 1, "reward": x, "done": flag, "terminated": flag}
    return TensorDict({"observation": x, "next": {**after, "truncated": flag}}, [count])


@pytest.fixture
def elsewhere() -> Iterator[None]:
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("n_step", [1, 3])
def test_a_replay_is_written_sampled_saved_and_loaded(n_step, tmp_path):
    with PackedReplayStorage(ROWS, n_step=n_step) as storage:
        buffer = ReplayBuffer(storage=storage, writer=PackedReplayWriter(), batch_size=4)
        buffer.extend(_rows(6))
        buffer.extend(_rows(4))  # around the end
        storage.add(_rows(2))
        storage[torch.tensor([0, 1], device="cpu")] = _rows(2)
        for rows in (buffer.sample(), storage.sample(5), storage.read_since(())[0], storage[:]):
            assert rows.device is None or rows.device.type == "cpu"
            assert rows["observation"].isfinite().all()
        buffer.dumps(tmp_path)
        buffer.loads(tmp_path)
        storage.load_state_dict(storage.state_dict())
        assert len(storage) == ROWS


@pytest.mark.usefixtures("elsewhere")
def test_rows_are_sampled_by_priority_and_as_slices():
    with PackedReplayStorage(ROWS) as storage, PackedReplayStorage(ROWS) as other:
        buffer = TensorDictReplayBuffer(
            storage=storage,
            sampler=PackedPrioritizedSampler(ROWS, 0.7, 0.5),
            writer=PackedReplayWriter(),
            batch_size=4,
        )
        buffer.extend(_rows())
        index = torch.arange(ROWS, device="cpu")
        # Not by the buffer, which takes priorities to the default device first.
        buffer.sampler.update_priority(index, torch.ones(ROWS, device="cpu"), storage=storage)
        assert buffer.sample()["priority_weight"].tolist() == [1.0] * 4
        slices = ReplayBuffer(
            storage=other,
            sampler=PackedSliceSampler(slice_len=2, end_key=("next", "done")),
            writer=PackedReplayWriter(),
            batch_size=4,
        )
        slices.extend(_rows())
        first, second = slices.sample()["observation"].view(2, 2).unbind(1)
        assert (second == first + 1).all()


@pytest.mark.usefixtures("elsewhere")
def test_a_pipeline_and_a_ring_hand_over_what_was_written():
    with PackedReplayStorage(ROWS) as storage, RolloutRingStorage(2, example=_rows()) as ring:
        storage.append(_rows())
        pipeline = DoubleBufferReplayPipeline(storage, sample_count=4)
        assert pipeline.start_prepare(0, 4)
        assert pipeline.sample_large_batch(0, 4)["observation"].isfinite().all()
        pipeline.close()
        ring.claim().update_(_rows())
        ring.commit()
        lease = ring.acquire()
        assert (lease.rollout["observation"] == _rows()["observation"]).all()
        ring.release(lease)


@pytest.mark.usefixtures("elsewhere")
def test_weights_and_statistics_are_published_and_read():
    sent, received = (nn.Linear(2, 2, device="cpu") for _ in range(2))
    with UniLabShmTransport.from_state_dict(sent) as transport:
        transport.write_weights(sent)
        assert transport.read_weights_into(received) == 2
    assert torch.equal(sent.weight, received.weight)
    stats = SharedObsNormStats(2)
    stats.put(([0.0, 0.5], [1.0, 2.0]))
    mean, std = stats.get() or pytest.fail("nothing was put")
    assert (mean.tolist(), std.tolist()) == ([0.0, 0.5], [1.0, 2.0])
    stats.close()


def test_statistics_and_zeros_are_of_single_precision_whatever_the_default(double_precision):
    stats, transport = SharedObsNormStats(2), UniLabShmTransport.create({"w": (2,)})
    stats.put(([0.0, 0.5], [1.0, 2.0]))
    mean, _ = stats.get() or pytest.fail("nothing was put")
    assert mean.dtype == transport.receive_weights()["w"].dtype == torch.float32
    stats.close()
    transport.close()
