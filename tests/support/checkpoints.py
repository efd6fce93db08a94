"""What is in a checkpoint, and whether it is what is in another one."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData
from torchrl.checkpoint import Checkpoint

Leaves = dict[str, Any]


def by_file(saved: Any, loaded: Any, path: Path) -> None:
    saved.dumps(path)
    loaded.loads(path)


def by_state(saved: Any, loaded: Any, path: Path) -> None:
    loaded.load_state_dict(saved.state_dict())


BOTH_WAYS = pytest.mark.parametrize("load", [by_file, by_state])


class LeavesAMark:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def plant_code(saved: Path, mark: Path) -> None:
    """Add an entry to a saved TensorDict that runs code where it is unpickled."""
    NonTensorData("harmless").memmap(saved / "evil")
    (saved / "evil" / "other.pickle").write_bytes(pickle.dumps(LeavesAMark(mark)))
    entries = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").unlink()  # where it is a hard link, the other stays
    (saved / "meta.json").write_text(json.dumps({**entries, "evil": {"type": "NonTensorData"}}))


class _Taker:
    """Takes what a component is given."""

    def __init__(self) -> None:
        self.state: Mapping[str, Any] = {}

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.state = state_dict


def contents(path: Path) -> Leaves:
    """Dotted name to what a checkpoint holds there; the rows of a replay as bytes."""
    leaves: Leaves = {}
    for name, record in Checkpoint.manifest(path)["components"].items():
        rows = path / record["path"] / "rows.bin"
        if rows.exists():
            leaves[name] = rows.read_bytes()
            continue
        taker = _Taker()
        Checkpoint(**{name: taker}).load(path, components=[name])
        leaves.update(_leaves(name, taker.state))
    return leaves


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(f"{name}.{number}", item)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        array = np.asarray(value)
        yield name, (array.dtype.str, array.shape, array.tobytes())
    else:
        yield name, repr(value)


def differences(one: Leaves, other: Leaves) -> list[str]:
    """The names under which there is not the same, bit by bit."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def tree(directory: Path) -> dict[str, tuple[bytes, int]]:
    """All files below a directory, hidden ones too, and when they were written."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
