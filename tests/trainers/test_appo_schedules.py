"""What changes over a run of APPO: the learning rate, the bound of the deviation, the discount."""

from __future__ import annotations

import pytest

from tests.support.training import FRAMES, QUICK, appo_trainer, trained_discounts
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import make_critic, make_sac_actor
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers import APPOConfig, APPOTrainer


@pytest.mark.parametrize("fused", [True, False])
def test_one_step_per_rollout_leaves_the_learning_rate_alone(fused):
    trainer = appo_trainer(8, epochs=1, minibatches=1, fused=fused)

    trainer.train()

    assert trainer.optimization_stepper.lr.item() == pytest.approx(1e-3)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stage", ["setup", "post_optim"])
def test_a_learning_rate_that_is_set_to_a_number_holds_from_then_on(fused, stage):
    trainer = appo_trainer(2, epochs=1, minibatches=2, fused=fused)

    def set_rate() -> None:
        trainer.optimizer.param_groups[0]["lr"] = 1e-4

    trainer.register_op(stage, set_rate)
    trainer.train()
    rate = trainer.optimization_stepper.lr
    assert rate is trainer.optimizer.param_groups[0]["lr"]
    assert 0.8e-4 < rate.item() < 1.22e-4  # two steps may have steered it


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("anneal", "shares"), [(1.0, [1 - i / 8 for i in range(8)]), (0.25, [1.0] * 7 + [0.5])]
)
@pytest.mark.parametrize("steps", [2, 1])
def test_an_annealed_rate_starts_at_its_setting_and_ends_near_zero(fused, anneal, shares, steps):
    trainer = appo_trainer(8, anneal=anneal, fused=fused, epochs=steps, minibatches=steps)
    rates = []
    trainer.register_op(
        "post_steps", lambda *_: rates.append(trainer.optimization_stepper.lr.item())
    )

    trainer.train()

    assert all(rate <= 1.0001e-3 * share for rate, share in zip(rates, shares, strict=True))
    assert rates[0] > 5e-4


@pytest.mark.parametrize("fused", [True, False])
def test_the_bound_of_the_deviation_falls_to_its_last_value(fused):
    trainer = appo_trainer(4, final_log_std=-3.0, fused=fused)
    highest = []
    trainer.register_op(
        "post_steps",
        lambda *_: highest.append(trainer.loss_module.actor_network[0].log_std.max().item()),
    )

    trainer.train()

    assert highest == pytest.approx([-1.5, -2.0, -2.5, -3.0])


@pytest.mark.parametrize("settings", [{}, {"target_update_freq": 3}, {"pool": 2, "fused": False}])
def test_the_fall_of_the_bound_is_no_divergence_that_slows_the_learning(settings):
    trainer = appo_trainer(6, final_log_std=-13.0, **settings)  # by 2 each rollout
    loss = trainer.loss_module
    apart = []

    def compare(*_: object) -> None:
        target, current = loss.target_actor_network[0].log_std, loss.actor_network[0].log_std
        apart.append((target - current).abs().max().item())

    trainer.register_op("post_steps", compare)

    trainer.train()

    assert max(apart) < 0.1


@pytest.mark.parametrize("fused", [True, False])
def test_values_are_estimated_with_a_discount_that_rises(fused, monkeypatch):
    trainer = appo_trainer(4, gamma=0.9, final_gamma=0.99, fused=fused)
    assert trained_discounts(trainer, monkeypatch) == pytest.approx(
        [1 - 0.1 ** (1 + i / 4) for i in range(4)]
    )


def test_without_a_last_discount_that_of_the_loss_stays():
    trainer = appo_trainer(2, gamma=0.9)
    trainer.loss_module.gamma = 0.8  # one's own
    trainer.train()
    assert trainer.loss_module.gamma == 0.8


def test_without_a_last_value_the_deviation_has_no_bound():
    trainer = appo_trainer(4)
    trainer.train()
    assert trainer.loss_module.actor_network[0].log_std.min() > -1.5


def test_a_last_deviation_is_refused_for_an_actor_of_another_kind():
    config = APPOConfig(**QUICK, final_log_std=-3.0)
    loss = APPOLoss(make_sac_actor(4, 1), make_critic(4))
    with pytest.raises(ConfigError, match=r"final_log_std: -3\.0 with SquashedGaussianActor"):
        APPOTrainer(collector=None, loss_module=loss, total_frames=FRAMES, config=config)
