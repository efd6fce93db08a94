"""`APPOTrainer`: asynchronous PPO on TorchRL's trainer."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.trainers import LRSchedulerHook, RewardNormalizer, ValueEstimatorHook

from torchrl_unilab.checks import as_instance, as_integer
from torchrl_unilab.collectors import ReplayCollector
from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.data import RolloutPool
from torchrl_unilab.errors import ConfigError, LayoutKeyError
from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.modules.gaussian import GaussianActor
from torchrl_unilab.objectives import APPOLoss, FusedAPPOUpdate
from torchrl_unilab.objectives.distributions import check_log_prob
from torchrl_unilab.objectives.fused.appo import STATISTICS
from torchrl_unilab.objectives.vtrace import check_time_order
from torchrl_unilab.runtime.ranks import SINGLE_RANK, Ranks
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.trainers.arguments import check_arguments, check_effect
from torchrl_unilab.trainers.base import NORM, RankTrainer, norm_of
from torchrl_unilab.trainers.hooks import PublishWeights
from torchrl_unilab.trainers.loss_updates import APPOStepper
from torchrl_unilab.trainers.reports import register_reports
from torchrl_unilab.weight_update.versions import PolicyVersions

LOSS_SETTINGS = (
    *("clip_epsilon", "value_clip", "entropy_coeff", "critic_coeff", "gamma", "lambda_"),
    *("rho_bar", "c_bar", "tau", "target_update_freq"),
)
"""Settings that the loss takes, by the names of its arguments."""


class APPOTrainer(RankTrainer):
    """Trains a policy by APPO while the collector's workers keep collecting.

    For each rollout that arrives, it copies the rollout into the pool in place of the oldest,
    updates the observation normalisers once, computes V-trace on the pool, takes minibatch steps,
    and publishes. It waits for its device once per rollout, and in copies of the rollout.

    `FusedAPPOUpdate` takes the steps if it supports the networks (and ``config.fused`` is true).
    With other networks, and with hooks that read or change minibatches (``process_optim_batch``,
    ``pre_epoch``, ``post_optim_log``), `APPOStepper` takes them.

    Args:
        collector: Yields rollouts [num_envs, num_steps], and has a weight-sync scheme for
            the policy.
        loss_module: The loss, which holds actor and critic. If it has not taken a step yet, the
            actor is copied to its target at construction.
        total_frames: Frames to collect.
        config: Settings.
        normalizers: Observation key to the normaliser in the networks that learns from it.
        scheme: The collector's scheme, for the policy lag; not logged if not given. Rollouts that
            are further behind than ``config.max_policy_lag`` are dropped.
        ranks: Processes that learn together, each by a separate trainer; their parameters are
            the same when they start. Frames are counted of all ranks.
        **kwargs: As for `torchrl.trainers.Trainer`, except what follows from `config`: ``logger``,
            ``checkpoint``, ``progress_bar``, ``seed``, ...

    Attributes:
        returns: The hook that follows episode returns.
        lag: The hook that follows the policy lag, if there is a scheme.
        busy_time: The hook that measures the learner's waiting.
        stale: Rollouts dropped because they were too far behind. `APPOCollector` drops and counts
            its own; rollouts from other machines age on their way.
        pool: The rollouts that are learnt from.

    Examples:
        >>> from functools import partial
        >>> from torchrl_unilab.collectors import APPOCollector
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.trainers import APPOConfig, APPOTrainer, build_learner
        >>> config = APPOConfig(num_envs=8, num_steps=16)
        >>> make_env = partial(MujocoBatchEnv, "InvertedPendulum-v5", 8, num_threads=1)
        >>> learner = build_learner(make_env(), config)
        >>> collector = APPOCollector(make_env, learner.actor, frames_per_batch=8 * 16)
        >>> trainer = APPOTrainer(
        ...     collector=collector,
        ...     loss_module=learner.loss,
        ...     total_frames=1024,
        ...     config=config,
        ...     normalizers=learner.normalizers,
        ...     progress_bar=False,
        ... )
        >>> trainer.train()  # ends the collector
        >>> trainer.collected_frames
        1024
    """

    config: APPOConfig

    def __init__(
        self,
        *,
        collector: BaseCollector,
        loss_module: APPOLoss,
        total_frames: int,
        config: APPOConfig,
        normalizers: Mapping[str, ObservationNormalizer] | None = None,
        scheme: PolicyVersions | None = None,
        ranks: Ranks = SINGLE_RANK,
        **kwargs: Any,
    ) -> None:
        check_arguments(kwargs, config, APPOConfig)
        if isinstance(collector, ReplayCollector):
            raise ConfigError(
                "collector: ReplayCollector, which fills a replay (expected one that yields "
                "rollouts). Use APPOCollector."
            )
        as_instance("loss_module", loss_module, APPOLoss, "Train others by TorchRL's PPOTrainer.")
        actor = loss_module.actor_network
        if config.final_log_std is not None and not isinstance(actor, GaussianActor):
            raise ConfigError(
                f"final_log_std: {config.final_log_std} with {type(actor).__name__} (expected "
                "an actor that make_actor made, which learns its deviation). Leave it out."
            )
        if config.max_policy_lag is not None and scheme is None:
            raise ConfigError(
                f"max_policy_lag: {config.max_policy_lag} without a scheme (expected the "
                "collector's, which counts versions). Pass scheme=, or leave max_policy_lag out."
            )
        follows = [name for name in LOSS_SETTINGS if name != "gamma" or config.final_gamma is None]
        check_effect(config, {name: getattr(loss_module, name) for name in follows}, "the loss")
        self.config, self.ranks = config, ranks
        self.stale = 0
        self._further: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self.normalizers = dict(normalizers or {})
        if loss_module.steps == 0:  # networks may have been loaded since the loss was made
            loss_module.target_actor_network.load_state_dict(actor.state_dict())
        self._fused: FusedAPPOUpdate | None = None
        if config.fused and FusedAPPOUpdate.supports(loss_module):
            self._fused = FusedAPPOUpdate(
                loss_module,
                lr=config.lr,
                desired_kl=config.desired_kl,
                max_grad_norm=config.max_grad_norm,
                ranks=ranks,
            )
        stepper = APPOStepper(loss_module, config, self._fused, ranks)
        super().__init__(
            collector=collector,
            total_frames=total_frames,
            frame_skip=ranks.size,  # all of them collect as many
            optim_steps_per_batch=config.minibatches,
            num_epochs=config.epochs,
            loss_module=loss_module,
            optimizer=stepper.optimizer,
            optimization_stepper=stepper,
            **kwargs,
        )
        self.pool = RolloutPool(config.pool, stepper.lr.device)
        self.register_module("rollout_pool", self.pool)
        reports = register_reports(self, collector, scheme, loss_module.tensor_keys.reward)
        self.busy_time, self.returns, self.lag = reports
        self._publish = PublishWeights(collector)
        self._publish.register(self)

    @property
    def _threads(self) -> int:
        """One for a fused update, whose networks are small; as many as torch has for others."""
        return self.config.learner_threads if self._fused is not None else super()._threads

    def register_op(self, dest: Any, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register a hook; see TorchRL.

        Raises:
            ConfigError: As in `OffPolicyTrainer`, or it normalises rewards or estimates advantages
                of minibatches, or schedules the learning rate, which the KL divergence steers.
        """
        if isinstance(op, ValueEstimatorHook):
            raise ConfigError(
                "hook ValueEstimatorHook: V-trace estimates advantages (expected another hook). "
                "Leave it out; set gamma and lambda_ in config."
            )
        if inspect.ismethod(op) and isinstance(op.__self__, RewardNormalizer):
            raise ConfigError(
                "hook RewardNormalizer: V-trace uses rewards before minibatches are made (expected "
                "another hook). Set reward_scale in config."
            )
        if isinstance(op, LRSchedulerHook) and op.scheduler.optimizer is self.optimizer:
            raise ConfigError(
                "hook LRSchedulerHook: the KL divergence steers the learning rate (expected "
                "another optimiser's). Leave the hook out; set anneal in config."
            )
        super().register_op(dest, op, **kwargs)

    def optim_steps(self, batch: TensorDictBase) -> None:
        """Take a rollout into the pool and update on the pool."""
        if self._exceeds_max_lag(batch):
            self.stale += 1
            self._publish.skip()
            return
        self._pre_optim_hook()
        with span("update"):
            logged = self._learn(batch)
        self._report_update(logged)

    def _exceeds_max_lag(self, batch: TensorDictBase) -> bool:
        """Return whether a rollout of any rank is too far behind: then all ranks drop theirs."""
        bound = self.config.max_policy_lag
        if bound is None or self.lag is None:
            return False
        return self.ranks.agree(self.lag.of(batch) > bound)

    def _learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Add a rollout to the pool, and take an update's steps on the pool; return what to log."""
        before = (self.collected_frames - batch.numel() * self.ranks.size) / self.total_frames
        self.optimization_stepper.limit_lr(self.config.highest_lr(before))
        self._add_to_pool(batch)
        loss = self.loss_module
        if self.config.final_gamma is not None:
            loss.gamma = self.config.discount(before)
        # The loss expects environments first, time last.
        estimated = loss.estimate(self.pool.data.transpose(0, 1))
        if missing := [key for key in loss.in_keys if estimated.get(key, None) is None]:
            raise LayoutKeyError(
                f"rollouts: no {missing}, which {type(loss).__name__} reads (expected all of its "
                "in_keys). Collect them, or write them in its `estimate`."
            )
        pool = estimated.select(*loss.in_keys).reshape(-1)
        statistics = self._take_steps(batch, pool) | _pool_statistics(loss, pool)
        if loss.target_update_freq is None:  # then once per rollout
            loss.update_target()
        if self.config.final_log_std is not None:
            bound = self.config.highest_log_std(self.collected_frames / self.total_frames)
            # The target's too: the bound must not raise the divergence, which steers the rate.
            for actor in (loss.actor_network, loss.target_actor_network):
                actor[0].log_std.detach().clamp_(max=bound)
        # The one wait for the device per rollout.
        stepper = self.optimization_stepper
        named = {**statistics, "lr": stepper.lr, NORM: norm_of([stepper.optimizer])}
        return dict(zip(named, torch.stack([*named.values()]).tolist(), strict=True))

    def _take_steps(self, batch: TensorDictBase, pool: TensorDictBase) -> dict[str, torch.Tensor]:
        """Take all passes over the pool; return the mean of each statistic."""
        remedy = "Each needs a sample: collect longer rollouts, or lower it."
        as_integer("minibatches", self.optim_steps_per_batch, remedy, most=len(pool))
        hooks = self._process_optim_batch_ops or self._pre_epoch_ops or self._post_optim_log_ops
        update = self._fused
        shuffled: Callable[[int], Iterable[Any]] = partial(self._shuffled, pool)
        step: Callable[[Any], torch.Tensor] = self._step
        if update is not None and not hooks:  # else hooks read or change minibatches
            shuffled, step = partial(update.shuffled, update.prepare(pool)), update.step
        reported = []
        self._further.clear()
        for _ in range(self.num_epochs):
            self._pre_epoch_log_hook(batch)
            for minibatch in shuffled(self.optim_steps_per_batch):
                minibatch = self._process_optim_batch_hook(minibatch)
                self._optim_count += 1
                reported.append(step(minibatch))
                self._post_optim_hook()
                self._post_optim_log(minibatch)
            self._post_epoch_log_hook(batch)
            self._post_epoch_hook()
        means = dict(zip(STATISTICS, torch.stack(reported).mean(0), strict=True))
        return means | {name: torch.stack(found).mean() for name, found in self._further.items()}

    def _shuffled(self, pool: TensorDictBase, minibatches: int) -> Iterable[TensorDictBase]:
        order = torch.randperm(pool.shape[0], device=pool.device)
        yield from self._pre_epoch_hook(pool[order]).tensor_split(minibatches)

    def _step(self, minibatch: TensorDictBase) -> torch.Tensor:
        samples = minibatch.batch_size.numel()
        as_integer("samples of a minibatch", samples, "Let the hooks leave some.")
        losses = self.optimization_stepper.step(self, minibatch)
        for name in self.optimization_stepper.further:
            self._further[name].append(losses.get(name).reshape(()).float())
        return torch.stack([losses.get(key) for key in STATISTICS])

    def _process_batch_hook(self, batch: TensorDictBase) -> TensorDictBase:
        """Do as the base class; then refuse environments end to end."""
        batch = super()._process_batch_hook(batch)
        check_time_order(batch, self.loss_module.tensor_keys.done)
        return batch

    def _add_to_pool(self, batch: TensorDictBase) -> None:
        """Copy what the loss reads of a rollout [..., T] into the pool; count its observations."""
        if batch.ndim != 2:
            batch = batch.reshape(-1, batch.shape[-1])
        loss = self.loss_module
        keys = loss.tensor_keys
        observations = {*loss.actor_network.in_keys, *loss.critic_network.in_keys}
        after = [("next", key) for key in (*observations, keys.reward, keys.done, keys.terminated)]
        needed = [*observations, keys.action, keys.sample_log_prob, *after]
        estimated = [keys.target, keys.target_log_prob, keys.advantage, keys.value_target]
        # A subclass of the loss may read more; its `estimate` may write what the batch lacks.
        further = {*loss.in_keys}.difference(needed, estimated, [keys.state_value])
        needed += [key for key in further if batch.get(key, None) is not None]
        if missing := [key for key in needed if batch.get(key, None) is None]:
            raise LayoutKeyError(
                f"rollouts: no {missing} (expected all that the loss reads). Collect with its "
                "actor, a ProbabilisticActor with return_log_prob=True, and leave out no key."
            )
        log_prob = keys.sample_log_prob
        check_log_prob("rollouts", log_prob, batch.get(log_prob), batch.shape)
        taken, reward = batch.select(*needed), ("next", keys.reward)
        taken.set(reward, taken.get(reward) * self.config.reward_scale)  # rewards may be integers
        rollout = self.pool.add(taken)
        self._count_observations(self._read_observations(rollout))


_MAX_SORTED = 1 << 24
"""Most samples that torch takes a quantile of; of more, every second or third is used."""


def _pool_statistics(loss: APPOLoss, pool: TensorDictBase) -> dict[str, torch.Tensor]:
    """Return statistics of policy lag and of the critic, scalars on the pool's device."""
    keys = loss.tensor_keys
    log_rho = (pool.get(keys.target_log_prob) - pool.get(keys.sample_log_prob)).flatten()
    target = pool.get(keys.value_target)
    unexplained = (target - pool.get(keys.state_value)).var(correction=0)
    return {
        "rho_p99": log_rho[:: -(-len(log_rho) // _MAX_SORTED)].quantile(0.99).exp(),
        "explained_variance": 1.0 - unexplained / target.var(correction=0).clamp(min=1e-8),
    }
