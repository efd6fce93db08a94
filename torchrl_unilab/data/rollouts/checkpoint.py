"""Checkpoints of rollouts: copies of the unread ones, in order, and the counters.

A file is whole or it is not there; nothing that is read from it can execute code.
`RolloutRingStorage` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchrl_unilab.data.rollouts.shared import SharedRollouts
from torchrl_unilab.data.shared_storage import SharedStorageCheckpointer
from torchrl_unilab.data.stock import is_stock_dump, replacing
from torchrl_unilab.errors import CheckpointError, ConfigError, UsageError


class RolloutRingCheckpointer(SharedStorageCheckpointer):
    """Saves the unread rollouts of a `RolloutRingStorage`, and its counters, as one file."""

    def dumps(self, storage: SharedRollouts, path: str | Path) -> None:
        """Save to ``path/rollouts.pt``; whole or not at all."""
        with replacing(Path(path) / "rollouts.pt") as file:
            torch.save(storage.state_dict(), file)

    def loads(self, storage: SharedRollouts, path: str | Path) -> None:
        """Load what `dumps` saved, see `RolloutRingStorage.load_state_dict`."""
        path = Path(path)
        if is_stock_dump(path):
            raise _foreign(f"a stock one in {path}")
        try:
            state = torch.load(path / "rollouts.pt", weights_only=True)
        except (RuntimeError, EOFError) as error:  # the file is cut off
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"cannot load {path / 'rollouts.pt'}: {reason} (expected a whole file). Load "
                "another checkpoint."
            ) from error
        storage.load_state_dict(state)


def check_state(storage: SharedRollouts, state: Mapping[str, Any]) -> None:
    """Refuse a state that a storage cannot load.

    Raises:
        UsageError: The storage has unread rollouts, or leases.
        ConfigError: The state is of another storage, of more rollouts than slots, or of another
            number of writers.
    """
    if "of" not in state:
        raise _foreign(f"state dict of {sorted(state)}")
    if len(storage) or storage.leases:
        raise UsageError(
            f"cannot load rollouts: {len(storage)} are unread and {len(storage.leases)} leased "
            "(expected none). Empty the buffer, or load into a new one."
        )
    counts, of = state["counts"], state["of"]
    if len(counts["written"]) != storage.writers:
        raise ConfigError(
            f"cannot load rollouts of {len(counts['written'])} writers (expected "
            f"{storage.writers}). Build the storage for as many."
        )
    most = max(Counter(of).values(), default=0)
    if most > storage.slots:
        raise ConfigError(
            f"cannot load {most} rollouts of one writer: it has {storage.slots} slots (expected "
            f"at least {most}). Use more slots."
        )


def _foreign(what: str) -> ConfigError:
    return ConfigError(
        f"cannot load rollouts: checkpoint of another storage, {what} (expected one of a "
        "RolloutRingStorage). Load it where it was saved, and extend the ring by each rollout "
        "of it."
    )
