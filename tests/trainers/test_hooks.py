from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_unilab.trainers import EpisodeReturns, PublishWeights


def _batch(ids, rewards, done) -> TensorDict:
    shape = [len(ids), len(ids[0])]
    return TensorDict(
        {
            "collector": {"traj_ids": torch.tensor(ids)},
            "next": {
                "reward": torch.tensor(rewards, dtype=torch.float32).unsqueeze(-1),
                "done": torch.tensor(done).unsqueeze(-1),
            },
        },
        batch_size=shape,
    )


def test_returns_are_summed_over_batches_by_trajectory():
    returns = EpisodeReturns()
    returns(_batch([[0, 0], [1, 1]], [[1, 2], [10, 20]], [[False, False], [False, True]]))
    assert list(returns.finished) == [30.0]
    returns(_batch([[2, 2], [0, 0]], [[5, 5], [3, 4]], [[False, False], [False, True]]))
    assert list(returns.finished) == [30.0, 10.0]
    assert list(returns.lengths) == [2, 4]
    assert returns.mean == 20.0


def test_two_episodes_of_one_environment_in_one_batch_are_told_apart():
    returns = EpisodeReturns()
    returns(_batch([[0, 0, 1]], [[1, 2, 4]], [[False, True, True]]))
    assert sorted(returns.finished) == [3.0, 4.0]


def test_the_mean_is_over_the_last_episodes_only():
    returns = EpisodeReturns(window=2)
    for i, reward in enumerate([1, 2, 3]):
        returns(_batch([[i]], [[reward]], [[True]]))
    assert returns.mean == 2.5


def test_weights_are_published_every_nth_batch():
    class Collector:
        published = 0

        def update_policy_weights_(self) -> None:
            self.published += 1

    collector = Collector()
    hook = PublishWeights(collector, every=3)
    for _ in range(7):
        hook()
    assert collector.published == 2
    restored = PublishWeights(collector, every=3)
    restored.load_state_dict(hook.state_dict())
    for _ in range(2):
        restored()
    assert collector.published == 3
