"""Checkpoints of unread rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchrl_unilab.data.shared_storage import SharedStorageCheckpointer
from torchrl_unilab.data.stock import is_stock_dump

if TYPE_CHECKING:
    from torchrl_unilab.data.rollout_ring import RolloutRingStorage

__all__ = ["RolloutRingCheckpointer"]


class RolloutRingCheckpointer(SharedStorageCheckpointer):
    """Saves the unread rollouts of a `RolloutRingStorage`, and its counters, as one file."""

    def dumps(self, storage: RolloutRingStorage, path: str | Path) -> None:
        """Save to ``path/rollouts.pt``; whole or not at all."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        draft = path / "rollouts.pt.part"
        torch.save(storage.state_dict(), draft)
        draft.replace(path / "rollouts.pt")

    def loads(self, storage: RolloutRingStorage, path: str | Path) -> None:
        """Load what `dumps` saved, see `RolloutRingStorage.load_state_dict`."""
        path = Path(path)
        if is_stock_dump(path) and not (path / "rollouts.pt").exists():
            raise storage.foreign_checkpoint(f"a stock one in {path}")
        storage.load_state_dict(torch.load(path / "rollouts.pt", weights_only=True))
