"""How named tensors lie in one flat run of bytes. Pure arithmetic; it allocates nothing.

Keys are dotted names: the nested key ``("actor", "0", "weight")`` of a TensorDict and the
entry ``"actor.0.weight"`` of a state dict are the same field.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from torchrl_unilab.errors import ConfigError, LayoutDtypeError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.shm.words import LINE

Spec = tuple[str, tuple[int, ...], torch.dtype]
"""Dotted key, shape and dtype of a tensor."""

_REMEDY = "Give tensors like those the layout was made from, or build it anew from these."


def align(offset: int, alignment: int = LINE) -> int:
    """Return the first multiple of `alignment` that is not below `offset`."""
    return -(-offset // alignment) * alignment


def dotted(key: str | tuple[str, ...]) -> str:
    """Return a TensorDict key as a dotted name.

    Examples:
        >>> dotted(("actor", "0", "weight"))
        'actor.0.weight'
    """
    return key if isinstance(key, str) else ".".join(key)


@dataclass(frozen=True)
class Field:
    """One tensor of a layout: dotted key, shape, dtype and its offset in bytes."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BlockLayout:
    """The fields of one block of bytes, each aligned to a cache line.

    Attributes:
        fields: The tensors, in order.
        nbytes: Size of the block, a multiple of 64 and at least 64.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.shm import BlockLayout
        >>> layout = BlockLayout.of({"w": torch.zeros(2, 3), "n": torch.tensor(0)})
        >>> [field.offset for field in layout.fields], layout.nbytes
        ([0, 64], 128)
    """

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> BlockLayout:
        """Lay out `tensors` (dotted key to tensor) in their own order and dtypes.

        Raises:
            ConfigError: A tensor is sparse, so that it has no run of bytes.
        """
        if sparse := {k: str(t.layout) for k, t in tensors.items() if t.layout != torch.strided}:
            raise ConfigError(
                f"cannot share tensors: {sparse} (expected dense ones). Keep them by their "
                "to_dense(), or by their indices and values."
            )
        return cls.of_specs((key, tuple(t.shape), t.dtype) for key, t in tensors.items())

    @classmethod
    def of_specs(cls, specs: Iterable[Spec]) -> BlockLayout:
        """Lay out tensors of these specs in order.

        Raises:
            LayoutKeyError: A key comes twice.
        """
        fields: dict[str, Field] = {}
        end = 0
        for key, shape, dtype in specs:
            if key in fields:
                raise LayoutKeyError(
                    f"cannot lay out tensors: key {key!r} comes twice (expected once). "
                    "Rename one; nested and dotted keys share one namespace."
                )
            field = fields[key] = Field(key, tuple(shape), dtype, align(end))
            end = field.offset + field.nbytes
        return cls(tuple(fields.values()), max(align(end), LINE))

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """The dotted keys, in order."""
        return tuple(field.key for field in self.fields)

    @property
    def digest(self) -> int:
        """64-bit hash of keys, shapes, dtypes and offsets: equal layouts, equal digests."""
        text = repr([(f.key, f.shape, str(f.dtype), f.offset) for f in self.fields])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def views(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return one typed view per field into `block`, uint8 of at least [nbytes]."""
        block, start = block[: self.nbytes], block.storage_offset()
        typed = {dtype: block.view(dtype) for dtype in {field.dtype for field in self.fields}}
        return [  # one call for each: part of each read of a snapshot
            typed[dtype].as_strided(shape, stride, (start + offset) // dtype.itemsize)
            for dtype, shape, stride, offset in self._places
        ]

    @functools.cached_property
    def _places(self) -> list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]:
        fields = [(f, torch.empty(f.shape, device="meta")) for f in self.fields]
        return [(f.dtype, like.shape, like.stride(), f.offset) for f, like in fields]

    def named_views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `views` by dotted key."""
        return dict(zip(self.keys, self.views(block), strict=True))

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check tensors given in the layout's order, before anything is written.

        Raises:
            LayoutKeyError: There are more or fewer tensors than fields.
            LayoutShapeError: A tensor has another shape.
            LayoutDtypeError: A tensor has another dtype.
        """
        shapes, dtypes = self._shapes_and_dtypes  # compared at once: this is part of each publish
        if [t.shape for t in tensors] == shapes and [t.dtype for t in tensors] == dtypes:
            return
        if len(tensors) != len(self.fields):
            raise LayoutKeyError(
                f"tensors: {len(tensors)} (expected {len(self.fields)}: {_some(self.keys)}). "
                "Give one for each key."
            )
        check_specs(((f.key, f.shape, f.dtype) for f in self.fields), tensors, _REMEDY)

    @functools.cached_property
    def _shapes_and_dtypes(self) -> tuple[list[torch.Size], list[torch.dtype]]:
        return [torch.Size(f.shape) for f in self.fields], [f.dtype for f in self.fields]

    def select(
        self, tensors: Mapping[str, torch.Tensor], *, remedy: str = _REMEDY
    ) -> list[torch.Tensor]:
        """Return the tensors of a mapping in the layout's order, checked.

        Raises as `check`, and a LayoutKeyError, with `remedy`, if a key is missing or unknown.
        """
        if tensors.keys() != set(self.keys):
            missing = sorted(set(self.keys) - tensors.keys())
            unknown = sorted(tensors.keys() - set(self.keys))
            raise LayoutKeyError(
                f"keys of the tensors: missing {missing}, unknown {unknown} "
                f"(expected {len(self.fields)} keys: {_some(self.keys)}). {remedy}"
            )
        ordered = [tensors[key] for key in self.keys]
        self.check(ordered)
        return ordered


def check_specs(specs: Iterable[Spec], tensors: Iterable[torch.Tensor], remedy: str) -> None:
    """Refuse tensors of other shapes or dtypes than their specs.

    Args:
        specs: One per tensor, in their order.
        tensors: The tensors.
        remedy: What to do about another shape.

    Raises:
        LayoutShapeError: A tensor has another shape.
        LayoutDtypeError: A tensor has another dtype.
    """
    for (key, shape, dtype), tensor in zip(specs, tensors, strict=True):
        if tensor.shape != shape:
            raise LayoutShapeError(
                f"shape of {key!r}: {tuple(tensor.shape)} (expected {tuple(shape)}). {remedy}"
            )
        if tensor.dtype is not dtype:
            raise LayoutDtypeError(f"dtype of {key!r}: {tensor.dtype} (expected {dtype}). Cast it.")


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "")
