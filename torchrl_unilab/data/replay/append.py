"""How transitions become rows: checked, staged in private memory, patched, appended.

Nothing in shared memory changes before all checks have passed; what is appended then is one
copy of whole rows. The storage appends with it, in any number of threads.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_unilab.data.replay.form import DONE, TERMINATED, TRUNCATED, RowForm, is_learnt_from
from torchrl_unilab.data.replay.trajectories import TrajectoryMarker
from torchrl_unilab.data.schema import leaves
from torchrl_unilab.errors import (
    ConfigError,
    LayoutDtypeError,
    LayoutKeyError,
    LayoutShapeError,
    UsageError,
)
from torchrl_unilab.shm.layout import dotted
from torchrl_unilab.shm.rows import SharedRows

NonFinite = Literal["refuse", "count", "pass"]
Finals: TypeAlias = torch.Tensor | TensorDictBase | None
"""True final observations: one tensor, or a TensorDict of several; None where no row is masked."""
_STAGES, _STAGE_BYTES = 8, 1 << 26
"""Stages kept per thread, by number of rows, and bytes of the largest that is kept."""


class _Stage(NamedTuple):
    """Rows in private memory, by part, and views of their fields."""

    parts: list[torch.Tensor]
    views: list[torch.Tensor]


class RowAppender:
    """Appends transitions of one form.

    Args:
        rows: Where to.
        form: What rows are.
        non_finite: What to do about a reward or action that is not finite, see
            `PackedReplayStorage`.
    """

    def __init__(self, rows: SharedRows, form: RowForm, non_finite: NonFinite) -> None:
        self._rows, self._form, self._non_finite = rows, form, non_finite
        self._marker = TrajectoryMarker(rows, form) if form.n_step > 1 else None
        self._checked_fields = [
            i
            for i, field in enumerate(form.schema.fields)
            if field.dtype.is_floating_point and is_learnt_from(field.path)
        ]
        self._memory = threading.local()

    def append(self, rows: TensorDictBase, at: int | None = None) -> int:
        """Append rows [n] unchanged, the first at position `at` if given; return its number."""
        return self._write(self._stage(rows), None, at)

    def add(self, rows: TensorDictBase, mask: torch.Tensor | None, finals: Finals) -> int:
        """Append steps [N] or [N, T]; return the number of the first. See the storage's `add`."""
        observed = {} if mask is None else self._final_observations(mask, finals)
        flat = rows if rows.ndim == 1 else rows.transpose(0, 1).reshape(-1)
        stage, index = self._stage(flat), self._form.index
        if mask is not None:
            # Where the masked rows, in the mask's order, lie among rows that are ordered by step.
            at = torch.arange(mask.numel(), device="cpu").view(mask.shape[::-1]).t()[mask]
            for name, tensor in observed.items():
                stage.views[index[name]][at] = tensor
        ends = [stage.views[index[name]] for name in (TERMINATED, TRUNCATED) if name in index]
        if DONE in index and ends:
            done = stage.views[index[DONE]]
            # With one of the two flags, `done` may mark further ends, which stay.
            torch.logical_or(ends[0], ends[1] if len(ends) == 2 else done, out=done)
        if len(ends) == 2:
            terminated, truncated = ends
            torch.gt(truncated, terminated, out=truncated)
        return self._write(stage, rows.batch_size[0])

    def rewrite(self, positions: torch.Tensor, rows: TensorDictBase) -> None:
        """Write rows [n] anew at positions, int64 [n], that have been written."""
        self._rows.rewrite(positions, self._stage(rows).parts)

    def replace(self, rows: TensorDictBase) -> None:
        """Replace all rows by rows [n], unless these are refused. Raises as `append`."""
        stage = self._stage(rows)
        self._rows.clear()
        self._write(stage, None)

    def check(self, rows: TensorDictBase) -> None:
        """Refuse rows [n] that cannot be written; count none. Raises as `append`."""
        self._stage(rows, counts=False)

    def _stage(self, rows: TensorDictBase, counts: bool = True) -> _Stage:
        """Copy rows [n] to private memory, checked; `counts` those that are not finite."""
        count = rows.batch_size[0]
        if "index" in self._form.index and rows.get("index", None) is None:
            raise LayoutKeyError(
                "cannot append rows: they have no 'index', which a TensorDictReplayBuffer added to "
                "the first rows (expected all rows through it). Give the buffer a "
                "PackedReplayWriter, which adds none."
            )
        chosen = self._form.schema.select(rows, (count,), ignore=(("index",),))
        if self._non_finite != "pass":
            self._check_finite(chosen, count, counts)
        stage = self._stage_for(count)
        # Not under no_grad: an interrupt at the end of its block would leave gradients off.
        if True in [tensor.requires_grad for tensor in chosen]:
            chosen = [tensor.detach() for tensor in chosen]
        torch._foreach_copy_(stage.views[: len(chosen)], chosen)
        return stage

    def _stage_for(self, count: int) -> _Stage:
        stages: dict[int, _Stage] = self._memory.__dict__.setdefault("stages", {})
        stage = stages.get(count)
        if stage is None:
            with torch.inference_mode(False):
                layout = self._form.layout
                parts = [
                    torch.zeros(count, width, dtype=torch.int32, device="cpu")
                    for width in layout.widths
                ]
                stage = _Stage(parts, layout.views(parts))
            if sum(part.nbytes for part in parts) <= _STAGE_BYTES:
                if len(stages) >= _STAGES:
                    stages.clear()
                stages[count] = stage
        return stage

    def _check_finite(self, chosen: list[torch.Tensor], count: int, counts: bool) -> None:
        bad: torch.Tensor | None = None
        for index in self._checked_fields:
            values = chosen[index]
            if values.dtype.itemsize == 1:
                values = values.float()  # torch cannot sum float8
            if math.isfinite(values.sum().item()):  # the cheapest look at all of them
                continue
            wrong = ~values.isfinite().reshape(count, -1).all(1)
            if self._non_finite == "refuse" and wrong.any():
                raise ConfigError(
                    f"cannot write rows: {self._form.schema.names[index]!r} of row "
                    f"{int(wrong.nonzero()[0])} is not finite (expected finite values). Correct "
                    "the environment, or use non_finite='count'."
                )
            bad = wrong if bad is None else bad | wrong
        if counts and bad is not None and bad.any():
            self._rows.count(int(bad.sum()))

    def _write(self, stage: _Stage, envs: int | None, at: int | None = None) -> int:
        """Append staged rows, in pieces if they are more than a shard holds.

        Args:
            stage: The rows.
            envs: Rows per step; None if it is not known.
            at: Position that the first row must have, if any.

        Returns:
            The number of the first row.
        """
        rows, size, numbers = self._rows, self._rows.shard_rows, list[int]()
        if envs is not None and envs < size:
            size -= size % envs  # whole steps
        count = stage.parts[0].shape[0]
        for start in range(0, count, size):
            piece = slice(start, start + size)

            def prepare(shard: int, head: int, piece: slice = piece) -> None:  # this round's piece
                if at is not None and head % rows.shard_rows != at:
                    raise UsageError(
                        f"cannot append rows at position {at}: the next one is "
                        f"{head % rows.shard_rows} (expected that). Another writer came in "
                        "between: use PackedReplayWriter."
                    )
                if self._marker is not None:
                    views = [view[piece] for view in stage.views]
                    step_rows = None if envs is None else min(envs, len(views[0]))
                    self._marker.mark(views, step_rows, shard, head)
                rows.note_steps(shard, envs or 1)  # last: nothing is refused after it

            parts = stage.parts if count <= size else [words[piece] for words in stage.parts]
            numbers.append(rows.append(parts, prepare))
        return numbers[0]

    # True final observations

    def _final_observations(self, mask: torch.Tensor, finals: Finals) -> dict[str, torch.Tensor]:
        """Return final observations of the masked rows, [mask.sum(), ...], by dotted key."""
        known = self._form.observations
        if isinstance(finals, torch.Tensor):
            if len(known) != 1:
                raise LayoutKeyError(
                    f"final observations: one tensor for the keys {[*known]} (expected exactly "
                    "one). Pass a TensorDict with one entry per observation."
                )
            named = {known[0]: finals}
        else:
            assert finals is not None
            named = {f"next.{dotted(key)}": leaf for key, leaf in leaves(finals).items()}
            missing = [name for name in known if name not in named]
            unknown = [name for name in named if name not in self._form.index]
            if missing or unknown:
                raise LayoutKeyError(
                    f"final observations: without {missing}, unknown {unknown} (expected "
                    f"{[*known]}). Leave out unknown keys, and add missing ones: a row would mix "
                    "the final state with that after the reset."
                )
        return {name: self._masked(name, leaf.detach(), mask) for name, leaf in named.items()}

    def _masked(self, name: str, leaf: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return an observation of the masked rows, given for these only or for all rows."""
        field = self._form.schema.fields[self._form.index[name]]
        all_rows, masked_rows = (*mask.shape, *field.shape), (int(mask.sum()), *field.shape)
        if leaf.dtype is not field.dtype:
            raise LayoutDtypeError(
                f"final observations {name!r}: {leaf.dtype} (expected {field.dtype}). Cast them to "
                "that dtype."
            )
        if leaf.shape == all_rows:
            return leaf[mask]
        if leaf.shape != masked_rows:
            raise LayoutShapeError(
                f"final observations {name!r}: shape {tuple(leaf.shape)} (expected {all_rows}, or "
                f"{masked_rows} for the masked rows). Check the mask."
            )
        return leaf


def as_rows(data: Any) -> TensorDictBase:
    """Return rows as a TensorDict; a list of rows is stacked.

    Raises:
        LayoutDtypeError: `data` is neither, or an element of the list is no TensorDict.
        LayoutShapeError: The rows of a list differ in keys or shapes.
    """
    if isinstance(data, TensorDictBase):
        return data
    stray = data
    if isinstance(data, list):
        stray = next((row for row in data if not isinstance(row, TensorDictBase)), None)
        if data and stray is None:
            rows = LazyStackedTensorDict.maybe_dense_stack(data)
            if isinstance(rows, LazyStackedTensorDict):
                raise LayoutShapeError(
                    f"cannot write rows: {len(data)} of several forms (expected the same keys and "
                    "shapes). Pad them, or leave keys out."
                )
            return rows
    raise LayoutDtypeError(
        f"cannot write rows: {type(stray).__name__} (expected a TensorDict). Convert them to a "
        "TensorDict."
    )


def check_steps(rows: TensorDictBase, mask: torch.Tensor | None, finals: Finals) -> None:
    """Refuse what `RowAppender.add` can never add.

    Raises:
        LayoutShapeError: The rows are not [N] or [N, T], there is none, or the mask is not of
            their shape or without final observations.
    """
    if (mask is None) != (finals is None):
        raise LayoutShapeError(
            f"final observations: mask {mask is not None}, observations {finals is not None} "
            "(expected both or none). Pass the missing one, or leave out the other."
        )
    if rows.ndim not in (1, 2) or not rows.batch_size.numel():
        raise LayoutShapeError(
            f"cannot add rows: batch size {list(rows.batch_size)} (expected [N] or [N, T], "
            "not empty). Reshape the rows to one of these."
        )
    if mask is None:
        return
    found = type(mask).__name__
    if isinstance(mask, torch.Tensor):
        if mask.shape == rows.batch_size and mask.dtype is torch.bool:
            return
        found = f"{mask.dtype} of shape {tuple(mask.shape)}"
    raise LayoutShapeError(
        f"terminal_mask: {found} (expected a tensor of torch.bool, {tuple(rows.batch_size)}). One "
        "entry for each row."
    )
