"""TorchRL's own trainers, for environments with three observations and one action."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import AdditiveGaussianModule
from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate, TD3Loss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import PPOTrainer, SACTrainer, TD3Trainer
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper

from torchrl_unilab.modules import (
    make_actor,
    make_critic,
    make_q_value,
    make_sac_actor,
    make_td3_actor,
)

WARNINGS = [
    pytest.mark.filterwarnings(
        "ignore:(PPO|SAC|TD3)Trainer is an experimental/prototype feature:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:The '(optimizer|post_loss)' hook stage will be replaced:FutureWarning"
    ),
]
"""Marks that ignore what TorchRL says about its own trainers."""


class Stock(NamedTuple):
    """A trainer that lacks its collector and its replay buffer.

    Attributes:
        make: Takes these, ``total_frames`` and ``optim_steps_per_batch``.
        policy: What explores.
        out: The key under which the policy leaves what follows from weights alone.
    """

    make: Callable[..., Trainer]
    policy: TensorDictModuleBase
    out: str


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def stock_ppo() -> Stock:
    """Proximal policy optimisation."""
    loss = ClipPPOLoss(make_actor(3, 1, hidden=(8,)), make_critic(3, hidden=(8,)))
    make = partial(
        PPOTrainer,
        loss_module=loss,
        optimizer=_adam(loss.parameters()),
        num_epochs=1,
        weight_update_map={"policy": "loss_module.actor_network"},
        frame_skip=1,
        progress_bar=False,
    )
    return Stock(make, loss.actor_network, "loc")


def stock_sac() -> Stock:
    """Soft actor-critic."""
    actor, critic = make_sac_actor(3, 1, hidden=(8,)), make_q_value(3, 1, hidden=(8,))
    loss = SACLoss(actor, critic, num_qvalue_nets=2)
    make = partial(
        SACTrainer,
        loss_module=loss,
        optimizer=_adam(loss.parameters()),
        target_net_updater=SoftUpdate(loss, eps=0.9),
        episode_reward_key="reward",
        frame_skip=1,
        progress_bar=False,
    )
    return Stock(make, actor, "loc")


def stock_td3() -> Stock:
    """Twin delayed DDPG, with so little noise that the action still shows the weights."""
    spec = Bounded(-1.0, 1.0, (1,))
    actor, critic = make_td3_actor(3, 1, hidden=(8,)), make_q_value(3, 1, hidden=(8,))
    noise = AdditiveGaussianModule(spec, sigma_init=1e-6, sigma_end=1e-6)
    loss = TD3Loss(actor, critic, action_spec=spec, num_qvalue_nets=2)
    groups = (loss.actor_network_params, loss.qvalue_network_params)
    make = partial(
        TD3Trainer,
        loss_module=loss,
        optimization_stepper=TD3OptimizationStepper(
            *(_adam(group.flatten_keys().values()) for group in groups)
        ),
        target_net_updater=SoftUpdate(loss, eps=0.9),
        exploration_module=noise,
        frame_skip=1,
        progress_bar=False,
    )
    return Stock(make, TensorDictSequential(actor, noise), "action")
