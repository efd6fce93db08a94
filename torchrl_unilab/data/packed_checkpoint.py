"""Checkpoints of packed rows: straight from shared memory to one file, and back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_unilab.data.shared_storage import SharedStorageCheckpointer
from torchrl_unilab.data.stock import is_stock_dump, rows_of_dump
from torchrl_unilab.errors import CheckpointError

if TYPE_CHECKING:
    from torchrl_unilab.data.packed_replay import PackedReplayStorage

__all__ = ["PackedReplayCheckpointer"]

_CHUNK = 1 << 24  # bytes written at a time


class PackedReplayCheckpointer(SharedStorageCheckpointer):
    """Saves a `PackedReplayStorage` as one file, straight from shared memory.

    Writers wait meanwhile; samplers do not.
    """

    def dumps(self, storage: PackedReplayStorage, path: str | Path) -> None:
        """Save to ``path/rows.bin``; whole or not at all."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        draft = path / "rows.bin.part"
        with draft.open("wb") as file:
            with storage.saved() as (head, parts):
                text = json.dumps(head).encode()
                file.write(len(text).to_bytes(8, "little") + text)
                for part in parts:
                    for start in range(0, part.nbytes, _CHUNK):
                        file.write(part[start : start + _CHUNK].data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path / "rows.bin")

    def loads(self, storage: PackedReplayStorage, path: str | Path) -> None:
        """Load what `dumps` of this class or of a stock storage saved, in place of what there is.

        Raises:
            CheckpointError: The storage holds other rows, or the file is not whole.
        """
        path = Path(path)
        if is_stock_dump(path) and not (path / "rows.bin").exists():
            storage.load_rows(rows_of_dump(path))
            return
        with (path / "rows.bin").open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            with storage.restored(head) as parts:
                for part in parts:
                    if file.readinto(part.data) != part.nbytes:
                        raise CheckpointError(
                            f"cannot load rows: {path} ends too early (expected "
                            f"{part.nbytes} bytes more). Load another checkpoint."
                        )
