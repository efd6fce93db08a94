"""How the fields of one record lie in a row of 32-bit words. Pure arithmetic.

A part of many rows is an int32 tensor of shape [rows, width]: whatever dtypes a record mixes,
one gather of rows moves the whole part. Each field lies at an aligned offset, so it is a strided
view of the part in its own dtype. `data.replay` lays out its rows with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from torchrl_unilab.shm.layout import align

WORD = 4
"""Bytes of a word."""
NARROW = 8
"""Bytes of the largest field in the narrow part."""

_Pieces = tuple[int, torch.dtype, list[int], list[tuple[int, int, tuple[int, ...]]]]
"""Part, dtype, how many of its items each piece has; the field, the piece and the shape of each."""


@dataclass(frozen=True)
class RowField:
    """One field of a row.

    Attributes:
        shape: Its shape in one row.
        dtype: Its dtype.
        part: Which part of the row it lies in.
        offset: Bytes from the start of the part, a multiple of an item.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row, in a wide part and a narrow one.

    Fields of at most 8 bytes (flags, rewards, numbers of trajectories) lie in the narrow part:
    samplers that read one such field of all rows touch few cache lines. In each part large items
    lie first, so nothing but the end is padded.

    Attributes:
        fields: All fields, in the order in which they were given.
        widths: 32-bit words of each part.

    Examples:
        >>> layout = RowLayout.of([((), torch.bool), ((3,), torch.float32)])
        >>> layout.widths, [(field.part, field.offset) for field in layout.fields]
        ((3, 1), [(1, 0), (0, 0)])
    """

    fields: tuple[RowField, ...]
    widths: tuple[int, ...]

    @classmethod
    def of(cls, specs: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> RowLayout:
        """Lay out fields, each given by its shape and dtype."""
        fields = [RowField(shape, dtype, 0, 0) for shape, dtype in specs]
        narrow = [i for i, field in enumerate(fields) if field.nbytes <= NARROW]
        wide = [i for i, field in enumerate(fields) if field.nbytes > NARROW]
        widths: list[int] = []
        for group in filter(None, (wide, narrow)):
            end = 0
            for i in sorted(group, key=lambda i: -fields[i].dtype.itemsize):
                fields[i] = replace(fields[i], part=len(widths), offset=end)
                end += fields[i].nbytes
            unit = max([WORD, *(fields[i].dtype.itemsize for i in group)])
            widths.append(max(unit, align(end, unit)) // WORD)
        return cls(tuple(fields), tuple(widths))

    def views(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a view of each field, of shape [rows, *shape], in the order of `fields`.

        Args:
            parts: Parts of rows, int32 [rows, width]; the words of a row are contiguous.
        """
        rows, views = parts[0].shape[0], [parts[0]] * len(self.fields)
        for part, dtype, sizes, places in self._pieces:
            # Views by another call would be outputs that autograd lets no one write to.
            pieces = torch.unsafe_split_with_sizes(parts[part].view(dtype), sizes, 1)
            for i, piece, shape in places:
                views[i] = pieces[piece] if len(shape) == 1 else pieces[piece].view(rows, *shape)
        return views

    @functools.cached_property
    def _pieces(self) -> list[_Pieces]:
        """How to split each part, for each dtype in it."""
        found = []
        for part, dtype in dict.fromkeys((field.part, field.dtype) for field in self.fields):
            sizes: list[int] = []
            places = []
            for i, field in sorted(enumerate(self.fields), key=lambda pair: pair[1].offset):
                if (field.part, field.dtype) != (part, dtype):
                    continue
                if gap := field.offset // dtype.itemsize - sum(sizes):
                    sizes.append(gap)
                places.append((i, len(sizes), field.shape))
                sizes.append(math.prod(field.shape))
            if rest := self.widths[part] * WORD // dtype.itemsize - sum(sizes):
                sizes.append(rest)
            found.append((part, dtype, sizes, places))
        return found
