"""SAC and TD3 updates in plain PyTorch: the same mathematics with autograd and tensors alone.

Written for speed as far as autograd goes: relu in place, fused Adam, one call per target
update, no gradient of a weight that it does not step, no look at a value. All gradients are taken
before any parameter moves, as TorchRL's losses and the fused updates take them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

from torchrl_unilab.modules.gaussian import HALF_LOG_2PI
from torchrl_unilab.modules.mlp import relu_mlp

LOG_STD_CENTER, LOG_STD_REACH = -1.5, 3.5  # log std within [-5, 2]

Batch = Mapping[str, torch.Tensor]


def _network(inputs: int, outputs: int) -> nn.Sequential:
    """Relu layers that write over their inputs, which spares fresh memory."""
    net = relu_mlp([inputs, 256, 256, outputs])
    for layer in net:
        if isinstance(layer, nn.ReLU):
            layer.inplace = True
    return net


class _PlainOffPolicy:
    """Actor, two critics, their targets and optimisers.

    Args:
        observation_size: Length of the observation.
        action_size: Length of the action, whose bounds are -1 and 1.
        outputs: Of the actor.
        lr: Learning rate of all.
        gamma: Discount.
        tau: Share that targets take over.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        outputs: int,
        *,
        lr: float = 3e-4,
        gamma: float = 0.99,
        tau: float = 0.005,
    ) -> None:
        self.gamma, self.tau = gamma, tau
        self.actor = _network(observation_size, outputs)
        self.critics = nn.ModuleList(
            [_network(observation_size + action_size, 1) for _ in range(2)]
        )
        self.actor_parameters = list(self.actor.parameters())
        self.critic_parameters = list(self.critics.parameters())
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        self.actor_adam = torch.optim.Adam(self.actor_parameters, lr=lr, fused=True)
        self.critic_adam = torch.optim.Adam(self.critic_parameters, lr=lr, fused=True)

    def learn(self, batch: Batch, next_action: torch.Tensor, bonus: torch.Tensor | float) -> None:
        """Set the critics' gradients."""
        with torch.no_grad():
            judged = torch.cat([batch["next_observation"], next_action], dim=1)
            values = [critic(judged) for critic in self.target_critics]
            value = torch.min(*values).squeeze(1) + bonus
            target = batch["reward"] + self.gamma * ~batch["terminated"] * value
        judged = torch.cat([batch["observation"], batch["action"]], dim=1)
        values = [critic(judged).squeeze(1) for critic in self.critics]
        self.loss = sum(F.smooth_l1_loss(value, target) for value in values)
        self.loss.backward()
        self.values = values

    def follow(self, targets: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Move targets."""
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), parameters, self.tau)


class PlainSAC(_PlainOffPolicy):
    """SAC with an automatic temperature."""

    def __init__(self, observation_size: int, action_size: int) -> None:
        super().__init__(observation_size, action_size, 2 * action_size)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.alpha_adam = torch.optim.Adam([self.log_alpha], lr=3e-4, fused=True)
        self.target_entropy = -float(action_size)

    def act(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw actions with their log probabilities."""
        loc, raw = self.actor(observation).chunk(2, dim=-1)
        log_std = LOG_STD_CENTER + LOG_STD_REACH * raw.tanh()
        noise = torch.randn_like(loc)
        u = torch.addcmul(loc, log_std.exp(), noise)
        log_p = -0.5 * noise.square() - log_std - HALF_LOG_2PI
        log_p = log_p - 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
        return u.tanh(), log_p.sum(-1)

    def update(self, batch: Batch) -> torch.Tensor:
        """Take one step; return the losses and what else is watched."""
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            next_action, log_p = self.act(batch["next_observation"])
        self.learn(batch, next_action, -alpha * log_p)
        action, log_p = self.act(batch["observation"])
        judged = torch.cat([batch["observation"], action], dim=1)
        value = torch.min(*[critic(judged) for critic in self.critics]).squeeze(1)
        actor_loss = (alpha * log_p - value).mean()
        actor_loss.backward(inputs=self.actor_parameters)
        alpha_loss = -(self.log_alpha * (log_p.detach() + self.target_entropy)).mean()
        alpha_loss.backward()
        for adam in (self.critic_adam, self.actor_adam, self.alpha_adam):
            adam.step()
            adam.zero_grad()
        self.follow(self.target_critics, self.critic_parameters)
        with torch.no_grad():
            watched = self.loss, self.values[0].mean(), actor_loss, alpha_loss, alpha
            return torch.stack([*watched, -log_p.mean()])


class PlainTD3(_PlainOffPolicy):
    """TD3 with target smoothing."""

    def __init__(self, observation_size: int, action_size: int) -> None:
        super().__init__(observation_size, action_size, action_size)

    def update(self, batch: Batch, *, update_policy: bool = True) -> torch.Tensor:
        """Take one step; return the losses and what else is watched."""
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(batch["action"])).clamp(-0.5, 0.5)
            next_action = self.target_actor(batch["next_observation"]).tanh()
            next_action = (next_action + noise).clamp(-1.0, 1.0)
        self.learn(batch, next_action, 0.0)
        actor_loss = self.loss.detach()
        if update_policy:
            action = self.actor(batch["observation"]).tanh()
            judged = torch.cat([batch["observation"], action], dim=1)
            actor_loss = -self.critics[0](judged).mean()
            actor_loss.backward(inputs=self.actor_parameters)
            self.actor_adam.step()
            self.actor_adam.zero_grad()
        self.critic_adam.step()
        self.critic_adam.zero_grad()
        self.follow(self.target_critics, self.critic_parameters)
        self.follow(self.target_actor, self.actor_parameters)
        with torch.no_grad():
            return torch.stack([self.loss, self.values[0].mean(), actor_loss])
