"""TorchRL's writer of packed rows, without a cursor or a lock: the shared rows have both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_unilab.data.replay.append import as_rows
from torchrl_unilab.data.replay.storage import PackedReplayStorage
from torchrl_unilab.data.shared_storage import SharedStorageWriter


class PackedReplayWriter(SharedStorageWriter):
    """Appends rows to a `PackedReplayStorage`, in any number of processes.

    TorchRL's round-robin writers keep a cursor, so with them processes must write under the lock of
    a shared buffer, to a storage of one shard.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter
        >>> from tensordict import TensorDict
        >>> storage = PackedReplayStorage(4)
        >>> writer = PackedReplayWriter()
        >>> writer.register_storage(storage)
        >>> writer.extend(TensorDict({"reward": torch.ones(3)}, [3]))
        tensor([0, 1, 2])
        >>> storage.close()
    """

    _kind = PackedReplayStorage
    _storage: PackedReplayStorage
    _emptied = 0  # rows that are counted, and were in the storage before it was emptied

    def add(self, data: TensorDictBase) -> int:
        """Append one row []; return its position. Raises as `PackedReplayStorage.append`."""
        return int(self.extend(as_rows(data).unsqueeze(0))[0])

    def extend(self, data: TensorDictBase | Sequence[TensorDictBase]) -> torch.Tensor:
        """Append rows [n], or a list of rows; return their positions, int64 [n].

        Raises as `PackedReplayStorage.append`.
        """
        index = self._storage.append(as_rows(data))
        for entity in self._storage._attached_entities:
            entity.mark_update(index)
        return index

    @property
    def _cursor(self) -> int:
        return int(self._storage.ptr % self._storage.max_size)

    @property
    def _write_count(self) -> int:
        return self._emptied + self._storage.ptr

    def loads(self, path: str | Path) -> None:
        """Go on where the stock writer of a stock checkpoint would."""
        file = Path(path) / "metadata.json"
        if file.is_file():  # not of this class, which saves nothing
            self._storage.continue_at(json.loads(file.read_text())["cursor"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the stock writer of a stock checkpoint would."""
        if "_cursor" in state_dict:
            self._storage.continue_at(state_dict["_cursor"])

    def _empty(self, empty_write_count: bool = True) -> None:
        """Keep the count, or not; the buffer empties the storage next, and so the cursor."""
        self._emptied = 0 if empty_write_count else self._write_count
