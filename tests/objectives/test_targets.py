from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives import TD3Loss

from torchrl_unilab.modules import ObservationNormalizer, make_td3_actor
from torchrl_unilab.objectives.targets import sync_normalizers, targets_of


class Twice(nn.Module):
    """A critic that normalises in two places by the same statistics."""

    def __init__(self, normalizer: nn.Module) -> None:
        super().__init__()
        self.one = self.other = normalizer
        self.net = nn.Linear(7, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([self.one(observation), self.other(observation), action], -1))


def test_a_normaliser_in_two_places_has_copies_that_follow_in_both():
    normalizer = ObservationNormalizer(3)
    critic = TensorDictModule(Twice(normalizer), ["observation", "action"], ["state_action_value"])
    loss = TD3Loss(make_td3_actor(3, 1), critic, bounds=(-1.0, 1.0))
    normalizer.update(torch.ones(10, 3))

    sync_normalizers(loss)

    for copies in (loss.qvalue_network_params, targets_of(loss, "qvalue_network")):
        for place in ("one", "other"):
            assert (copies["module", place, "mean"] == 1.0).all()
