from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal

from torchrl_unilab.modules import make_actor
from torchrl_unilab.modules.gaussian import DiagonalNormal


def test_the_actor_gives_action_and_log_probability_and_its_mean_without_exploration():
    actor = make_actor(3, 2, log_std=-1.0)
    batch = actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))
    assert batch["action"].shape == (5, 2)
    assert batch["action_log_prob"].shape == (5,)
    torch.testing.assert_close(batch["scale"], torch.full((5, 2), -1.0).exp())
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        batch = actor(batch.select("observation"))
    assert torch.equal(batch["action"], batch["loc"])


def test_the_distribution_agrees_with_torchrls():
    loc, scale, other = torch.randn(4, 3), torch.rand(4, 3) + 0.1, torch.randn(4, 3)
    ours, theirs = DiagonalNormal(loc, scale), IndependentNormal(loc, scale, tanh_loc=False)
    torch.testing.assert_close(ours.log_prob(other), theirs.log_prob(other))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    divergence = torch.distributions.kl_divergence(ours, DiagonalNormal(other, scale))
    torch.testing.assert_close(divergence, ((loc - other) / scale).square().sum(-1) / 2)
