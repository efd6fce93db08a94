"""`APPOTrainer`: asynchronous PPO on TorchRL's trainer."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from tensordict import TensorDictBase, cat
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import OptimizationStepper

from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.objectives import APPOLoss, kl_adapted_lr
from torchrl_unilab.trainers.configs import APPOConfig
from torchrl_unilab.trainers.hooks import BusyTime, EpisodeReturns, LogPolicyLag, PublishWeights
from torchrl_unilab.weight_update import UniLabShmScheme

__all__ = ["APPOStepper", "APPOTrainer"]

_REPORTED = ("loss_objective", "loss_critic", "entropy", "kl", "clip_fraction", "rho_clip_fraction")


class APPOStepper(OptimizationStepper):
    """One APPO optimiser step, which never waits for the device.

    Steps the optimiser on the sum of the losses, lets the KL divergence steer the learning
    rate, and moves the target policy when it is due.

    Args:
        loss: The loss.
        config: Learning rate, desired KL divergence and bound of the gradient.
    """

    def __init__(self, loss: APPOLoss, config: APPOConfig) -> None:
        self.loss = loss
        self.desired_kl = config.desired_kl
        self.max_grad_norm = config.max_grad_norm
        self.parameters = [p for p in loss.parameters() if p.requires_grad]
        # A tensor, so that steering it takes no look at its value.
        lr = torch.tensor(config.lr, device=self.parameters[0].device)
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr, fused=True)

    @property
    def lr(self) -> torch.Tensor:
        """The learning rate, a scalar tensor of the optimiser's own."""
        lr: torch.Tensor = self.optimizer.param_groups[0]["lr"]
        return lr

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """Take one step on a minibatch; return its losses, detached."""
        losses = self.loss(sub_batch)
        total = losses.get("loss_objective") + losses.get("loss_critic")
        (total + losses.get("loss_entropy")).backward()
        nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss.step_target()
        self.lr.copy_(kl_adapted_lr(self.lr, losses.get("kl"), self.desired_kl))
        for key in ("loss_objective", "loss_critic", "loss_entropy"):
            losses.set(key, losses.get(key).detach())
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the trainer checkpoints loss and optimiser."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""

    def register(self, trainer: Trainer, name: str = "optimization_stepper") -> None:
        """Register as the trainer's stepper."""
        trainer.register_module(name, self)


class APPOTrainer(Trainer):
    """Trains a policy by APPO while the collector's workers go on collecting.

    For each rollout that arrives: update the observation normaliser once, put the rollout
    into the pool in place of the oldest, compute V-trace on the pool, take minibatch steps,
    publish. The hooks of TorchRL's trainer run at their usual places, the per-minibatch
    ones included.

    Args:
        collector: Yields rollouts [num_envs, num_steps], and has a weight-sync scheme for
            the policy.
        loss_module: The loss, which holds actor and critic.
        total_frames: Frames to collect.
        config: Settings.
        normalizer: The observation normaliser in the actor, if any.
        scheme: The collector's scheme, for the policy lag; not logged if not given.
        **kwargs: As for `torchrl.trainers.Trainer`: ``logger``, ``checkpoint``,
            ``progress_bar``, ``seed``, ...

    Attributes:
        returns: The hook that follows episode returns.
        busy_time: The hook that measures the learner's waiting.
    """

    def __init__(
        self,
        *,
        collector: BaseCollector,
        loss_module: APPOLoss,
        total_frames: int,
        config: APPOConfig,
        normalizer: ObservationNormalizer | None = None,
        scheme: UniLabShmScheme | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = config
        self.normalizer = normalizer
        stepper = APPOStepper(loss_module, config)
        super().__init__(
            collector=collector,
            total_frames=total_frames,
            frame_skip=1,
            optim_steps_per_batch=config.minibatches,
            num_epochs=config.epochs,
            loss_module=loss_module,
            optimizer=stepper.optimizer,
            optimization_stepper=stepper,
            **kwargs,
        )
        self._pool: deque[TensorDictBase] = deque(maxlen=config.pool)
        self.busy_time = BusyTime()
        self.busy_time.register(self)
        self.returns = EpisodeReturns()
        self.returns.register(self)
        if scheme is not None:
            LogPolicyLag(scheme).register(self)
        PublishWeights(collector).register(self)

    def optim_steps(self, batch: TensorDictBase) -> None:
        """Take a rollout into the pool and update on the pool."""
        self._pre_optim_hook()
        self._pool.append(self._learnable(batch))
        pool = cat(list(self._pool)) if len(self._pool) > 1 else self._pool[0]
        pool = self.loss_module.estimate(pool).reshape(-1)
        reported = []
        for _ in range(self.num_epochs):
            self._pre_epoch_log_hook(batch)
            shuffled = self._pre_epoch_hook(pool[torch.randperm(pool.shape[0])])
            for minibatch in shuffled.chunk(self.optim_steps_per_batch):
                minibatch = self._process_optim_batch_hook(minibatch)
                self._optim_count += 1
                losses = self.optimization_stepper.step(self, minibatch)
                reported.append(torch.stack([losses.get(key) for key in _REPORTED]))
                self._post_optim_hook()
                self._post_optim_log(minibatch)
            self._post_epoch_log_hook(batch)
            self._post_epoch_hook()
        # The one look at the device per rollout.
        means = dict(zip(_REPORTED, torch.stack(reported).mean(0).tolist(), strict=True))
        lr = self.optimization_stepper.lr.item()
        self._log(optim_steps=self._optim_count, lr=lr, **means)

    def _learnable(self, batch: TensorDictBase) -> TensorDictBase:
        """Return what the loss reads of a rollout, [B, T], on the learner's device."""
        if batch.ndim == 1:
            batch = batch.unsqueeze(0)
        loss = self.loss_module
        keys = loss.tensor_keys
        observations = {*loss.actor_network.in_keys, *loss.critic_network.in_keys}
        after = [("next", key) for key in (*observations, keys.reward, keys.done, keys.terminated)]
        rollout = batch.select(*observations, keys.action, keys.sample_log_prob, *after)
        rollout = rollout.to(self.optimization_stepper.lr.device)
        rollout["next", keys.reward] = rollout["next", keys.reward] * self.config.reward_scale
        if self.normalizer is not None:
            self.normalizer.update(rollout["observation"])
            loss.sync_target_buffers()
        return rollout
