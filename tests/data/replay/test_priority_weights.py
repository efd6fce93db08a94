"""The weights of rows that were drawn by their priority, by hand."""

from __future__ import annotations

import pickle

import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from torchrl_unilab.data import PackedPrioritizedSampler, PackedReplayStorage


def _weights(batch: TensorDict) -> dict[int, float]:
    return dict(zip(batch["x"].tolist(), batch["priority_weight"].tolist(), strict=True))


def test_weights_are_of_priorities_plus_eps_and_negative_positions_are_left_out():
    sampler = PackedPrioritizedSampler(4, alpha=1.0, beta=1.0, eps=1.0)
    with PackedReplayStorage(4) as storage:
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
        buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
        buffer.update_priority(torch.tensor([-1, 0]), torch.tensor([1e9, 3.0]))
        assert _weights(buffer.sample()) == {0: 0.5, 1: 1.0, 2: 1.0, 3: 1.0}


def test_a_sampler_that_has_sampled_can_be_pickled_and_draws_by_the_same_priorities():
    sampler = PackedPrioritizedSampler(4, alpha=1.0, beta=1.0)
    with PackedReplayStorage(4) as storage:
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
        buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
        buffer.update_priority(torch.arange(4), torch.tensor([2.0, 2.0, 4.0, 8.0]))
        weights = _weights(buffer.sample())
        index, found = pickle.loads(pickle.dumps(sampler)).sample(storage, 64)
        assert _weights(TensorDict(found | {"x": index}, [64])) == weights
