"""An `APPOTrainer` of several ranks: whose frames and whose lag count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.support.training import appo_trainer, trained_discounts
from torchrl_unilab.runtime import Ranks
from torchrl_unilab.trainers import APPOTrainer


class Twins(Ranks):
    """Two ranks, of which this one sees what the other does; the other may say yes."""

    def __init__(self, *, yes: bool = False) -> None:
        super().__init__(0, 2)
        self.yes = yes

    def agree(self, fact: bool) -> bool:
        return fact or self.yes

    def gather(self, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        return tensor, tensor

    def check_same(self, settings: Any) -> None:
        pass


def _with_a_twin(trainer: APPOTrainer, **options: bool) -> APPOTrainer:
    trainer.ranks, trainer.frame_skip = Twins(**options), 2
    return trainer


def test_schedules_go_by_the_frames_of_all_ranks(monkeypatch):
    trainer = _with_a_twin(appo_trainer(8, gamma=0.9, final_gamma=0.99))
    assert trained_discounts(trainer, monkeypatch) == pytest.approx(
        [1 - 0.1 ** (1 + i / 4) for i in range(4)]
    )


def test_a_rollout_that_is_too_old_on_another_rank_is_left_out_here_too():
    trainer = appo_trainer(4, max_policy_lag=2)
    _with_a_twin(trainer, yes=True).request_stop("after one rollout")
    trainer.train()
    assert (trainer.stale, trainer._optim_count) == (1, 0)
