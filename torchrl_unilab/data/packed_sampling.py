"""Batches gathered from shared rows: next observations derived, n steps summed up."""

from __future__ import annotations

import functools
import math
import threading
from collections import deque

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_unilab.data.packed_form import DONE, REWARD, RowForm
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.shm.layout import align
from torchrl_unilab.shm.rows import Gather, SharedRows

__all__ = ["BatchMemory", "RowGatherer", "draw_positions"]


class BatchMemory:
    """The memory of a batch, one flat run of bytes, as few blocks.

    Attributes:
        flat: All of it, uint8.
        blocks: Name to tensor of shape [count, ...].
    """

    def __init__(self, flat: torch.Tensor, blocks: dict[str, torch.Tensor]) -> None:
        self.flat = flat
        self.blocks = blocks

    @functools.cached_property
    def index(self) -> torch.Tensor:
        """Positions of the rows, int64 of shape [count]."""
        return self.blocks["index"]


class RowGatherer:
    """Gathers rows into batches.

    Args:
        rows: The rows.
        form: What they are.
        n_step: Steps that a transition of a batch takes, if its episode and the rows so far
            go on for as long.
        gamma: Discount of a step.
        reuse: How many memories `next_memory` gives in turn; 0 for a new one each time.
    """

    def __init__(
        self, rows: SharedRows, form: RowForm, n_step: int, gamma: float, reuse: int = 0
    ) -> None:
        self._rows, self._form, self._layout = rows, form, rows.layout
        self.n_step, self.gamma, self.reuse = n_step, gamma, reuse
        self._turning = threading.Lock()
        self._turns: dict[int, deque[BatchMemory]] = {}  # the latest one last, by count
        words, bits = self._layout.words, self._layout.flag_bits
        plan: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
            ("index", torch.int64, ()),
            ("rows", torch.int32, (words,)),
        ]
        if form.derived:
            plan.append(("following", torch.int32, (words,)))
        if bits:
            plan.append(("flags", torch.bool, (bits,)))
        if n_step > 1:
            reward = next(f for f in self._layout.fields if f.key == REWARD)
            plan += [
                ("last", torch.int32, (words,)),
                ("last_flags", torch.bool, (bits,)),
                ("reward", reward.dtype, reward.shape),
                ("steps", torch.int64, ()),
                ("gamma", torch.float32, ()),
                ("nonterminal", torch.bool, ()),
            ]
        self._plan = tuple(plan)

    def nbytes(self, count: int) -> int:
        """Bytes of the memory of a batch of `count` rows."""
        return sum(
            align(count * math.prod(shape) * dtype.itemsize) for _, dtype, shape in self._plan
        )

    def memory(self, count: int, flat: torch.Tensor | None = None) -> BatchMemory:
        """Return memory for `count` rows, in `flat`, uint8 [nbytes(count)], if given."""
        if flat is None:
            flat = torch.empty(self.nbytes(count), dtype=torch.uint8)
        blocks, start = {}, 0
        for name, dtype, shape in self._plan:
            end = start + count * math.prod(shape) * dtype.itemsize
            blocks[name] = flat[start:end].view(dtype).view(count, *shape)
            start = align(end)
        return BatchMemory(flat, blocks)

    def next_memory(self, count: int) -> BatchMemory:
        """Return memory for `count` rows, which is used again after `reuse` more."""
        if not self.reuse:
            return self.memory(count)
        with self._turning:
            turns = self._turns.setdefault(count, deque(maxlen=self.reuse))
            if len(turns) < self.reuse:
                turns.append(self.memory(count))
            else:
                turns.rotate(-1)
            return turns[-1]

    def into(self, memory: BatchMemory) -> Gather:
        """Return what gathers rows into `memory`, see `SharedRows.read_rows`."""

        def gather(places: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor | None:
            if places is None:
                return self._fill(memory.blocks, positions)
            part = self.memory(len(places))
            lost = self._fill(part.blocks, positions)
            for name, block in part.blocks.items():
                memory.blocks[name].index_copy_(0, places, block)
            return lost

        return gather

    def _fill(self, out: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor | None:
        """Gather rows at `positions`; return those whose slot has changed hands, if any."""
        out["index"].copy_(positions)
        torch.index_select(self._rows.block, 0, positions, out=out["rows"])
        if self._layout.link is None:
            return None
        last, at = out["rows"], positions
        codes = self._unpack(last, out.get("flags"))
        if self.n_step > 1:
            last, at = out["last"], positions.clone()
            codes = self._sum_up(out, at, codes)
        return self._derive(out["following"], at, codes) if self._form.derived else None

    def _unpack(self, rows: torch.Tensor, flags: torch.Tensor | None) -> torch.Tensor:
        """Unpack the flags of rows, if they are packed; return the links."""
        words = rows[:, self._layout.link]
        bits = self._layout.flag_bits
        if not bits or flags is None:
            return words
        low = words.bitwise_and(2**bits - 1)
        torch.index_select(self._layout.flag_table, 0, low, out=flags)
        return words.bitwise_right_shift(bits)

    def _derive(
        self, following: torch.Tensor, at: torch.Tensor, codes: torch.Tensor
    ) -> torch.Tensor | None:
        """Gather the next observations of the rows at `at`, given their links."""
        rows, capacity = self._rows, self._rows.capacity
        torch.index_select(rows.block, 0, (codes - 1).clamp_(0, capacity - 1), out=following)
        own = (codes > capacity).nonzero().squeeze(1)
        if not len(own):
            return None
        slots = codes[own] - (capacity + 1)
        following[:, : rows.side.shape[1]].index_copy_(0, own, rows.side.index_select(0, slots))
        rows.fence()
        lost = rows.owners.index_select(0, slots) != at[own]
        return own[lost] if lost.any() else None

    def _sum_up(
        self, out: dict[str, torch.Tensor], at: torch.Tensor, codes: torch.Tensor
    ) -> torch.Tensor:
        """Go on for n steps where the links do, from rows at `at`, which becomes where to.

        Returns:
            Links of the last rows, int32 of shape [n].
        """
        layout, rows = self._layout, out["rows"]
        last, last_flags = out["last"].copy_(rows), out["last_flags"]
        flags = out.get("flags", last_flags)
        last_flags.copy_(flags)
        reward = out["reward"].copy_(layout.view(REWARD, rows, flags))
        steps, codes = out["steps"].fill_(1), codes.clone()
        places = self._going_on(codes, layout.view(DONE, rows, flags))
        for k in range(1, self.n_step):
            if not len(places):
                break
            ahead = codes[places].long() - 1
            part = self._rows.block.index_select(0, ahead)
            part_flags = torch.empty(len(places), layout.flag_bits, dtype=torch.bool)
            part_codes = self._unpack(part, part_flags)
            reward.index_add_(0, places, layout.view(REWARD, part, part_flags), alpha=self.gamma**k)
            last.index_copy_(0, places, part)
            last_flags.index_copy_(0, places, part_flags)
            codes.index_copy_(0, places, part_codes)
            at.index_copy_(0, places, ahead)
            steps[places] = k + 1
            going = self._going_on(part_codes, layout.view(DONE, part, part_flags))
            places = places[going]
        torch.pow(self.gamma, steps, out=out["gamma"])
        torch.gt(steps, 1, out=out["nonterminal"])
        return codes

    def _going_on(self, codes: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        """Places of rows that do not end an episode and whose successor has come."""
        known = (codes > 0) & (codes <= self._rows.capacity)
        return (known & ~done.flatten(1).any(1)).nonzero().squeeze(1)

    def tensordict(self, memory: BatchMemory, *, index: bool) -> TensorDict:
        """Return the batch in `memory`, [count], as views.

        Args:
            memory: A batch.
            index: Whether to add the rows' positions as ``"index"``.
        """
        out, layout, form = memory.blocks, self._layout, self._form
        none = out["rows"].new_empty(0, dtype=torch.bool)
        views = layout.views(out["rows"])
        if layout.flag_bits:
            views |= layout.flag_views(out.get("flags", none))
        extra = []
        if self.n_step > 1:
            last = layout.views(out["last"])
            if layout.flag_bits:
                last |= layout.flag_views(out["last_flags"])
            views["next.original_reward"] = views[REWARD]
            views |= {key: view for key, view in last.items() if key.startswith("next.")}
            views |= {REWARD: out["reward"], "steps_to_next_obs": out["steps"]}
            views |= {name: out[name] for name in ("gamma", "nonterminal")}
            extra = ["next.original_reward", "steps_to_next_obs", "gamma", "nonterminal"]
        if form.derived:
            again = layout.views(out["following"], linked=True)
            views |= {f"next.{key}": view for key, view in again.items()}
        if index:
            views["index"] = out["index"]
            extra.append("index")
        return form.tensordict(views, (len(out["index"]),), extra)

    def memory_of(self, batch: TensorDictBase) -> BatchMemory:
        """Return the memory of a batch that `tensordict` returned, here or in another process.

        Raises:
            ConfigError: It is none of these.
        """
        index = batch.get("index", None)
        count = batch.batch_size[0] if batch.batch_size else 0
        if index is not None and count:
            storage = index.untyped_storage()
            if storage.nbytes() >= self.nbytes(count) and not index.storage_offset():
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                return self.memory(count, flat)
        raise ConfigError(
            f"batch to sample into: batch size {list(batch.batch_size)}, not made for it (expected "
            "one of empty_batch). Make it with the storage's empty_batch."
        )


def draw_positions(rows: SharedRows, count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draw positions as any storage of TorchRL does, of rows that are not being written.

    Args:
        rows: The rows.
        count: How many.
        generator: Source of the draw; the global one if None.

    Returns:
        Positions, int64 [count].
    """
    seen, capacity = rows.wait_readable(), rows.capacity
    length = seen.end if seen.head <= capacity else capacity
    index = torch.randint(0, max(1, length), (count,), generator=generator)
    if seen.end == seen.head and seen.floor == max(0, seen.head - capacity):
        return index
    numbers = rows.rows_at(index, seen.head)
    bad = ((numbers < seen.floor) | (numbers >= seen.end)).nonzero().squeeze(1)
    if len(bad):
        drawn = torch.randint(seen.floor, seen.end, (len(bad),), generator=generator)
        index[bad] = drawn.remainder_(capacity)
    return index
