"""`UniLabShmTransport`: weights through snapshot cells in shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_unilab.errors import LayoutKeyError
from torchrl_unilab.shm import SnapshotCell
from torchrl_unilab.shm.layout import dotted
from torchrl_unilab.shm.seqlock import DEFAULT_SLOTS
from torchrl_unilab.weight_update.module_tensors import ModuleTensors

__all__ = ["UniLabShmTransport", "Weights", "named_tensors", "nested"]

Weights: TypeAlias = TensorDictBase | nn.Module | Mapping[str, Any]


def named_tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, TensorDict or (nested) state dict by dotted key.

    Raises:
        ValueError: `weights` is something else.
        LayoutKeyError: Two entries have the same dotted key.
    """
    if isinstance(weights, nn.Module):
        return ModuleTensors(weights).as_dict()
    if isinstance(weights, dict):
        weights = TensorDict(weights)
    if not isinstance(weights, TensorDictBase):
        raise ValueError(
            f"cannot publish weights: {type(weights).__name__} (expected a module, a "
            "TensorDict or a state dict). Convert it first."
        )
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in weights.items(include_nested=True, leaves_only=True):
        name = dotted(key)
        if name in tensors:
            raise LayoutKeyError(
                f"cannot publish weights: key {name!r} comes twice (expected once). "
                "Leave out either the nested or the dotted entry."
            )
        tensors[name] = tensor
    return tensors


class UniLabShmTransport:
    """Moves weights from one sender to the receivers through shared snapshot cells.

    Receivers with equal weights share one cell, so a publish costs the same for any
    number of them. Sending writes a cell and returns; it knows nothing of the receivers.

    Args:
        initial: For each worker index, its initial weights. Workers that are given the
            same object share one cell.
        slots: How many snapshots rotate in each cell, at least 2.

    Raises:
        SegmentSpaceError: The cells do not fit shared memory.

    Example:
        >>> weights = TensorDict(w=torch.zeros(2))
        >>> transport = UniLabShmTransport({0: weights, 1: weights})
        >>> transport.send_weights(TensorDict(w=torch.ones(2)))
        >>> transport.version
        1
        >>> transport.close()
    """

    def __init__(self, initial: Mapping[int, Weights], *, slots: int = DEFAULT_SLOTS) -> None:
        readers = max(initial, default=-1) + 1
        by_source: dict[int, SnapshotCell] = {}
        self.cells: dict[int, SnapshotCell] = {}
        for worker, weights in initial.items():
            if id(weights) not in by_source:
                by_source[id(weights)] = SnapshotCell(
                    named_tensors(weights), slots=slots, readers=readers
                )
            self.cells[worker] = by_source[id(weights)]
        self.unique_cells = list(by_source.values())

    @property
    def version(self) -> int:
        """The newest version of any cell; 0 is the initial weights."""
        return max(cell.version for cell in self.unique_cells)

    def cell(self, worker: int) -> SnapshotCell:
        """Return the cell of a worker.

        Raises:
            ValueError: The worker is not registered.
        """
        try:
            return self.cells[worker]
        except KeyError:
            raise ValueError(
                f"Worker {worker} not registered (expected one of {sorted(self.cells)}). "
                "Check worker_ids."
            ) from None

    def send_ordered(self, tensors: Sequence[torch.Tensor], cells: Sequence[SnapshotCell]) -> None:
        """Publish tensors that are in the cells' order: the path without look-ups."""
        for cell in cells:
            cell.layout.check(tensors)
        for cell in cells:
            cell.publish_ordered(tensors)

    def send_weights(self, weights: Weights, worker_ids: int | Sequence[int] | None = None) -> None:
        """Publish `weights` to the cells of `worker_ids` (all if not given).

        Raises:
            ValueError: A worker is not registered.
            LayoutError: Keys, shapes or dtypes differ; nothing was written anywhere.
        """
        cells = self.select(worker_ids)
        tensors = named_tensors(weights)
        ordered = [cell.layout.select(tensors) for cell in cells]
        for cell, values in zip(cells, ordered, strict=True):
            cell.publish_ordered(values)

    def select(self, worker_ids: int | Sequence[int] | None) -> list[SnapshotCell]:
        """Return the distinct cells of `worker_ids`, all if not given."""
        if worker_ids is None:
            return self.unique_cells
        ids = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        return list({id(cell): cell for cell in map(self.cell, ids)}.values())

    def setup_connection_and_weights_on_sender(self) -> None:
        """Do nothing: cells travel with the scheme and hold the initial weights."""

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> TensorDictBase:
        """Return the newest published weights of `worker_idx`, copied out."""
        return nested(self.cell(worker_idx).read()[1])

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> TensorDictBase:
        """Return the newest published weights of the first cell, applied to `model` if given."""
        received = nested(self.unique_cells[0].read()[1])
        if model is not None and strategy is not None:
            strategy.apply_weights(model, received)
        return received

    def close(self) -> None:
        """Give up the cells; their creator frees them. Idempotent."""
        for cell in self.unique_cells:
            cell.close()


def nested(tensors: Mapping[str, torch.Tensor]) -> TensorDictBase:
    """Return tensors by dotted key as a nested TensorDict."""
    return TensorDict(dict(tensors)).unflatten_keys(".")
