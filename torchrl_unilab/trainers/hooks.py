"""Hooks for TorchRL trainers that publish weights and measure who is busy.

A `Hook` names the stages of the trainer at which its methods run, and its `state_dict` has what a
resumed run needs. `APPOTrainer`, `OffPolicyTrainer` and `Run` register them; `PublishWeights`
works in any TorchRL trainer. What is logged is in `reports`.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Literal

import psutil
from tensordict import TensorDictBase
from torchrl.trainers import Trainer, UpdateWeights
from torchrl.trainers.trainers import TrainerHookBase

from torchrl_unilab.collectors.base import WorkerCollector
from torchrl_unilab.errors import ConfigError

__all__ = [
    "BusyTime",
    "CollectorTime",
    "Hook",
    "PublishWeights",
    "keep_newest_values",
]

KEPT = 100
"""Logged values of each key that a trainer keeps."""


def keep_newest_values(trainer: Trainer) -> None:
    """Let a trainer keep the last values of each key that it logs.

    TorchRL's trainers keep all, for hooks that read the last, and so grow as long as they run.
    """
    trainer._log_dict = defaultdict(partial(deque, maxlen=KEPT))


class Hook(TrainerHookBase):
    """A hook whose methods run at stages of a trainer; by default without state."""

    name: ClassVar[str]
    stages: ClassVar[Mapping[str, str]]
    """Stage of the trainer to the name of the method that runs there."""
    _trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def register(self, trainer: Trainer, name: str | None = None) -> None:
        """Register the methods at their stages, and the state for checkpoints."""
        self._trainer = trainer
        for stage, method in self.stages.items():
            trainer.register_op(stage, getattr(self, method))
        trainer.register_module(name or self.name, self)


class PublishWeights(Hook):
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

    name = "publish_weights"

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

    def register(self, trainer: Trainer, name: str | None = None) -> None:
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
        trainer.register_module(name or self.name, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the count of batches or steps."""
        return {"counted": self._counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count of batches or steps."""
        self._counted = state_dict["counted"]


class BusyTime(Hook):
    """Measures the share of time that the learner does not wait for data.

    Attributes:
        waited: Seconds spent waiting for batches, the first one left out.
        total: Seconds since the first batch arrived.
    """

    name = "busy_time"
    stages: ClassVar[Mapping[str, str]] = {
        "pre_steps_log": "arrived",
        "post_steps_log": "finished",
    }

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

    def arrived(self, batch: TensorDictBase | None) -> None:
        """A batch arrived, or what a replay has of it: the wait is over."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now
        if self._idle_since is not None:
            self.waited += now - self._idle_since
            self._idle_since = None

    def finished(self, batch: TensorDictBase) -> dict[str, Any]:
        """The batch is dealt with: the next wait begins."""
        self._idle_since = time.perf_counter()
        return {"learner_busy": self.busy}


class CollectorTime(Hook):
    """Measures the processor time of each collector per second since training began.

    Args:
        collector: Its processes are measured, those that replace others included.

    Attributes:
        busy: One share per collector; above 1 if several threads step physics.
    """

    name = "collector_time"
    stages: ClassVar[Mapping[str, str]] = {"setup": "start", "post_steps": "sample"}

    def __init__(self, collector: WorkerCollector) -> None:
        self.collector = collector
        self.busy: list[float] = []
        self._seconds: list[dict[int, float]] = [{} for _ in collector.pids]  # by process id

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
        """Seconds of each collector; a process that has ended counts with those seen last."""
        for seconds, pid in zip(self._seconds, self.collector.pids, strict=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(pid).cpu_times()
                seconds[pid] = float(times.user + times.system)
        return [sum(seconds.values()) for seconds in self._seconds]
