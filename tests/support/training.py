"""APPO trainers of a pendulum, everything seeded."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDictBase

from tests.support.quick import APPO, four_pendulums
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers import APPOConfig, APPOTrainer
from torchrl_unilab.trainers.runs.builders import ring_collector
from torchrl_unilab.weight_update import UniLabShmScheme

QUICK = APPO | {"num_envs": 4, "hidden": (8,), "lr": 1e-3, "log_std": -1.0, "anneal": 0.0}
FRAMES = 64


def appo_loss(config: APPOConfig, normalizer: ObservationNormalizer) -> APPOLoss:
    torch.manual_seed(0)
    return APPOLoss(
        make_actor(4, 1, normalizer=normalizer, hidden=config.hidden),
        make_critic(4, normalizer=normalizer, hidden=config.hidden),
        gamma=config.gamma,
        value_clip=None,
        target_update_freq=config.target_update_freq or config.epochs * config.minibatches,
    )


def appo_trainer(rollouts: int = 5, *, inline: bool = True, **settings: object) -> APPOTrainer:
    """A trainer of a pendulum, everything seeded."""
    config = APPOConfig(**{**QUICK, **settings})
    normalizer = ObservationNormalizer(4)
    loss = appo_loss(config, normalizer)
    scheme, waits = UniLabShmScheme(), {"inline": inline, "lockstep": True}
    return APPOTrainer(
        collector=ring_collector(
            four_pendulums, loss.actor_network, scheme, config, seed=3, **waits
        ),
        loss_module=loss,
        total_frames=rollouts * FRAMES,
        config=config,
        normalizers={"observation": normalizer},
        scheme=scheme,
        progress_bar=False,
        seed=1,
    )


def trainer_of(collector: object, loss: APPOLoss, **settings: object) -> APPOTrainer:
    """A trainer of a collector and a loss that are made already, for one rollout if not said."""
    quick = {"total_frames": FRAMES, "config": APPOConfig(**QUICK), "progress_bar": False}
    return APPOTrainer(collector=collector, loss_module=loss, **{**quick, **settings})


def parameters_of(trainer: APPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.loss_module.named_parameters()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def pendulum_rollouts(count: int) -> list[TensorDictBase]:
    """Rollouts of the pendulum under the trainers' first policy."""
    loss = appo_loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    collector = APPOCollector(
        four_pendulums,
        loss.actor_network,
        frames_per_batch=FRAMES,
        total_frames=count * FRAMES,
        inline=True,
        seed=3,
    )
    batches = list(collector)
    collector.shutdown()
    return batches


def trained_discounts(trainer: APPOTrainer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Train; return the discount by which each batch of rollouts was estimated."""
    discounts, estimate = [], APPOLoss.estimate

    def recorded(loss: APPOLoss, rollouts: TensorDictBase) -> TensorDictBase:
        discounts.append(loss.gamma)
        return estimate(loss, rollouts)

    monkeypatch.setattr(APPOLoss, "estimate", recorded)
    trainer.train()
    return discounts
