"""How one process appends transitions to shared rows: checked, staged, patched, written."""

from __future__ import annotations

import math
from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_unilab.data.packed_form import (
    DONE,
    REWARD,
    SIGNALS,
    TERMINATED,
    TRUNCATED,
    RowForm,
    StagedRows,
    leaves,
)
from torchrl_unilab.data.packed_links import RowLinker
from torchrl_unilab.errors import ConfigError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.shm.layout import dotted
from torchrl_unilab.shm.row_copy import RowCopy, RowFinder
from torchrl_unilab.shm.rows import SharedRows

__all__ = ["NonFinite", "RowAppender", "check_steps"]

NonFinite = Literal["refuse", "count", "pass"]
_FINITE = (REWARD, "action")  # keys that must be, unless they pass
_STAGES = 8  # private blocks kept, by number of rows


class RowAppender:
    """Appends rows of one form. One thread at a time.

    Args:
        rows: Where to.
        form: What rows are.
        non_finite: What to do about a reward or action that is not finite, see
            `PackedReplayStorage`.

    Attributes:
        linker: What links rows to their successors, if they are linked.
    """

    def __init__(self, rows: SharedRows, form: RowForm, non_finite: NonFinite) -> None:
        self._rows, self._form, self._policy = rows, form, non_finite
        self.linker = RowLinker(rows) if form.linked else None
        self._stages: dict[int, StagedRows] = {}
        if self.linker is None:
            self._copy = RowCopy(rows.layout, rows.block, form.names)
            finite = [] if non_finite == "pass" else [tuple(key.split(".")) for key in _FINITE]
            self._finder = RowFinder(TensorDict, form.fields, finite)

    def forget(self) -> None:
        """Follow nothing up: rows have been rewritten or are no more."""
        if self.linker is not None:
            self.linker.forget()

    def append(self, rows: TensorDictBase, at: int | None) -> int:
        """Append rows [n]; return the number of the first one. See the storage's `append`."""
        count = rows.batch_size[0]
        if self.linker is not None or count > self._rows.capacity:
            return self._write(self.stage(rows), count, at=at)
        found = self._finder.find(rows, count)
        if found is not None:
            with self._rows.reserve(count, 0, at) as (start, _):
                self._copy.put_found(found, count, start % self._rows.capacity)
            return start
        chosen = self._check(rows, count)
        if not all(leaf.is_cpu and leaf.layout is torch.strided for leaf in chosen):
            return self._write(self.stage(rows), count, at=at)  # that copy may fail, or wait
        with self._rows.reserve(count, 0, at) as (start, _):
            self._copy.put(chosen, start % self._rows.capacity)
        return start

    def add(
        self,
        rows: TensorDictBase,
        mask: torch.Tensor | None,
        finals: torch.Tensor | TensorDictBase | None,
    ) -> int:
        """Append steps [N] or [N, T]; return the number of the first. See the storage's `add`."""
        patches = {} if mask is None else self._patches(mask, finals)
        envs, flat = rows.batch_size[0], rows
        if rows.ndim == 2:
            flat = rows.transpose(0, 1).reshape(-1)
            mask = None if mask is None else mask.t()
            patches = {name: patch.transpose(0, 1) for name, patch in patches.items()}
        staged = self.stage(flat)
        views = staged.views
        for name, patch in patches.items():
            assert mask is not None
            views[name][mask.flatten()] = patch[mask]
        if TERMINATED in views and TRUNCATED in views:
            terminated, truncated = views[TERMINATED], views[TRUNCATED]
            if DONE in views:
                torch.logical_or(terminated, truncated, out=views[DONE])
            torch.gt(truncated, terminated, out=truncated)
        return self._write(staged, len(flat), lanes=envs)

    def _patches(
        self, mask: torch.Tensor, finals: torch.Tensor | TensorDictBase | None
    ) -> dict[str, torch.Tensor]:
        """Dotted key to final observations [*mask.shape, ...], checked; only masked ones count."""
        kinds = {
            name: (shape, dtype)
            for (_, shape, dtype), name in zip(self._form.fields, self._form.names, strict=True)
        }
        if isinstance(finals, torch.Tensor):
            seen = [
                name
                for name in kinds
                if name.startswith("next.")
                and name[5:] in kinds
                and name.split(".")[-1] not in SIGNALS
            ]
            if len(seen) != 1:
                raise LayoutKeyError(
                    f"final observations: one tensor for {seen} (expected one observation). "
                    "Give a TensorDict with the key of each."
                )
            named = {seen[0]: finals}
        else:
            assert finals is not None
            named = {f"next.{dotted(key)}": leaf for key, leaf in leaves(finals).items()}
        masked = int(mask.sum())
        patches = {}
        for name, leaf in named.items():
            if name not in kinds:
                raise LayoutKeyError(
                    f"final observations: unknown key {name!r} (expected one of {[*kinds]}). "
                    "Leave it out."
                )
            shape, dtype = kinds[name]
            if leaf.shape == (masked, *shape) and leaf.shape != (*mask.shape, *shape):
                whole = torch.zeros(*mask.shape, *shape, dtype=dtype)
                whole[mask] = leaf.to(dtype)
                leaf = whole
            if leaf.shape != (*mask.shape, *shape):
                raise LayoutShapeError(
                    f"final observations {name!r}: {tuple(leaf.shape)} (expected "
                    f"{(*mask.shape, *shape)} or {(masked, *shape)}). Check them."
                )
            patches[name] = leaf
        return patches

    def stage(self, rows: TensorDictBase) -> StagedRows:
        """Copy rows [n] to private memory, checked."""
        form, count = self._form, len(rows)
        staged = self._stages.get(count)
        if staged is None:
            if len(self._stages) >= _STAGES:
                self._stages.clear()
            staged = self._stages[count] = form.stage(self._rows.layout, count)
        with torch.no_grad():
            chosen = self._check(rows, count)
            torch._foreach_copy_([staged.views[name] for name in form.names], chosen)
        return staged

    def _check(self, rows: TensorDictBase, count: int) -> list[torch.Tensor]:
        """Return the tensors of rows [n] in order, if they may be written."""
        chosen = self._form.select(rows)
        if self._policy != "pass":
            self._check_finite(chosen, count)
        return chosen

    def _check_finite(self, chosen: list[torch.Tensor], count: int) -> None:
        bad: torch.Tensor | None = None
        for name, leaf in zip(self._form.names, chosen, strict=True):
            if name not in _FINITE or not leaf.is_floating_point():
                continue
            flat = leaf.reshape(-1)
            if math.isfinite(flat.dot(flat).item()):  # the cheapest look at all of them
                continue
            wrong = ~leaf.isfinite().reshape(count, -1).all(1)
            if self._policy == "refuse" and wrong.any():
                raise ConfigError(
                    f"cannot write rows: {name!r} of row {int(wrong.nonzero()[0])} is not finite "
                    "(expected finite values). Mend the environment, or use non_finite='count'."
                )
            bad = wrong if bad is None else bad | wrong
        if bad is not None and bad.any():
            self._rows.count_non_finite(int(bad.sum()))

    def _write(
        self, staged: StagedRows, count: int, *, lanes: int = 0, at: int | None = None
    ) -> int:
        """Append staged rows; return the number of the first one that is kept."""
        rows = self._rows
        if count > rows.capacity:
            staged = staged.last(rows.capacity)
        if self.linker is not None:
            return self.linker.write(staged, count, lanes, at)
        with rows.reserve(count, 0, at) as (first, _):
            start = first + count - len(staged.words)
            rows.write(start, staged.words)
        return start


def check_steps(
    rows: TensorDictBase,
    mask: torch.Tensor | None,
    finals: torch.Tensor | TensorDictBase | None,
) -> None:
    """Refuse what `RowAppender.add` cannot add, whatever the form of the rows.

    Raises:
        LayoutShapeError: The rows are not [N] or [N, T], there is none, or the mask is not of
            their shape or without final observations.
    """
    if (mask is None) != (finals is None):
        raise LayoutShapeError(
            f"final observations: mask {mask is not None}, observations {finals is not None} "
            "(expected both or none). Give both."
        )
    if rows.ndim not in (1, 2) or not rows.numel():
        raise LayoutShapeError(
            f"cannot add rows: batch size {list(rows.batch_size)} (expected [N] or [N, T], "
            "not empty). Reshape them."
        )
    if mask is not None and (mask.shape != rows.batch_size or mask.dtype is not torch.bool):
        raise LayoutShapeError(
            f"terminal_mask: {mask.dtype} of shape {tuple(mask.shape)} (expected torch.bool of "
            f"{tuple(rows.batch_size)}). One entry for each row."
        )
