"""Optimiser steps by a loss's own backward pass, and the choice between them and fused ones.

`APPOStepper` and `LossUpdate` take what networks of any structure need; where the networks
are ours, `FusedAPPOUpdate`, `FusedSACUpdate` and `FusedTD3Update` take the same steps in a
fraction of the time. `APPOTrainer` and `OffPolicyTrainer` call them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules import GRUModule, LSTMModule
from torchrl.objectives import LossModule, SoftUpdate, TD3Loss
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import OptimizationStepper

from torchrl_unilab.checks import as_instance, as_integer, entry_of
from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.configs.off_policy import OffPolicyConfig
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.limits import available_cores
from torchrl_unilab.objectives import APPOLoss, FusedAPPOUpdate, FusedSACUpdate, FusedTD3Update
from torchrl_unilab.objectives.appo import kl_adapted_lr
from torchrl_unilab.objectives.compiler import compiled
from torchrl_unilab.objectives.fused.adam import rate_of
from torchrl_unilab.objectives.fused.appo import STATISTICS
from torchrl_unilab.objectives.targets import sync_normalizers
from torchrl_unilab.runtime.ranks import SINGLE_RANK, Ranks

REWARD_REMEDY = "Call the loss's set_keys(reward=...) with the environment's own key."
_OF_APPO = (*STATISTICS, "loss_entropy")
"""What `APPOLoss` gives."""


class APPOStepper(OptimizationStepper):
    """One APPO optimiser step, which never waits for the device.

    Steps the optimiser on the sum of the losses, lets the KL divergence steer the learning
    rate, and moves the target policy when it is due.

    Args:
        loss: The loss.
        config: Learning rate, desired KL divergence and bound of the gradient.
        fused: The update that owns the parameters' memory and their optimiser, if any.
        ranks: Processes over whose minibatches gradients and statistics are averaged.

    Attributes:
        owner: What has the optimiser and its highest rate, ``max_lr``: `fused`, or this.
        further: Names of the numbers that the last losses had beside those of `APPOLoss`.
    """

    def __init__(
        self,
        loss: APPOLoss,
        config: APPOConfig,
        fused: FusedAPPOUpdate | None = None,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        self.loss, self.ranks = loss, ranks
        self._losses = compiled(loss.forward) if config.compile else loss
        self.desired_kl, self.max_lr = config.desired_kl, config.lr
        self.owner: APPOStepper | FusedAPPOUpdate = self if fused is None else fused
        self.max_grad_norm = config.max_grad_norm
        self.further: tuple[str, ...] = ()
        self.parameters = [p for p in loss.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError(
                f"{type(loss).__name__}: no parameter requires a gradient (expected at least one "
                "to learn). Call requires_grad_(True) of a network."
            )
        if fused is None:  # the rate is a tensor, so that steering it waits for no device
            lr = torch.tensor(config.lr, device=self.parameters[0].device)
            self.optimizer = torch.optim.Adam(self.parameters, lr=lr, fused=True)
        else:
            self.optimizer = fused.optimizer

    @property
    def lr(self) -> torch.Tensor:
        """The learning rate, a scalar tensor of the optimiser's own."""
        return rate_of(self.optimizer)

    def limit_lr(self, highest: float) -> None:
        """Keep the learning rate at `highest` or below from now on."""
        self.owner.max_lr = highest
        self.lr.clamp_(max=highest)

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """Take one step on a minibatch; return its losses, detached.

        Raises:
            ConfigError: The memory of the owner's parameters has moved.
        """
        if isinstance(self.owner, FusedAPPOUpdate):
            self.owner.check()
        # For example those of a fused step, which are views of one tensor and must stay so.
        self.optimizer.zero_grad(set_to_none=self.owner is self)
        losses: TensorDictBase = self._losses(sub_batch)
        learnt_by = [loss for key, loss in losses.items() if key.startswith("loss")]
        torch.stack(learnt_by).sum().backward()
        losses = losses.detach()
        numbers = {name: loss for name, loss in losses.items() if loss.numel() == 1}
        self.further = tuple(name for name in numbers if name not in _OF_APPO)
        statistics = [*numbers.values()]
        self.ranks.mean_(_gradients(self.parameters, self.ranks), statistics)
        nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
        if not self.loss.target_is_current:
            kl = losses.get("kl")
            self.lr.copy_(kl_adapted_lr(self.lr, kl, self.desired_kl, self.owner.max_lr))
        self.loss.step_target()
        return losses


class LossUpdate:
    """Updates by a loss module's backward pass, Adam and `SoftUpdate`: for any loss.

    Args:
        loss: Any off-policy loss of TorchRL.
        config: Learning rates, tau, and whether to compile.
        ranks: Processes over whose minibatches gradients and statistics are averaged.

    Raises:
        ConfigError: A network of the loss is recurrent.
    """

    def __init__(
        self, loss: LossModule, config: OffPolicyConfig, ranks: Ranks = SINGLE_RANK
    ) -> None:
        _refuse_recurrence(loss)
        self.loss, self.ranks = loss, ranks
        self._losses = compiled(loss.forward) if config.compile else loss
        self._groups: dict[str, list[nn.Parameter]] = {"actor": [], "critic": [], "alpha": []}
        for name, parameter in loss.named_parameters():
            if parameter.requires_grad:
                part = "actor" if name.startswith("actor") else "critic"
                self._groups["alpha" if name == "log_alpha" else part].append(parameter)
        self.optimizers = {
            part: torch.optim.Adam(group, lr=getattr(config, f"lr_{part}"), fused=True)
            for part, group in self._groups.items()
            if group
        }
        targets = any(name.startswith("target_") for name, _ in loss.named_children())
        self._target = _soft_update(loss, config.tau) if targets else None
        self.statistics: tuple[str, ...] = ()

    def prepare(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch; until the next call all networks normalise by the current statistics.

        Raises:
            ConfigError: Truncated rows would pass for terminated ones, as nothing tells them apart.
            LayoutKeyError: The rows lack what came next, or the loss's reward.
        """
        after = entry_of("transitions", batch, "next", "Leave it in.")
        reward, keys = vars(self.loss.tensor_keys).get("reward"), after.keys()
        if reward is not None:
            entry_of("transitions, 'next'", after, reward, REWARD_REMEDY)
        if "truncated" in keys and "terminated" not in keys:
            raise ConfigError(
                "batch: 'next.truncated' without 'next.terminated' (expected both, or a loss takes "
                "done for terminated). Write rows with terminated = done & ~truncated."
            )
        sync_normalizers(self.loss)
        return batch

    def minibatches(self, prepared: TensorDictBase, count: int) -> Iterable[TensorDictBase]:
        """Cut a batch into minibatches, whose sizes differ by one at most.

        Raises:
            ConfigError: There are not that many rows.
        """
        remedy = "Prepare a larger sample."
        count = as_integer("minibatches", count, remedy, most=len(prepared))
        yield from prepared.tensor_split(count)

    def step(self, minibatch: TensorDictBase, *, update_policy: bool = True) -> torch.Tensor:
        """Take one step; return the losses, named by `statistics`.

        Raises:
            ConfigError: The loss module gives no TensorDict, or no loss, or one that is no number.
        """
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        losses = self._losses(minibatch)
        gives = f"{type(self.loss).__name__} gives"
        as_instance(gives, losses, TensorDictBase, "Return TensorDict({'loss_NAME': ...}).")
        names = tuple(sorted(key for key, loss in losses.items() if loss.numel() == 1))
        learnt_by = [key for key, _ in losses.items() if key.startswith("loss")]
        if not learnt_by or not {*learnt_by} <= {*names}:
            shapes = {key: tuple(loss.shape) for key, loss in losses.items()}
            raise ConfigError(
                f"{gives} {shapes} (expected numbers, some under names "
                "that begin with 'loss'). Rename what it gives, or give it reduction='mean'."
            )
        torch.stack([losses.get(key).reshape(()) for key in learnt_by]).sum().backward()
        observed = torch.stack([losses.get(key).detach().reshape(()) for key in names])
        steps = [part for part in self.optimizers if update_policy or part == "critic"]
        learnt = [p for part in steps for p in self._groups[part]]
        self.ranks.mean_(_gradients(learnt, self.ranks), [observed])
        for part in steps:
            self.optimizers[part].step()
        if self._target is not None:
            self._target.step()
        self.statistics = names
        return observed


def _gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> list[torch.Tensor]:
    """Return gradients; with several ranks of all parameters, 0 where this rank has none."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None and ranks.size > 1:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    return gradients


def make_update(
    loss: LossModule, config: OffPolicyConfig, ranks: Ranks = SINGLE_RANK
) -> FusedSACUpdate | FusedTD3Update | LossUpdate:
    """Return what takes the updates: a fused one where the loss allows.

    Targets begin where their networks are, whatever was loaded into these: `SoftUpdate` sees to it.
    """
    on_cpu = next(loss.parameters()).device.type == "cpu"
    options: dict[str, Any] = {
        "lr_actor": config.lr_actor,
        "lr_critic": config.lr_critic,
        "tau": config.tau,
        "matmul_dtype": _matmul_dtype(loss, config),
        "ranks": ranks,
        "policy_thread": on_cpu and (config.learner_threads or available_cores()) > 1,
    }
    kind: type[FusedSACUpdate | FusedTD3Update]
    if config.fused and FusedSACUpdate.supports(loss):
        kind, options["lr_alpha"] = FusedSACUpdate, config.lr_alpha
    elif config.fused and FusedTD3Update.supports(loss):
        kind = FusedTD3Update
    else:
        if isinstance(loss, TD3Loss):
            _check_actor_inputs(loss)
        return LossUpdate(loss, config, ranks)
    _soft_update(loss, config.tau)
    update = kind(loss, **options)
    if config.compile:
        update.compile()
    return update


def _soft_update(loss: LossModule, tau: float) -> SoftUpdate:
    """Return what moves the targets, which begin where their networks are from now on."""
    with warnings.catch_warnings():
        # A tau above 0.5 was chosen: it is no eps by mistake.
        warnings.filterwarnings("ignore", "Found an eps value", UserWarning)
        return SoftUpdate(loss, tau=tau)


def _check_actor_inputs(loss: TD3Loss) -> None:
    """Refuse a critic that `TD3Loss` would not give what it reads: it has the actor's inputs."""
    actor, critic = loss.actor_network, loss.qvalue_network
    missing = [key for key in critic.in_keys if key not in (*actor.in_keys, *actor.out_keys)]
    if missing:
        raise ConfigError(
            f"TD3Loss: its critic reads {missing} (expected what the actor reads or writes, "
            f"{[*actor.in_keys, *actor.out_keys]}). Set fused=True, with networks that it takes."
        )


def _refuse_recurrence(loss: LossModule) -> None:
    """Refuse networks that a loss of TorchRL runs over its batch as over one sequence."""
    networks = [value for value in vars(loss).values() if isinstance(value, nn.Module)]
    for layer in (part for network in (loss, *networks) for part in network.modules()):
        if isinstance(layer, LSTMModule | GRUModule):
            raise ConfigError(
                f"{type(loss).__name__}: a {type(layer).__name__} in its networks (expected none: "
                "updates are of single rows, in no order of time). Train it by TorchRL's Trainer, "
                "with a PackedSliceSampler."
            )


def _matmul_dtype(loss: LossModule, config: OffPolicyConfig) -> torch.dtype | None:
    """Return the dtype of hidden layers' products; None: the parameters'."""
    chosen = config.matmul_dtype
    if chosen == "auto":
        parameter = next(loss.parameters())
        # Before 2.11 torch does not say what the processor can do.
        capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        ours = (parameter.dtype, parameter.device.type) == (torch.float32, "cpu")
        native = any(map(capabilities.get, ("amx_bf16", "avx512_bf16")))
        chosen = "bfloat16" if ours and native else "float32"
    return torch.bfloat16 if chosen == "bfloat16" else None
