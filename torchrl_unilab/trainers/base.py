"""`RankTrainer`: what both trainers do in step with the other ranks, and how they log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl import logger as torchrl_logger
from torchrl.trainers import Trainer

from torchrl_unilab.collectors.base import WorkerCollector
from torchrl_unilab.errors import ConfigError, DivergedError, LayoutKeyError
from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.runtime.ranks import Ranks

_NEVER_CALLED = ("post_loss", "process_loss", "optimizer")
"""Stages of TorchRL's own step, which it does not call either where another takes its place."""


_OF_SETTINGS = (
    "frame_skip",
    "num_epochs",
    "optim_steps_per_batch",
    "optimizer",
    "optimization_stepper",
)
"""Arguments of TorchRL's trainers that follow from the settings."""


def check_arguments(given: Iterable[str], config: object, kind: type) -> None:
    """Refuse arguments that follow from the settings, and settings of another algorithm.

    Raises:
        ConfigError: Names them.
    """
    if not isinstance(config, kind):
        raise ConfigError(
            f"config: {type(config).__name__} (expected {kind.__name__}). Give the algorithm's."
        )
    if own := [name for name in given if name in _OF_SETTINGS]:
        raise ConfigError(
            f"{', '.join(own)}: given (expected to follow from config). Set epochs, minibatches, "
            "updates_per_step or rates in config."
        )


class RankTrainer(Trainer):
    """A trainer that counts observations, and stops, in step with those of the other ranks.

    Attributes:
        ranks: The processes that learn together.
        normalizers: Observation key to the normaliser in the networks that learns from it.
    """

    ranks: Ranks
    normalizers: Mapping[str, ObservationNormalizer]

    def __init__(self, *, collector: Any, loss_module: nn.Module, **kwargs: Any) -> None:
        super().__init__(collector=collector, loss_module=loss_module, **kwargs)
        if isinstance(collector, WorkerCollector):
            acting = {*collector.policy.parameters()}
            if acting and not acting & {*loss_module.parameters()}:
                torchrl_logger.warning(
                    "%s: the collector's policy has no parameter of the loss (expected the actor "
                    "that it learns). Give both the same one, or publish by a map of your own.",
                    type(self).__name__,
                )

    def register_op(self, dest: Any, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register a hook; see TorchRL.

        Raises:
            ConfigError: It is of a stage that an update of ours does not have.
        """
        if dest in _NEVER_CALLED:
            raise ConfigError(
                f"hook stage {dest!r}: {type(self).__name__} takes its own steps (expected another "
                "stage, such as 'process_optim_batch' or 'post_optim'). Put what it does into the "
                "loss, or use TorchRL's Trainer."
            )
        super().register_op(dest, op, **kwargs)

    def _report_update(self, logged: Mapping[str, float]) -> None:
        """Call the hooks that come after an update's steps, and log its means.

        Raises:
            DivergedError: A loss is not finite: what was learnt has not been published.
        """
        # Of several ranks all see the same: what they log has been averaged.
        bad = [n for n, mean in logged.items() if n.startswith("loss") and not math.isfinite(mean)]
        if bad:
            self.ranks.agree(False)  # names the rank whose gradients are not finite
            raise DivergedError(
                f"update after {self.collected_frames} frames: {bad[0]} is {logged[bad[0]]} "
                "(expected finite losses). Lower the learning rates, or look at rewards and "
                "observations; checkpoints are of before."
            )
        if self._post_optim_complete_log_ops:
            losses = TensorDict({name: torch.tensor(mean) for name, mean in logged.items()})
            for hook, kwargs in self._post_optim_complete_log_ops:
                self._log(**(hook(self._optim_count, losses, **kwargs) or {}))
        if self.auto_log_optim_steps:
            self._log(optim_steps=self._optim_count, **logged)

    def _observed(self, data: TensorDictBase) -> dict[str, torch.Tensor]:
        """Return the observations that the normalisers learn from."""
        found = {key: data.get(key, None) for key in self.normalizers}
        if missing := [key for key, seen in found.items() if seen is None]:
            raise LayoutKeyError(
                f"normalizers: no {missing} in what is collected (expected keys of observations, "
                f"of {sorted(map(str, data.keys()))}). Name them by the observation's key."
            )
        return found

    def _count_observations(self, observed: Mapping[str, torch.Tensor]) -> None:
        """Update the normalisers with new observations by key, of all ranks, each once."""
        if not observed:
            return
        own = {key: self.normalizers[key].moments(seen) for key, seen in observed.items()}
        sizes = [len(moments) for moments in own.values()]
        for gathered in self.ranks.gather(torch.cat([*own.values()])):
            for normalizer, moments in zip(
                self.normalizers.values(), gathered.split(sizes), strict=True
            ):
                normalizer.merge(moments)

    def _post_steps_log_hook(self, batch: TensorDictBase | None) -> None:
        super()._post_steps_log_hook(batch)  # TorchRL looks next whether to stop
        if self.ranks.agree(self._stop_training) and not self._stop_training:
            self.request_stop("another rank stops")

    def save_trainer(self, force_save: bool = False) -> None:
        """Save a checkpoint if one is due, on rank 0."""
        if self.ranks.rank == 0:
            super().save_trainer(force_save)
