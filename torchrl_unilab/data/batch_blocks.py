"""The few stretches of memory that a batch's many tensors are views of."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch
from tensordict import TensorDictBase

__all__ = ["contiguous_blocks", "mirror", "page_ranges"]

_ALIGNMENT = 16
"""Bytes that every dtype's size divides: where blocks start."""


def contiguous_blocks(batch: TensorDictBase) -> dict[int, torch.Tensor]:
    """Find the few stretches of memory that a batch's tensors are views of.

    Args:
        batch: Tensors on one device.

    Returns:
        Address of a storage to the bytes of it that the batch spans, uint8, in the order of
        the batch's keys. A stretch starts at a multiple of 16 bytes of its storage.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = torch.zeros(8, 3)
        >>> batch = TensorDict({"a": rows[:, :2], "b": rows[:, 2]}, [8])
        >>> [block.numel() for block in contiguous_blocks(batch).values()]
        [96]
    """
    spans: dict[int, tuple[int, int, torch.Tensor]] = {}
    for leaf in batch.values(include_nested=True, leaves_only=True):
        if not leaf.numel():
            continue
        size = leaf.element_size()
        reach = sum((n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride(), strict=True))
        start, end = leaf.storage_offset() * size, (leaf.storage_offset() + reach + 1) * size
        address = leaf.untyped_storage().data_ptr()
        if address in spans:
            start, end = min(start, spans[address][0]), max(end, spans[address][1])
        spans[address] = start - start % _ALIGNMENT, end, leaf
    return {
        address: torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(
            leaf.untyped_storage(), start, (end - start,), (1,)
        )
        for address, (start, end, leaf) in spans.items()
    }


def mirror(
    batch: TensorDictBase, device: torch.device
) -> tuple[TensorDictBase, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Make room for a batch on a device, so that it takes one copy per block.

    Args:
        batch: Tensors in host memory.
        device: Where to make room.

    Returns:
        A batch of equal keys, shapes, dtypes and strides, uninitialised, and for each block
        of bytes (target on the device, source on the host).
    """
    sources = contiguous_blocks(batch)
    memory = {
        address: torch.empty(
            -(-block.numel() // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=device
        )
        for address, block in sources.items()
    }

    def place(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.numel():
            return torch.empty_like(leaf, device=device)
        address = leaf.untyped_storage().data_ptr()
        before = sources[address].storage_offset() // leaf.element_size()
        typed = memory[address].view(leaf.dtype)
        return typed.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset() - before)

    there: TensorDictBase = batch.apply(place, device=device)
    pairs = [(memory[key][: block.numel()], block) for key, block in sources.items()]
    return there, pairs


def page_ranges(blocks: Iterable[torch.Tensor], page: int = mmap.PAGESIZE) -> list[tuple[int, int]]:
    """Find the pages that blocks lie on: a page can be locked once, by whole pages.

    Args:
        blocks: Blocks of bytes in host memory.
        page: Size of a page, bytes.

    Returns:
        Address and size, bytes, of each run of pages, in order and apart from each other.
    """
    ranges: list[tuple[int, int]] = []
    for block in sorted(blocks, key=torch.Tensor.data_ptr):
        start = block.data_ptr() // page * page
        end = -(-(block.data_ptr() + block.numel()) // page) * page
        if ranges and start <= sum(ranges[-1]):
            start, end = ranges[-1][0], max(end, sum(ranges.pop()))
        ranges.append((start, end - start))
    return ranges
