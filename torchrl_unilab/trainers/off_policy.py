"""`OffPolicyTrainer`: SAC, TD3 and similar, on TorchRL's trainer, while collectors collect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl import logger as torchrl_logger
from torchrl.collectors import BaseCollector
from torchrl.objectives import LossModule, SACLoss, TD3Loss
from torchrl.trainers import LRSchedulerHook, TargetNetUpdaterHook

from torchrl_unilab.checks import as_integer, entry_of
from torchrl_unilab.collectors import ReplayCollector
from torchrl_unilab.configs.off_policy import OffPolicyConfig, compute_train_start_threshold
from torchrl_unilab.data import DoubleBufferReplayPipeline, PackedReplayStorage
from torchrl_unilab.errors import CheckpointError, ConfigError, DivergedError, LayoutKeyError
from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.owner import Owner
from torchrl_unilab.runtime.ranks import SINGLE_RANK, Ranks
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.trainers.arguments import check_arguments, check_effect, isclose
from torchrl_unilab.trainers.base import NORM, RankTrainer, norm_of
from torchrl_unilab.trainers.hooks import PublishWeights
from torchrl_unilab.trainers.loss_updates import REWARD_REMEDY, LossUpdate, make_update
from torchrl_unilab.trainers.reports import register_reports
from torchrl_unilab.weight_update.versions import PolicyVersions


def replay_buffer_ready_for_learning(
    replay_buffer_size: int, *, batch_size: int, learning_starts: int, num_envs: int
) -> bool:
    """Return whether a replay has enough rows for the first update.

    Examples:
        >>> from torchrl_unilab.trainers import replay_buffer_ready_for_learning
        >>> replay_buffer_ready_for_learning(
        ...     255, batch_size=256, learning_starts=0, num_envs=16)
        False
    """
    threshold = compute_train_start_threshold(batch_size, learning_starts, num_envs)
    return replay_buffer_size >= threshold


def build_reward_comparison_metrics(
    reward_history: Sequence[float], smoothed_reward: float
) -> dict[str, float]:
    """Return the latest mean return of 100 episodes, by which runs are compared.

    Args:
        reward_history: Means over the last 100 episodes, oldest first. Collectors here report
            those of 64 (`CollectorMetrics.episode_return`).
        smoothed_reward: Accepted as in UniLab, and not used.

    Returns:
        ``mean_ep100``, or nothing before the first mean.

    Examples:
        >>> from torchrl_unilab.trainers import build_reward_comparison_metrics
        >>> build_reward_comparison_metrics([1.5, 2.0], 7.0)
        {'mean_ep100': 2.0}
        >>> build_reward_comparison_metrics([], 7.0)
        {}
    """
    return {"mean_ep100": float(reward_history[-1])} if len(reward_history) else {}


class OffPolicyTrainer(RankTrainer, Owner):
    """Trains by an off-policy loss while the collector's workers fill the replay.

    Per tick of the collector, it publishes, updates the normalisers with the new rows, takes one
    large sample and as many updates as `config` says. It waits for its device once per tick, and in
    copies of the sample. While it trains, torch's thread count follows from
    ``config.learner_threads``. For hooks, a tick is an epoch; those of ``process_optim_batch`` get
    each of its minibatches before the first of its updates.

    Args:
        collector: Fills its replay, or yields rollouts [envs, steps] for `storage`.
        loss_module: `SACLoss`, `TD3Loss`, or another off-policy loss of TorchRL.
        total_frames: Frames to collect.
        config: Settings.
        normalizers: Observation key to the normaliser in the networks that learns from it.
        scheme: The collector's scheme, for the policy lag; not logged if not given.
        storage: The replay that the collector's batches are written to, for example if it collects
            on other machines; by default the collector's own.
        ranks: Processes that learn together, each by a separate trainer; their parameters are
            the same when they start. Frames are counted of all ranks.
        **kwargs: As for `torchrl.trainers.Trainer`, except what follows from `config`.

    Attributes:
        returns: The hook that follows episode returns.
        lag: The hook that follows the policy lag, if there is a scheme.
        busy_time: The hook that measures the learner's waiting.
        pipeline: Prepares the samples in this thread, or with ``config.prefetch`` in another thread
            during the updates of the previous tick.
        update: Takes the updates; fused if the loss allows it.
        updates: Updates taken.

    Raises:
        ConfigError: The replay is too small for the first update, or an argument is given that
            follows from `config`, such as ``num_epochs``.

    Examples:
        >>> from functools import partial
        >>> from torchrl_unilab.collectors import ReplayCollector
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.trainers import OffPolicyConfig, OffPolicyTrainer, build_learner
        >>> config = OffPolicyConfig.for_task("InvertedPendulum-v5", "sac", num_envs=8)
        >>> make_env = partial(MujocoBatchEnv, "InvertedPendulum-v5", 8, num_threads=1)
        >>> learner = build_learner(make_env(), config)
        >>> collector = ReplayCollector(
        ...     make_env,
        ...     learner.actor,
        ...     capacity=1000,
        ...     frames_per_batch=config.frames_per_tick,
        ...     init_random_frames=100,
        ...     inline=True,
        ... )
        >>> trainer = OffPolicyTrainer(
        ...     collector=collector,
        ...     loss_module=learner.loss,
        ...     total_frames=200,
        ...     config=config,
        ...     normalizers=learner.normalizers,
        ...     progress_bar=False,
        ... )
        >>> trainer.train()  # ends the collector
        >>> trainer.collected_frames
        200
        >>> trainer.close()
    """

    config: OffPolicyConfig

    def __init__(
        self,
        *,
        collector: BaseCollector,
        loss_module: LossModule,
        total_frames: int,
        config: OffPolicyConfig,
        normalizers: Mapping[str, ObservationNormalizer] | None = None,
        scheme: PolicyVersions | None = None,
        storage: PackedReplayStorage | None = None,
        ranks: Ranks = SINGLE_RANK,
        **kwargs: Any,
    ) -> None:
        check_arguments(kwargs, config, OffPolicyConfig)
        self.config, self.ranks = config, ranks
        self.normalizers = dict(normalizers or {})
        self._keys: Sequence[Any] = [] if storage is None else [*storage[:].keys(True, True)]
        if storage is None and not isinstance(collector, ReplayCollector):
            raise ConfigError(
                f"storage: none, with {type(collector).__name__} (expected one to write its "
                "rollouts to). Pass a PackedReplayStorage, or collect by ReplayCollector."
            )
        self.storage = collector.storage if storage is None else storage
        if isinstance(collector, ReplayCollector) and self.storage is not collector.storage:
            raise ConfigError(
                "storage: another than ReplayCollector's (expected none: workers fill its own). "
                "Leave it out, or collect by APPOCollector."
            )
        _check_replay(self.storage, loss_module, config)
        self.update = update = make_update(loss_module, config, ranks)
        self._fused = None if isinstance(update, LossUpdate) else update
        if isinstance(collector, ReplayCollector):
            if collector.frames_per_batch != config.frames_per_tick:
                torchrl_logger.warning(
                    f"OffPolicyTrainer: ticks of {collector.frames_per_batch} frames (expected "
                    f"{config.frames_per_tick}, those of config: updates_per_step is per tick, and "
                    "num_envs decides when learning starts). Give collector and config the same."
                )
            collector.learners, collector.batch_size = ranks.size, config.batch_size
        super().__init__(
            collector=collector,
            total_frames=total_frames,
            frame_skip=ranks.size,  # for batches that it yields; a replay counts by itself
            optim_steps_per_batch=config.updates_per_step,
            loss_module=loss_module,
            optimizer=None,
            **kwargs,
        )
        self._tick = 0
        self._ready = False  # all ranks have enough rows
        self._counted: Sequence[int] = ()  # rows of each shard that the normalisers have counted
        self.pipeline = DoubleBufferReplayPipeline(
            self.storage,
            device=next(loss_module.parameters()).device,
            sample_count=config.batch_size * config.updates_per_step,
            base_seed=int(torch.randint(2**31, ())),
            packer="thread" if config.prefetch else "inline",
        )
        # Critics refer to their normaliser without containing it.
        self._parts: dict[str, torch.optim.Optimizer | ObservationNormalizer] = {
            **{f"optimizer_{part}": one for part, one in update.optimizers.items()},
            **{f"normalizer_{key}": one for key, one in self.normalizers.items()},
        }
        own = {"state_dict": self._own_state, "load_state_dict": self._load_own_state}
        self.register_module("learner", SimpleNamespace(**own))
        self.register_module("pipeline", self.pipeline)
        reports = register_reports(self, collector, scheme, _reward_of(loss_module))
        self.busy_time, self.returns, self.lag = reports
        PublishWeights(collector).register(self)

    def register_op(self, dest: Any, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register a hook; see TorchRL.

        Raises:
            ConfigError: As in `APPOTrainer`, or it moves the targets, or schedules rates that
                `config` anneals.
        """
        moves = isinstance(op, TargetNetUpdaterHook) and op.target_params_updater.loss_module
        if moves is self.loss_module:
            raise ConfigError(
                "hook TargetNetUpdaterHook: OffPolicyTrainer moves the loss's targets itself "
                "(expected one move). Leave the hook out; set tau in config."
            )
        steers = isinstance(op, LRSchedulerHook) and op.scheduler.optimizer
        if self.config.anneal and steers in self.update.optimizers.values():
            raise ConfigError(
                f"hook LRSchedulerHook: with anneal={self.config.anneal:g}, which sets the same "
                "rates (expected one of them). Leave the hook out, or set anneal=0 in config."
            )
        super().register_op(dest, op, **kwargs)

    @property
    def _threads(self) -> int:
        """Of the learner's threads, one by default, fused updates have half: see `run_both`."""
        threads = self.config.learner_threads or 1
        return max(1, threads // 2) if self._fused is not None else threads

    def _process_batch_hook(self, batch: TensorDictBase) -> TensorDictBase:
        """Write a rollout to the storage, also those with random actions."""
        batch = super()._process_batch_hook(batch)
        if missing := [key for key in self._keys if batch.get(key, None) is None]:
            raise LayoutKeyError(
                f"rollouts: no {missing} (expected all keys of the replay's rows). Fill the "
                "replay by its own `add`, or by a PackedReplayWriter, which adds no key."
            )
        if self._keys:
            self.storage.add(batch.select(*self._keys).reshape(-1, batch.shape[-1]))
        return batch

    def optim_steps(self, batch: TensorDictBase | None) -> None:
        """Take a tick's updates, if the replay has enough rows."""
        config = self.config
        if self.normalizers:
            rows, self._counted = self.storage.read_since(self._counted)
            observed = self._read_observations(rows)
            if bad := [key for key, seen in observed.items() if not seen.isfinite().all()]:
                raise DivergedError(
                    f"observations until {self.collected_frames} frames: not all of {bad[0]!r} are "
                    "finite (expected finite ones). Correct the environment or its transforms."
                )
            self._count_observations(observed)
        self._ready = self._ready or not self.ranks.agree(self.storage.size < config.min_frames)
        if not self._ready:
            return
        self._pre_optim_hook()
        count = config.batch_size * config.updates_per_step
        sample = self.pipeline.sample_large_batch(self._tick, count)
        try:
            self._tick += 1
            if config.prefetch:
                self.pipeline.start_prepare(self._tick, count)
            with span("update"):
                logged = self._learn(sample)
        finally:
            self.pipeline.after_tick()  # also after an interrupt: training may continue
        self._report_update(logged)

    def _learn(self, sample: TensorDictBase) -> dict[str, float]:
        """Take a tick's updates on its sample; return what to log."""
        config, update = self.config, self.update
        if config.reward_scale != 1.0:
            key = ("next", _reward_of(self.loss_module))
            reward = entry_of("transitions", sample, key, REWARD_REMEDY)
            sample.set(key, reward * config.reward_scale)  # rewards may be integers
        if config.anneal:
            share = config.lr_share(self.collected_frames / self.total_frames)
            for part, optimizer in update.optimizers.items():
                optimizer.param_groups[0]["lr"] = share * getattr(config, f"lr_{part}")
        self._pre_epoch_log_hook(sample)
        sample, parts = self._pre_epoch_hook(sample), []
        if self._process_optim_batch_ops or self._post_optim_log_ops:
            raw = sample.tensor_split(config.updates_per_step)
            parts = [self._process_optim_batch_hook(part) for part in raw]
            sample = torch.cat(parts)
        observed = []
        for minibatch in update.minibatches(update.prepare(sample), config.updates_per_step):
            self._optim_count += 1
            policy = self.updates % config.policy_frequency == 0
            observed.append(update.step(minibatch, update_policy=policy))
            self._post_optim_hook()
            if parts:
                self._post_optim_log(parts[len(observed) - 1])
        self._post_epoch_log_hook(sample)
        self._post_epoch_hook()
        stacked, norm = torch.stack(observed), norm_of(update.optimizers.values())
        # The one wait for the device per tick.
        *means, size = torch.cat([stacked.mean(0), norm.reshape(1)]).tolist()
        may_be_nan = self._fused is not None and math.isfinite(size)  # until the policy moves
        if may_be_nan and any(map(math.isnan, means)):
            means = stacked.nanmean(0).tolist()
        logged = dict(zip((*update.statistics, NORM), (*means, size), strict=True))
        return {n: v for n, v in logged.items() if not (may_be_nan and math.isnan(v))}

    def _saved_optimizers(
        self, state_dict: Mapping[str, Any]
    ) -> list[tuple[torch.optim.Optimizer, Mapping[str, Any]]]:
        saved, optimizers = state_dict["learner"], self.update.optimizers
        own = {f"optimizer_{part}": optimizer for part, optimizer in optimizers.items()}
        found = {name for name in saved if name.startswith("optimizer_")}
        if found != own.keys():
            raise CheckpointError(
                f"state of {type(self).__name__}: {sorted(found)} (expected {sorted(own)}). Load "
                "it into a trainer of the algorithm that was saved."
            )
        return [(optimizer, saved[name]) for name, optimizer in own.items()]

    def _own_state(self) -> dict[str, Any]:
        """Return what a resumed trainer needs besides the loss and TorchRL's counts."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        state |= {"tick": self._tick, "counted": [*self._counted]}
        if self._fused is not None:
            state["observed"] = self._fused.observed.clone()
        return state

    def _load_own_state(self, state_dict: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])
        self._tick, self._counted = state_dict["tick"], state_dict["counted"]
        if "observed" in state_dict and self._fused is not None:
            self._fused.observed.copy_(state_dict["observed"])

    @property
    def updates(self) -> int:
        """Updates taken so far."""
        return int(self._optim_count)

    def close(self) -> None:
        """Close the pipeline, and end the update's thread. Idempotent."""
        self.pipeline.close()
        if self._fused is not None:
            self._fused.close()


def _check_replay(storage: PackedReplayStorage, loss: LossModule, config: OffPolicyConfig) -> None:
    """Refuse a replay that is too small, or whose returns are not those that the loss counts on."""
    remedy = "The first update needs so many: raise it, or lower learning_starts or batch_size."
    as_integer("rows of the replay", storage.max_size, remedy, least=config.min_frames)
    counts: dict[str, Any] = {"n_step": storage.n_step}
    if isinstance(loss, SACLoss | TD3Loss):
        counts["gamma"] = float(loss.value_estimator.gamma)
    check_effect(config, counts, "replay and loss")
    if storage.n_step == 1:
        return
    if (reward := _reward_of(loss)) != "reward":
        raise ConfigError(
            f"replay of n_step={storage.n_step}: a loss of the reward {reward!r} (expected "
            "'reward', which returns of several steps sum up). Rename it, or take n_step=1."
        )
    gamma = counts.get("gamma", storage.gamma)
    if not isclose(gamma, storage.gamma):
        raise ConfigError(
            f"replay of n_step={storage.n_step}: returns of gamma={storage.gamma} (expected "
            f"{gamma:g}, the loss's). Use one gamma for both."
        )


def _reward_of(loss: LossModule) -> Any:
    """Return the key of the reward that a loss reads."""
    return vars(loss.tensor_keys).get("reward", "reward")
