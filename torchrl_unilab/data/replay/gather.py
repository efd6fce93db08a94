"""Batches gathered from shared rows into one flat run of memory; n-step returns are summed here.

`RowReader` makes batches of one form and fills them; `batch_nbytes` says what one takes, for
budgets. The storage samples and reads with it, and a pipeline's host batches are made by it.
"""

from __future__ import annotations

import functools
import itertools
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


class _Known(NamedTuple):
    """A batch whose memory has been recognised as that of `RowReader.memory`.

    Attributes:
        batch: The batch; its end ends this entry.
        nested: The TensorDicts in it.
        held: What they and the batch hold.
        memory: The memory.
    """

    batch: weakref.ref[TensorDictBase]
    nested: tuple[TensorDictBase, ...]
    held: list[Any]
    memory: Batch

    def is_still(self, batch: TensorDictBase) -> bool:
        """Return whether nothing in the batch has been replaced."""
        held = _held(batch, self.nested)
        return len(held) == len(self.held) and all(map(operator.is_, held, self.held))


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
        self._known: dict[int, _Known] = {}  # by the batch's id()

    def empty(self, count: int, *, pin_memory: bool) -> TensorDict:
        """Make a batch to gather into: see `PackedReplayStorage.empty_batch`."""
        nbytes = batch_nbytes(self._form, count)
        check_memory(f"batch of {count} rows", nbytes, "Sample fewer rows.")
        flat = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin_memory, device="cpu")
        return self.tensordict(self.memory(count, flat), index=True)

    def memory(self, count: int, flat: torch.Tensor | None = None) -> Batch:
        """Return memory for `count` rows, in `flat`, uint8 [batch_nbytes], if given."""
        if flat is None:
            return {
                name: torch.empty(count, *shape, dtype=dtype, device="cpu")
                for name, shape, dtype in self._blocks
            }
        layout = _in_one_run(self._blocks, count)
        return dict(zip(layout.keys, layout.views(flat), strict=True))

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
        """Return the memory of a batch of `tensordict`, made here or in another process.

        Raises:
            ConfigError: `batch` was not made by `tensordict`.
        """
        count = batch.batch_size[0] if batch.batch_size else 0
        known = self._known.get(id(batch))
        if known is not None and known.is_still(batch):
            return known.memory
        index = batch.get("index", None)
        if index is not None and count:
            storage = index.untyped_storage()
            if storage.nbytes() >= batch_nbytes(self._form, count) and not index.storage_offset():
                with torch.inference_mode(False):  # it is kept
                    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                    memory = self.memory(count, flat)
                made = self.tensordict(memory, index=True)
                if _addresses(made).items() <= _addresses(batch).items():
                    # The weak reference passes itself: `pop` takes it as its default value.
                    forget = functools.partial(self._known.pop, id(batch))
                    leaves_and_nodes = batch.values(include_nested=True)
                    nested = tuple(v for v in leaves_and_nodes if isinstance(v, TensorDictBase))
                    held = _held(batch, nested)
                    known = _Known(weakref.ref(batch, forget), nested, held, memory)
                    self._known[id(batch)] = known
                    return memory
        raise ConfigError(
            f"batch to sample into: batch size {list(batch.batch_size)}, not made for it (expected "
            "one of empty_batch). Make it with the storage's empty_batch."
        )

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


def _addresses(batch: TensorDictBase) -> dict[Any, tuple[int, torch.dtype, torch.Size]]:
    """Return where each tensor of a batch lies, and as what, by key."""
    return {
        key: (leaf.data_ptr(), leaf.dtype, leaf.shape)
        for key, leaf in batch.items(include_nested=True, leaves_only=True)
    }


def _held(batch: TensorDictBase, nested: Iterable[TensorDictBase]) -> list[Any]:
    """Return what a batch holds, and then what the TensorDicts in it do."""
    return [*batch.values(), *itertools.chain.from_iterable(node.values() for node in nested)]


@functools.lru_cache(maxsize=64)
def _in_one_run(blocks: tuple[Spec, ...], count: int) -> BlockLayout:
    """Return where the blocks of a batch lie in one run of memory."""
    return BlockLayout.of_specs((name, (count, *shape), dtype) for name, shape, dtype in blocks)
