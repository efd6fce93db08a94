"""APPO: IMPACT's surrogate with V-trace targets, as a TorchRL loss."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    dispatch,
)
from tensordict.utils import NestedKey
from torch.nn.parameter import is_lazy
from torchrl import logger as torchrl_logger
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import LossModule

from torchrl_unilab.checks import as_instance, as_integer, as_number, entry_of
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.objectives.distributions import (
    check_log_prob,
    distribution_params,
    divergence_of,
    entropy_of,
)
from torchrl_unilab.objectives.vtrace import check_time_order, vtrace

MIN_LR = 1e-5


def kl_adapted_lr(
    lr: torch.Tensor, kl: torch.Tensor, desired_kl: float, max_lr: float | torch.Tensor
) -> torch.Tensor:
    """Return the learning rate after one observation of the KL divergence.

    Divided by 1.1 above ``1.2 * desired_kl``, multiplied by 1.1 below
    ``desired_kl / 1.2``, and kept within [1e-5, max_lr], or at `max_lr` where that is lower. A
    divergence of 0 is that of a policy that has not moved, which says nothing: the rate stays as
    it is. Nothing leaves the device.

    The divergence is always small in the first steps on a rollout, so that without `max_lr` the
    rate would rise without end.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.objectives.appo import kl_adapted_lr
        >>> kl_adapted_lr(torch.tensor(1e-3), torch.tensor(0.5), 0.01, max_lr=1e-3).item()
        0.000909...
    """
    raised = torch.where((kl > 0.0) & (kl < desired_kl / 1.2), lr * 1.1, lr)
    steered = torch.where(kl > desired_kl * 1.2, lr / 1.1, raised)
    return steered.clamp_(min=MIN_LR).clamp_(max=max_lr)


class APPOLoss(LossModule):
    """Clipped surrogate against a slowly moving target policy, with V-trace.

    With behaviour policy ``b``, target policy ``t`` and current policy ``p``
    (Luo et al. 2019, IMPACT, arXiv 1912.00167, eq. 4; Espeholt et al. 2018, V-trace,
    arXiv 1802.01561; Schulman et al. 2017, PPO, arXiv 1707.06347)::

        ratio   = min(b / t, 1) * p / b
        policy  = -min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A)
        value   = 0.5 * max((V - v)^2, (V_old + clip(V - V_old, -eps_v, eps_v) - v)^2)

    `estimate` computes ``v`` and ``A`` by V-trace with ``rho = t / b`` once per pool of rollouts;
    `forward` returns the losses of a minibatch of it. In a loop of your own, call `step_target`
    after each optimiser step: nothing else moves the target policy. Runs have other defaults
    (`APPOConfig`): values are not clipped, and the target moves once per rollout.

    Args:
        actor_network: Probabilistic actor that returns its log probability.
        critic_network: Writes the state value, [..., 1].
        clip_epsilon: Bound of the surrogate's ratio.
        value_clip: Bound of a value's change from its old estimate, in units of the value targets;
            None does not clip.
        entropy_coeff: Weight of the entropy bonus.
        critic_coeff: Weight of the value loss.
        gamma: Discount.
        lambda_: Decay of V-trace's traces.
        rho_bar: V-trace's bound of the ratio in temporal differences.
        c_bar: V-trace's bound of the ratio in traces.
        tau: Share of the current policy that each update mixes into the target.
        target_update_freq: Optimiser steps between target updates; None: call `update_target`.

    Raises:
        ConfigError: A coefficient is out of its range, or the actor is no `ProbabilisticActor`,
            draws several actions or is lazy.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules import make_actor, make_critic
        >>> from torchrl_unilab.objectives import APPOLoss
        >>> loss = APPOLoss(make_actor(3, 1), make_critic(3))
        >>> policy_output = loss.actor_network(TensorDict(observation=torch.zeros(4, 8, 3)))
        >>> flag = torch.zeros(4, 8, 1, dtype=torch.bool)
        >>> rollout = TensorDict(policy_output, batch_size=[4, 8]).update(
        ...     {"next": {"observation": torch.zeros(4, 8, 3), "reward": torch.ones(4, 8, 1),
        ...               "done": flag, "terminated": flag}})
        >>> losses = loss(loss.estimate(rollout).reshape(-1))
        >>> sum(loss for key, loss in losses.items() if key.startswith("loss_")).backward()
        >>> torch.optim.Adam(p for p in loss.parameters() if p.requires_grad).step()
        >>> loss.step_target()
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the input, settable by ``set_keys``.

        ``sample_log_prob`` is the behaviour policy's; ``target_log_prob``, ``advantage``,
        ``value_target`` and ``state_value`` are what `estimate` writes; ``target`` nests
        the target policy's distribution parameters.
        """

        action: NestedKey = "action"
        sample_log_prob: NestedKey = "action_log_prob"
        target_log_prob: NestedKey = "target_log_prob"
        target: NestedKey = "target"
        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        state_value: NestedKey = "state_value"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    functional = False
    """The networks hold their own parameters, which spares a swap per call."""

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModuleBase,
        *,
        clip_epsilon: float = 0.2,
        value_clip: float | None = 0.2,
        entropy_coeff: float = 0.0,
        critic_coeff: float = 1.0,
        gamma: float = 0.99,
        lambda_: float = 0.95,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        tau: float = 1.0,
        target_update_freq: int | None = 64,
    ) -> None:
        remedy = "Leave it out for the default."
        for name, value in (("gamma", gamma), ("lambda_", lambda_), ("tau", tau)):
            as_number(name, value, remedy, "[0, 1]")
        as_number("entropy_coeff", entropy_coeff, remedy, "[-1e38, 1e38]")
        as_number("clip_epsilon", clip_epsilon, remedy, "[0, inf]")
        as_number("value_clip", value_clip or 0.0, remedy, "[0, inf]")
        as_number("critic_coeff", critic_coeff, remedy, "[0, inf]")
        as_number("rho_bar", rho_bar, remedy, "[0, inf]")
        as_number("c_bar", c_bar, remedy, "[0, inf]")
        if target_update_freq is not None:
            as_integer("target_update_freq", target_update_freq, "It counts optimiser steps.")
        remedy = (
            "Wrap the whole network, such as embedding, recurrence and head, in a single "
            "ProbabilisticActor."
        )
        as_instance("actor_network", actor_network, ProbabilisticTensorDictSequential, remedy)
        if lazy := [name for name, tensor in actor_network.named_parameters() if is_lazy(tensor)]:
            raise ConfigError(
                f"actor_network: {lazy[0]!r} is lazy and has no shape yet (expected an initialised "
                "parameter: the target policy is a copy). Run one forward pass first."
            )
        heads = [m for m in actor_network.modules() if isinstance(m, ProbabilisticTensorDictModule)]
        if any(head.distribution_class is CompositeDistribution for head in heads):
            raise ConfigError(
                "actor_network: it draws from a CompositeDistribution (expected one distribution "
                "of one action). Join the actions in one vector."
            )
        super().__init__()
        self.actor_network = actor_network
        self.critic_network = critic_network
        self.target_actor_network = deepcopy(actor_network).requires_grad_(False)
        self.clip_epsilon, self.value_clip = clip_epsilon, value_clip
        self.entropy_coeff, self.critic_coeff = entropy_coeff, critic_coeff
        self.gamma, self.lambda_ = gamma, lambda_
        self.rho_bar, self.c_bar = rho_bar, c_bar
        self.tau, self.target_update_freq = tau, target_update_freq
        self.steps = 0  # an int: counting never waits for a device
        self._estimated_at: int | None = None  # value of `steps` at the last `estimate`
        self._updated_at: int | None = 0  # value of `steps` at the last move of the target policy
        self._losses_taken = False  # losses were taken since the last move of the target policy
        self._warned = False  # of that

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that `forward` reads."""
        keys = self.tensor_keys
        own = [keys.action, keys.sample_log_prob, keys.target_log_prob, keys.target]
        own += [keys.advantage, keys.value_target, keys.state_value]
        networks = [*self.actor_network.in_keys, *self.critic_network.in_keys]
        return list(dict.fromkeys([*networks, *own]))

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys that `forward` writes."""
        losses = ["loss_objective", "loss_critic", "loss_entropy"]
        return [*losses, "entropy", "kl", "clip_fraction", "rho_clip_fraction"]

    @property
    def target_is_current(self) -> bool:
        """Whether the last estimated pool's target policy is the current one.

        Its KL divergence is then 0 except for rounding, and says nothing about the learning rate.
        """
        copied = self.steps == self._updated_at and (self.tau == 1.0 or self.steps == 0)
        return self.steps == self._estimated_at and copied

    def get_extra_state(self) -> dict[str, int | None]:
        """Return counts of optimiser steps, which a checkpoint carries."""
        return {"steps": self.steps, "updated_at": self._updated_at}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Restore the counts of optimiser steps."""
        self.steps, self._updated_at = state["steps"], state.get("updated_at")

    def _forward_value_estimator_keys(self, **_: NestedKey) -> None:
        """Do nothing: V-trace is part of this loss, not a separate module."""

    def make_value_estimator(self, *_: object, **__: object) -> NoReturn:
        """Refuse another value estimator: `estimate` is V-trace."""
        raise ConfigError(
            "APPOLoss: make_value_estimator was called (expected no call: `estimate` is V-trace). "
            "Give APPOLoss gamma, lambda_, rho_bar and c_bar."
        )

    @torch.no_grad()
    def estimate(self, rollouts: TensorDictBase) -> TensorDictBase:
        """Add V-trace targets, advantages and the target policy's outputs to rollouts.

        The target policy normalises observations by the current statistics.

        Args:
            rollouts: Batch [..., T], time last, with the true next observations under
                ``next``.

        Returns:
            A shallow copy with the keys that `forward` reads in addition to the rollouts' own.
            Advantages have zero mean and unit variance over the batch.

        Raises:
            LayoutKeyError: The rollouts lack the behaviour policy's log probabilities, what the
                networks read, or what a collector adds.
            LayoutShapeError: There is another number of log probabilities than one per action, or
                a trajectory that is not done is followed by another.
        """
        keys = self.tensor_keys
        remedy = "Collect with a policy that returns it, and leave no key of the collector's out."
        needed = partial(entry_of, "APPOLoss", rollouts, remedy=remedy)
        log_b, action = needed(keys.sample_log_prob), needed(keys.action)
        check_log_prob("APPOLoss", keys.sample_log_prob, log_b, rollouts.batch_size)
        signals = keys.reward, keys.done, keys.terminated
        reward, done, terminated = (needed(("next", key)).squeeze(-1) for key in signals)
        check_time_order(rollouts, keys.done)
        critic_in = self.critic_network.in_keys
        for key in (*critic_in, *self.actor_network.in_keys):
            needed(key)
        for key in critic_in:
            needed(("next", key))
        if self._losses_taken and self.steps == 0 and not self._warned:
            self._warned = True
            torchrl_logger.warning(
                "APPOLoss: losses were taken, and the target policy has not moved (expected a call "
                "of `step_target` after each optimiser step). Call it: the loss holds the policy "
                "near its target."
            )
        self.sync_target_buffers()
        self._estimated_at = self.steps
        # One call for the values on both sides of each step.
        after = rollouts.get("next")
        both = torch.stack([rollouts.select(*critic_in), after.select(*critic_in)])
        v_tm1, v_t = self._value(both).unbind(0)
        policy = self.target_actor_network
        dist_params = distribution_params(policy, rollouts)
        target_log_prob = policy.build_dist_from_params(dist_params).log_prob(action)
        log_rho = target_log_prob - log_b
        value_target, advantage = vtrace(
            log_rho,
            v_tm1,
            v_t,
            reward.to(v_t),
            done,
            terminated,
            gamma=self.gamma,
            lambda_=self.lambda_,
            rho_bar=self.rho_bar,
            c_bar=self.c_bar,
        )
        advantage = advantage - advantage.mean()
        if advantage.numel() > 1:  # one alone has no deviation
            advantage = advantage / (advantage.std() + 1e-8)
        out = rollouts.copy()
        out.set(keys.target, dist_params)
        out.set(keys.target_log_prob, target_log_prob)
        out.set(keys.advantage, advantage)
        out.set(keys.value_target, value_target)
        out.set(keys.state_value, v_tm1)
        return out

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the losses of a minibatch that `estimate` prepared.

        Args:
            tensordict: Batch [N]; or its `in_keys` by name, for a tuple of `out_keys`.

        Returns:
            Scalars ``loss_objective``, ``loss_critic``, ``loss_entropy`` with gradients, and ``kl``
            (target to current policy), ``entropy``, ``clip_fraction``, ``rho_clip_fraction``
            without. Quantities without a closed form are estimated from samples.

        Raises:
            LayoutKeyError: `estimate` has not prepared the minibatch, or it lacks one of `in_keys`.
        """
        keys = self.tensor_keys
        if torch.is_grad_enabled():
            self._losses_taken = True
        remedy = "Call `estimate` with the rollouts first, and leave none of `in_keys` out."
        needed = partial(entry_of, "APPOLoss", tensordict, remedy=remedy)
        log_t, actor = needed(keys.target_log_prob), self.actor_network
        for key in (*actor.in_keys, *self.critic_network.in_keys):
            needed(key)
        dist = actor.build_dist_from_params(distribution_params(actor, tensordict))
        log_p = dist.log_prob(needed(keys.action))
        log_b, advantage = needed(keys.sample_log_prob), needed(keys.advantage)
        # min(b/t, 1) * p/b in logarithms; the minimum has no gradient as b and t have none.
        log_ratio = (log_b - log_t).clamp(max=0.0) + log_p - log_b
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - self.clip_epsilon, 1.0 + self.clip_epsilon)
        objective = torch.min(ratio * advantage, clipped * advantage)

        value = self._value(tensordict.select(*self.critic_network.in_keys))
        target = needed(keys.value_target)
        error = (value - target).square()
        if self.value_clip is not None:
            old = needed(keys.state_value)
            near = old + (value - old).clamp(-self.value_clip, self.value_clip)
            error = torch.max(error, (near - target).square())

        entropy = entropy_of(dist).mean()
        with torch.no_grad():
            target_dist = self.target_actor_network.build_dist_from_params(needed(keys.target))
            kl = divergence_of(target_dist, dist).mean()
            clip_fraction = (ratio != clipped).float().mean()
            rho_clip_fraction = ((log_t - log_b).exp() > self.rho_bar).float().mean()
        return TensorDict(
            loss_objective=-objective.mean(),
            loss_critic=self.critic_coeff * 0.5 * error.mean(),
            loss_entropy=-self.entropy_coeff * entropy,
            entropy=entropy.detach(),
            kl=kl,
            clip_fraction=clip_fraction,
            rho_clip_fraction=rho_clip_fraction,
        )

    def _value(self, observations: TensorDictBase) -> torch.Tensor:
        """Return the critic's state values, [...]; it may write more than these."""
        key, written = self.tensor_keys.state_value, self.critic_network.out_keys
        with set_recurrent_mode(False):  # samples are single steps, whose order means nothing
            values = self.critic_network(observations)
        value: torch.Tensor = values.get(key if key in written else written[-1])
        return value.squeeze(-1)

    def step_target(self) -> None:
        """Count an optimiser step; move the target policy every `target_update_freq`."""
        self.steps += 1
        if self.target_update_freq is not None and self.steps % self.target_update_freq == 0:
            self.update_target()

    @torch.no_grad()
    def update_target(self) -> None:
        """Move the target policy."""
        current, target = self.actor_network.parameters(), self.target_actor_network.parameters()
        torch._foreach_lerp_(list(target), list(current), self.tau)
        self.sync_target_buffers()
        self._updated_at, self._losses_taken = self.steps, False

    @torch.no_grad()
    def sync_target_buffers(self) -> None:
        """Copy the actor's buffers (observation statistics) to the target policy."""
        pairs = zip(self.target_actor_network.buffers(), self.actor_network.buffers(), strict=True)
        for target, buffer in pairs:
            target.copy_(buffer)
