"""Tensors of rows into shared rows: natively where they lie as hoped, else by torch.

The native half, ``_rows.c``, is built where a C compiler is found when the package is
installed; `native_rows` says whether it is there. It takes rows that need no second look, and
leaves all others, and every error, to Python.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from torchrl_unilab.shm.row_layout import WORD, RowLayout

try:
    from torchrl_unilab.shm import _rows as _native
except ImportError:  # no compiler when the package was installed
    _native = None  # type: ignore[assignment]

__all__ = ["FoundRows", "RowCopy", "RowFinder", "is_run", "native_rows"]

_PLACES = 512  # of a block, whose views are kept if there are no more
_MOST_FIELDS = 256  # of a row that `_rows.c` takes

Tree = tuple[tuple[str, ...], tuple[Any, ...]]
FoundRows = tuple[tuple[torch.Tensor, ...], bytes]
"""The tensors of rows, and their addresses while those live."""

_ATTRIBUTES = ("_tensordict", "shape", "dtype", "is_cpu", "is_contiguous", "is_neg", "data_ptr")


def native_rows() -> bool:
    """Return whether rows are copied natively."""
    return _native is not None


def _tree(keys: Sequence[tuple[str, ...]]) -> Tree:
    """Names of entries, and for each the tree below it, or None for a tensor."""
    below: dict[str, list[tuple[str, ...]]] = {}
    for key in keys:
        below.setdefault(key[0], []).append(key[1:])
    return tuple(below), tuple(_tree(rest) if rest[0] else None for rest in below.values())


class RowFinder:
    """Finds the tensors of rows that can be copied as they lie.

    Args:
        kind: The class of dictionaries that rows come in; it keeps its entries in a dict
            ``_tensordict``, as TensorDict does.
        fields: Key path, shape without the row dimension, and dtype of each field.
        finite: Key paths of those that must be finite, of the floating-point ones.
    """

    def __init__(
        self,
        kind: type,
        fields: Sequence[tuple[tuple[str, ...], tuple[int, ...], torch.dtype]],
        finite: Sequence[tuple[str, ...]],
    ) -> None:
        self._classes = (torch.Tensor, kind)
        self._tree = _tree([key for key, _, _ in fields])
        self._dtypes = tuple(dtype for _, _, dtype in fields)
        self._shapes = [shape for _, shape, _ in fields]
        self._checked = [key in finite and dtype.is_floating_point for key, _, dtype in fields]
        checked = [dtype for key, _, dtype in fields if key in finite]
        self._able = (
            _native is not None
            and len(fields) <= _MOST_FIELDS
            and _in_order(self._tree) == [key for key, _, _ in fields]
            and not any(dtype.is_complex for dtype in self._dtypes)  # may be lazily conjugated
            and all(
                dtype in (torch.float32, torch.float64) or not dtype.is_floating_point
                for dtype in checked
            )
        )
        self._expected: tuple[int, tuple[torch.Size, ...], bytes] = (-1, (), b"")

    def find(self, rows: object, count: int) -> FoundRows | None:
        """Return the tensors of `count` rows, or None if Python must look at them.

        They are given if there is one of each field's shape and dtype and nothing else, on the
        CPU, contiguous, and finite where they must be.
        """
        if not self._able:
            return None
        if self._expected[0] != count:
            self._expected = self._expect(count)
        _, shapes, checks = self._expected
        return _native.find(
            self._classes, _ATTRIBUTES, self._tree, shapes, self._dtypes, checks, rows
        )

    def _expect(self, count: int) -> tuple[int, tuple[torch.Size, ...], bytes]:
        """Shapes of `count` rows, and how many elements of how many bytes to look at."""
        shapes = tuple(torch.Size((count, *shape)) for shape in self._shapes)
        checks = (
            struct.pack("=qq", shape.numel() if checked else 0, dtype.itemsize)
            for shape, dtype, checked in zip(shapes, self._dtypes, self._checked, strict=True)
        )
        return count, shapes, b"".join(checks)


def _in_order(tree: Tree, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys: list[tuple[str, ...]] = []
    for name, child in zip(*tree, strict=True):
        here = (*path, name)
        keys += [here] if child is None else _in_order(child, here)
    return keys


class RowCopy:
    """Copies tensors of so many rows to their places in a block of rows.

    Args:
        layout: A row, without packed flags.
        block: The rows, int32 [capacity, words].
        keys: Fields of the layout, in the order in which their tensors will come.

    Example:
        >>> layout = RowLayout.of([], [("x", (), torch.float32), ("y", (), torch.float32)])
        >>> block = torch.zeros(4, 2, dtype=torch.int32)
        >>> RowCopy(layout, block, ["x", "y"]).put([torch.ones(2), torch.full((2,), 3.0)], 3)
        >>> block.view(torch.float32).tolist()
        [[1.0, 3.0], [0.0, 0.0], [0.0, 0.0], [1.0, 3.0]]
    """

    def __init__(self, layout: RowLayout, block: torch.Tensor, keys: Sequence[str]) -> None:
        views = layout.views(block)
        fields = {field.key: field for field in layout.fields}
        self._block, self._capacity = block, len(block)
        self._columns = [views[key] for key in keys]
        self._places: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._row_bytes = layout.words * WORD
        in_row = sorted((fields[key].offset, i, key) for i, key in enumerate(keys))
        self._spec = b"".join(
            struct.pack("=qqq", offset, fields[key].numel * fields[key].dtype.itemsize, i)
            for offset, i, key in in_row
        )

    def put(self, tensors: Sequence[torch.Tensor], at: int) -> None:
        """Copy tensors to rows from a position on, in a circle.

        Args:
            tensors: One [n, ...] for each key, of the field's shape and dtype, on the CPU; `n`
                is at most the number of rows.
            at: Position of the first row.
        """
        count = tensors[0].shape[0]
        first = min(count, self._capacity - at)
        with torch.no_grad():
            torch._foreach_copy_(self._place(at, first), [tensor[:first] for tensor in tensors])
            if first < count:
                rest = [tensor[first:] for tensor in tensors]
                torch._foreach_copy_(self._place(0, count - first), rest)

    def put_found(self, found: FoundRows, count: int, at: int) -> None:
        """The same for `count` rows that a `RowFinder` for these keys found."""
        _native.put(
            self._spec,
            self._block.data_ptr(),
            self._row_bytes,
            self._capacity,
            at,
            count,
            found[1],
        )

    def _place(self, at: int, count: int) -> list[torch.Tensor]:
        """Views of the rows, kept where rows come in few places."""
        place = self._places.get((at, count))
        if place is None:
            place = [column[at : at + count] for column in self._columns]
            if self._capacity <= _PLACES * count:
                if len(self._places) >= _PLACES:
                    self._places.clear()
                self._places[at, count] = place
        return place


def is_run(positions: torch.Tensor, first: int, capacity: int) -> bool:
    """Return whether int64 positions [n] count up from `first`, in a circle of `capacity`."""
    count = positions.numel()
    if _native is not None and positions.is_cpu and positions.is_contiguous():
        return _native.is_run(positions.data_ptr(), count, first, capacity)
    if int(positions[0]) != first:
        return False
    run = torch.arange(first, first + count)
    if first + count > capacity:
        run.remainder_(capacity)
    return torch.equal(positions, run)
