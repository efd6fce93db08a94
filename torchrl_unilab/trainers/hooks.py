"""Hooks for TorchRL trainers: publishing weights, and how busy learner and collectors are.

`APPOTrainer`, `OffPolicyTrainer` and `Run` register them; `PublishWeights` works in any TorchRL
trainer, and has state for checkpoints. `reports` logs returns, rates and policy lag.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from operator import attrgetter
from typing import Any

import psutil
from tensordict import TensorDictBase
from torchrl.trainers import Trainer, UpdateWeights

from torchrl_unilab.checks import as_integer
from torchrl_unilab.collectors.base import WorkerCollector


class PublishWeights(UpdateWeights):
    """Publishes models to the collector's workers after every n batches.

    Replaces the `UpdateWeights` hook that TorchRL's trainers register for the same collector,
    including its ``weight_update_map``, so that nothing is published twice. Without a map, the
    policy is published from the model that the scheme knows.

    Args:
        collector: Has a weight-sync scheme for each model.
        every: Batches between publishes.

    Raises:
        ConfigError: `every` is not positive.

    Examples:
        >>> from torchrl.collectors import Collector
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.modules import make_actor
        >>> from torchrl_unilab.trainers import PublishWeights
        >>> env = MujocoBatchEnv("Hopper-v5", 2, num_threads=1)
        >>> collector = Collector(
        ...     env, make_actor(11, 3), frames_per_batch=8, auto_register_policy_transforms=False
        ... )
        >>> publish = PublishWeights(collector, every=2)  # then publish.register(trainer)
        >>> collector.shutdown()
    """

    def __init__(self, collector: Any, every: int = 1) -> None:
        every = as_integer("PublishWeights every", every, "Leave it out for each batch.")
        super().__init__(collector, every)
        self._skipped = False

    def skip(self) -> None:
        """Do not publish after this batch, nor count it: nothing was learnt from it."""
        self._skipped = True

    def __call__(self) -> None:
        """Count a batch; publish if it is due."""
        if not self._skipped:
            super().__call__()
        self._skipped = False

    def _update_with_map(self) -> None:
        """Publish models as they are: TorchRL's takes their extra state out."""
        paths = self.weight_update_map.items()
        sources = {model: attrgetter(path)(self.trainer) for model, path in paths}
        self.collector.update_policy_weights_(weights_dict=sources)

    def register(self, trainer: Trainer, name: str = "publish_weights") -> None:
        """Register after the optimisation of each batch."""
        for entry in list(trainer._post_steps_ops):
            hook = inspect.unwrap(entry[0])  # TorchRL times its hooks
            if is_stock_update(hook, self.collector):
                self.weight_update_map = hook.weight_update_map
                trainer._post_steps_ops.remove(entry)
        super().register(trainer, name)


def is_stock_update(hook: Any, collector: Any) -> bool:
    """Return whether a hook is TorchRL's own, which publishes to the same collector."""
    stock = isinstance(hook, UpdateWeights) and not isinstance(hook, PublishWeights)
    return stock and hook.collector is collector


class BusyTime:
    """Measures the share of time that the learner does not wait for data, and logs it.

    Attributes:
        waited: Seconds spent waiting for batches, the first one left out.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._started: float | None = None
        self._idle_since = 0.0

    def register(self, trainer: Trainer) -> None:
        """Measure from each batch's arrival to its end."""
        trainer.register_op("pre_steps_log", self.arrived)
        trainer.register_op("post_steps_log", self.finished)

    @property
    def busy(self) -> float:
        """Share of time since the first batch that the learner was busy, in [0, 1]."""
        if self._started is None:
            return 0.0
        return 1.0 - self.waited / (time.perf_counter() - self._started)

    def arrived(self, batch: TensorDictBase | None) -> None:
        """End the wait: a batch has arrived (None from a collector that fills a replay)."""
        now = time.perf_counter()
        if self._started is None:
            self._started = now
        else:
            self.waited += now - self._idle_since

    def finished(self, batch: TensorDictBase) -> dict[str, Any]:
        """Begin the next wait; return what to log."""
        self._idle_since = time.perf_counter()
        return {"learner_busy": self.busy}


class CollectorTime:
    """Measures the processor time of each collector per second since training began.

    Args:
        collector: Its processes are measured, those that replace others included.

    Attributes:
        busy: One share per collector; above 1 if several threads step physics.
    """

    def __init__(self, collector: WorkerCollector) -> None:
        self.collector = collector
        self.busy = [0.0 for _ in collector.pids]
        self._seconds: list[dict[int, float]] = [{} for _ in collector.pids]  # by process id

    def register(self, trainer: Trainer) -> None:
        """Measure from the start of training to the last batch."""
        trainer.register_op("setup", self.start)
        trainer.register_op("post_steps", self.sample)

    def start(self) -> None:
        """Start to count: training begins."""
        self._started = time.perf_counter()
        self._before = self._total()

    def sample(self) -> None:
        """Set `busy` to what it is now."""
        elapsed = time.perf_counter() - self._started
        now = self._total()
        self.busy = [(b - a) / elapsed for a, b in zip(self._before, now, strict=True)]

    def _total(self) -> list[float]:
        """Return seconds of each collector; a process that has ended counts as last seen."""
        for seconds, pid in zip(self._seconds, self.collector.pids, strict=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(pid).cpu_times()
                seconds[pid] = float(times.user + times.system)
        return [sum(seconds.values()) for seconds in self._seconds]
