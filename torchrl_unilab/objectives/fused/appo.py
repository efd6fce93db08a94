"""One APPO update with its gradients written out, for the networks of `make_actor`, `make_critic`.

Samples are columns. `APPOTrainer` makes it where `FusedAPPOUpdate.supports` the loss.
"""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_unilab.checks import as_integer, as_number
from torchrl_unilab.errors import ConfigError, LayoutShapeError
from torchrl_unilab.modules.critics import StateValue
from torchrl_unilab.modules.gaussian import HALF_LOG_2PI, GaussianActor, GaussianParameters
from torchrl_unilab.modules.normalizer import ObservationNormalizer
from torchrl_unilab.objectives.appo import APPOLoss, kl_adapted_lr
from torchrl_unilab.objectives.fused.adam import FlatAdam, rate_of
from torchrl_unilab.objectives.fused.graphs import DeviceNumber, graphs_of
from torchrl_unilab.objectives.fused.networks import (
    TanhNetwork,
    are_hooked,
    check_hooks,
    is_tanh_mlp,
    one_input,
)
from torchrl_unilab.runtime.ranks import SINGLE_RANK, Ranks

STATISTICS = (
    "loss_objective",
    "loss_critic",
    "entropy",
    "kl",
    "clip_fraction",
    "rho_clip_fraction",
)
"""What `FusedAPPOUpdate.step` returns, in order; named as `APPOLoss.forward` names them."""


class FusedAPPOUpdate:
    """Losses, gradients, clipping, Adam and learning rate of a minibatch in few operations.

    Equals a backward pass through `APPOLoss.forward`, ``clip_grad_norm_``, a step of fused
    Adam, `APPOLoss.step_target` and `kl_adapted_lr`, without autograd. With ``z = (a - mu)
    / sigma`` the gradients start from::

        d log p / d mu = z / sigma,    d log p / d log sigma = z^2 - 1

    and the surrogate's slope in ``log p``, which is the surrogate itself where it is not clipped.
    Where the two sides of a minimum or maximum are equal but have different slopes, autograd
    averages the slopes; this update takes that of the unclipped side.

    The parameters of actor and critic become views of one tensor (`FlatAdam`), so that the
    optimiser and the gradient's norm take one operation each. Create the update before anything
    else keeps a reference to a parameter's memory. Nothing here waits for the device. On a GPU
    steps are replayed as graphs (`StepGraphs`), unless ranks learn together.

    Args:
        loss: The loss, which must be supported. Changed coefficients take effect at the next
            `prepare`.
        lr: Initial and highest learning rate.
        desired_kl: KL divergence, target to current policy, that the learning rate is steered to.
        max_grad_norm: Bound of the gradient's norm.
        ranks: Processes over whose minibatches gradients and statistics are averaged.

    Attributes:
        optimizer: Adam over the one tensor, to be checkpointed.

    Raises:
        ConfigError: The loss is not supported, or a bound is not above 0.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules import make_actor, make_critic
        >>> from torchrl_unilab.objectives import APPOLoss, FusedAPPOUpdate
        >>> loss = APPOLoss(make_actor(3, 1), make_critic(3))
        >>> update = FusedAPPOUpdate(loss, lr=1e-3, desired_kl=0.01, max_grad_norm=1.0)
        >>> flag = torch.zeros(4, 8, 1, dtype=torch.bool)
        >>> rollout = TensorDict(observation=torch.zeros(4, 8, 3), batch_size=[4, 8])
        >>> rollout = loss.actor_network(rollout).detach().update(
        ...     {"next": {"observation": torch.zeros(4, 8, 3), "reward": torch.ones(4, 8, 1),
        ...               "done": flag, "terminated": flag}})
        >>> columns = update.prepare(loss.estimate(rollout).reshape(-1))
        >>> for minibatch in update.shuffled(columns, 2):
        ...     statistics = update.step(minibatch)
        >>> statistics.shape  # as `STATISTICS` names them
        torch.Size([6])
    """

    @staticmethod
    def supports(loss: APPOLoss) -> bool:
        """Return whether the loss and its networks are of the known structure.

        That is `APPOLoss` itself with networks as `make_actor` and `make_critic` make them:
        tanh layers, one standard deviation for all states, and all parameters learnt.
        """
        if type(loss) is not APPOLoss or type(loss.actor_network) is not GaussianActor:
            return False
        actor, critic, head = loss.actor_network, loss.critic_network, loss.actor_network[0]
        if type(head) is not GaussianParameters or type(critic) is not StateValue:
            return False
        named = nn.ModuleList([actor, critic]).named_parameters(remove_duplicate=False)
        parameters = [parameter for _, parameter in named]  # twice, and refused below, if shared
        return (
            {type(head.normalizer), type(critic.normalizer)} <= {nn.Identity, ObservationNormalizer}
            and is_tanh_mlp(head.net, len(head.log_std))
            and is_tanh_mlp(critic.net, 1)
            and len(set(parameters)) == len(parameters)
            and not are_hooked([*actor.modules(), *critic.modules()], parameters)
            and all(parameter.requires_grad for parameter in parameters)
            and len({(parameter.device, parameter.dtype) for parameter in parameters}) == 1
        )

    def __init__(
        self,
        loss: APPOLoss,
        *,
        lr: float,
        desired_kl: float,
        max_grad_norm: float,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        if not self.supports(loss):
            raise ConfigError(
                f"FusedAPPOUpdate: {type(loss).__name__} (expected APPOLoss of make_actor's and "
                "make_critic's networks). Take steps by APPOStepper."
            )
        for name, value in (("desired_kl", desired_kl), ("max_grad_norm", max_grad_norm)):
            remedy = "Use for example desired_kl=0.01, max_grad_norm=1.0."
            as_number(f"FusedAPPOUpdate {name}", value, remedy, "(0, inf]")
        self.loss, self.ranks = loss, ranks
        self.desired_kl, self.max_lr = desired_kl, lr
        head, critic = loss.actor_network[0], loss.critic_network
        parameters = [*head.parameters(), *critic.parameters()]
        self._unhooked = [*loss.actor_network.modules(), *critic.modules()], [*loss.parameters()]
        # A tensor: it is steered without a wait for the device.
        rate = torch.tensor(lr, device=parameters[0].device, dtype=torch.float32)
        self._adam = FlatAdam(parameters, rate)
        self.optimizer = self._adam.optimizer
        self._actor, self._critic = TanhNetwork(head.net), TanhNetwork(critic.net)
        self._log_std = head.log_std.detach()
        self._log_std_grad = head.log_std.grad
        self._one_input = one_input(head, critic)
        # How many rows each part has in the columns that `prepare` packs.
        actions = len(head.log_std)
        inputs = [head.net[0].in_features, 0 if self._one_input else critic.net[0].in_features]
        self._part_sizes = [*inputs, 2 * actions, actions, 2, *[1] * 5]
        self._entropy = actions * (0.5 + HALF_LOG_2PI)  # for a standard deviation of 1
        # Factors of the averaged statistics. The entropy is not averaged: it replaces its entry.
        self._factors = self._adam.flat.new_tensor([-1.0, 0.5, 0.0, -1.0, 1.0, 1.0])
        self._max_grad_norm = self._adam.flat.new_tensor(max_grad_norm)
        self._highest = DeviceNumber(rate.device)
        self._graphs = graphs_of(self._adam.flat.device, ranks)

    @property
    def lr(self) -> torch.Tensor:
        """The learning rate, a scalar tensor of the optimiser's own."""
        return rate_of(self.optimizer)

    def check(self) -> None:
        """Ensure that steps reach the parameters; see `FlatAdam.check`."""
        self._adam.check()

    @torch.no_grad()
    def prepare(self, pool: TensorDictBase) -> torch.Tensor:
        """Pack what a pool's updates read; compute in advance what they do not change.

        Observations are normalised here, by the current statistics.

        Args:
            pool: Batch [M] that `APPOLoss.estimate` prepared.

        Returns:
            Columns [k, M] for `step`; any selection of them is a minibatch. Samples are the last
            dimension, so that operations on a feature read contiguous memory.

        Raises:
            ConfigError: A parameter's memory has moved since this was made, or it was frozen, or
                a hook was registered on a network or a parameter.
            LayoutShapeError: The batch has several dimensions.
        """
        self.check()
        check_hooks(*self._unhooked)
        if pool.batch_dims != 1:
            raise LayoutShapeError(
                f"pool: batch size {tuple(pool.batch_size)} (expected one dimension). Flatten it "
                "by reshape(-1)."
            )
        loss, keys = self.loss, self.loss.tensor_keys
        self._factors[1] = 0.5 * loss.critic_coeff
        networks = (loss.actor_network[0], loss.critic_network)[: 1 if self._one_input else 2]
        inputs = [net.normalizer(pool.get(net.in_keys[0])) for net in networks]
        action, target = pool.get(keys.action), pool.get(keys.target)
        log_b, log_t = pool.get(keys.sample_log_prob), pool.get(keys.target_log_prob)
        advantage = pool.get(keys.advantage)
        scale = target.get("scale")
        low, high = advantage * (1.0 - loss.clip_epsilon), advantage * (1.0 + loss.clip_epsilon)
        scalars = (
            # log(min(b/t, 1) / b), and the constant terms of log p
            (log_b - log_t).clamp(max=0.0) - log_b - action.shape[-1] * HALF_LOG_2PI,
            # the constant terms of the negative KL divergence
            scale.log().sum(-1) + 0.5 * action.shape[-1],
            advantage,
            torch.maximum(low, high),  # upper bound of the surrogate
            pool.get(keys.value_target),
            pool.get(keys.state_value),
            ((log_t - log_b).exp() > loss.rho_bar).to(advantage.dtype),
        )
        vectors = (*inputs, action, target.get("loc"), scale.square())
        columns = torch.cat([*(vector.t() for vector in vectors), torch.stack(scalars)])
        return columns.to(self._adam.flat.dtype)  # some collectors act in float64

    @staticmethod
    def shuffled(columns: torch.Tensor, minibatches: int) -> tuple[torch.Tensor, ...]:
        """Return `prepare`'s columns in a random order, in chunks.

        Args:
            columns: A pool, [k, M].
            minibatches: Chunks, whose sizes differ by one at most.

        Raises:
            ConfigError: There are not that many samples.
        """
        remedy = "Take fewer, or collect more steps."
        minibatches = as_integer("minibatches", minibatches, remedy, most=columns.shape[1])
        order = torch.randperm(columns.shape[1], device=columns.device)
        return columns.index_select(1, order).tensor_split(minibatches, dim=1)

    def step(self, columns: torch.Tensor) -> torch.Tensor:
        """Take one step on a minibatch; leave its gradients, clipped, in ``parameter.grad``.

        Args:
            columns: Some of `prepare`'s columns, [k, N].

        Returns:
            Losses and statistics as `STATISTICS` names them, [6].
        """
        steers = not self.loss.target_is_current
        take = partial(self._step, self._highest.of(self.max_lr) if steers else None)
        with torch.inference_mode():  # each operation takes less time than without gradients
            if self._graphs is None:
                statistics = take(columns)
            else:
                loss = self.loss
                coefficients = loss.clip_epsilon, loss.value_clip, loss.entropy_coeff
                settings = (steers, self.desired_kl, *coefficients, loss.critic_coeff)
                statistics = self._graphs(take, columns, *settings, *self._adam.constants())
            self.loss.step_target()
        return statistics.clone()  # outside, so that it can be used like any other tensor

    def _step(self, highest: torch.Tensor | None, columns: torch.Tensor) -> torch.Tensor:
        """Move the parameters, and the learning rate unless `highest` is None."""
        statistics, gradient = self._differentiate(columns), self._adam.grad
        self.ranks.mean_([gradient], [statistics])
        norm = torch.linalg.vector_norm(gradient)
        gradient.mul_((self._max_grad_norm / norm.add_(1e-6)).clamp_(max=1.0))
        self._adam.step()
        if highest is not None:
            kl = statistics[3]
            self.lr.copy_(kl_adapted_lr(self.lr, kl, self.desired_kl, highest))
        return statistics

    def _differentiate(self, columns: torch.Tensor) -> torch.Tensor:
        """Write the gradients of a minibatch, [k, N]; return its statistics."""
        loss, n, actions = self.loss, columns.shape[1], len(self._log_std)
        parts = columns.split(self._part_sizes)
        x, y, points, variance, offsets, advantage, bound, target, old, rho_clipped = parts
        loc, value = self._actor.forward(x), self._critic.forward(x if self._one_input else y)

        # How far action and target policy's mean are from `loc`, in deviations: [2, A, N].
        precision = self._log_std.neg().exp_().unsqueeze(1)
        noise = points.view(2, actions, n).sub(loc).mul_(precision)
        squares = noise.square()
        squares[1].addcmul_(variance, precision.square())
        log_volume = self._log_std.sum()
        logs = offsets.sub(squares.sum(1), alpha=0.5).sub_(log_volume)  # log ratio, -KL
        ratio = logs[:1].exp()
        surrogate = ratio * advantage
        slope = surrogate.mul(surrogate <= bound).div_(-n)  # derivative of the loss by log p
        self._actor.backward((noise[0] * slope).mul_(precision))
        torch.mv(squares[0], slope[0], out=self._log_std_grad)
        self._log_std_grad.sub_(slope.sum()).sub_(loss.entropy_coeff)

        value_slope = value - target  # derivative of the loss by the value
        error = value_slope.square()
        if loss.value_clip is not None:
            change, clip = value - old, loss.value_clip
            clipped_error = change.clamp(-clip, clip).add_(old).sub_(target).square_()
            value_slope.mul_((clipped_error <= error).logical_or_(change.abs_() <= clip))
            error = torch.maximum(error, clipped_error)
        self._critic.backward(value_slope.mul_(loss.critic_coeff / n))

        clipped = ratio.clamp(1.0 - loss.clip_epsilon, 1.0 + loss.clip_epsilon).ne_(ratio)
        objective = torch.minimum(surrogate, bound)
        observed = torch.cat([objective, error, logs, clipped, rho_clipped])
        statistics = observed.mean(1).mul_(self._factors)
        torch.add(log_volume, self._entropy, out=statistics[2])
        return statistics
