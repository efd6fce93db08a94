"""What an `APPOTrainer` logs of the pool that it learns from."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from tests.support.training import FRAMES, QUICK, appo_loss, appo_trainer, pendulum_rollouts
from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.trainers import APPOConfig, appo


def test_of_more_samples_than_torch_takes_a_quantile_of_some_are_taken(monkeypatch):
    monkeypatch.setattr(appo, "_MAX_SORTED", FRAMES // 3)
    quantile, counts = torch.Tensor.quantile, []

    def recorded(samples: torch.Tensor, *arguments: float) -> torch.Tensor:
        counts.append(len(samples))
        return quantile(samples, *arguments)

    monkeypatch.setattr(torch.Tensor, "quantile", recorded)
    trainer = appo_trainer(2)

    trainer.train()

    assert counts == [FRAMES // 4] * 2


@pytest.mark.parametrize(
    ("targets", "values", "explained"),
    [
        ([1.0, 3.0, 5.0, 7.0], [0.0, 4.0, 4.0, 8.0], 1 - 1 / 5),
        ([2.0] * 4, [5.0] * 4, 1.0),  # there is nothing to explain
    ],
)
def test_it_says_how_well_values_are_known_and_how_far_the_policy_is(targets, values, explained):
    pool = TensorDict(
        target_log_prob=torch.linspace(1.0, 2.0, 4),
        action_log_prob=torch.ones(4),
        value_target=torch.tensor(targets),
        state_value=torch.tensor(values),
        batch_size=[4],
    )
    loss = appo_loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    said = appo._pool_statistics(loss, pool)
    assert said["explained_variance"].item() == pytest.approx(explained)
    assert said["rho_p99"].item() == pytest.approx(math.exp(0.99))


def test_a_statistic_is_logged_as_its_mean_over_an_updates_steps():
    trainer, (batch,) = appo_trainer(fused=False), pendulum_rollouts(1)
    said, step = [], trainer.optimization_stepper.step

    def recorded(*arguments: object) -> TensorDictBase:
        said.append(step(*arguments))
        return said[-1]

    trainer.optimization_stepper.step = recorded
    trainer.optim_steps(batch)
    trainer.collector.shutdown()
    for name in ("loss_critic", "kl"):
        mean = sum(losses[name].item() for losses in said) / len(said)
        assert [*trainer._log_dict[name]] == [pytest.approx(mean)]
