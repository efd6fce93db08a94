"""Trainers of SAC and TD3 on four pendulums, and what they have learnt."""

from __future__ import annotations

import pytest
import torch

from tests.support.quick import OFF_POLICY, four_pendulums
from torchrl_unilab.collectors.arguments import CreateEnv
from torchrl_unilab.trainers import OffPolicyConfig, OffPolicyTrainer
from torchrl_unilab.trainers.runs.builders import build_off_policy, replay_collector
from torchrl_unilab.weight_update import UniLabShmScheme

QUICK = OFF_POLICY | {"replay_buffer_n": 100, "updates_per_step": 2, "obs_normalization": False}
BOTH = pytest.mark.parametrize("algorithm", ["sac", "td3"])


def off_policy_trainer(
    ticks: int = 20,
    create_env: CreateEnv = four_pendulums,
    *,
    inline: bool = True,
    seed: int = 0,
    **settings: object,
) -> OffPolicyTrainer:
    """A trainer of a pendulum if not said otherwise, everything seeded."""
    torch.manual_seed(0)
    config = OffPolicyConfig(**{**QUICK, "sync_collection": not inline, **settings})
    env = create_env()
    learner = build_off_policy(env, config)
    env.close()
    scheme = UniLabShmScheme()
    waits = {"inline": inline, "lockstep": config.sync_collection and not inline}
    collector = replay_collector(create_env, learner.actor, scheme, config, seed=0, **waits)
    return OffPolicyTrainer(
        collector=collector,
        loss_module=learner.loss,
        total_frames=ticks * config.frames_per_tick,
        config=config,
        normalizers=learner.normalizers,
        scheme=scheme,
        progress_bar=False,
        seed=seed,
    )


def trained(trainer: OffPolicyTrainer) -> dict[str, torch.Tensor]:
    """Train to the end; return what the loss holds then."""
    trainer.train()
    trainer.close()
    return {key: value.clone() for key, value in trainer.loss_module.state_dict().items()}


def equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether all is equal bit for bit."""
    return a.keys() == b.keys() and all(
        torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a
    )
