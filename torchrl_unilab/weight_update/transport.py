"""`UniLabShmTransport`: weights through snapshot cells in shared memory.

Workers with equal weights share one cell, so a publish costs the same for any number of them, and
the transport knows nothing of its readers. Weights are checked before a byte is written. The scheme
publishes through it; programs without collectors use it directly.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import nn

from torchrl_unilab.checks import as_indices, as_integer
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.owner import Owner
from torchrl_unilab.shm import BlockLayout, SnapshotCell
from torchrl_unilab.shm.seqlock import DEFAULT_SLOTS
from torchrl_unilab.weight_update.module_weights import (
    ModuleWeights,
    Weights,
    check_tied,
    is_expanded,
    named_tensors,
    nested,
    tied_names,
)
from torchrl_unilab.weight_update.packing import DevicePacker

WorkerIds = int | Sequence[int] | None
"""One worker, or several; None: all."""
ParamShapes: TypeAlias = Mapping[str, Sequence[int] | torch.Tensor] | Weights
"""Shapes of weights, or tensors of such shapes, by dotted key; or weights."""


class UniLabShmTransport(Owner):
    """Moves weights from one sender to the receivers through shared snapshot cells.

    TorchRL's schemes use `send_weights` and `receive_weights`. A program without collectors, also
    in an unrelated process, uses `create`, `attach`, `write_weights` and `read_weights_into`.

    Args:
        initial: For each worker index, its initial weights. Workers that are given the
            same object share one cell. What a module keeps out of its state dict, later weights may
            lack: it stays as it was published last.
        slots: How many snapshots rotate in each cell, at least 2.
        name: Name to attach by, if there is one set of weights; anonymous if not given.
        casts: Convert floating-point weights to the dtypes of a worker's initial weights,
            for workers that were given other dtypes.
        first_version: Version of the initial weights.

    Attributes:
        cells: Worker index to its cell.
        unique_cells: Each cell once.

    Raises:
        SegmentSpaceError: The cells do not fit shared memory.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.weight_update import UniLabShmTransport
        >>> weights = TensorDict(w=torch.zeros(2))
        >>> transport = UniLabShmTransport({0: weights, 1: weights})
        >>> transport.send_weights(TensorDict(w=torch.ones(2)))
        1
        >>> transport.close()
    """

    def __init__(
        self,
        initial: Mapping[int, Weights],
        *,
        slots: int = DEFAULT_SLOTS,
        name: str | None = None,
        casts: bool = False,
        first_version: int = 0,
    ) -> None:
        settings: dict[str, Any] = {"slots": slots, "name": name, "first_version": first_version}
        as_indices("a worker of the initial weights", initial)
        as_integer("workers with initial weights", len(initial), "Pass those of worker 0.")
        sources = {id(weights): named_tensors(weights) for weights in initial.values()}
        for tensors in sources.values():
            if meta := [key for key, tensor in tensors.items() if tensor.is_meta]:
                raise ConfigError(
                    f"initial weights {meta}: on the meta device (expected values). Initialise "
                    "the policy, or also pass a policy_factory that returns an initialised one."
                )
        cells = {
            source: SnapshotCell(tensors, readers=max(initial) + 1, **settings)
            for source, tensors in sources.items()
        }
        workers = {worker: cells[id(weights)] for worker, weights in initial.items()}
        first = next(iter(initial.values()))
        optional = ModuleWeights(first).optional if isinstance(first, nn.Module) else frozenset()
        self._setup(workers, casts, optional)

    def _setup(self, cells: dict[int, SnapshotCell], casts: bool, optional: frozenset[str]) -> None:
        self.cells = cells
        self.unique_cells = list(dict.fromkeys(cells.values()))
        self._casts = casts
        self._optional = optional
        self._packers: dict[tuple[SnapshotCell, torch.device, int], DevicePacker] = {}
        self._known: dict[int, ModuleWeights] = {}  # of the last two modules published, by id

    @classmethod
    def create(
        cls, param_shapes: ParamShapes, *, name: str | None = None, slots: int = DEFAULT_SLOTS
    ) -> UniLabShmTransport:
        """Create one cell for float32 zeros of the given shapes, or for the given tensors.

        Args:
            param_shapes: Dotted key to shape, or to a tensor for other dtypes and values; or a
                module or TensorDict, for its own.
            name: Name to attach by from an unrelated process; anonymous if not given.
            slots: How many snapshots rotate, at least 2.
        """
        return cls({0: _initial(param_shapes)}, name=name, slots=slots)

    @classmethod
    def from_state_dict(cls, state_dict: Weights, **kwargs: Any) -> UniLabShmTransport:
        """Create one cell that holds `state_dict` as version 1; keywords as for `create`.

        Version 0 is for a cell without weights yet, so readers may wait for ``version > 0``.
        """
        return cls({0: named_tensors(state_dict)}, first_version=1, **kwargs)

    @classmethod
    def attach(cls, name: str, param_shapes: ParamShapes) -> UniLabShmTransport:
        """Attach the cell that an unrelated process created under `name`.

        Raises:
            SegmentError: There is no segment of that name.
            LayoutError: The cell holds other keys, shapes or dtypes.
        """
        transport = cls.__new__(cls)
        cell = SnapshotCell.attach(name, BlockLayout.of(_initial(param_shapes)))
        transport._setup({0: cell}, casts=False, optional=frozenset())
        return transport

    @property
    def name(self) -> str | None:
        """The name to attach by, or None if anonymous."""
        return self.unique_cells[0].name

    @property
    def version(self) -> int:
        """The newest version of any cell; each publish raises it, whichever cells it is for."""
        return max(cell.version for cell in self.unique_cells)

    # Sender

    def write_weights(self, state_dict: Weights) -> int:
        """Publish `state_dict` to every worker and return its version. Raises as `send_weights`."""
        return self.send_weights(state_dict)

    def send_weights(
        self, weights: Weights, worker_ids: WorkerIds = None, *, version: int = 0
    ) -> int:
        """Publish weights to the cells of `worker_ids`; fastest a module's, again and again.

        Args:
            weights: A module, TensorDict or state dict.
            worker_ids: Whose cells; all if not given.
            version: Lower bound of the new version, which is above the newest in any case.

        Returns:
            The new version; where another thread publishes too, the highest of these cells'.

        Raises:
            ConfigError: A worker is not registered.
            LayoutError: Keys, shapes or dtypes differ; nothing was written anywhere.
        """
        cells = self.unique_cells if worker_ids is None else self.select(worker_ids)
        if isinstance(weights, nn.Module):
            known = self._known.get(id(weights))
            tensors = None if known is None else known.tensors()
            if known is None or tensors is None:
                if len(self._known) == 2:
                    self._known.clear()
                known = self._known[id(weights)] = ModuleWeights(weights)
                tensors = known.tensors() or []
            keys = known.keys
            if known.is_stateful:  # the order of its keys may have changed
                extra = known.extra_state()
                keys, tensors = (*known.names, *extra), [*tensors, *extra.values()]
            fits = not self._casts and all(cell.layout.keys == keys for cell in cells)
            if cells and fits and all(tensor.is_cpu for tensor in tensors):
                if len(self.unique_cells) > 1:
                    for cell in cells:
                        cell.layout.check(tensors)
                    version = max(version, self.version + 1)
                for cell in cells:
                    version = cell.publish(tensors, version=version)
                return version
            detached = (tensor.detach() for tensor in tensors)
            weights = dict(zip(keys, detached, strict=True))
        return self.send_each(dict.fromkeys(cells, weights), version=version)

    def send_each(self, weights: Mapping[SnapshotCell, Weights], *, version: int = 0) -> int:
        """Publish to each cell its weights, all checked before any is written; return the version.

        Where another thread publishes too, it is the highest of these cells'.
        """
        ordered = {cell: self._ordered(cell, named_tensors(w)) for cell, w in weights.items()}
        version = max(version, self.version + 1)
        published = [cell.publish(tensors, version=version) for cell, tensors in ordered.items()]
        return max(published, default=self.version)

    def _ordered(
        self, cell: SnapshotCell, tensors: dict[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Bring named tensors into a cell's order, checked, on the host."""
        if absent := self._optional - tensors.keys():
            _, last = cell.newest()
            tensors = tensors | {key: last[key] for key in absent}
        if self._casts:
            for field in cell.layout.fields:
                tensor = tensors.get(field.key)
                if tensor is not None and field.dtype.is_floating_point:
                    tensors[field.key] = tensor.to(field.dtype)
        if sparse := [key for key, tensor in tensors.items() if tensor.layout is not torch.strided]:
            raise ConfigError(f"weights {sparse}: sparse (expected dense ones). Call to_dense().")
        return self._to_host(cell, cell.layout.select(tensors))

    def _to_host(
        self, cell: SnapshotCell, tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return tensors, given in a cell's order, on the host, by one transfer if necessary."""
        device = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        if device is None:
            return tensors
        if device.type == "meta":
            raise ConfigError("weights: on the meta device (expected values). Initialise them.")
        key = cell, device, threading.get_ident()  # a thread's host copy stays until it publishes
        if key not in self._packers:
            self._packers[key] = DevicePacker(cell.layout, device)
        return self._packers[key].to_host(tensors)

    # Receivers

    def read_weights_into(self, state_dict: TensorDictBase | nn.Module | dict[str, Any]) -> int:
        """Copy the newest weights into the tensors of `state_dict`, in place.

        Returns:
            The version of what was read.

        Raises:
            LayoutError: Keys, shapes or dtypes differ, or values of tensors that `state_dict` ties;
                nothing was written.
            ContentionError: Overtaken on every bounded try; nothing was written.
            ConfigError: The state dict holds plain numbers of extra state, or tensors without their
                own memory, neither of which can be written to.
        """
        module = ModuleWeights(state_dict) if isinstance(state_dict, nn.Module) else None
        named = named_tensors(state_dict) if module is None else module.named()
        expanded = [k for k, tensor in named.items() if is_expanded(tensor) or tensor.is_meta]
        if expanded or _is_stacked(state_dict):
            raise ConfigError(
                f"cannot read weights: {expanded or 'stacked lazily'}, without memory of their own "
                "(expected tensors that can be written). Call contiguous() first."
            )
        targets = self.unique_cells[0].layout.select(named)
        version, weights = self.newest(0)
        numbers = [key for key in weights if "#" in key]
        if numbers and module is None:
            raise ConfigError(
                f"cannot read weights: {numbers} are no tensors of the state dict (expected a "
                "module, whose extra state they are). Read into the module."
            )
        check_tied(tied_names(named), weights)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, list(weights.values()))
        if module is not None:
            module.set_extra_state(weights)
        return version

    def newest(self, worker: int) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the newest version of a worker's weights and a copy of them by dotted key."""
        return self.cell(worker).newest()

    def cell(self, worker: int) -> SnapshotCell:
        """Return the cell of a worker.

        Raises:
            ConfigError: The worker is not registered.
        """
        try:
            return self.cells[worker]
        except KeyError:
            raise ConfigError(
                f"Worker {worker} not registered (expected one of {sorted(self.cells)}). "
                "Check worker_ids."
            ) from None

    def select(self, worker_ids: int | Sequence[int]) -> list[SnapshotCell]:
        """Return the distinct cells of `worker_ids`. Raises as `cell`."""
        return list(dict.fromkeys(map(self.cell, as_indices("worker_ids", worker_ids))))

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> TensorDictBase:
        """Return the first worker's newest weights, applied to `model` if given. Never waits."""
        received = nested(self.newest(min(self.cells))[1])
        if model is not None and strategy is not None:
            strategy.apply_weights(model, received)
        return received

    # Lifetime

    def close(self) -> None:
        """Close the cells; their creator frees them. Idempotent."""
        for cell in self.unique_cells:
            cell.close()

    cleanup = close

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_packers": {}, "_known": {}}


def _is_stacked(weights: Any) -> bool:
    """Return whether weights hold a lazy stack, which makes new tensors at each access."""
    if isinstance(weights, LazyStackedTensorDict):
        return True
    parts = weights.values() if isinstance(weights, (dict, TensorDictBase)) else ()
    return any(map(_is_stacked, parts))


def _is_length(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _initial(param_shapes: ParamShapes) -> dict[str, torch.Tensor]:
    if isinstance(param_shapes, TensorDictBase) or not isinstance(param_shapes, Mapping):
        return named_tensors(param_shapes)
    initial = {}
    for key, value in param_shapes.items():
        if isinstance(value, torch.Tensor):
            initial[key] = value
        elif isinstance(value, Sequence) and all(map(_is_length, value)):
            zero = torch.zeros((), dtype=torch.float32, device="cpu")
            initial[key] = zero.expand([*map(int, value)])  # no memory, which may not be there
        else:
            raise ConfigError(
                f"initial weights: {key!r} is {value!r} (expected a shape or a tensor). Pass one "
                "of these for it."
            )
    return initial
