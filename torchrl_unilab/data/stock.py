"""Compatibility with TorchRL's own ("stock") storages: their arguments, checkpoints and writers.

Nothing that is read here can execute code: a checkpoint with a pickle in it is refused.
Storages, their checkpointers and collectors call it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer, RoundRobinWriter, TensorDictMaxValueWriter, Writer
from torchrl.data.replay_buffers.storages import Storage

from torchrl_unilab.checks import as_choice
from torchrl_unilab.data.positions import is_single
from torchrl_unilab.errors import CheckpointError

STORAGE_ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "device": ((None, "cpu"), "Move what is sampled with a transform, or a replay pipeline"),
    "ndim": ((1,), "Flatten what you extend by"),
    "compilable": ((False,), "Leave it out: the storage is shared between processes"),
    "consolidated": ((False, True), ""),
    "shared_init": ((False, True), ""),
    "cleanup_memmap": ((True,), "Leave it out: there is no file to keep"),
    "scratch_dir": ((None,), "Leave it out, and save with dumps()"),
    "existsok": ((False, True), ""),
    "auto_cleanup": ((None, True), "Leave it out: the kernel frees shared memory"),
}
"""Arguments of TorchRL's storages: the values that shared rows accept, and what to do instead."""


def check_stock_arguments(
    owner: str, given: Mapping[str, Any], honoured: Mapping[str, tuple[tuple[Any, ...], str]]
) -> None:
    """Refuse arguments of TorchRL's that cannot be honoured.

    Args:
        owner: Name of the class.
        given: Arguments by name.
        honoured: For each argument, the values that are accepted, and what to do instead of others.

    Raises:
        ConfigError: A value cannot be honoured.
        TypeError: An argument is unknown.
    """
    for name, value in given.items():
        if name not in honoured:
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}")
        values, remedy = honoured[name]
        plain = str(value) if isinstance(value, torch.device) else value
        as_choice(f"{owner} {name}", plain, values, f"{remedy}.")


_METADATA = "storage_metadata.json"
"""The file that marks a dump of a stock storage."""


def is_stock_dump(path: Path) -> bool:
    """Return whether a stock storage's ``dumps`` was the last to save to a folder."""
    return (path / _METADATA).is_file()


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Write a file in place of what its folder had saved, a stock dump too; whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.part")
    with draft.open("wb") as written:
        yield written
        written.flush()
        os.fsync(written.fileno())
    (file.parent / _METADATA).unlink(missing_ok=True)
    draft.replace(file)


def rows_of_dump(path: Path) -> TensorDictBase:
    """Return the rows [n] that a stock storage's ``dumps`` saved, memory-mapped.

    Raises:
        CheckpointError: The dump holds other things than tensors in a TensorDict, or too few rows.
    """
    saved = json.loads((path / _METADATA).read_text())
    if saved["is_pytree"]:
        raise _no_rows(str(path), "plain tensors")
    try:
        rows: TensorDictBase = TensorDict.load_memmap(path, allow_pickle=False)
    except RuntimeError as error:
        raise _no_rows(str(path), f"more than tensors: {error}") from error
    return _written(rows, saved["len"])


def rows_of_state_dict(state_dict: Mapping[str, Any]) -> TensorDictBase:
    """Return the rows [n] of a stock storage's ``state_dict``.

    Raises:
        CheckpointError: The state holds other things than tensors in a TensorDict, or too few
            rows, or is of another class.
    """
    if "_storage" not in state_dict:
        raise _no_rows("state dict", f"{sorted(state_dict)}")
    if isinstance(state_dict["_storage"], torch.Tensor):
        raise _no_rows("state dict", "plain tensors")
    if not state_dict["_len"]:
        return TensorDict(batch_size=[0])
    rows = TensorDict().load_state_dict(state_dict["_storage"], strict=False)
    if not rows.batch_dims:  # a file may lose what the state dict knows beside its keys
        rows.auto_batch_size_(1)
    return _written(rows, state_dict["_len"])


def _written(rows: TensorDictBase, length: int) -> TensorDictBase:
    if length > len(rows):  # all elements of a storage of several dimensions
        raise CheckpointError(
            f"cannot load rows: the checkpoint counts {length} rows and holds {len(rows)} "
            "(expected a storage of ndim=1). Load it where it was saved, and extend this storage "
            "with what you read there."
        )
    return rows[:length]


def _no_rows(what: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"cannot load rows from {what}: {found} (expected tensors of a PackedReplayStorage, or of "
        "a stock storage of TensorDicts). Load it where it was saved, and extend this storage "
        "by what you read there."
    )


def writers_ahead(storage: Storage, cursor: Any, head: int) -> list[RoundRobinWriter]:
    """Return the stock writers whose own cursor is past rows at `cursor` that are not written yet.

    They move their cursor before they write.

    Args:
        storage: Their storage.
        cursor: The index that is being written.
        head: Rows ever written to the storage.
    """
    single = is_single(cursor)
    if not single and not (isinstance(cursor, torch.Tensor) and len(cursor)):
        return []  # no stock writer passes such an index
    after = (int(cursor if single else cursor[-1]) + 1) % storage.max_size
    writers = _writers_of(storage, RoundRobinWriter)
    return [each for each in writers if each._cursor == after != head % storage.max_size]


def set_back_writers(storage: Storage, cursor: Any, head: int) -> None:
    """After a failed write, move stock writers' cursors back, and drop ranks of unwritten rows.

    The arguments are those of `writers_ahead`.
    """
    for writer in writers_ahead(storage, cursor, head):
        writer._cursor = head % storage.max_size
        writer._write_count -= 1 if is_single(cursor) else len(cursor)
    for writer in _writers_of(storage, TensorDictMaxValueWriter):
        there = sorted(pair for pair in writer._current_top_values if pair[1] < len(storage))
        writer._write_count -= len(writer._current_top_values) - len(there)
        writer._current_top_values[:] = there
        writer._cursor = len(storage) % storage.max_size


def _writers_of(storage: Storage, kind: type[Writer]) -> list[Any]:
    writers = [b.writer for b in storage._attached_entities if isinstance(b, ReplayBuffer)]
    return [writer for writer in writers if isinstance(writer, kind)]
