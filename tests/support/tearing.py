"""A writer that publishes without a pause, and readers that look for mixed versions.

Version ``v`` fills every element with ``v``, so a copy with two values is torn.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch

from tests.support.bounds import DEADLINE
from torchrl_unilab.shm import SnapshotCell, seqlock
from torchrl_unilab.shm.seqlock import Snapshot

ELEMENTS = 16_384


def make_cell(*, slots: int, elements: int = ELEMENTS) -> SnapshotCell:
    """A cell of two equal halves in two dtypes, whose version 0 is zero everywhere."""
    initial = {
        "half": torch.zeros(elements // 2),
        "other": torch.zeros(elements // 2, dtype=torch.int32),
    }
    return SnapshotCell(initial, slots=slots)


def publish_until_told(pipe: Connection, cell: SnapshotCell) -> None:
    """Publish version after version until the other end says something."""
    torch.set_num_threads(1)
    half, other = (torch.zeros(f.shape, dtype=f.dtype) for f in cell.layout.fields)
    pipe.send("ready")
    version = cell.version
    while not pipe.poll():
        for _ in range(100):
            version += 1
            half.fill_(version % 65_536)
            other.fill_(version % 65_536)
            cell.publish([half, other])
    pipe.send(version)


def publish_and_die(pipe: Connection, cell: SnapshotCell) -> None:
    """Publish other bytes, and be killed when they are written and not announced."""
    fences = itertools.count(1)

    def fence() -> None:
        if next(fences) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    seqlock.fence = fence  # in this process
    cell.publish([torch.full(f.shape, 255, dtype=f.dtype) for f in cell.layout.fields])


def read(cell: SnapshotCell) -> tuple[int, dict[str, torch.Tensor]]:
    """The newest version of a cell and its tensors."""
    snapshot = Snapshot(cell.layout)
    return cell.read(snapshot), snapshot.tensors


def lapped_copy(
    cell: SnapshotCell, torn: list[bool], deadline: float = DEADLINE
) -> Callable[[np.ndarray, np.ndarray], None]:
    """A copy that stops half-way until the writer has rewritten the slot; notes each tear."""

    def copy(out: np.ndarray, payload: np.ndarray) -> None:
        half = out.nbytes // 2
        out[:half] = payload[:half]
        lapped = cell.version + 2 * cell.slots
        until = time.monotonic() + deadline
        while cell.version < lapped:
            assert time.monotonic() < until, "the writer does not go on"
        out[half:] = payload[half:]
        first, last = cell.layout.views(torch.from_numpy(out))
        torn.append(first[0].item() != last[-1].item())

    return copy


def count_torn(cell: SnapshotCell, reads: int, *, checked: bool) -> tuple[int, int]:
    """Read `reads` times; return how many copies mixed versions, and how many retries.

    With ``checked=False`` the reader skips the sequence check: what it then finds shows
    that the harness can find a tear.
    """
    snapshot = Snapshot(cell.layout)
    half, other = snapshot.tensors.values()
    torn, before = 0, cell.overtaken
    for _ in range(reads):
        if checked:
            cell.read(snapshot, retries=1_000_000)
        else:
            np.copyto(snapshot.bytes, cell._payloads[cell._words[seqlock._ANNOUNCED] % cell.slots])
        expected = half[0].item()
        mixed = (half != expected).any() or (other != int(expected)).any()
        torn += bool(mixed)
    return torn, cell.overtaken - before
