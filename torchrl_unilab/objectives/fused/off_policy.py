"""The skeleton of an off-policy update: draw, bootstrap, regress the critics, climb, follow.

`FusedSACUpdate` and `FusedTD3Update` are its formulas. Transitions are packed once per
sample; all gradients are taken before any parameter moves. `OffPolicyTrainer` calls it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.objectives import LossModule, ValueEstimators

from torchrl_unilab.checks import as_choice, as_integer, as_number
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules.critics import QValue
from torchrl_unilab.modules.normalizer import ObservationNormalizer
from torchrl_unilab.objectives.compiler import compiled_method
from torchrl_unilab.objectives.fused.adam import FlatAdam, flatten, learnable
from torchrl_unilab.objectives.fused.graphs import SideStream, graphs_of
from torchrl_unilab.objectives.fused.networks import (
    Network,
    are_hooked,
    check_hooks,
    is_relu_mlp,
    relu_networks,
)
from torchrl_unilab.objectives.fused.threads import SideExecutor, run_both
from torchrl_unilab.objectives.fused.transitions import TransitionRows, Transitions
from torchrl_unilab.objectives.targets import targets_of
from torchrl_unilab.owner import Owner
from torchrl_unilab.runtime.ranks import SINGLE_RANK, Ranks
from torchrl_unilab.runtime.worker_thread import WorkerThread

OF_CRITICS = ("loss_qvalue", "q_value", "td_error")
"""What the critics' part of a step observes: the first statistics of all updates."""


def critics_are_known(loss: LossModule, actor: TensorDictModuleBase) -> bool:
    """Return whether a loss has two critics as `make_q_value` makes them, beside an actor's head.

    With targets of their own, bootstrapped over one step, averaged over the batch; and all
    parameters learnt, of one dtype, on one device, and none of them shared.
    """
    critic = loss.qvalue_network
    if type(critic) is not QValue or not is_relu_mlp(critic.net, 1):
        return False
    parts = loss.actor_network_params, loss.qvalue_network_params
    learnt = [parameter for part in parts for parameter in learnable(part).values()]
    keys = loss.tensor_keys
    return (
        loss.num_qvalue_nets == 2
        and loss.delay_qvalue
        and loss.reduction == "mean"
        and loss.loss_function in ("l1", "l2", "smooth_l1")
        and loss.value_type is ValueEstimators.TD0
        and (keys.action, keys.state_action_value) == ("action", critic.out_keys[0])
        and {type(n.normalizer) for n in (actor, critic)} <= {nn.Identity, ObservationNormalizer}
        and len(learnt) == len(list(actor.net.parameters())) + len(list(critic.net.parameters()))
        and not are_hooked([*loss.actor_network.modules(), *critic.modules()], loss.parameters())
        and len(set(learnt)) == len(learnt)
        and len({(parameter.device, parameter.dtype) for parameter in learnt}) == 1
    )


class FusedOffPolicyUpdate(Owner):
    """Losses, gradients, Adam and target networks of a minibatch, without autograd.

    The base of `FusedSACUpdate` and `FusedTD3Update`. Parameters of actor, critics and targets
    become views of one tensor each. The loss, and the actor that it was made of, keep their
    `nn.Parameter` objects, whose memory moves: make this after the loss is on its device, and
    before anything keeps that memory (``parameter.data``). Nothing waits for the device. On a
    GPU steps are replayed graphs (`StepGraphs`), unless ranks learn together.

    Args:
        loss: A supported loss. Make another update once its settings have changed.
        lr_actor: Learning rate of the actor.
        lr_critic: Learning rate of the critics.
        tau: Share of the networks that their targets take over in each step.
        matmul_dtype: The dtype of hidden layers' products; the parameters' if None.
        policy_thread: Compute the policy's gradient in a second thread, in parallel with the
            critics', and share the critics' work with it while it is free. The results are the
            same, bit for bit. On a GPU both are branches of a graph in any case.
        ranks: Processes over whose minibatches gradients and statistics are averaged.

    Attributes:
        optimizers: By part of the loss, to be checkpointed; changed settings take effect at once.
        observed: What the last `step` returned; to resume, overwrite it in place.

    Raises:
        ConfigError: The loss is not supported, or a deep copy, whose actor does not learn; or `tau`
            or `matmul_dtype` cannot work.
    """

    statistics: ClassVar[tuple[str, ...]]
    """What `step` returns, in order. ``td_error`` is the mean absolute one."""

    expected: ClassVar[str]
    """The losses that are supported, in words."""

    policy_draws: ClassVar[int]
    """Noise samples per transition that the policy's gradient needs."""

    head_path: ClassVar[tuple[str, ...]]
    """Where the actor's head, its ``net`` and ``normalizer``, is among its parameters."""

    @classmethod
    def supports(cls, loss: LossModule) -> bool:
        """Return whether the loss and its networks are of the known structure."""
        head = cls._known_head(loss)
        return head is not None and critics_are_known(loss, head)

    @staticmethod
    @abc.abstractmethod
    def _known_head(loss: LossModule) -> TensorDictModuleBase | None:
        """Return the actor's head; None if the loss or its actor is of another structure."""

    def __init__(
        self,
        loss: LossModule,
        *,
        lr_actor: float,
        lr_critic: float,
        tau: float,
        matmul_dtype: torch.dtype | None = None,
        policy_thread: bool = False,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        actor = self._known_head(loss)
        if actor is None or not critics_are_known(loss, actor):
            raise ConfigError(
                f"{type(self).__name__}: {type(loss).__name__} (expected {self.expected}). Take "
                "steps by the loss and an optimiser."
            )
        remedy = "It is the share of the networks that their targets take over in each step."
        as_number("tau", tau, remedy, "[0, 1]")
        kinds = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)
        as_choice(f"{type(self).__name__} matmul_dtype", matmul_dtype, kinds, "Leave it out.")
        if loss.value_estimator.average_rewards:
            raise ConfigError(
                f"{type(self).__name__}: average_rewards True (expected False). Normalise "
                "rewards before they are stored."
            )
        actor_parameters = loss.actor_network_params.get((*self.head_path, "net"))
        if {*actor.net.parameters()} != {*learnable(actor_parameters).values()}:
            raise ConfigError(
                f"{type(self).__name__}: the loss's actor_network has other parameters than the "
                "loss learns (expected the same; deep copies of TorchRL's losses part them). Make "
                "a new loss of deep copies of the networks."
            )
        self.loss, self.ranks, self.tau = loss, ranks, tau
        self._thread: SideExecutor = None
        self._critics_in_one_thread = False  # else the policy's thread helps if it is idle
        critic = loss.qvalue_network
        self._unhooked = [*loss.actor_network.modules(), *critic.modules()], [*loss.parameters()]
        online, target = loss.qvalue_network_params, targets_of(loss, "qvalue_network")
        learnt = learnable(online)
        self._actor_adam = FlatAdam(list(learnable(actor_parameters).values()), lr_actor)
        self._critic_adam = FlatAdam(list(learnt.values()), lr_critic)
        self._policy_adams = [self._actor_adam]
        adams = {"actor": self._actor_adam, "critic": self._critic_adam}
        self.optimizers = {part: adam.optimizer for part, adam in adams.items()}
        # Networks and the targets that follow them, each one tensor.
        self._followers = [(flatten([target.get(key) for key in learnt]), self._critic_adam.flat)]
        self._matmul_dtype, self._networks = matmul_dtype, list[Network]()
        self._actor = self._network(actor.net, actor_parameters)
        self._critics = self._network(critic.net, online.get("net"))
        self._target_critics = self._network(critic.net, target.get("net"))
        # Detached copies, which TorchRL's losses keep of parameters, show the old memory.
        loss._erase_cache()
        for name in loss._has_update_associated:  # spares a warning that targets stand still
            loss._has_update_associated[name] = True
        self._rows = TransitionRows(loss, actor)
        flat = self._critic_adam.flat
        self._center, self._reach = actor.center.to(flat), actor.reach.to(flat)
        self.observed = torch.full_like(flat[:1], float("nan")).repeat(len(self.statistics))
        # One view for each thread: compiled code may write to all of a tensor that it is given.
        self._of_critics = self.observed[: len(OF_CRITICS)]
        self._of_policy = self.observed[self.statistics.index("loss_actor") :]
        self._error = torch.empty_like(flat[:0]).expand(2, 0)
        self._graphs = graphs_of(flat.device, ranks)
        if self._graphs is not None:
            self._thread = self._graphs.branch()
        elif policy_thread:
            self._thread = WorkerThread("policy")

    def _network(self, net: nn.Module, parameters: TensorDictBase) -> Network:
        """Make networks; each step refreshes their copies of parameters."""
        self._networks.append(relu_networks(net, parameters, self._matmul_dtype))
        return self._networks[-1]

    def compile(self) -> None:
        """Take gradients by compiled code: fewer passes over memory, without Python's lock.

        The first step on each number of rows takes seconds.

        Raises:
            ConfigError: There is no compiler.
        """
        on_cpu = self.observed.device.type == "cpu"
        for name in ("_differentiate_critics", "_differentiate_policy"):
            setattr(self, name, compiled_method(self, name, cpp_wrapper=on_cpu))
        self._critics_in_one_thread = True  # faster than to share them with the thread
        self._graphs = graphs_of(self.observed.device, self.ranks)  # without captured steps

    def close(self) -> None:
        """End the policy's thread; a step after it takes none. Idempotent."""
        thread, self._thread = self._thread, None
        if isinstance(thread, WorkerThread):
            thread.close()

    @property
    @abc.abstractmethod
    def td_error(self) -> torch.Tensor:
        """The last step's temporal differences, [n], as the loss gives them as priorities."""

    @torch.no_grad()
    def prepare(self, batch: TensorDictBase) -> torch.Tensor:
        """Pack transitions, with all that updates do not change computed.

        Observations are normalised here, by the current statistics, which the loss's own copies
        take over (`sync_normalizers`). ``steps_to_next_obs``, if the batch has it, is the power
        of the discount, as in TorchRL's estimators; a ``priority_weight``, if the loss uses it,
        weights the losses' means.

        Args:
            batch: Transitions [M] with the keys that the loss reads. ``done`` is not among
                them: an episode that was cut off, and not terminated, bootstraps.

        Returns:
            Rows [M, k] for `minibatches` and `step`, of the networks' dtype.

        Raises:
            LayoutError: The batch lacks a key, has not one dimension, or a part another width.
            ConfigError: A parameter's memory has moved since this was made, or it was frozen, or
                a hook was registered on a network or a parameter.
        """
        check_hooks(*self._unhooked)
        for adam in (self._critic_adam, *self._policy_adams):
            adam.check()
        return self._rows.pack(batch, self._critic_adam.flat.dtype)

    @staticmethod
    def minibatches(packed: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        """Cut packed transitions into views, in order; sizes differ by at most one row.

        Args:
            packed: From `prepare`, [M, k].
            count: Minibatches.

        Raises:
            ConfigError: There are not that many rows.
        """
        remedy = "Prepare a larger sample."
        count = as_integer("minibatches", count, remedy, most=len(packed))
        return torch.tensor_split(packed, count)

    def step(self, minibatch: torch.Tensor, *, update_policy: bool = True) -> torch.Tensor:
        """Take one step; leave its gradients in ``parameter.grad``.

        Args:
            minibatch: Some of `prepare`'s rows, [n, k].
            update_policy: Whether the policy learns too; critics and targets always move. Noise is
                drawn in the order in which the loss draws it, the policy's only where it learns;
                on the CPU torch fills by 16 numbers.

        Returns:
            Losses and statistics as `statistics` names them. Those of the policy are of the
            last step that moved it, NaN before the first. Means are weighted as the losses
            are.
        """
        adams = [self._critic_adam, *(self._policy_adams if update_policy else ())]
        take = partial(self._step, adams)
        with torch.inference_mode():  # each operation takes less time than without gradients
            if self._graphs is None:
                self._error = take(minibatch)
            else:
                constants = (adam.constants() for adam in adams)
                self._error = self._graphs(take, minibatch, self.tau, *constants)
        return self.observed.clone()  # outside, so that it can be used like any other tensor

    def _step(self, adams: list[FlatAdam], minibatch: torch.Tensor) -> torch.Tensor:
        """Do a step's work; return the temporal differences of both critics, [2, n]."""
        for network in self._networks:  # here, as others may have set parameters since
            network.refresh()
        data, update_policy = self._rows.unpack(minibatch), self._actor_adam in adams
        error = self._differentiate(data, update_policy)
        self.ranks.mean_([adam.grad for adam in adams], [self.observed])
        for adam in adams:
            adam.step()
        for target, source in self._followers:
            target.lerp_(source, self.tau)
        return error

    def _differentiate(self, data: Transitions, update_policy: bool) -> torch.Tensor:
        """Compute gradients and statistics, in place; return the temporal differences."""
        draws = 1 + self.policy_draws * update_policy
        noise = data.weight.new_empty(draws, len(data.weight), len(self._reach))
        noise.normal_()  # in one call, in the order in which the loss draws
        thread = None if self._critics_in_one_thread else self._thread
        if update_policy and isinstance(thread, SideStream):
            thread = None  # a stream is the policy's then; a thread helps once it is done
        critics = partial(self._differentiate_critics, data, noise[0], thread)
        if not update_policy:
            return critics()
        policy = partial(self._differentiate_policy, data, noise[1:])
        return run_both(self._thread, critics, policy)[0]

    def _differentiate_critics(
        self, data: Transitions, noise: torch.Tensor, thread: SideExecutor
    ) -> torch.Tensor:
        """Compute the critics' gradients and statistics.

        A thread computes the next values meanwhile, and then the first critic's gradients.
        """
        evaluate_critics = partial(self._critics.forward, data.critic_input)
        next_values = partial(self._next_value, data, noise)
        (values, passes), next_value = run_both(thread, evaluate_critics, next_values)
        values = values.squeeze(2)
        error = values - torch.addcmul(data.reward, data.discount, next_value)
        distance = error.abs()
        if self.loss.loss_function == "l2":
            loss, slope = error.square(), error * 2.0
        elif self.loss.loss_function == "l1":
            loss, slope = distance, error.sign()
        else:
            slope = error.clamp(-1.0, 1.0)
            loss = slope * (error - 0.5 * slope)  # e^2 / 2, and |e| - 1/2 beyond 1
        self._critics.backward((slope * data.weight).unsqueeze(2), passes, thread)
        rows = torch.stack([loss.sum(0), values.mean(0), distance.mean(0)])
        self._of_critics.copy_(rows @ data.weight)
        return error

    @abc.abstractmethod
    def _next_value(self, data: Transitions, noise: torch.Tensor) -> torch.Tensor:
        """Return the next states' value, [n], by the targets.

        The noise is standard normal, [n, actions], and may be overwritten.
        """

    @abc.abstractmethod
    def _differentiate_policy(self, data: Transitions, noise: torch.Tensor) -> None:
        """Write the policy's gradients and statistics, perhaps beside the critics'.

        The noise is standard normal, [policy_draws, n, actions].
        """

    def _target_values(self, data: Transitions, action: torch.Tensor) -> torch.Tensor:
        """Return the minimum of the target critics' values of the next actions, [n]."""
        critic_input = torch.cat([data.next_state, action], dim=1)
        return self._target_critics.forward(critic_input)[0].squeeze(2).amin(0)
