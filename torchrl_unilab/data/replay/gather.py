"""Batches gathered from shared rows into one flat run of memory; n-step returns are summed here.

`RowReader` makes batches of one form and fills them; `batch_nbytes` says what one takes, for
budgets. The storage samples and reads with it, and a pipeline's host batches are made by it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_unilab.data.replay.form import EXTRA, ONE_STEP_REWARD, REWARD, RowForm
from torchrl_unilab.data.replay.trajectories import stride_of
from torchrl_unilab.data.schema import TensorField
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.limits import check_memory
from torchrl_unilab.shm.layout import BlockLayout, Spec
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.window import Window


class ReplaySnapshot(NamedTuple):
    """What there is to sample from.

    Attributes:
        ptr: Rows written since the storage was last emptied.
        size: Rows that can be sampled.
        window: Which ones; None for all of them.
    """

    ptr: int
    size: int
    window: Window | None = None


Batch = dict[str, torch.Tensor]
"""The memory of a batch, as blocks of shape [count, ...]."""


class _Made(NamedTuple):
    """A batch that `RowReader.empty` made.

    Attributes:
        batch: The batch; its end ends this entry.
        form: What its rows are.
        nested: The TensorDicts in it.
        held: What the batch, and each of these, held at first.
        memory: Its memory.
    """

    batch: weakref.ref[TensorDictBase]
    form: RowForm
    nested: list[TensorDictBase]
    held: list[list[Any]]
    memory: Batch

    def serves(self, batch: TensorDictBase, form: RowForm) -> bool:
        """Return whether rows of a form fit, and nothing has been replaced; more may be in it."""
        if self.form is not form and self.form != form:
            return False
        for now, first in zip(_held(batch, self.nested), self.held, strict=True):
            if len(now) < len(first) or not all(map(operator.is_, now, first)):
                return False
        return True


_made: dict[int, _Made] = {}
"""All of them in this process, by id(): a batch serves all storages of its form."""


def batch_nbytes(form: RowForm, count: int) -> int:
    """Return the bytes of the memory of a batch of `count` rows."""
    return _in_one_run(_blocks_of(form), count).nbytes


def _blocks_of(form: RowForm) -> tuple[Spec, ...]:
    """Return the blocks of a batch, by name, with the shape and dtype of each row of one."""

    def by_part(of: str) -> list[Spec]:
        return [(f"{of} {i}", (w,), torch.int32) for i, w in enumerate(form.layout.widths)]

    blocks = [("index", (), torch.int64), *by_part("rows")]
    if form.n_step > 1:
        reward = form.schema.fields[form.index[REWARD]]
        blocks += [*by_part("last"), (REWARD, reward.shape, reward.dtype)]
        blocks += [(name, (), dtype) for name, dtype in EXTRA.items()]
    return tuple(blocks)


class RowReader:
    """Gathers rows of a form into batches.

    Args:
        rows: The rows.
        form: What rows are.
        gamma: Discount of a step.
    """

    def __init__(self, rows: SharedRows, form: RowForm, gamma: float) -> None:
        self._rows, self._form, self._gamma = rows, form, gamma
        self._blocks = _blocks_of(form)
        self._trajectory = form.layout.views(rows.blocks)[-1]  # where there are n steps
        fields = [*form.schema.fields]
        if form.n_step > 1:
            fields.append(fields[form.index[REWARD]]._replace(path=ONE_STEP_REWARD))
            fields += [TensorField((name,), (), dtype) for name, dtype in EXTRA.items()]
        self._plain = replace(form.schema, fields=tuple(fields))
        index = TensorField(("index",), form.schema.batch_size, torch.int64)
        self._indexed = replace(form.schema, fields=(*fields, index))

    def empty(self, count: int, *, pin_memory: bool) -> TensorDict:
        """Make a batch to gather into: see `PackedReplayStorage.empty_batch`."""
        nbytes = batch_nbytes(self._form, count)
        check_memory(f"batch of {count} rows", nbytes, "Sample fewer rows.")
        layout = _in_one_run(self._blocks, count)
        with torch.inference_mode(False):  # or it could be written in that mode only
            flat = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin_memory, device="cpu")
            memory = layout.named_views(flat)
            batch = self.tensordict(memory, index=True)
        nested = [v for v in batch.values(include_nested=True) if isinstance(v, TensorDictBase)]
        # The weak reference passes itself: `pop` takes it as its default value.
        ended = weakref.ref(batch, functools.partial(_made.pop, id(batch)))
        _made[id(batch)] = _Made(ended, self._form, nested, _held(batch, nested), memory)
        return batch

    def memory(self, count: int) -> Batch:
        """Return memory for `count` rows."""
        return {
            name: torch.empty(count, *shape, dtype=dtype, device="cpu")
            for name, shape, dtype in self._blocks
        }

    def _parts(self, batch: Batch, name: str) -> list[torch.Tensor]:
        """Return the rows (``"rows"``) of a batch, or the last of n steps (``"last"``), by part."""
        return [batch[f"{name} {part}"] for part in range(len(self._form.layout.widths))]

    def tensordict(self, batch: Batch, *, index: bool) -> TensorDict:
        """Return a batch as views of its memory, [count, ...], with an ``"index"`` or not."""
        form, count = self._form, batch["index"].shape[0]
        views = form.layout.views(self._parts(batch, "rows"))[: len(form.schema.fields)]
        if form.n_step > 1:
            last = form.layout.views(self._parts(batch, "last"))
            original = views[form.index[REWARD]]
            for i, field in enumerate(form.schema.fields):
                if field.path[0] == "next":
                    views[i] = last[i]
            views[form.index[REWARD]] = batch[REWARD]
            views.append(original)
            views += [batch[name] for name in EXTRA]
        if not index:
            return self._plain.tensordict(views, (count,))
        inner = form.schema.batch_size
        at = batch["index"]
        views.append(at.view(count, *[1] * len(inner)).expand(count, *inner) if inner else at)
        return self._indexed.tensordict(views, (count,))

    def memory_of(self, batch: TensorDictBase) -> Batch:
        """Return the memory of a batch of `empty`.

        Raises:
            ConfigError: `batch` was not made by `empty` for rows of this form, or something in it
                has been replaced.
        """
        made = _made.get(id(batch))
        if made is None or not made.serves(batch, self._form):
            raise ConfigError(
                f"batch to sample into: batch size {list(batch.batch_size)}, not made for it "
                "(expected one of empty_batch). Make it with the storage's empty_batch."
            )
        return made.memory

    def at(self, positions: torch.Tensor) -> TensorDict:
        """Return copies of whole rows at positions, [n], as `SharedRows.read_at` reads them."""
        memory = self.memory(len(positions))
        self._rows.read_at(positions, functools.partial(self.gather, memory))
        return self.tensordict(memory, index=False)

    def gather(
        self,
        out: Batch,
        places: torch.Tensor | None,
        positions: torch.Tensor,
        heads: tuple[int, ...],
    ) -> None:
        """Gather rows into the memory of a batch: the rest of the arguments are `Gather`'s."""
        if places is not None:
            part = self.memory(len(places))
            self.gather(part, None, positions, heads)
            for name, block in part.items():
                out[name].index_copy_(0, places, block)
            return
        out["index"].copy_(positions)
        for i, block in enumerate(self._rows.blocks):
            torch.index_select(block, 0, positions, out=out[f"rows {i}"])
        if self._form.n_step > 1:
            self._sum_n_steps(out, positions, heads)

    def _sum_n_steps(self, out: Batch, positions: torch.Tensor, heads: tuple[int, ...]) -> None:
        """Sum rewards over up to n steps from each row, as far as its trajectory is written."""
        rows, view = self._rows, self._form.layout.views
        first, last = self._parts(out, "rows"), self._parts(out, "last")
        torch._foreach_copy_(last, first)
        fields, reward, steps = view(first), out[REWARD], out["steps_to_next_obs"]
        reward_at = self._form.index[REWARD]
        reward.copy_(fields[reward_at])
        steps.fill_(1)
        ids = rows.newest(positions, heads)
        trajectory, places = fields[-1], torch.arange(len(positions), device="cpu")
        for k in range(1, self._form.n_step):
            ids = ids + stride_of(trajectory) * rows.shards
            written = (ids < rows.bounds(heads, ids)).nonzero().squeeze(1)
            ids, trajectory, places = ids[written], trajectory[written], places[written]
            at = rows.positions(ids)
            follows = (self._trajectory[at] == trajectory).nonzero().squeeze(1)
            if not len(follows):
                break
            ids, trajectory, places = ids[follows], trajectory[follows], places[follows]
            parts = [block.index_select(0, at[follows]) for block in rows.blocks]
            reward.index_add_(0, places, view(parts)[reward_at], alpha=self._gamma**k)
            for words, part in zip(last, parts, strict=True):
                words.index_copy_(0, places, part)
            steps[places] = k + 1
        torch.pow(self._gamma, steps, out=out["gamma"])
        torch.gt(steps, 1, out=out["nonterminal"])


def _held(batch: TensorDictBase, nested: Iterable[TensorDictBase]) -> list[list[Any]]:
    """Return what a batch holds, and what each of the TensorDicts in it does."""
    return [[*batch.values()], *([*node.values()] for node in nested)]


@functools.lru_cache(maxsize=64)
def _in_one_run(blocks: tuple[Spec, ...], count: int) -> BlockLayout:
    """Return where the blocks of a batch lie in one run of memory."""
    return BlockLayout.of_specs((name, (count, *shape), dtype) for name, shape, dtype in blocks)
