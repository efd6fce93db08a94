"""TD3's formulas for the fused off-policy update, for the networks of `make_td3_actor`."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.objectives import LossModule, TD3Loss

from torchrl_unilab.modules.squashed import SquashedDeterministicActor
from torchrl_unilab.objectives.fused.adam import flatten, learnable
from torchrl_unilab.objectives.fused.networks import is_relu_mlp
from torchrl_unilab.objectives.fused.off_policy import OF_CRITICS, FusedOffPolicyUpdate
from torchrl_unilab.objectives.fused.transitions import Transitions
from torchrl_unilab.objectives.targets import targets_of


class FusedTD3Update(FusedOffPolicyUpdate):
    """Losses, gradients, Adam and targets of a TD3 minibatch in few operations.

    Equals a backward pass through `TD3Loss.forward`, one step of fused Adam each for actor and
    critics, and a step of `SoftUpdate`, without autograd (Fujimoto et al. 2018, arXiv 1802.09477,
    algorithm 1). ``step(minibatch, update_policy=False)`` skips the actor's update, with which the
    caller delays the policy; all targets move in every step.

    `FusedOffPolicyUpdate` explains what happens to the memory of the parameters.

    Args:
        loss: `TD3Loss` with two critics and targets of all networks, which are as
            `make_td3_actor` and `make_q_value` make them.
        lr_actor: Learning rate of the actor.
        lr_critic: Learning rate of the critics.
        tau: Share of the networks that each step mixes into their targets.
        **options: As for `FusedOffPolicyUpdate`: ``matmul_dtype``, ``policy_thread``,
            ``ranks``.

    Raises:
        ConfigError: The loss is not supported, or `tau` is out of its range.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.objectives import TD3Loss
        >>> from torchrl_unilab.modules import make_q_value, make_td3_actor
        >>> from torchrl_unilab.objectives import FusedTD3Update
        >>> loss = TD3Loss(make_td3_actor(3, 1), make_q_value(3, 1), bounds=(-1.0, 1.0))
        >>> loss.make_value_estimator(gamma=0.99)
        >>> update = FusedTD3Update(loss, lr_actor=3e-4, lr_critic=3e-4, tau=0.005)
        >>> flag = torch.zeros(8, 1, dtype=torch.bool)
        >>> after = {"observation": torch.zeros(8, 3), "reward": torch.ones(8, 1),
        ...          "done": flag, "terminated": flag}
        >>> sample = TensorDict(
        ...     {"observation": torch.zeros(8, 3), "action": torch.zeros(8, 1), "next": after},
        ...     batch_size=[8])
        >>> for i, minibatch in enumerate(update.minibatches(update.prepare(sample), 4)):
        ...     observed = update.step(minibatch, update_policy=i % 2 == 1)
        >>> update.td_error.shape
        torch.Size([2])
    """

    statistics = (*OF_CRITICS, "loss_actor")
    expected = "TD3Loss of make_td3_actor's and make_q_value's networks, two critics, all targets"
    policy_draws = 0
    head_path = ()

    @staticmethod
    def _known_head(loss: LossModule) -> TensorDictModuleBase | None:
        if type(loss) is not TD3Loss or type(loss.actor_network) is not SquashedDeterministicActor:
            return None
        actor: TensorDictModuleBase = loss.actor_network
        return actor if is_relu_mlp(actor.net, len(actor.center)) and loss.delay_actor else None

    def __init__(
        self, loss: TD3Loss, *, lr_actor: float, lr_critic: float, tau: float, **options: Any
    ) -> None:
        super().__init__(loss, lr_actor=lr_actor, lr_critic=lr_critic, tau=tau, **options)
        actor = loss.actor_network
        target = targets_of(loss, "actor_network").get("net")
        learnt = learnable(loss.actor_network_params.get("net"))
        flat = flatten([target.get(key) for key in learnt])
        self._followers.append((flat, self._actor_adam.flat))
        self._target_actor = self._network(actor.net, target)
        # The policy maximises the first critic's value only.
        critic, online = loss.qvalue_network, loss.qvalue_network_params.get("net")
        self._first_critic = self._network(critic.net, online.detach()[:1])
        self._low, self._high = loss.min_action.to(flat), loss.max_action.to(flat)

    @property
    def td_error(self) -> torch.Tensor:
        """The last step's larger squared temporal difference of the two critics, [n]."""
        return self._error.square().amax(0)

    def _next_value(self, data: Transitions, noise: torch.Tensor) -> torch.Tensor:
        """``min_i Q_i(s', a')`` at the target policy's smoothed action."""
        loss = self.loss
        noise = noise.mul_(loss.policy_noise).clamp_(-loss.noise_clip, loss.noise_clip)
        y = self._target_actor.forward(data.next_observation)[0].squeeze(0).tanh_()
        action = noise.add_(torch.addcmul(self._center, y, self._reach))
        return self._target_values(data, action.clamp_(self._low, self._high))

    def _differentiate_policy(self, data: Transitions, noise: torch.Tensor) -> None:
        out, actor_pass = self._actor.forward(data.observation)
        y = out.squeeze(0).tanh_()
        action = torch.addcmul(self._center, y, self._reach)
        value, saved = self._first_critic.forward(torch.cat([data.state, action], dim=1))
        slope = data.weight.neg().view(1, -1, 1)
        by_action = self._first_critic.backward_to_input(slope, saved, data.next_state.shape[1])
        by_y = by_action.mul_(self._reach)
        self._actor.backward(torch.ops.aten.tanh_backward(by_y, y).unsqueeze(0), actor_pass)
        self._of_policy.copy_(-torch.dot(value.view(-1), data.weight))
