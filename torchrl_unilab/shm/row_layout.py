"""How the fields of one record lie in a row of 32-bit words. Pure arithmetic.

A block of rows is an int32 tensor of shape [rows, words]: whatever dtypes a record mixes,
one gather of rows moves all of it. Fields are views of the block in their own dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.shm.layout import align

__all__ = ["FieldSpec", "RowField", "RowLayout"]

FieldSpec = tuple[str, tuple[int, ...], torch.dtype]
"""Dotted key, shape without the row dimension, dtype."""

WORD = 4
LINK_BITS = 31  # a link word is not negative
MOST_PACKED_FLAGS = 10  # unpacking looks all of them up at once, in 2**flags entries


@dataclass(frozen=True)
class RowField:
    """One field of a row: its key, shape, dtype, and its first element or bit.

    Attributes:
        offset: Bytes from the start of the row; of a packed flag, its first bit of the link
            word.
        packed: Whether it is bits of the link word.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    packed: bool = False

    @property
    def numel(self) -> int:
        """Elements of the field in one row."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row, large items first, so that nothing lies between them.

    Args of `of` in order: first the fields that are linked (observations), as `linked_words`
    words; with ``repeated`` their successors in the same order; then the rest; at the end, if
    there is one, the link word.

    Attributes:
        fields: All fields.
        words: 32-bit words of a row.
        linked_words: Words of the linked fields, the first of the row.
        link: Column of the link word, or None.
        flag_bits: Low bits of the link word that hold flags.

    Example:
        >>> float_, bool_ = torch.float32, torch.bool
        >>> layout = RowLayout.of([("x", (3,), float_)], [("done", (1,), bool_)])
        >>> layout.words, [field.offset for field in layout.fields]
        (4, [0, 12])
    """

    fields: tuple[RowField, ...]
    words: int
    linked_words: int = 0
    link: int | None = None
    flag_bits: int = 0

    @classmethod
    def of(
        cls,
        linked: Iterable[FieldSpec],
        rest: Iterable[FieldSpec],
        *,
        repeated: Iterable[FieldSpec] = (),
        link_codes: int = 0,
        pack_flags: bool = False,
    ) -> RowLayout:
        """Lay out a row.

        Args:
            linked: Fields at the start.
            rest: Fields after them.
            repeated: Fields of the shapes and dtypes of `linked`, right behind them.
            link_codes: Values a link takes; 0 for rows without a link word.
            pack_flags: Keep the bools of `rest` as bits of the link word, if they fit.

        Raises:
            ConfigError: So many links do not fit a word.
        """
        linked, rest, repeated = list(linked), list(rest), list(repeated)
        unit = max([WORD, *(dtype.itemsize for _, _, dtype in (*linked, *rest))])
        link_bits = (link_codes - 1).bit_length() if link_codes else 0
        if link_bits > LINK_BITS:
            raise ConfigError(
                f"rows with links: {link_codes} links (expected at most {2**LINK_BITS}). "
                "Use a smaller capacity."
            )
        flags: list[FieldSpec] = []
        if pack_flags:
            flags = [spec for spec in rest if spec[2] is torch.bool]
            bits = sum(math.prod(shape) for _, shape, _ in flags)
            if bits > MOST_PACKED_FLAGS or bits + link_bits > LINK_BITS:
                flags = []
        fields: list[RowField] = []
        end = 0
        for part in (linked, repeated, [spec for spec in rest if spec not in flags]):
            for key, shape, dtype in sorted(part, key=lambda spec: -spec[2].itemsize):
                fields.append(RowField(key, tuple(shape), dtype, end))
                end += fields[-1].numel * dtype.itemsize
            if part is linked or part is repeated:  # equal words of equal content
                end = align(end, unit)
            if part is linked:
                linked_words = end // WORD
        flag_bits = 0
        for key, shape, dtype in flags:
            fields.append(RowField(key, tuple(shape), dtype, flag_bits, packed=True))
            flag_bits += fields[-1].numel
        words = max(align(end + (WORD if link_codes else 0), unit), unit) // WORD
        link = words - 1 if link_codes else None
        return cls(tuple(fields), words, linked_words, link, flag_bits)

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """Dotted keys, in order."""
        return tuple(field.key for field in self.fields)

    def views(self, block: torch.Tensor, *, linked: bool = False) -> dict[str, torch.Tensor]:
        """Return dotted key to view of each field that is not packed.

        Args:
            block: int32 of shape [rows, words], rows contiguous.
            linked: Only the linked fields: `block` then needs no more words than they have.
        """
        rows = len(block)
        typed: dict[torch.dtype, torch.Tensor] = {}
        views = {}
        for field in self.fields:
            if field.packed or (linked and field.offset >= self.linked_words * WORD):
                continue
            if field.dtype not in typed:
                typed[field.dtype] = block.view(field.dtype)
            base = typed[field.dtype]
            views[field.key] = base.as_strided(
                (rows, *field.shape),
                (base.stride(0), *_strides(field.shape)),
                base.storage_offset() + field.offset // field.dtype.itemsize,
            )
        return views

    def view(self, key: str, block: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        """Return the view of one field: of `block`, or of the flags it had packed."""
        field = self.fields[self.keys.index(key)]
        base = flags if field.packed else block.view(field.dtype)
        first = field.offset if field.packed else field.offset // field.dtype.itemsize
        return base[:, first : first + field.numel].view(len(block), *field.shape)

    def flag_views(self, flags: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return dotted key to view of each packed field; `flags` is bool [rows, flag_bits]."""
        return {
            field.key: flags.as_strided(
                (len(flags), *field.shape),
                (flags.stride(0), *_strides(field.shape)),
                flags.storage_offset() + field.offset,
            )
            for field in self.fields
            if field.packed
        }

    @functools.cached_property
    def flag_table(self) -> torch.Tensor:
        """The flags of each value of the low bits, bool [2**flag_bits, flag_bits]."""
        values = torch.arange(2**self.flag_bits).unsqueeze(1)
        return values.bitwise_right_shift(torch.arange(self.flag_bits)).bitwise_and(1).bool()

    def unpack(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return links, int32 [rows], and flags, bool [rows, flag_bits], of link words."""
        if not self.flag_bits:
            return words, torch.empty(len(words), 0, dtype=torch.bool)
        low = words.bitwise_and(2**self.flag_bits - 1)
        return words.bitwise_right_shift(self.flag_bits), self.flag_table.index_select(0, low)

    def pack(self, links: torch.Tensor, flags: torch.Tensor | None) -> torch.Tensor:
        """Return link words, int32 [rows], of what `unpack` returns."""
        words = links.to(torch.int32).bitwise_left_shift(self.flag_bits)
        if flags is not None and self.flag_bits:
            weights = 2 ** torch.arange(self.flag_bits, dtype=torch.float32)
            words = words.bitwise_or(flags.float().mv(weights).to(torch.int32))
        return words


@functools.cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
