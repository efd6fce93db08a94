"""What the tensors of an item look like: keys, shapes, dtypes and batch size. Pure.

One `TensorSchema` serves the rows of a replay, the rollouts of a ring, memory budgets and
checkpoints. A schema says *what* an item is; layouts (`torchrl_unilab.shm`) say *where* its
bytes lie. Fields keep their order, and no two have one dotted name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from torchrl_unilab.errors import LayoutDtypeError, LayoutError, LayoutKeyError
from torchrl_unilab.shm.layout import check_specs, dotted

Path = tuple[str, ...]
"""A TensorDict key as a tuple."""

_Tree = tuple[dict[str, Any], tuple[int, ...]]
_RECENT = 64
"""Batch sizes whose shapes are kept."""
_REMEDY = (
    "Pass items like the first one, or give the storage an example: TorchRL's collectors first "
    "write a placeholder."
)


def leaves(data: TensorDictBase) -> dict[Path, torch.Tensor]:
    """Return key to tensor of all entries, nested ones too.

    Raises:
        LayoutDtypeError: An entry is not a tensor, or `data` is no TensorDict.
    """
    if not isinstance(data, TensorDictBase):
        raise LayoutDtypeError(
            f"cannot read tensors: {type(data).__name__} (expected a TensorDict). Convert it to "
            "one."
        )
    found: dict[Path, torch.Tensor] = {}
    _collect(data, (), found)
    return found


def _collect(data: TensorDictBase, path: Path, found: dict[Path, torch.Tensor]) -> None:
    for key, entry in data.items():
        here = (*path, key)
        if isinstance(entry, torch.Tensor):
            found[here] = entry
        elif isinstance(entry, TensorDictBase) and not is_non_tensor(entry):
            _collect(entry, here, found)
        else:
            raise LayoutDtypeError(
                f"entry {dotted(here)!r}: {type(entry).__name__} (expected a tensor). Leave it out."
            )


class TensorField(NamedTuple):
    """One tensor of an item: its key, its whole shape and its dtype."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The dotted key."""
        return dotted(self.path)


@dataclass(frozen=True)
class TensorSchema:
    """Keys, shapes and dtypes of an item's tensors, and the item's batch size.

    Attributes:
        batch_size: Batch size of one item: [] for a transition, [N, T] for a rollout.
        fields: Its tensors in order; their shapes include `batch_size`.
        inner: Key and further batch dimensions of each nested TensorDict that has more of them
            than the item, such as one of several agents.
        dims: Names of the item's batch dimensions, such as ``"time"``, of which a checkpoint has
            none, as in TorchRL; empty without names.

    Examples:
        >>> row = TensorDict({"x": torch.zeros(3), "next": {"done": torch.ones(1).bool()}}, [])
        >>> schema = TensorSchema.of(row)
        >>> schema.names
        ('x', 'next.done')
        >>> batch = schema.empty((5,))
        >>> [tuple(tensor.shape) for tensor in schema.select(batch, (5,))]
        [(5, 3), (5, 1)]
    """

    batch_size: tuple[int, ...]
    fields: tuple[TensorField, ...]
    inner: tuple[tuple[Path, tuple[int, ...]], ...] = ()
    dims: tuple[str | None, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, item: TensorDictBase, dims: Sequence[str | None] = ()) -> TensorSchema:
        """Return the schema of an item, with names of its dimensions; its values are not used.

        Raises:
            LayoutKeyError: There is no tensor, a nested TensorDict is empty, or two keys have
                one dotted name.
            LayoutDtypeError: An entry is not a tensor, or a sparse or jagged one, or `item` is no
                TensorDict.
        """
        tensors = leaves(item)
        layouts = {dotted(path): tensor.layout for path, tensor in tensors.items()}
        if odd := [name for name, layout in layouts.items() if layout != torch.strided]:
            raise LayoutDtypeError(
                f"entries {odd} of an item: {layouts[odd[0]]} (expected {torch.strided}). Convert "
                "them by to_dense(), or pad them."
            )
        fields = [TensorField(path, tuple(t.shape), t.dtype) for path, t in tensors.items()]
        names = [field.name for field in fields]
        if not names or len(set(names)) < len(names):
            raise LayoutKeyError(
                f"keys of an item: {names} (expected at least one, each dotted name once). "
                "Pass tensors; where nested and dotted keys have one name, rename one."
            )
        inner = []
        for key, entry in item.items(include_nested=True):
            if not isinstance(entry, TensorDictBase):
                continue
            if entry.is_empty():
                raise LayoutKeyError(
                    f"entry {dotted(key)!r}: an empty TensorDict (expected tensors in it). "
                    "Leave it out."
                )
            if entry.ndim > item.ndim:
                path = (key,) if isinstance(key, str) else key
                inner.append((path, tuple(entry.batch_size[item.ndim :])))
        named = tuple(dims) if any(dims) else ()
        return cls(tuple(item.batch_size), tuple(fields), tuple(inner), named)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Dotted keys of all fields, in order."""
        return tuple(field.name for field in self.fields)

    def select(
        self, data: TensorDictBase, batch_size: Sequence[int] = (), *, ignore: Iterable[Path] = ()
    ) -> list[torch.Tensor]:
        """Return the tensors of items in the order of the fields, checked.

        Args:
            data: Items of batch size [*batch_size, *self.batch_size].
            batch_size: Batch dimensions in front of an item's.
            ignore: Keys that may be there although the schema does not know them.

        Raises:
            LayoutKeyError: A key is missing or unknown.
            LayoutShapeError: A tensor has another shape.
            LayoutDtypeError: A tensor has another dtype, or an entry is not a tensor.
        """
        found = leaves(data)
        if tuple(found) != self._paths:  # another order, or other keys
            unknown = found.keys() - {*self._paths}
            missing = [path for path in self._paths if path not in found]
            if missing or unknown - {*ignore}:
                raise LayoutKeyError(
                    f"keys: missing {[*map(dotted, missing)]}, unknown "
                    f"{sorted(map(dotted, unknown))} (expected {[*self.names]}). "
                    "Pass items like the first one, or make a new storage. If only some batches "
                    "have a key, leave it out: append ExcludeTransform(key, inverse=True) to the "
                    "buffer."
                )
            found = {path: found[path] for path in self._paths}
        tensors, shapes = [*found.values()], self._shapes(tuple(batch_size))
        if [t.shape for t in tensors] != shapes or [t.dtype for t in tensors] != self._dtypes:
            check_specs(zip(self.names, shapes, self._dtypes, strict=True), tensors, _REMEDY)
        return tensors

    def _shapes(self, batch: tuple[int, ...]) -> list[torch.Size]:
        """Return the shapes of all tensors of a batch; those of recent batches are kept."""
        shapes = self._recent.get(batch)
        if shapes is None:
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            shapes = [torch.Size((*batch, *field.shape)) for field in self.fields]
            self._recent[batch] = shapes
        return shapes

    @functools.cached_property
    def _recent(self) -> dict[tuple[int, ...], list[torch.Size]]:
        return {}

    @functools.cached_property
    def _dtypes(self) -> list[torch.dtype]:
        return [field.dtype for field in self.fields]

    @functools.cached_property
    def _paths(self) -> tuple[Path, ...]:
        return tuple(field.path for field in self.fields)

    def tensordict(
        self, tensors: Sequence[torch.Tensor], batch_size: Sequence[int] = ()
    ) -> TensorDict:
        """Return tensors of one device, given in the order of the fields, as a TensorDict.

        Nothing is copied, and nothing is checked.

        Args:
            tensors: One per field, of shape [*batch_size, *field.shape].
            batch_size: Batch dimensions in front of an item's.
        """
        shape = torch.Size((*batch_size, *self.batch_size))
        names = [*[None] * len(batch_size), *self.dims] if self.dims else None
        return _nested(self._tree, tensors, shape, tensors[0].device, names)

    @functools.cached_property
    def _tree(self) -> _Tree:
        """Name to a field's index or to a subtree, and the inner batch size of the whole."""
        inner = dict(self.inner)
        tree: _Tree = {}, ()
        for index, path in enumerate(self._paths):
            node, _ = tree
            for depth, part in enumerate(path[:-1]):
                node, _ = node.setdefault(part, ({}, inner.get(path[: depth + 1], ())))
            node[path[-1]] = index
        return tree

    def empty(
        self, batch_size: Sequence[int] = (), device: torch.device | str = "cpu"
    ) -> TensorDict:
        """Allocate items of batch size [*batch_size, *self.batch_size], not initialised."""
        tensors = [
            torch.empty((*batch_size, *shape), dtype=dtype, device=device)
            for _, shape, dtype in self.fields
        ]
        return self.tensordict(tensors, batch_size)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` makes the schema from: lists, integers and strings."""
        fields = [[[*path], [*shape], str(dtype)] for path, shape, dtype in self.fields]
        saved = {"batch_size": [*self.batch_size], "fields": fields}
        inner = [[[*path], [*shape]] for path, shape in self.inner]
        return saved | ({"inner": inner} if inner else {})

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TensorSchema:
        """Return the schema that was saved.

        Raises:
            LayoutError: `saved` is not what `to_json` returns.
        """
        try:
            fields = tuple(
                TensorField(tuple(map(str, path)), tuple(map(int, shape)), _dtypes()[dtype])
                for path, shape, dtype in saved["fields"]
            )
            inner = tuple(
                (tuple(map(str, path)), tuple(map(int, shape)))
                for path, shape in saved.get("inner", ())
            )
            return cls(tuple(map(int, saved["batch_size"])), fields, inner)
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(
                f"saved schema: {error!r} (expected the result of `to_json`). Load another file."
            ) from error


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _nested(
    tree: _Tree,
    tensors: Sequence[torch.Tensor],
    batch: torch.Size,
    device: torch.device,
    names: list[str | None] | None,
) -> TensorDict:
    nodes, inner = tree
    source = {
        key: tensors[entry]
        if isinstance(entry, int)
        else _nested(entry, tensors, batch, device, names)
        for key, entry in nodes.items()
    }
    # The checks of the public constructor take longer than the gather of a small batch.
    shape = torch.Size((*batch, *inner)) if inner else batch
    dims = [*names, *[None] * len(inner)] if names else None
    return TensorDict._new_unsafe(source=source, batch_size=shape, device=device, names=dims)
