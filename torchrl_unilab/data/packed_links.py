"""Which row follows which: rows of a writer, linked as they come."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchrl_unilab.data.packed_form import StagedRows
from torchrl_unilab.shm.rows import SharedRows

__all__ = ["RowLinker", "successors"]


def successors(
    following: torch.Tensor, observed: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """Find where what follows is observed, bit by bit.

    Args:
        following: int32 of shape [m, words].
        observed: int32 of shape [n, words].
        first: Of each of the m, the first of the n that may be it, int64 of shape [m].

    Returns:
        Index into `observed` of shape [m], -1 where there is none. Of several equal ones only
        the first of all is tried.

    Example:
        >>> x = torch.tensor([[1], [2], [3]], dtype=torch.int32)
        >>> successors(x + 1, x, torch.zeros(3, dtype=torch.int64))
        tensor([ 1,  2, -1])
    """
    if not len(following) or not len(observed):
        return torch.full((len(following),), -1)
    weights = _weights(observed.shape[1])
    hashes, order = (observed.long() * weights).sum(1).sort(stable=True)
    at = torch.searchsorted(hashes, (following.long() * weights).sum(1))
    found = order[at.clamp(max=len(order) - 1)]
    same = (observed[found] == following).all(1) & (found >= first)
    return torch.where(same, found, -1)


@functools.cache
def _weights(words: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(words)
    return torch.randint(-(2**62), 2**62, (words,), generator=generator) | 1


@dataclass(frozen=True)
class _Waiting:
    """Rows written last, whose successors may come with the next ones.

    Attributes:
        lanes: Environments, a row each in order; 0 if the rows are of no known order.
        rows: Their numbers, int64 of shape [p].
        following: Their next observations, int32 of shape [p, words].
        slots: Their slots of the side table, or empty.
        version: The rows' version then.
    """

    lanes: int
    rows: torch.Tensor
    following: torch.Tensor
    slots: torch.Tensor
    version: int


_SAVED = ("lanes", "rows", "following", "slots")


class RowLinker:
    """Writes the rows of one writer and links each to the one that follows it.

    A row's successor is the row whose observation is, bit by bit, the next observation of the
    row: with `lanes` (rows in steps of so many environments) only the same environment's row
    of the next step. Without, any later row of the same write, or of the next one; but if most
    rows of one write are followed by those of the next in the same order, these are steps too.

    Args:
        rows: Where to write; its rows have links.
    """

    def __init__(self, rows: SharedRows) -> None:
        self._rows = rows
        self._waiting: _Waiting | None = None

    def write(self, staged: StagedRows, count: int, lanes: int = 0, at: int | None = None) -> int:
        """Append rows; return the number of the first one that was kept.

        Args:
            staged: The rows, the last ones if there are more than fit.
            count: How many there are.
            lanes: Environments per step, or 0.
            at: Position of the first row, if it is to be checked.
        """
        assert staged.following is not None
        rows, layout = self._rows, self._rows.layout
        words, following, kept = staged.words, staged.following, len(staged.words)
        observed = words[:, : layout.linked_words]
        waiting, met, goes_on = self._waiting, None, False
        if waiting is not None and waiting.lanes == lanes and kept == count:
            met, goes_on = _meets(waiting, observed)
        inner = None if goes_on and not lanes else _inner(following, observed, lanes)
        open_ = None if inner is None else (inner < 0).nonzero().squeeze(1)
        opened = kept if open_ is None else len(open_)
        sides = opened if rows.side_slots else 0
        self._waiting = None
        with rows.reserve(count, sides, at) as (first, slots):
            version, start = rows.version, first + count - kept
            own = rows.slot_code(slots) if sides else torch.zeros(opened, dtype=torch.int64)
            if inner is None or open_ is None:
                codes, numbers = own, torch.arange(start, start + kept)
            else:
                codes, numbers = rows.row_code(inner.add_(start)), open_ + start
                codes[open_] = own
                following = following[open_]
            if sides:
                rows.write_side(slots, numbers, following)
            words[:, layout.link] = layout.pack(codes, staged.flags)
            rows.write(start, words)
        if waiting is not None and met is not None:
            self._link(waiting, met, start)
        if lanes:  # those of the last step
            last = max(0, opened - lanes)
            numbers, following, slots = numbers[last:], following[last:], slots[last:]
        if lanes <= kept:
            self._waiting = _Waiting(lanes, numbers, following.clone(), slots, version)
        return start

    def _link(self, waiting: _Waiting, met: torch.Tensor, start: int) -> None:
        """Link rows to those they have met, numbered from `start`."""
        numbers, slots = waiting.rows, waiting.slots
        hit = (met >= 0).nonzero().squeeze(1)
        if len(hit) < len(met):
            met, numbers = met[hit], numbers[hit]
            slots = slots[hit] if len(slots) else slots
        self._rows.relink(numbers, met + start, slots, waiting.version)

    def forget(self) -> None:
        """Link nothing to the rows written last."""
        self._waiting = None

    def state_dict(self) -> dict[str, Any]:
        """Return which rows wait for their successors, if any do."""
        if self._waiting is None:
            return {"waiting": None}
        return {"waiting": {name: getattr(self._waiting, name) for name in _SAVED}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was returned; the rows of then have been loaded before.

        Rows that have not been loaded are not linked.
        """
        saved, rows = state_dict["waiting"], self._rows
        there = saved is not None and (saved["rows"] < rows.head).all()
        self._waiting = _Waiting(**saved, version=rows.version) if there else None


def _meets(waiting: _Waiting, observed: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Where the rows that wait go on, -1 for nowhere; and whether most do row by row."""
    count = len(waiting.rows)
    met = torch.arange(count)
    if waiting.lanes or count == len(observed):
        met.masked_fill_((waiting.following != observed[:count]).any(1), -1)
        goes_on = int((met >= 0).sum()) * 2 > count
        if waiting.lanes or goes_on:
            return met, goes_on
    return successors(waiting.following, observed, torch.zeros(count, dtype=torch.int64)), False


def _inner(following: torch.Tensor, observed: torch.Tensor, lanes: int) -> torch.Tensor | None:
    """Successors within one write, -1 for none; None if there is none at all."""
    count = len(observed)
    if lanes >= count:
        return None
    if not lanes:
        return successors(following, observed, torch.arange(1, count + 1))
    inner = torch.full((count,), -1)
    same = (following[:-lanes] == observed[lanes:]).all(1)
    inner[:-lanes] = torch.arange(lanes, count).masked_fill_(~same, -1)
    return inner
