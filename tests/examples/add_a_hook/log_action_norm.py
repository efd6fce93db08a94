"""A hook of your own, in three steps.

1. Subclass `TrainerHookBase`; return what is to be logged from `__call__`.
2. Register it for one of the places of a TorchRL trainer: ``hook.register(trainer)``.
3. Keep what a checkpoint needs in `state_dict`.

Names that the package itself logs stand in ``tutorials/metrics.md``.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TrainerHookBase


class LogActionNorm(TrainerHookBase):
    """Logs the largest mean absolute action of any batch so far."""

    def __init__(self) -> None:
        self.largest = 0.0

    def __call__(self, batch: TensorDictBase) -> dict[str, Any]:
        """Take a batch in and return what to log."""
        self.largest = max(self.largest, float(batch["action"].abs().mean()))
        return {"largest_action": self.largest}

    def register(self, trainer: Trainer, name: str = "action_norm") -> None:
        """Register to log before the optimisation steps of each batch."""
        trainer.register_op("pre_steps_log", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"largest": self.largest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.largest = state_dict["largest"]
