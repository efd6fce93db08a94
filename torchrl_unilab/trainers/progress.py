"""What ends a run in time, and says how far it is.

`Run` registers the hooks after the trainer's reports, which keep the curve in
``trainer.returns``. `APPOTrainer` and `OffPolicyTrainer` are of `RankTrainer`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.trainers import Trainer

from torchrl_unilab.errors import ConfigError, DivergedError
from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.runtime.ranks import Ranks

__all__ = ["RankTrainer", "can_draw", "stop_when", "tell_progress"]


_NEVER_CALLED = ("post_loss", "process_loss", "optimizer")
"""Stages of TorchRL's own step, which it does not call either where another takes its place."""


class RankTrainer(Trainer):
    """A trainer that counts observations, and stops, in step with those of the other ranks.

    Attributes:
        ranks: The processes that learn together.
        normalizers: Observation key to the normaliser in the networks that learns from it.
    """

    ranks: Ranks
    normalizers: Mapping[str, ObservationNormalizer]

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
            DivergedError: A loss is not finite: what was learnt has not been published. Of several
                ranks, `Ranks.agree` names the one.
        """
        bad = [n for n, mean in logged.items() if n.startswith("loss") and not math.isfinite(mean)]
        if bad and self.ranks.size == 1:
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

    def _count_observations(self, data: TensorDictBase) -> None:
        """Let the normalisers learn from the new observations of all ranks, each once."""
        own = {key: one.moments(data.get(key)) for key, one in self.normalizers.items()}
        if not own:
            return
        sizes = [len(moments) for moments in own.values()]
        for told in self.ranks.gather(torch.cat([*own.values()])):
            for normalizer, moments in zip(
                self.normalizers.values(), told.split(sizes), strict=True
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


def stop_when(trainer: Trainer, stop_at: float | None, max_seconds: float | None) -> None:
    """End training once a return is reached or the time is up.

    Args:
        trainer: `APPOTrainer` or `OffPolicyTrainer`.
        stop_at: Mean return at which to stop.
        max_seconds: Seconds since training began after which to stop.
    """

    def look(batch: TensorDictBase | None) -> None:
        mean, seconds = trainer.returns.mean, trainer.returns.seconds
        if stop_at is not None and mean >= stop_at:
            trainer.request_stop(f"return {mean:g} reached")
        elif max_seconds is not None and seconds >= max_seconds:
            trainer.request_stop(f"{seconds:g} seconds are over")

    trainer.register_op("pre_steps_log", look)


def can_draw() -> bool:
    """Return whether a progress bar can be drawn: in a terminal, or in a notebook."""
    shell = sys.modules.get("IPython")
    return sys.stderr.isatty() or (shell is not None and shell.get_ipython() is not None)


def tell_progress(trainer: Trainer, tell: Callable[[str], None], every: float = 10.0) -> None:
    """Say how far training is, line by line, where no progress bar can be drawn.

    Args:
        trainer: `APPOTrainer` or `OffPolicyTrainer`.
        tell: Takes a line.
        every: Seconds between lines.
    """
    told = trainer.returns.seconds

    def look(batch: TensorDictBase | None) -> None:
        nonlocal told
        mean, seconds = trainer.returns.mean, trainer.returns.seconds
        if seconds - told < every:
            return
        told = seconds
        frames, total = trainer.collected_frames, trainer.total_frames
        left = seconds * max(0, total - frames) / frames
        reached = "no episode has ended" if math.isnan(mean) else f"return {mean:.1f}"
        tell(
            f"{frames:,} of {total:,} frames, {frames / seconds:,.0f} frames/s, {reached}, "
            f"{left:.0f} s left"
        )

    trainer.register_op("pre_steps_log", look)
