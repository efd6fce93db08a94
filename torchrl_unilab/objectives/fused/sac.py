"""SAC's formulas for the fused off-policy update, for the networks of `make_sac_actor`."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch.nn import functional as F
from torchrl.objectives import LossModule, SACLoss

from torchrl_unilab.modules.gaussian import HALF_LOG_2PI
from torchrl_unilab.modules.squashed import (
    SquashedGaussianActor,
    SquashedGaussianParameters,
    squash,
)
from torchrl_unilab.objectives.fused.adam import FlatAdam
from torchrl_unilab.objectives.fused.networks import Passes, is_relu_mlp
from torchrl_unilab.objectives.fused.off_policy import OF_CRITICS, FusedOffPolicyUpdate
from torchrl_unilab.objectives.fused.transitions import Transitions


class FusedSACUpdate(FusedOffPolicyUpdate):
    """Losses, gradients, Adam and targets of a SAC minibatch in few operations.

    Equals a backward pass through `SACLoss.forward`, one step of fused Adam each for actor,
    critics and temperature, and a step of `SoftUpdate`, without autograd (Haarnoja et al.
    2018, arXiv 1812.05905, eq. 5, 6, 9 and 18). With ``u = loc + scale * noise``, ``y =
    tanh(u)`` and the action ``a = center + reach * y``::

        log p = sum(-noise^2 / 2 - log scale - log sqrt(2 pi) - log reach - log(1 - y^2))
        log(1 - y^2) = 2 (log 2 - u - softplus(-2 u))
        d log p / d loc = 2 y,    d log p / d log scale = 2 y * scale * noise - 1

    as in `SACLoss`, which takes the probability at ``u`` itself. In both, ``y`` is kept away from
    -1 and 1 by the dtype's resolution. ``d log p / d u`` uses this bounded ``y`` here and the exact
    tanh in `SACLoss`: at saturation they differ by that resolution.

    The loss's ``target_entropy``, like its density, is for actions in their own units.
    `FusedOffPolicyUpdate` explains what happens to the memory of the parameters.

    Args:
        loss: `SACLoss` without a state-value network, with two critics and their targets, of
            networks as `make_sac_actor` and `make_q_value` make them.
        lr_actor: Learning rate of the actor.
        lr_critic: Learning rate of the critics.
        lr_alpha: Learning rate of the temperature's logarithm; unused if it is fixed.
        tau: Share of the critics that each step mixes into their targets.
        **options: As for `FusedOffPolicyUpdate`: ``matmul_dtype``, ``policy_thread``,
            ``ranks``.

    Raises:
        ConfigError: The loss is not supported, or `tau` is out of its range.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.objectives import SACLoss
        >>> from torchrl_unilab.modules import make_q_value, make_sac_actor
        >>> from torchrl_unilab.objectives import FusedSACUpdate
        >>> loss = SACLoss(make_sac_actor(3, 1), make_q_value(3, 1))
        >>> loss.make_value_estimator(gamma=0.99)
        >>> update = FusedSACUpdate(loss, lr_actor=3e-4, lr_critic=3e-4, lr_alpha=3e-4, tau=0.005)
        >>> flag = torch.zeros(8, 1, dtype=torch.bool)
        >>> after = {"observation": torch.zeros(8, 3), "reward": torch.ones(8, 1),
        ...          "done": flag, "terminated": flag}
        >>> sample = TensorDict(
        ...     {"observation": torch.zeros(8, 3), "action": torch.zeros(8, 1), "next": after},
        ...     batch_size=[8])
        >>> for minibatch in update.minibatches(update.prepare(sample), 2):
        ...     observed = update.step(minibatch)
        >>> round(dict(zip(update.statistics, observed.tolist()))["alpha"], 2)
        1.0
    """

    statistics = (*OF_CRITICS, "alpha", "loss_actor", "entropy", "loss_alpha")
    expected = "SACLoss of make_sac_actor's and make_q_value's networks, two critics, targets"
    policy_draws = 1
    head_path = ("module", "0")

    @staticmethod
    def _known_head(loss: LossModule) -> TensorDictModuleBase | None:
        if type(loss) is not SACLoss or type(loss.actor_network) is not SquashedGaussianActor:
            return None
        head: TensorDictModuleBase = loss.actor_network[0]
        known = (
            type(head) is SquashedGaussianParameters
            and is_relu_mlp(head.net, 2 * len(head.center))
            and loss.value_network_params is None
            and not loss.delay_actor
            and not loss.skip_done_states
            and (loss.fixed_alpha or loss.log_alpha.requires_grad)
        )
        return head if known else None

    def __init__(
        self,
        loss: SACLoss,
        *,
        lr_actor: float,
        lr_critic: float,
        lr_alpha: float,
        tau: float,
        **options: Any,
    ) -> None:
        super().__init__(loss, lr_actor=lr_actor, lr_critic=lr_critic, tau=tau, **options)
        self._alpha_adam = None if loss.fixed_alpha else FlatAdam([loss.log_alpha], lr_alpha)
        if self._alpha_adam is not None:
            self._policy_adams.append(self._alpha_adam)
            self.optimizers["alpha"] = self._alpha_adam.optimizer
        self._log_alpha = loss.log_alpha.detach()
        self._target_entropy = loss.target_entropy
        low, high = loss.actor_network[0].log_std_bounds
        self._log_std = low, (high - low) / 2
        # The constant terms of the log probability.
        per_action = HALF_LOG_2PI + 2.0 * math.log(2.0)
        self._volume = self._reach.log().sum() + len(self._reach) * per_action

    @property
    def td_error(self) -> torch.Tensor:
        """The last step's larger absolute temporal difference of the two critics, [n]."""
        return self._error.abs().amax(0)

    def _differentiate(self, data: Transitions, update_policy: bool) -> torch.Tensor:
        loss = self.loss
        if loss.min_log_alpha is not None or loss.max_log_alpha is not None:
            self._log_alpha.clamp_(loss.min_log_alpha, loss.max_log_alpha)
        self.observed[3] = self._alpha = self._log_alpha.exp()
        return super()._differentiate(data, update_policy)

    def _next_value(self, data: Transitions, noise: torch.Tensor) -> torch.Tensor:
        """Soft value of the next state: ``min_i Q_i(s', a') - alpha log p(a')`` (eq. 3)."""
        action, log_p, _, _ = self._act(data.next_observation, noise)
        return self._target_values(data, action).sub_(self._alpha * log_p)

    def _differentiate_policy(self, data: Transitions, noise: torch.Tensor) -> None:
        weight, alpha = data.weight, self._alpha
        action, log_p, (y, raw, spread), actor_pass = self._act(data.observation, noise[0])
        values, critic_pass = self._critics.forward(torch.cat([data.state, action], dim=1))
        value, choice = values.min(0)
        # Slopes of the loss: by the smaller value, by the action, by u, by the log scale, by r.
        slope = values.new_zeros(values.shape).scatter_(0, choice.unsqueeze(0), -1.0)
        slope.mul_(weight.unsqueeze(1))
        by_action = self._critics.backward_to_input(slope, critic_pass, data.next_state.shape[1])
        entropy_slope = (weight * alpha).unsqueeze(1)
        by_u = torch.addcmul(2.0 * entropy_slope * y, by_action * self._reach, 1.0 - y.square())
        by_log_std = torch.addcmul(-entropy_slope, by_u, spread)
        by_raw = by_log_std.mul_(1.0 - raw.square()).mul_(self._log_std[1])
        self._actor.backward(torch.cat([by_u, by_raw], dim=1).unsqueeze(0), actor_pass)

        loss, entropy = torch.stack([alpha * log_p - value.squeeze(1), -log_p]) @ weight
        excess = self._target_entropy - entropy
        self._of_policy.copy_(torch.stack([loss, entropy, -self._log_alpha * excess]))
        if self._alpha_adam is not None:
            self._alpha_adam.grad.copy_(excess.neg_())

    def _act(
        self, observation: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], Passes]:
        """Return actions, log probabilities [n], (y, tanh(r), scale * noise), and the pass.

        With ``r`` the network's second half of outputs, as in `SquashedGaussianParameters`.
        """
        out, actor_pass = self._actor.forward(observation)
        loc, raw = out.squeeze(0).chunk(2, dim=1)
        raw = raw.tanh()
        low, reach = self._log_std
        log_std = (raw + 1.0).mul_(reach).add_(low)
        spread = log_std.exp().mul_(noise)
        u = loc + spread
        # -noise^2 / 2 - log scale + 2 u + 2 softplus(-2 u)
        log_p = (u + F.softplus(-2.0 * u)).mul_(2.0).sub_(log_std)
        log_p = log_p.addcmul_(noise, noise, value=-0.5).sum(1).sub_(self._volume)
        y = squash(u)
        return torch.addcmul(self._center, y, self._reach), log_p, (y, raw, spread), actor_pass
