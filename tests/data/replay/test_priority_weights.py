"""The weights of rows that were drawn by their priority, by hand."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from torchrl_unilab.data import PackedPrioritizedSampler, PackedReplayStorage


def test_weights_are_of_priorities_plus_eps_and_negative_positions_are_left_out():
    sampler = PackedPrioritizedSampler(4, alpha=1.0, beta=1.0, eps=1.0)
    with PackedReplayStorage(4) as storage:
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
        buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
        buffer.update_priority(torch.tensor([-1, 0]), torch.tensor([1e9, 3.0]))
        batch = buffer.sample()
    weights = dict(zip(batch["x"].tolist(), batch["priority_weight"].tolist(), strict=True))
    assert weights == {0: 0.5, 1: 1.0, 2: 1.0, 3: 1.0}
