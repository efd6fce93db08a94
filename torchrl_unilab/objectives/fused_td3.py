"""One TD3 update with its gradients written out, for relu networks of our own making."""

from __future__ import annotations

import torch
from torchrl.objectives import TD3Loss

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules.squashed import SquashedPoint
from torchrl_unilab.objectives.fused_networks import ReluNetwork, flatten, is_relu_mlp
from torchrl_unilab.objectives.fused_off_policy import (
    FusedOffPolicyUpdate,
    Transitions,
    critics_are_known,
    targets_of,
    trained,
)

__all__ = ["FusedTD3Update"]


class FusedTD3Update(FusedOffPolicyUpdate):
    """Losses, gradients, Adam and targets of a TD3 minibatch in few operations.

    Equals a backward pass through `TD3Loss.forward`, one step of fused Adam each for actor
    and critics, and a step of `SoftUpdate`, without autograd (Fujimoto et al. 2018, arXiv
    1802.09477, algorithm 1). ``step(minibatch, update_policy=False)`` leaves the actor's
    turn out, by which the caller delays the policy; all targets move in every step.

    The parameters of the actor, of the critics and of the targets of both become views of
    one tensor each. The loss, and the actor that it was made of, keep their `nn.Parameter`
    objects, whose memory moves: make this after the loss is on its device, and before
    whatever holds on to that memory, such as ``parameter.data``. Nothing here waits for the
    device.

    Args:
        loss: The loss, which must be supported. Its settings stay as they are now.
        lr_actor: Learning rate of the actor.
        lr_critic: Learning rate of the critics.
        tau: Share of the networks that their targets take over in each step.

    Raises:
        ConfigError: The loss is not supported, or `tau` is out of its range.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules.q_value import make_q_value
        >>> from torchrl_unilab.modules.squashed import make_td3_actor
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

    statistics = ("loss_qvalue", "q_value", "td_error", "loss_actor")
    """What `step` returns, in order. ``td_error`` is the mean absolute one."""

    @staticmethod
    def supports(loss: TD3Loss) -> bool:
        """Return whether the loss and its networks are of the known structure.

        That is `TD3Loss` with two critics, targets of all networks, and networks as
        `make_td3_actor` and `make_q_value` make them.
        """
        actor = loss.actor_network
        return (
            type(loss) is TD3Loss
            and type(actor) is SquashedPoint
            and is_relu_mlp(actor.net, len(actor.center))
            and critics_are_known(loss, actor)
            and loss.delay_actor
        )

    def __init__(self, loss: TD3Loss, *, lr_actor: float, lr_critic: float, tau: float) -> None:
        if not self.supports(loss):
            raise ConfigError(
                f"FusedTD3Update: {type(loss).__name__} of {loss.actor_network} and "
                f"{loss.qvalue_network} (expected TD3Loss of make_td3_actor's and "
                "make_q_value's networks, two critics, and targets of all). Take steps by the "
                "loss and an optimiser."
            )
        actor, parameters = loss.actor_network, loss.actor_network_params.get("net")
        super().__init__(loss, actor, parameters, lr_actor=lr_actor, lr_critic=lr_critic, tau=tau)
        followers = targets_of(loss, "actor_network")
        target = followers.get("net")
        flat = flatten([target.get(key) for key in trained(parameters)])
        self._followers.append((flat, self._actor_adam.flat))
        self._target_actor = ReluNetwork(actor.net, target, stacked=False)
        # The policy climbs the first critic alone.
        critic = loss.qvalue_network
        online = loss.qvalue_network_params.get("net")
        self._first_critic = ReluNetwork(critic.net, online, stacked=True, first=True)
        self._low, self._high = loss.min_action.to(flat), loss.max_action.to(flat)

    @property
    def td_error(self) -> torch.Tensor:
        """The last step's larger squared temporal difference of the two critics, [n]."""
        return self._error.square().amax(0)

    def _differentiate(
        self, data: Transitions, update_policy: bool, generator: torch.Generator | None
    ) -> None:
        loss, weight = self.loss, data.weight
        noise = weight.new_empty(len(weight), len(self._reach)).normal_(generator=generator)
        noise = noise.mul_(loss.policy_noise).clamp_(-loss.noise_clip, loss.noise_clip)
        y = self._target_actor.forward(data.next_observation).squeeze(0).tanh_()
        action = noise.add_(torch.addcmul(self._center, y, self._reach))
        value = self._target_values(data, action.clamp_(self._low, self._high))
        target = torch.addcmul(data.reward, data.discount, value)
        self._observe(0, self._judge(data, target), weight)
        if not update_policy:
            return

        y = self._actor.forward(data.observation).squeeze(0).tanh_()
        action = torch.addcmul(self._center, y, self._reach)
        value = self._first_critic.forward(torch.cat([data.state, action], dim=1)).view(-1)
        slope = weight.neg().view(1, -1, 1)
        by_action = self._first_critic.backward_to_input(slope, data.next_state.shape[1])
        by_y = by_action.mul_(self._reach)
        self._actor.backward(torch.ops.aten.tanh_backward(by_y, y).unsqueeze(0))
        self._observe(3, (-value,), weight)
