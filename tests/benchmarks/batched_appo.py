"""APPO's update of `APPOTrainer`, for several seeds at once, with gradients written out.

The mathematics of `APPOLoss`, `APPOStepper` and `kl_adapted_lr`, on networks whose parameters
are rows of one tensor. `tests.benchmarks.screen` trains with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic
from torchrl_unilab.modules.gaussian import HALF_LOG_2PI
from torchrl_unilab.objectives import vtrace
from torchrl_unilab.objectives.appo import kl_adapted_lr
from torchrl_unilab.trainers import APPOConfig


@dataclass(frozen=True)
class Member:
    """One of the runs that are trained together.

    Attributes:
        seed: Seed of the initial networks.
        config: Settings. One rollout is learnt from, and the target policy moves with it.
    """

    seed: int
    config: APPOConfig


class BatchedTanhNetworks:
    """One tanh network per seed; samples are columns, [S, features, N].

    Args:
        flat: Parameters, [S, P]: for each layer the weights, then the biases.
        sizes: Widths from input to output.
    """

    def __init__(self, flat: torch.Tensor, sizes: Sequence[int]) -> None:
        self._layers = []
        for n_in, n_out in pairwise(sizes):
            weight, bias, flat = flat.split(
                [n_in * n_out, n_out, flat.shape[1] - (n_in + 1) * n_out], 1
            )
            self._layers.append((weight.unflatten(1, (n_out, n_in)), bias.unsqueeze(2)))
        self._inputs: list[torch.Tensor] = []
        self._minus_one = flat.new_tensor(-1.0)

    @staticmethod
    def size(sizes: Sequence[int]) -> int:
        """Return the number of parameters of one network."""
        return sum((n_in + 1) * n_out for n_in, n_out in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs [S, n_out, N] of `x`, [S, n_in, N]."""
        self._inputs = [x]
        for weight, bias in self._layers[:-1]:
            # tanh(y) = 2 * sigmoid(2 * y) - 1, at half of tanh's time on a CPU.
            x = torch.baddbmm(bias, weight, x, beta=2.0, alpha=2.0).sigmoid_()
            x = torch.add(self._minus_one, x, alpha=2.0, out=x)
            self._inputs.append(x)
        weight, bias = self._layers[-1]
        return torch.baddbmm(bias, weight, x)

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' gradients, [S, ...] each, given the outputs', [S, n_out, N]."""
        gradients: list[torch.Tensor] = []
        for i in reversed(range(len(self._layers))):
            x = self._inputs[i]
            weight_gradient = torch.bmm(gradient, x.transpose(1, 2))
            gradients = [weight_gradient.flatten(1), gradient.sum(2), *gradients]
            if i:
                gradient = torch.bmm(self._layers[i][0].transpose(1, 2), gradient)
                gradient = torch.ops.aten.tanh_backward(gradient, x)
        return gradients


class Policies:
    """Actor and critic of each seed, and what they normalise observations by.

    Args:
        flat: Parameters, [S, P]: of the actors, log standard deviations, of the critics.
        sizes: Lengths of an observation, and of an action.
        hidden: Widths of the layers between.
    """

    def __init__(self, flat: torch.Tensor, sizes: tuple[int, int], hidden: Sequence[int]) -> None:
        inputs, actions = sizes
        widths = [inputs, *hidden, actions], [inputs, *hidden, 1]
        counts = [BatchedTanhNetworks.size(width) for width in widths]
        actor, self.log_std, critic = flat.split([counts[0], actions, counts[1]], 1)
        self.actor = BatchedTanhNetworks(actor, widths[0])
        self.critic = BatchedTanhNetworks(critic, widths[1])
        self.flat = flat
        self.mean = flat.new_zeros(len(flat), inputs, 1)
        self.scale = torch.ones_like(self.mean)

    def normalized(self, observation: torch.Tensor) -> torch.Tensor:
        """Normalise observations, [S, size, N]."""
        return ((observation - self.mean) * self.scale).clamp_(-10.0, 10.0)

    def log_prob(self, noise: torch.Tensor) -> torch.Tensor:
        """Log probability [S, 1, N] of actions `noise` standard deviations from their means."""
        volume = self.log_std.sum(1).add(self.log_std.shape[1] * HALF_LOG_2PI)
        return noise.square().sum(1, keepdim=True).mul(-0.5).sub(volume[:, None, None])

    def copy_(self, other: Policies) -> None:
        """Become as `other` is now."""
        self.flat.copy_(other.flat)
        self.mean.copy_(other.mean)
        self.scale.copy_(other.scale)


SHARED = ("num_envs", "num_steps", "epochs", "minibatches", "hidden", "observation")
"""Settings that members must have in common."""


class BatchedLearner:
    """APPO's update, as `APPOTrainer` makes it, for all members at once.

    Args:
        sizes: Lengths of an observation, and of an action.
        members: What to train; they have the `SHARED` settings in common.

    Attributes:
        max_lr: Highest learning rate of each, [S, 1].
    """

    def __init__(self, sizes: tuple[int, int], members: Sequence[Member]) -> None:
        self.members, self.config = members, members[0].config
        _check(members)
        self.normalizers = [ObservationNormalizer(sizes[0]) for _ in members]
        flat = torch.stack([_initial(sizes, member) for member in members])
        self.policies = Policies(flat, sizes, self.config.hidden)
        self._moments = torch.zeros_like(flat), torch.zeros_like(flat)
        self._steps = torch.zeros(())
        self.max_lr = self._each(lambda m: m.config.lr)
        self.lr = self.max_lr.clone()
        self.discounts = [member.config.gamma for member in members]
        # What each step reads, [S, 1].
        self._desired_kl = self._each(lambda m: m.config.desired_kl)
        self._max_grad_norm = self._each(lambda m: m.config.max_grad_norm)
        self._entropy_coeff = self._each(lambda m: m.config.entropy_coeff)
        self._critic_coeff = self._each(lambda m: m.config.critic_coeff).unsqueeze(2)

    def _each(self, read: Callable[[Member], float]) -> torch.Tensor:
        """Return a setting of each member, [S, 1]."""
        return self.policies.flat.new_tensor([[read(member)] for member in self.members])

    def update(
        self, rollout: dict[str, torch.Tensor], orders: Sequence[torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Learn from a rollout; return ``kl`` after the last pass, ``explained_variance``, [S].

        Args:
            rollout: ``observation`` and ``next_observation`` [S, size, n, T], ``action``
                [S, size, n, T], and ``log_prob``, ``reward``, ``done``, ``terminated``
                [S, 1, n, T].
            orders: Order of the samples in each pass; random by default.
        """
        columns, explained = self._estimated(rollout)
        kls: list[torch.Tensor] = []
        for epoch in range(self.config.epochs):
            order = torch.randperm(columns.shape[2]) if orders is None else orders[epoch]
            chunks = columns.index_select(2, order).chunk(self.config.minibatches, 2)
            for chunk in chunks:
                kls.append(self._step(chunk, steered=bool(kls)))
        return {"kl": torch.stack(kls[-len(chunks) :]).mean(0), "explained_variance": explained}

    def _estimated(self, rollout: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the steps read, as columns [S, k, n * T], and explained variances, [S]."""
        policies = self.policies
        for normalizer, observation in zip(self.normalizers, rollout["observation"], strict=True):
            normalizer.update(observation.flatten(1).t())
        mean = torch.stack([normalizer.mean for normalizer in self.normalizers])
        scale = torch.stack([(each.variance + each.epsilon).rsqrt() for each in self.normalizers])
        policies.mean.copy_(mean.unsqueeze(2))
        policies.scale.copy_(scale.unsqueeze(2))

        x = policies.normalized(rollout["observation"].flatten(2))
        after = policies.normalized(rollout["next_observation"].flatten(2))
        action, log_b = rollout["action"].flatten(2), rollout["log_prob"].flatten(2)
        loc = policies.actor.forward(x)
        log_t = policies.log_prob((action - loc) * policies.log_std.neg().exp().unsqueeze(2))
        value = policies.critic.forward(x)
        next_value = policies.critic.forward(after)
        target, advantage = self._traced(rollout, log_t - log_b, value, next_value)
        unexplained = (target - value).var(2, correction=0)
        explained = 1.0 - unexplained / target.var(2, correction=0).clamp(min=1e-8)
        advantage = advantage - advantage.mean(2, keepdim=True)
        advantage /= advantage.std(2, keepdim=True) + 1e-8
        clip = self._each(lambda m: m.config.clip_epsilon).unsqueeze(2)
        actions = loc.shape[1]
        variance = (2.0 * policies.log_std).exp().unsqueeze(2).expand_as(loc)
        columns = (
            x,
            action,
            loc,
            variance,
            # log(min(b / t, 1) / b), and what is constant of log p and of the KL divergence
            (log_b - log_t).clamp(max=0.0) - log_b - actions * HALF_LOG_2PI,
            variance.log().sum(1, keepdim=True).add(actions).mul(-0.5),
            advantage,
            torch.maximum((1.0 - clip) * advantage, (1.0 + clip) * advantage),
            target,
        )
        return torch.cat(columns, 1), explained.flatten()

    def _traced(
        self,
        rollout: dict[str, torch.Tensor],
        log_rho: torch.Tensor,
        value: torch.Tensor,
        after: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return V-trace's targets and advantages, [S, 1, n * T]."""
        columns = {**rollout, "log_rho": log_rho, "value": value, "after": after}
        names = ("log_rho", "value", "after", "reward", "done", "terminated")
        shape = rollout["reward"].shape[2:]
        traced = []
        for i, member in enumerate(self.members):
            config = member.config
            log_rho, value, after, reward, *flags = (columns[name][i].view(shape) for name in names)
            targets_and_advantages = vtrace(
                log_rho,
                value,
                after,
                reward * config.reward_scale,
                *flags,
                gamma=self.discounts[i],
                lambda_=config.lambda_,
                rho_bar=config.rho_bar,
                c_bar=config.c_bar,
            )
            traced.append(torch.stack(targets_and_advantages).flatten(1))
        return torch.stack(traced, 1).unsqueeze(2).unbind(0)

    def _step(self, columns: torch.Tensor, *, steered: bool) -> torch.Tensor:
        """Take a step on a minibatch, [S, k, N]; return the KL divergences, [S]."""
        policies = self.policies
        actions, n = policies.log_std.shape[1], columns.shape[2]
        sizes = [columns.shape[1] - 3 * actions - 5, *[actions] * 3, *[1] * 5]
        x, action, loc_t, variance, offset, kl_offset, advantage, bound, target = columns.split(
            sizes, 1
        )
        loc, value = policies.actor.forward(x), policies.critic.forward(x)
        precision = policies.log_std.neg().exp_().unsqueeze(2)
        volume = policies.log_std.sum(1).view(-1, 1, 1)
        noise = (action - loc) * precision
        squares = noise.square()
        moved = ((loc_t - loc).square() + variance).mul_(precision.square())
        kl = (kl_offset + 0.5 * moved.sum(1, keepdim=True) + volume).mean((1, 2))

        ratio = squares.sum(1, keepdim=True).mul_(-0.5).add_(offset).sub_(volume).exp_()
        surrogate = ratio.mul_(advantage)
        slope = surrogate.mul_(surrogate <= bound).div_(-n)  # of the loss in log p
        gradient = torch.cat(
            [
                *policies.actor.backward((noise * slope).mul_(precision)),
                (squares * slope).sum(2) - slope.sum(2) - self._entropy_coeff,
                *policies.critic.backward((value - target).mul_(self._critic_coeff).div_(n)),
            ],
            1,
        )
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient.mul_((self._max_grad_norm / (norm + 1e-6)).clamp_(max=1.0))
        self._adam(gradient)
        if steered:
            lr = kl_adapted_lr(self.lr, kl.unsqueeze(1), self._desired_kl, max_lr=1.0)
            self.lr = torch.minimum(lr, self.max_lr)
        return kl

    def _adam(self, gradient: torch.Tensor) -> None:
        """Step each seed by its own learning rate."""
        self._steps.add_(1)
        tensors = (self.policies.flat, gradient, *self._moments)
        for seed, row in enumerate(zip(*tensors, strict=True)):
            torch._fused_adam_(
                *([tensor] for tensor in row),
                [],
                [self._steps],
                lr=self.lr[seed, 0],
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )


def _initial(sizes: tuple[int, int], member: Member) -> torch.Tensor:
    """Return the parameters that a run of this seed starts from, [P]."""
    torch.manual_seed(member.seed)
    hidden = member.config.hidden
    actor = make_actor(*sizes, hidden=hidden, log_std=member.config.log_std)[0]
    critic = make_critic(sizes[0], hidden=hidden)
    parts = [*actor.net.parameters(), actor.log_std, *critic.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def _check(members: Sequence[Member]) -> None:
    """Refuse settings that are not known here, or that differ where they must not."""
    first = members[0].config
    expected = {"pool": 1, "tau": 1.0, "target_update_freq": None, "value_clip": None}
    expected |= {"num_collectors": 1, "critic_observation": first.observation}
    expected |= {name: getattr(first, name) for name in SHARED}
    for member in members:
        others = {name: getattr(member.config, name) for name in expected}
        others = {name: other for name, other in others.items() if other != expected[name]}
        if others:
            raise ValueError(f"screen: {others} (expected {expected}). Train them apart.")
