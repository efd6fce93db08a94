"""Hooks that log returns, rates and policy lag.

A report logs the same keys for every batch, as loggers keep a file open for each, and shows some
of them in the progress bar. `APPOTrainer` and `OffPolicyTrainer` call `register_reports`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter, defaultdict, deque
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TrainerHookBase

from torchrl_unilab.checks import as_integer, entry_of
from torchrl_unilab.collectors.base import WorkerCollector
from torchrl_unilab.runtime.trace import counter
from torchrl_unilab.trainers.hooks import BusyTime
from torchrl_unilab.weight_update.versions import PolicyVersions

KEPT = 100
"""Logged values of each key that a trainer keeps."""


class _Report(TrainerHookBase):
    """A hook that logs values before the optimisation steps, some of them in the bar, too.

    Its `state_dict` has what a resumed run needs.
    """

    name: ClassVar[str]
    headlines: ClassVar[tuple[str, ...]]
    """Keys that the progress bar shows."""
    _trainer: Trainer | None = None

    def __call__(self, batch: TensorDictBase) -> dict[str, Any]:
        """Return all that is logged of a batch."""
        raise NotImplementedError

    def register(self, trainer: Trainer, name: str | None = None) -> None:
        """Register for each batch, and for checkpoints."""
        self._trainer = trainer
        trainer.register_op("pre_steps_log", self.log)
        trainer.register_module(name or self.name, self)

    def log(self, batch: TensorDictBase) -> dict[str, Any]:
        """Log the values of a batch; return the headlines, which the trainer logs."""
        values = self(batch)
        headlines = {key: values.pop(key) for key in self.headlines if key in values}
        assert self._trainer is not None, "register comes first"
        self._trainer._log(**values)
        return {**headlines, "log_pbar": True}


_LAG_SHARES = {
    "policy_lag_0": 0,
    "policy_lag_1": 1,
    "policy_lag_2_3": 3,
    "policy_lag_4_7": 7,
    "policy_lag_8_15": 15,
    "policy_lag_16_up": float("inf"),
}
"""Logged shares of batches by policy lag: key to the largest lag that it counts."""


class LogPolicyLag(_Report):
    """Logs how many published versions the workers' rollouts are behind.

    The keys are always the same, whatever the lag, because loggers keep a file open for each:

    ====================  ==============================================================
    ``policy_lag``        of this batch, the mean over its samples
    ``policy_version``    the newest published version; a resumed run counts on
    ``policy_lag_max``    of the batch that was furthest behind so far
    ``policy_lag_0``      share of the batches so far that were 0 versions behind, and so
                          for ``_1``, ``_2_3``, ``_4_7``, ``_8_15`` and ``_16_up``
    ====================  ==============================================================

    The lag is 0 in lock-step, and 1 if workers collect while the learner learns. A share at 8 or
    above means that data is old: use fewer slots or collectors, or a bound (``max_policy_lag``).

    Warns once if the lag only grows: the workers no longer pull.

    Args:
        scheme: The scheme that publishes the policy.
        patience: Batches in a row over which the lag must have grown for the warning.

    Raises:
        ConfigError: `patience` is no positive integer.

    Attributes:
        histogram: How many batches were that many versions behind.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules import make_actor
        >>> from torchrl_unilab.trainers import LogPolicyLag
        >>> from torchrl_unilab.weight_update import UniLabShmScheme
        >>> scheme = UniLabShmScheme()  # a collector does what follows with it
        >>> devices = [torch.device("cpu")]
        >>> scheme.init_on_sender(model_id="policy", model=make_actor(11, 3), devices=devices)
        >>> lag = LogPolicyLag(scheme)  # then lag.register(trainer)
        >>> batch = TensorDict({"next": {"policy_version": torch.zeros(4, 1)}}, [4])
        >>> lag(batch)["policy_lag"]
        0.0
        >>> scheme.shutdown()
    """

    name = "policy_lag"
    headlines = ("policy_lag",)

    def __init__(self, scheme: PolicyVersions, patience: int = 20) -> None:
        self.scheme = scheme
        self.patience = as_integer("patience", patience, "It counts batches.")
        self.histogram: Counter[int] = Counter()
        self._last, self._grown = float("inf"), 0  # the last lag, and rises in a row

    def __call__(self, batch: TensorDictBase | None) -> dict[str, Any]:
        """Return what to log of the batch."""
        lag = self.of(batch)
        counter("policy_lag", lag)
        self.histogram[round(lag)] += 1
        self._watch(lag)
        return {
            "policy_lag": lag,
            "policy_version": self.scheme.version,
            "policy_lag_max": max(self.histogram),
            **self._shares(),
        }

    def of(self, batch: TensorDictBase | None) -> float:
        """Return the mean lag of a batch, or the workers' largest if it carries no version."""
        versions = None if batch is None else batch.get(("next", "policy_version"), None)
        if versions is not None:
            return self.scheme.version - float(versions.double().mean())
        applied = [v for v in self.scheme.applied_versions.values() if v is not None]
        return float(self.scheme.version - min(applied, default=self.scheme.version))

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


class LearningCurve(_Report):
    """Logs the mean return of the last episodes at each batch, and keeps the curve.

    Attributes:
        curve: (seconds, frames, mean return) at each batch since the first full episode.
        seconds: Since training began, at the last batch.
        mean: Mean return of the last finished episodes; NaN before the first.
    """

    name = "learning_curve"
    headlines = ("return", "fps")

    def __init__(self) -> None:
        self.curve: list[tuple[float, int, float]] = []
        self.seconds, self.mean = 0.0, float("nan")
        self._started = time.perf_counter()

    def register(self, trainer: Trainer, name: str | None = None) -> None:
        """Register for the start of training, too."""
        trainer.register_op("setup", self.start)
        super().register(trainer, name)

    def start(self) -> None:
        """Start the clock of the curve, at a checkpoint's seconds."""
        self._started = time.perf_counter() - self.seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the curve, as the bytes of [n, 3] float64, and the seconds so far."""
        curve = np.array(self.curve, dtype=np.float64).tobytes()
        return {"curve": curve, "seconds": self.seconds, "mean": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; `start` continues the clock."""
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


class EpisodeReturns(LearningCurve):
    """Sums rewards to episode returns and logs the mean of the last ones.

    Follows each trajectory through the batches by ``("collector", "traj_ids")``, so the number of
    workers and the order of batches do not matter, as long as no batch is left out.

    Args:
        window: Number of finished episodes that the mean covers.
        reward: Key of the rewards, under ``next``.

    Raises:
        ConfigError: `window` is no positive integer.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.trainers import EpisodeReturns
        >>> done = torch.tensor([[False], [False], [True]])
        >>> batch = TensorDict(
        ...     {
        ...         "collector": {"traj_ids": torch.zeros(3, dtype=torch.int64)},
        ...         "next": {"reward": torch.ones(3, 1), "done": done},
        ...     }
        ... ).auto_batch_size_(1)
        >>> EpisodeReturns(window=10).measure(batch)
        {'return': 3.0, 'episode_length': 3.0}
    """

    def __init__(self, window: int = 64, reward: NestedKey = "reward") -> None:
        super().__init__()
        self.reward = reward
        window = as_integer("window", window, "It counts episodes.")
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
        remedy = "Leave track_traj_ids=False out of the collector: returns are counted by them."
        entry_of("batch", batch, ("collector", "traj_ids"), remedy)
        remedy = "Give the loss's set_keys, or EpisodeReturns, reward= with the environment's key."
        entry_of("batch, 'next'", batch["next"], self.reward, remedy)
        reward = ("next", self.reward)
        batch = batch.select(("collector", "traj_ids"), reward, ("next", "done")).cpu()
        ids, index = torch.unique(batch["collector", "traj_ids"].reshape(-1), return_inverse=True)
        rewards = batch.get(reward).double().reshape(len(index), -1).sum(-1)  # over agents
        dones = batch["next", "done"].reshape(-1).double()
        # What each trajectory has of steps, rewards and ends.
        sums = index.bincount(), index.bincount(rewards), index.bincount(dones)
        columns = [ids.tolist(), *(each.tolist() for each in sums)]
        for trajectory, count, total, is_done in zip(*columns, strict=True):
            before, steps = self._open.pop(trajectory, (0.0, 0))
            if is_done:
                self.finished.append(before + total)
                self.lengths.append(steps + count)
            else:
                self._open[trajectory] = (before + total, steps + count)


class CollectorReport(LearningCurve):
    """Logs what a collector's workers count: returns, rates, memory, frames per second.

    The workers count their episodes themselves, so returns are right even if rollouts are
    dropped. Reading never blocks.

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
        metrics, status = self.collector.metrics(), self.collector.status()
        for name, value in status.items():
            counter(name, value)
        measured: dict[str, Any] = {
            **status,
            **{f"fps_{phase}": value for phase, value in metrics.fps.items()},
            **{name: value for name, value in metrics.values.items() if not math.isnan(value)},
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


def register_reports(
    trainer: Trainer, collector: Any, scheme: PolicyVersions | None, reward: NestedKey = "reward"
) -> tuple[BusyTime, LearningCurve, LogPolicyLag | None]:
    """Register a trainer's busy time, learning curve and, where a scheme is given, policy lag.

    TorchRL's trainers keep all that they log, for hooks that read the last: from now on only the
    newest `KEPT` values of each key. A collector of ours counts its episodes itself; those of
    others are summed from their batches' `reward`.
    """
    trainer._log_dict = defaultdict(partial(deque, maxlen=KEPT))
    busy = BusyTime()
    busy.register(trainer)
    ours = isinstance(collector, WorkerCollector)
    returns = CollectorReport(collector) if ours else EpisodeReturns(reward=reward)
    lag = None if scheme is None else LogPolicyLag(scheme)
    for report in (returns, lag):
        if report is not None:
            report.register(trainer)
    return busy, returns, lag
