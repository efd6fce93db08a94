"""Checkpoints of replays: copies of the rows, made while writers write on; memory stays flat.

A file holds the rows of each shard in the order of their numbers, then a JSON text that
describes them, then that text's length. It is whole or it is not there; nothing that is read
from it can execute code. `PackedReplayStorage.dumps` and `loads` come here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from operator import index
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from torchrl_unilab.data.replay.shared import SharedReplay
from torchrl_unilab.data.schema import TensorSchema
from torchrl_unilab.data.shared_storage import SharedStorageCheckpointer
from torchrl_unilab.data.stock import is_stock_dump, replacing, rows_of_dump
from torchrl_unilab.errors import CheckpointError, LayoutError
from torchrl_unilab.shm.row_layout import WORD
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.shards import STRIDE_BITS, Parts
from torchrl_unilab.shm.window import Lineage, Window

_LENGTH = 8
"""Bytes of the text's length."""


def save_rows(
    rows: SharedRows, lineage: Lineage, write: Callable[[int, npt.NDArray[np.int32]], object]
) -> dict[str, list[int]]:
    """Copy all readable rows of an instant, while others write.

    Rows that are overwritten before they are copied are left out, the oldest first.

    Args:
        rows: The rows.
        lineage: The instant: what `SharedRows.lineage` returned.
        write: Called with a place below the size of the window, and the rows from there on,
            int32 [n, words].

    Returns:
        Numbers that describe the rows: per shard, the first that was ever written (``bases``),
        those that were saved (from ``floors`` to ``heads``), the place that row 0 has or would
        have (``starts``), `SharedRows.lineage`'s ``origins``, and `SharedRows.steps`, as
        ``firsts`` and ``strides``.
    """
    bases, origins, window = lineage
    floors, starts, end = list(window.heads), [], 0
    for shard, (floor, head) in enumerate(zip(*window, strict=True)):
        starts.append(end - floor)
        for first, words in rows.copies(shard, window):
            write(end - floor + first, words)
            floors[shard] = first
        end += head - floor
    firsts, strides = zip(*rows.steps(), strict=True)
    firsts = tuple(map(min, map(max, firsts, bases), window.heads))  # only saved rows count
    numbers = {"bases": bases, "heads": window.heads, "origins": origins}
    numbers |= {"firsts": firsts, "strides": strides}
    return {key: [*of] for key, of in numbers.items()} | {"floors": floors, "starts": starts}


def load_rows(
    storage: SharedReplay,
    header: dict[str, Any],
    count: int,
    read: Callable[[int, int], torch.Tensor],
) -> None:
    """Replace all rows of a storage by saved ones.

    Args:
        storage: Made like the one that was saved.
        header: The `header` of the storage that was saved, with the result of `save_rows`.
        count: Rows that can be read.
        read: Called with a place and a count; returns rows, int32 [count, words].

    Raises:
        CheckpointError: The storage is of another kind, or the header is not valid. The storage
            keeps its rows.
    """
    try:
        schema = TensorSchema.from_json(header["schema"])
        mine = storage.header(schema)
        other = {key: header[key] for key in mine if header[key] != mine[key]}
        keys = ("bases", "floors", "heads", "starts", "origins", "firsts", "strides")
        # Older checkpoints lack the last two: their rows are taken to be in the order of time.
        # Numbers are counted from a shard's base below; a place is that of row 0 in the file.
        header = {"firsts": header["bases"], "strides": [1] * mine["writers"]} | header
        numbers = (map(index, header[key]) for key in keys)
        shards = [
            (floor - base, head - base, start + base, (origin, first - base, stride))
            for _, base, floor, head, start, origin, first, stride in zip(
                range(header["writers"]), *numbers, strict=True
            )
        ]
    except (KeyError, TypeError, ValueError, LayoutError) as error:
        raise CheckpointError(
            f"cannot load rows: unknown header {str(header)[:200]} (expected one that this version "
            "saves). Load it with the version that saved it."
        ) from error
    if other:
        raise CheckpointError(
            f"cannot load rows: {other} (expected { {key: mine[key] for key in other} }). "
            "Load into a storage made like the one that was saved."
        )
    none = read(0, 0)
    if none.dtype is not torch.int32 or none.shape != (0, mine["words"]):
        raise CheckpointError(
            f"cannot load rows: {none.dtype} of shape {[count, *none.shape[1:]]} (expected "
            f"torch.int32 of [{count}, {mine['words']}]). Load the state as it was saved."
        )
    size = storage.max_size // storage.writers
    for floor, head, place, (origin, first, stride) in shards:
        fits = 0 <= floor <= head <= floor + size
        is_in_file = floor == head or 0 <= place + floor <= place + head <= count
        steps_fit = 0 <= first <= head < 1 << 62 - STRIDE_BITS and 0 < stride < 1 << STRIDE_BITS
        if not (fits and is_in_file and steps_fit and 0 <= origin < 1 << 62):
            raise CheckpointError(
                f"cannot load rows: rows {floor} to {head} of a shard (expected at most {size}, "
                f"of {count} in the file). Load another checkpoint."
            )
    storage.initialize(schema)
    floors, heads, places, saved = zip(*shards, strict=True)

    def read_shard(shard: int, number: int, count: int) -> Parts:
        parts: Parts = read(places[shard] + number, count).split(storage.rows.widths, 1)
        return parts

    storage.rows.replace(Window(floors, heads), read_shard, saved)


class PackedReplayCheckpointer(SharedStorageCheckpointer):
    """Saves a `PackedReplayStorage` as one file. Writers and samplers continue meanwhile."""

    def dumps(self, storage: SharedReplay, path: str | Path) -> None:
        """Save to ``path/rows.bin``; whole or not at all.

        Rows that are overwritten before they are copied are left out, the oldest first. Waits for a
        process that replaces all rows; rows that it leaves when it is killed are none.

        Raises:
            WaitTimeoutError: That process did not finish in time; names it.
        """
        lineage = storage.rows.settled_lineage()
        with replacing(Path(path) / "rows.bin") as file:
            row_bytes = sum(storage.rows.widths) * WORD

            def write(place: int, words: npt.NDArray[np.int32]) -> None:
                file.seek(place * row_bytes)
                file.write(words.data)

            header = storage.header() | save_rows(storage.rows, lineage, write)
            text = json.dumps(header).encode()
            file.seek(0, os.SEEK_END)
            file.write(text + len(text).to_bytes(_LENGTH, "little"))

    def loads(self, storage: SharedReplay, path: str | Path) -> None:
        """Load what `dumps` of this class or of a stock storage saved; replaces all rows.

        Raises:
            CheckpointError: The storage is not like the one that was saved, or the file is
                not whole; the storage keeps its rows.
        """
        path = Path(path)
        if is_stock_dump(path):
            storage.load_rows(rows_of_dump(path))
            return
        with (path / "rows.bin").open("rb") as file:
            header, end = _read_header(file, path)
            words = header["words"]

            def read(place: int, count: int) -> torch.Tensor:
                out = torch.empty(count, words, dtype=torch.int32, device="cpu")
                file.seek(place * words * WORD)
                file.readinto(out.numpy().data)
                return out

            load_rows(storage, header, end // (words * WORD), read)


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """Return the description at the end of a file, and the bytes before it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LENGTH))
    length = int.from_bytes(file.read(), "little")
    if length <= size - _LENGTH:
        file.seek(size - _LENGTH - length)
        try:
            header = json.loads(file.read(length))
        except ValueError:
            header = None
        words = header.get("words") if isinstance(header, dict) else None
        if isinstance(words, int) and words > 0:
            return header, size - _LENGTH - length
    raise CheckpointError(
        f"cannot load rows: {path / 'rows.bin'} does not end with their description (expected a "
        "whole file of this version). Load another checkpoint."
    )
