"""One SAC update with its gradients written out, for relu networks of our own making."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F
from torchrl.objectives import SACLoss

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules.actor_critic import HALF_LOG_TAU
from torchrl_unilab.modules.squashed import (
    SquashedGaussianActor,
    SquashedGaussianParameters,
    squash,
)
from torchrl_unilab.objectives.fused_networks import FlatAdam, is_relu_mlp
from torchrl_unilab.objectives.fused_off_policy import (
    FusedOffPolicyUpdate,
    Transitions,
    critics_are_known,
)

__all__ = ["FusedSACUpdate"]


class FusedSACUpdate(FusedOffPolicyUpdate):
    """Losses, gradients, Adam and targets of a SAC minibatch in few operations.

    Equals a backward pass through `SACLoss.forward`, one step of fused Adam each for actor,
    critics and temperature, and a step of `SoftUpdate`, without autograd (Haarnoja et al.
    2018, arXiv 1812.05905, eq. 5, 6, 9 and 18). With ``u = loc + scale * noise``, ``y =
    tanh(u)`` and the action ``a = center + reach * y``::

        log p = sum(-noise^2 / 2 - log scale - log sqrt(2 pi) - log reach - log(1 - y^2))
        log(1 - y^2) = 2 (log 2 - u - softplus(-2 u))
        d log p / d loc = 2 y,    d log p / d log scale = 2 y * scale * noise - 1

    as `SACLoss` has it, which takes the probability at ``u`` itself. There and here ``y`` is
    kept off -1 and 1 by the dtype's resolution. ``d log p / d u`` is of the ``y`` that is
    kept off, of the exact tanh in `SACLoss`: at saturation they are a resolution apart.

    The parameters of the actor, of the critics and of the target critics become views of
    one tensor each. The loss, and the actor that it was made of, keep their `nn.Parameter`
    objects, whose memory moves: make this after the loss is on its device, and before
    whatever holds on to that memory, such as ``parameter.data``. Nothing here waits for the
    device.

    Args:
        loss: The loss, which must be supported. Its settings stay as they are now.
        lr_actor: Learning rate of the actor.
        lr_critic: Learning rate of the critics.
        lr_alpha: Learning rate of the temperature's logarithm; unused where it is fixed.
        tau: Share of the critics that their targets take over in each step.

    Raises:
        ConfigError: The loss is not supported, or `tau` is out of its range.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules.q_value import make_q_value
        >>> from torchrl_unilab.modules.squashed import make_sac_actor
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
        >>> dict(zip(update.statistics, observed.tolist()))["alpha"]
        0.9...
    """

    statistics = (
        "loss_qvalue",
        "q_value",
        "td_error",
        "alpha",
        "loss_actor",
        "entropy",
        "loss_alpha",
    )
    """What `step` returns, in order. ``td_error`` is the mean absolute one."""

    @staticmethod
    def supports(loss: SACLoss) -> bool:
        """Return whether the loss and its networks are of the known structure.

        That is `SACLoss` without a state-value network, with two critics and their targets,
        of networks as `make_sac_actor` and `make_q_value` make them.
        """
        actor = loss.actor_network
        if type(loss) is not SACLoss or type(actor) is not SquashedGaussianActor:
            return False
        head = actor[0]
        return (
            type(head) is SquashedGaussianParameters
            and is_relu_mlp(head.net, 2 * len(head.center))
            and critics_are_known(loss, head)
            and loss.value_network_params is None
            and not loss.delay_actor
            and not loss.skip_done_states
        )

    def __init__(
        self,
        loss: SACLoss,
        *,
        lr_actor: float,
        lr_critic: float,
        lr_alpha: float,
        tau: float,
    ) -> None:
        if not self.supports(loss):
            raise ConfigError(
                f"FusedSACUpdate: {type(loss).__name__} of {loss.actor_network} and "
                f"{loss.qvalue_network} (expected SACLoss of make_sac_actor's and "
                "make_q_value's networks, two critics and their targets). Take steps by the "
                "loss and an optimiser."
            )
        head = loss.actor_network[0]
        parameters = loss.actor_network_params.get(("module", "0", "net"))
        super().__init__(loss, head, parameters, lr_actor=lr_actor, lr_critic=lr_critic, tau=tau)
        self._alpha_adam = None if loss.fixed_alpha else FlatAdam([loss.log_alpha], lr_alpha)
        self._log_alpha = loss.log_alpha.detach()
        self._target_entropy = loss.target_entropy
        low, high = head.log_std_bounds
        self._log_std = low, (high - low) / 2
        # What is constant of the log probability.
        self._volume = self._reach.log().sum() + len(self._reach) * (
            HALF_LOG_TAU + 2.0 * math.log(2.0)
        )

    @property
    def optimizers(self) -> dict[str, torch.optim.Adam]:
        """The optimisers by what they step, to be checkpointed; settings hold at once."""
        own = {} if self._alpha_adam is None else {"alpha": self._alpha_adam.optimizer}
        return {**super().optimizers, **own}

    @property
    def td_error(self) -> torch.Tensor:
        """The last step's larger absolute temporal difference of the two critics, [n]."""
        return self._error.abs().amax(0)

    def _step_policy(self) -> None:
        super()._step_policy()
        if self._alpha_adam is not None:
            self._alpha_adam.step()

    def _differentiate(
        self, data: Transitions, update_policy: bool, generator: torch.Generator | None
    ) -> None:
        loss, weight, actions = self.loss, data.weight, len(self._reach)
        if loss.min_log_alpha is not None or loss.max_log_alpha is not None:
            self._log_alpha.clamp_(loss.min_log_alpha, loss.max_log_alpha)
        alpha = self._log_alpha.exp()
        self._observed[3] = alpha
        shape = (2 if update_policy else 1, len(weight), actions)
        noise = weight.new_empty(shape).normal_(generator=generator)

        action, log_p, _ = self._act(data.next_observation, noise[0])
        value = self._target_values(data, action).sub_(alpha * log_p)
        target = torch.addcmul(data.reward, data.discount, value)
        self._observe(0, self._judge(data, target), weight)
        if not update_policy:
            return

        action, log_p, slopes = self._act(data.observation, noise[1])
        y, raw, spread = slopes
        values = self._critics.forward(torch.cat([data.state, action], dim=1))
        value, choice = values.min(0)
        # Of the loss: in the value of the critic that was chosen, in the action, in u.
        slope = values.new_zeros(values.shape).scatter_(0, choice.unsqueeze(0), -1.0)
        slope.mul_(weight.unsqueeze(1))
        by_action = self._critics.backward_to_input(slope, data.next_state.shape[1])
        entropy_slope = (weight * alpha).unsqueeze(1)
        by_u = torch.addcmul(2.0 * entropy_slope * y, by_action * self._reach, 1.0 - y.square())
        by_log_std = torch.addcmul(-entropy_slope, by_u, spread)
        by_raw = by_log_std.mul_(1.0 - raw.square()).mul_(self._log_std[1])
        self._actor.backward(torch.cat([by_u, by_raw], dim=1).unsqueeze(0))

        self._observe(4, (alpha * log_p - value.squeeze(1), -log_p), weight)
        excess = self._target_entropy - self._observed[5]
        self._observed[6] = -self._log_alpha * excess
        if self._alpha_adam is not None:
            loss.log_alpha.grad.copy_(excess.neg_())

    def _act(
        self, observation: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return actions, log probabilities [n], and (y, tanh(r), scale * noise).

        With ``r`` the network's second half of outputs, as in `SquashedGaussianParameters`.
        """
        loc, raw = self._actor.forward(observation).squeeze(0).chunk(2, dim=1)
        raw = raw.tanh()
        low, reach = self._log_std
        log_std = (raw + 1.0).mul_(reach).add_(low)
        spread = log_std.exp().mul_(noise)
        u = loc + spread
        # -noise^2 / 2 - log scale + 2 u + 2 softplus(-2 u)
        log_p = (u + F.softplus(-2.0 * u)).mul_(2.0).sub_(log_std)
        log_p = log_p.addcmul_(noise, noise, value=-0.5).sum(1).sub_(self._volume)
        y = squash(u)
        return torch.addcmul(self._center, y, self._reach), log_p, (y, raw, spread)
