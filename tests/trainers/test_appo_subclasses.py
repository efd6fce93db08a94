"""A subclass of `APPOLoss` with a further loss, of a key of its own, in the trainer."""

from __future__ import annotations

import math

import pytest
from tensordict import TensorDictBase
from torch import nn

from tests.support.quick import four_pendulums
from tests.support.training import FRAMES, pendulum_rollouts, trainer_of
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.errors import DivergedError, LayoutKeyError
from torchrl_unilab.modules import make_actor, make_critic
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers import APPOTrainer


class _Auxiliary(APPOLoss):
    """Has a loss of its own, of a key of its own."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.own = nn.Linear(4, 1)

    @property
    def in_keys(self) -> list:
        return [*super().in_keys, "seen"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().forward(tensordict).set("loss_own", self.own(tensordict["seen"]).sum())


def _auxiliary_trainer() -> APPOTrainer:
    loss = _Auxiliary(make_actor(4, 1), make_critic(4))
    settings = {"frames_per_batch": FRAMES, "inline": True}
    return trainer_of(APPOCollector(four_pendulums, loss.actor_network, **settings), loss)


def test_a_further_loss_of_a_subclass_is_learnt_by_from_the_keys_that_it_reads():
    trainer, (batch,) = _auxiliary_trainer(), pendulum_rollouts(1)
    before = trainer.loss_module.own.weight.detach().clone()
    trainer.optim_steps(batch.set("seen", batch["observation"].abs()))
    assert (trainer.loss_module.own.weight < before).all()
    trainer.collector.shutdown()


def test_a_further_loss_of_a_subclass_is_logged_as_the_mean_of_its_steps():
    trainer, (batch,) = _auxiliary_trainer(), pendulum_rollouts(1)
    loss, seen = trainer.loss_module, []
    loss.register_forward_hook(lambda _, __, losses: seen.append(losses["loss_own"].item()))
    with trainer.collector:
        trainer.optim_steps(batch.set("seen", batch["observation"].abs()))
        means = trainer._log_dict["loss_own"]
        assert [*means] == [pytest.approx(sum(seen) / len(seen), rel=1e-5)]


def test_a_further_loss_that_is_not_finite_is_named():
    trainer, (batch,) = _auxiliary_trainer(), pendulum_rollouts(1)
    trainer.loss_module.own.weight.data.fill_(math.inf)
    with trainer.collector, pytest.raises(DivergedError, match="loss_own is"):
        trainer.optim_steps(batch.set("seen", batch["observation"].abs()))


def test_a_key_that_a_subclass_reads_and_no_collector_writes_is_named():
    trainer, (batch,) = _auxiliary_trainer(), pendulum_rollouts(1)
    with (
        trainer.collector,
        pytest.raises(LayoutKeyError, match=r"no \['seen'\], which _Auxiliary reads"),
    ):
        trainer.optim_steps(batch)
