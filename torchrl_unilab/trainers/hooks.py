"""Hooks for TorchRL trainers."""

from __future__ import annotations

import inspect
import time
import warnings
from collections import deque
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer, UpdateWeights
from torchrl.trainers.trainers import TrainerHookBase

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.weight_update import UniLabShmScheme

__all__ = ["BusyTime", "EpisodeReturns", "LogPolicyLag", "PublishWeights"]


class _Stateless(TrainerHookBase):
    """A hook with nothing to checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class PublishWeights(TrainerHookBase):
    """Publishes models to the collector's workers, every n batches or optimiser steps.

    Takes the place of the `UpdateWeights` hook that TorchRL's trainers register for the
    same collector, and its ``weight_update_map``, so that nothing is published twice.

    Args:
        collector: Has a weight-sync scheme for each model.
        every: Batches or optimiser steps between publishes.
        unit: What `every` counts, ``"batches"`` or ``"optim_steps"``.
        weight_update_map: Model id to the dotted attribute of the trainer where its module
            or weights are, such as ``{"policy": "loss_module.actor_network"}``. If not
            given, that of the hook it replaces; without one, the policy is published from
            the model that the scheme knows.

    Raises:
        ConfigError: `every` is not positive, or `unit` is not one of the two.

    Example:
        >>> PublishWeights(collector).register(trainer)  # doctest: +SKIP
    """

    def __init__(
        self,
        collector: Any,
        every: int = 1,
        *,
        unit: Literal["batches", "optim_steps"] = "batches",
        weight_update_map: Mapping[str, str] | None = None,
    ) -> None:
        if every < 1 or unit not in ("batches", "optim_steps"):
            raise ConfigError(
                f"PublishWeights: every {every} {unit} (expected at least 1, of 'batches' or "
                "'optim_steps'). Leave both out to publish after each batch."
            )
        self.collector = collector
        self.every = every
        self.unit = unit
        self.weight_update_map = weight_update_map
        self._counted = 0
        self._trainer: Trainer | None = None

    def __call__(self) -> None:
        """Count a batch or step; publish if it is due."""
        self._counted += 1
        if self._counted % self.every:
            return
        if self.weight_update_map is None:
            self.collector.update_policy_weights_()
        else:
            sources = {
                model_id: attrgetter(path)(self._trainer)
                for model_id, path in self.weight_update_map.items()
            }
            self.collector.update_policy_weights_(weights_dict=sources)

    def register(self, trainer: Trainer, name: str = "publish_weights") -> None:
        """Register after the optimisation of each batch, or after each optimiser step."""
        self._trainer = trainer
        kept = []
        for op, arguments in trainer._post_steps_ops:
            hook = inspect.unwrap(op)  # TorchRL times its hooks
            if isinstance(hook, UpdateWeights) and hook.collector is self.collector:
                self.weight_update_map = self.weight_update_map or hook.weight_update_map
            else:
                kept.append((op, arguments))
        trainer._post_steps_ops[:] = kept
        trainer.register_op("post_steps" if self.unit == "batches" else "post_optim", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the count of batches or steps."""
        return {"counted": self._counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count of batches or steps."""
        self._counted = state_dict["counted"]


class LogPolicyLag(_Stateless):
    """Logs how many published versions the workers' rollouts are behind.

    Warns once if the lag only grows: the workers no longer pull.

    Args:
        scheme: The scheme that publishes the policy.
        patience: Batches in a row over which the lag must have grown for the warning.
    """

    def __init__(self, scheme: UniLabShmScheme, patience: int = 20) -> None:
        self.scheme = scheme
        self.patience = patience
        self._last = float("inf")
        self._grown = 0

    def __call__(self, batch: TensorDictBase | None) -> dict[str, Any]:
        """Return the lag of the batch, or of the workers if it carries no version."""
        versions = None if batch is None else batch.get(("next", "policy_version"), None)
        if versions is not None:
            lag = self.scheme.version - float(versions.float().mean())
        else:
            applied = [v for v in self.scheme.applied_versions.values() if v is not None]
            lag = float(self.scheme.version - min(applied, default=self.scheme.version))
        self._watch(lag)
        return {"policy_lag": lag, "log_pbar": True}

    def _watch(self, lag: float) -> None:
        self._grown = self._grown + 1 if lag > self._last else 0
        self._last = lag
        if self._grown == self.patience:
            warnings.warn(
                f"policy lag only grows: {lag:g} versions after {self.patience} batches "
                "(expected it to stay). Check that the workers collect, and that their "
                "scheme does not pull by hand only.",
                stacklevel=2,
            )

    def register(self, trainer: Trainer, name: str = "policy_lag") -> None:
        """Register to log before the optimisation steps of each batch."""
        trainer.register_op("pre_steps_log", self)
        trainer.register_module(name, self)


class EpisodeReturns(_Stateless):
    """Sums rewards to episode returns and logs the mean of the last ones.

    Follows each trajectory through the batches by ``("collector", "traj_ids")``, so any
    number of workers and any order of batches will do.

    Args:
        window: How many finished episodes the mean is over.

    Attributes:
        curve: (seconds, frames, mean return) at each batch since the first full episode.
        seconds: Since training began, at the last batch.
    """

    def __init__(self, window: int = 64) -> None:
        self.finished: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        self.curve: list[tuple[float, int, float]] = []
        self._open: dict[int, tuple[float, int]] = {}
        self._trainer: Trainer | None = None
        self._started = time.perf_counter()
        self.seconds = 0.0

    @property
    def mean(self) -> float:
        """Mean return of the last finished episodes; NaN before the first."""
        return sum(self.finished) / len(self.finished) if self.finished else float("nan")

    def start(self) -> None:
        """Start the clock of the curve."""
        self._started = time.perf_counter()

    def __call__(self, batch: TensorDictBase) -> dict[str, Any]:
        """Take a batch in and return what to log."""
        self._add(batch)
        self.seconds = seconds = time.perf_counter() - self._started
        frames = self._trainer.collected_frames if self._trainer else 0
        logged: dict[str, Any] = {"fps": frames / seconds, "log_pbar": True}
        if self.finished:
            self.curve.append((seconds, frames, self.mean))
            logged["return"] = self.mean
            logged["episode_length"] = sum(self.lengths) / len(self.lengths)
        return logged

    def _add(self, batch: TensorDictBase) -> None:
        ids, index = torch.unique(batch["collector", "traj_ids"], return_inverse=True)
        index = index.reshape(-1)
        rewards = batch["next", "reward"].reshape(-1).double()
        sums = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, index, rewards)
        done = torch.zeros(len(ids), dtype=torch.bool)
        done[index[batch["next", "done"].reshape(-1)]] = True
        counts = torch.bincount(index, minlength=len(ids))
        columns = (ids.tolist(), sums.tolist(), counts.tolist(), done.tolist())
        for trajectory, total, count, is_done in zip(*columns, strict=True):
            before, steps = self._open.pop(trajectory, (0.0, 0))
            if is_done:
                self.finished.append(before + total)
                self.lengths.append(steps + count)
            else:
                self._open[trajectory] = (before + total, steps + count)

    def register(self, trainer: Trainer, name: str = "episode_returns") -> None:
        """Register to log before the optimisation steps of each batch."""
        self._trainer = trainer
        trainer.register_op("setup", self.start)
        trainer.register_op("pre_steps_log", self)
        trainer.register_module(name, self)


class BusyTime(_Stateless):
    """Measures the share of time that the learner does not wait for data.

    Attributes:
        waited: Seconds spent waiting for batches, the first one left out.
        total: Seconds since the first batch arrived.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._first: float | None = None
        self._idle_since: float | None = None

    @property
    def total(self) -> float:
        """Seconds since the first batch arrived."""
        return time.perf_counter() - self._first if self._first is not None else 0.0

    @property
    def busy(self) -> float:
        """Share of time the learner was busy, in [0, 1]."""
        return 1.0 - self.waited / self.total if self.total else 0.0

    def arrived(self, batch: TensorDictBase) -> TensorDictBase:
        """A batch arrived: the wait is over."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now
        if self._idle_since is not None:
            self.waited += now - self._idle_since
        return batch

    def finished(self, batch: TensorDictBase) -> dict[str, Any]:
        """The batch is dealt with: the next wait begins."""
        self._idle_since = time.perf_counter()
        return {"learner_busy": self.busy}

    def register(self, trainer: Trainer, name: str = "busy_time") -> None:
        """Register at both ends of the work on a batch."""
        trainer.register_op("batch_process", self.arrived)
        trainer.register_op("post_steps_log", self.finished)
        trainer.register_module(name, self)
