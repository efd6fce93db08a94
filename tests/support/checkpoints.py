"""What is in a checkpoint, and whether it is what is in another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrl.checkpoint import Checkpoint

Leaves = dict[str, Any]


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
