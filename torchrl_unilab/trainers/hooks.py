"""Hooks for TorchRL trainers."""

from __future__ import annotations

import inspect
import time
import warnings
from collections import Counter, deque
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer, UpdateWeights
from torchrl.trainers.trainers import TrainerHookBase

from torchrl_unilab.collectors.base import WorkerCollector
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.runtime.trace import counter
from torchrl_unilab.weight_update import UniLabShmScheme

__all__ = [
    "BusyTime",
    "CollectorReport",
    "EpisodeReturns",
    "LearningCurve",
    "LogPolicyLag",
    "PublishWeights",
    "StopWhen",
]


class _Stateless(TrainerHookBase):
    """A hook with nothing to checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _Report(_Stateless):
    """A hook that logs several values before the optimisation steps, the first in the bar.

    Attributes:
        headlines: What the progress bar shows.
    """

    headlines: tuple[str, ...] = ()

    def __call__(self, batch: TensorDictBase) -> dict[str, Any]:
        """Return all that is to be logged."""
        raise NotImplementedError

    def _headlines(self, batch: TensorDictBase) -> dict[str, Any]:
        self._logged = self(batch)
        return {key: self._logged[key] for key in self.headlines if key in self._logged} | {
            "log_pbar": True
        }

    def _details(self, batch: TensorDictBase) -> dict[str, Any]:
        return {key: value for key, value in self._logged.items() if key not in self.headlines}

    def _register_report(self, trainer: Trainer, name: str) -> None:
        trainer.register_op("pre_steps_log", self._headlines)
        trainer.register_op("pre_steps_log", self._details)
        trainer.register_module(name, self)


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


_LAG_SHARES = {
    "policy_lag_0": 0,
    "policy_lag_1": 1,
    "policy_lag_2_3": 3,
    "policy_lag_4_7": 7,
    "policy_lag_8_15": 15,
    "policy_lag_16_up": float("inf"),
}
"""What is logged of how far behind batches were: key to the largest lag of its share."""


class LogPolicyLag(_Report):
    """Logs how many published versions the workers' rollouts are behind.

    Logged are always the same keys, whatever the lag, as loggers keep a file open for each:

    ====================  ==============================================================
    ``policy_lag``        of this batch, the mean over its samples
    ``policy_version``    the newest published version; a resumed run counts on
    ``policy_lag_max``    of the batch that was furthest behind so far
    ``policy_lag_0``      share of the batches so far that were 0 versions behind, and so
                          for ``_1``, ``_2_3``, ``_4_7``, ``_8_15`` and ``_16_up``
    ====================  ==============================================================

    0 is as in lock-step, 1 where workers collect while the learner learns; a share at 8 or
    above says that data is old: fewer slots or collectors, or a bound (``max_policy_lag``).

    Warns once if the lag only grows: the workers no longer pull.

    Args:
        scheme: The scheme that publishes the policy.
        patience: Batches in a row over which the lag must have grown for the warning.

    Attributes:
        histogram: How many batches were that many versions behind.
    """

    headlines = ("policy_lag",)

    def __init__(self, scheme: UniLabShmScheme, patience: int = 20) -> None:
        self.scheme = scheme
        self.patience = patience
        self.histogram: Counter[int] = Counter()
        self._last = float("inf")
        self._grown = 0

    def __call__(self, batch: TensorDictBase | None) -> dict[str, Any]:
        """Return the lag of the batch, or of the workers if it carries no version."""
        versions = None if batch is None else batch.get(("next", "policy_version"), None)
        if versions is not None:
            lag = self.scheme.version - float(versions.double().mean())
        else:
            applied = [v for v in self.scheme.applied_versions.values() if v is not None]
            lag = float(self.scheme.version - min(applied, default=self.scheme.version))
        counter("policy_lag", lag)
        self.histogram[round(lag)] += 1
        self._watch(lag)
        return {
            "policy_lag": lag,
            "policy_version": self.scheme.version,
            "policy_lag_max": max(self.histogram),
            **self._shares(),
        }

    def _shares(self) -> dict[str, float]:
        shares = dict.fromkeys(_LAG_SHARES, 0.0)
        for behind, count in self.histogram.items():
            key = next(key for key, most in _LAG_SHARES.items() if behind <= most)
            shares[key] += count / self.histogram.total()
        return shares

    def state_dict(self) -> dict[str, Any]:
        """Return the histogram, and what the warning follows from."""
        return {"histogram": dict(self.histogram), "last": self._last, "grown": self._grown}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.histogram = Counter(state_dict["histogram"])
        self._last, self._grown = state_dict["last"], state_dict["grown"]

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
        self._register_report(trainer, name)


class LearningCurve(_Report):
    """Logs the mean return of the last episodes at each batch, and keeps the curve.

    Attributes:
        curve: (seconds, frames, mean return) at each batch since the first full episode.
        seconds: Since training began, at the last batch.
        mean: Mean return of the last finished episodes; NaN before the first.
    """

    headlines = ("return", "fps")

    def __init__(self) -> None:
        self.curve: list[tuple[float, int, float]] = []
        self.seconds = 0.0
        self.mean = float("nan")
        self._trainer: Trainer | None = None
        self._started = time.perf_counter()

    def start(self) -> None:
        """Start the clock of the curve, or go on from a checkpoint's."""
        self._started = time.perf_counter() - self.seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the curve, as the bytes of [n, 3] float64, and the seconds so far."""
        curve = np.array(self.curve, dtype=np.float64).tobytes()
        return {"curve": curve, "seconds": self.seconds, "mean": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the clock goes on when training does."""
        points = np.frombuffer(state_dict["curve"], dtype=np.float64).reshape(-1, 3).tolist()
        self.curve = [(seconds, int(frames), mean) for seconds, frames, mean in points]
        self.seconds, self.mean = state_dict["seconds"], state_dict["mean"]

    def measure(self, batch: TensorDictBase) -> dict[str, Any]:
        """Return what to log, with ``return`` and ``episode_length`` once there are any."""
        raise NotImplementedError

    def __call__(self, batch: TensorDictBase) -> dict[str, Any]:
        """Take a batch in and return what to log."""
        measured = self.measure(batch)
        self.seconds = time.perf_counter() - self._started
        frames = self._trainer.collected_frames if self._trainer else 0
        if "return" in measured:
            self.mean = measured["return"]
            self.curve.append((self.seconds, frames, self.mean))
        return {"fps": frames / self.seconds, **measured}

    def register(self, trainer: Trainer, name: str = "learning_curve") -> None:
        """Register to log before the optimisation steps of each batch."""
        self._trainer = trainer
        trainer.register_op("setup", self.start)
        self._register_report(trainer, name)


class EpisodeReturns(LearningCurve):
    """Sums rewards to episode returns and logs the mean of the last ones.

    Follows each trajectory through the batches by ``("collector", "traj_ids")``, so any
    number of workers and any order of batches will do, as long as none is left out.

    Args:
        window: How many finished episodes the mean is over.
    """

    def __init__(self, window: int = 64) -> None:
        super().__init__()
        self.finished: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        self._open: dict[int, tuple[float, int]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the curve, and the episodes, ended or not."""
        return {
            **super().state_dict(),
            "finished": list(self.finished),
            "lengths": list(self.lengths),
            "open": dict(self._open),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self.finished = deque(state_dict["finished"], maxlen=self.finished.maxlen)
        self.lengths = deque(state_dict["lengths"], maxlen=self.lengths.maxlen)
        self._open = dict(state_dict["open"])

    def measure(self, batch: TensorDictBase) -> dict[str, Any]:
        """Take a batch in and return the means."""
        self._add(batch)
        if not self.finished:
            return {}
        return {
            "return": sum(self.finished) / len(self.finished),
            "episode_length": sum(self.lengths) / len(self.lengths),
        }

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


class CollectorReport(LearningCurve):
    """Logs what a collector's workers tell: returns, rates, memory, frames per second.

    The workers count their episodes themselves, so returns are right also where rollouts
    are dropped. Reading waits for nobody.

    Args:
        collector: The collector.

    Attributes:
        last: What was logged last.
    """

    def __init__(self, collector: WorkerCollector) -> None:
        super().__init__()
        self.collector = collector
        self.last: dict[str, Any] = {}

    def measure(self, batch: TensorDictBase) -> dict[str, Any]:
        """Return the newest metrics."""
        collector = self.collector
        metrics = collector.metrics()
        status = collector.status()
        for name, value in status.items():
            counter(name, value)
        measured: dict[str, Any] = {
            **status,
            **{f"fps_{phase}": value for phase, value in metrics.fps.items()},
        }
        if metrics.episodes:
            measured |= {
                "return": metrics.episode_return,
                "episode_length": metrics.episode_length,
                "timeout_rate": metrics.timeout_rate,
                "termination_rate": metrics.termination_rate,
            }
        self.last = measured
        return measured


class StopWhen(_Stateless):
    """Ends training once a return is reached or the time is up.

    Args:
        returns: The trainer's learning curve.
        stop_at: Mean return at which to stop.
        max_seconds: Seconds since training began after which to stop.
    """

    def __init__(
        self,
        returns: LearningCurve,
        *,
        stop_at: float | None = None,
        max_seconds: float | None = None,
    ) -> None:
        self.returns = returns
        self.stop_at = stop_at
        self.max_seconds = max_seconds
        self._trainer: Trainer | None = None

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        """Look at the curve; ask the trainer to stop after this batch if it is time."""
        assert self._trainer is not None, "register comes first"
        if self.stop_at is not None and self.returns.mean >= self.stop_at:
            self._trainer.request_stop(f"return {self.returns.mean:g} reached")
        elif self.max_seconds is not None and self.returns.seconds >= self.max_seconds:
            self._trainer.request_stop(f"{self.returns.seconds:g} seconds are over")
        return {}

    def register(self, trainer: Trainer, name: str = "stop_when") -> None:
        """Register after the learning curve, before the optimisation steps."""
        self._trainer = trainer
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

    def arrived(self, batch: TensorDictBase | None) -> TensorDictBase | None:
        """A batch arrived: the wait is over."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now
        if self._idle_since is not None:
            self.waited += now - self._idle_since
            self._idle_since = None
        return batch

    def arrived_in_replay(self, batch: TensorDictBase | None) -> None:
        """Data arrived that no batch shows, but the replay holds."""
        if batch is None:
            self.arrived(batch)

    def finished(self, batch: TensorDictBase) -> dict[str, Any]:
        """The batch is dealt with: the next wait begins."""
        self._idle_since = time.perf_counter()
        return {"learner_busy": self.busy}

    def register(self, trainer: Trainer, name: str = "busy_time") -> None:
        """Register at both ends of the work on a batch."""
        trainer.register_op("batch_process", self.arrived)
        trainer.register_op("pre_steps_log", self.arrived_in_replay)
        trainer.register_op("post_steps_log", self.finished)
        trainer.register_module(name, self)
