"""`PackedReplayStorage`: a replay in shared memory as a storage of TorchRL's replay buffers.

Indices, views, assignment, state and copies: what TorchRL's buffers, samplers and writers
use. What lies below, and the replay's own `add` and `sample`, is in
`torchrl_unilab.data.replay.shared`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torchrl.data import HERReplayBuffer

from torchrl_unilab.data.positions import (
    batch_shape,
    check_range,
    flat_positions,
    is_mask,
    is_run,
    is_single,
    last_of_each,
    wrap_negative,
)
from torchrl_unilab.data.replay.append import as_rows
from torchrl_unilab.data.replay.checkpoint import PackedReplayCheckpointer, load_rows, save_rows
from torchrl_unilab.data.replay.shared import CLOSED, SharedReplay
from torchrl_unilab.data.stock import rows_of_state_dict, set_back_writers, writers_ahead
from torchrl_unilab.errors import ConfigError, LayoutShapeError, PositionError, UsageError
from torchrl_unilab.shm.shards import FLOOR
from torchrl_unilab.shm.window import Window


class PackedReplayStorage(SharedReplay):
    """`max_size` transitions in shared memory, one row each, in a wide and a narrow part.

    A drop-in for ``LazyTensorStorage`` in ``ReplayBuffer`` and ``TensorDictReplayBuffer``: same
    indices, same batches for a seed. But rows must be TensorDicts of tensors, not tensorclasses,
    plain tensors or ``NonTensorData``. Any number of processes may extend and sample it: pickle it,
    or its buffer, to spawned processes once it knows its rows, from `example`, from a spec
    (`from_spec`), or from the first write.

    ``storage[:]``, other slices, ``storage[i]`` and ``storage.get(key)`` are views of the rows:
    they cost nothing, and writing through them changes the rows (not the flags of ``storage[:]`` in
    a ``HERReplayBuffer``, which are copies). Batches are copies of whole rows, also while other
    processes write; views are not protected from writers. Tensors of batches and views are strided,
    one row apart, and share one block of memory: use `reshape` where ``Tensor.view`` fails, and
    call ``batch.clone()`` before ``torch.save``.

    Positions alternate between `writers` shards: position ``i`` is in shard ``i % writers``. Each
    writing process claims one shard; if there are more processes than shards, they share, one
    append at a time. With one shard per process, n-step returns continue over several appends of
    whole steps (`add`, or one step of all environments) or of one trajectory; segments of several
    environments, one after the other in one `extend`, end with it. The order of rows does not
    depend on which process is faster. `PackedSliceSampler` finds the order of time. TorchRL's
    samplers of slices assume that it is the order of positions, which holds for one shard that is
    extended by whole trajectories; otherwise they are refused.

    Args:
        max_size: Rows; rounded down to a multiple of `writers`.
        example: A transition: shapes and dtypes, not the content.
        writers: Shards.
        n_step: Steps a sampled transition takes (Sutton and Barto, 2nd edition, chapter 7): the
            reward is the discounted sum, and everything else under ``"next"`` is of the last step.
            There are fewer steps where an episode or the written rows end. The batch then also has
            the keys of TorchRL's ``MultiStepTransform``: ``"steps_to_next_obs"``, ``"gamma"``
            (``gamma ** steps``), ``"nonterminal"``, ``("next", "original_reward")``. Views show
            rows as they were written.
        gamma: Discount of a step.
        observation_keys: For several steps: keys whose entry under ``"next"`` is the observation of
            the following row. By default all keys that are also under ``"next"`` with the same
            shape and dtype, except done, terminated, truncated and reward.
        non_finite: What to do with rows that have a ``"reward"`` under ``"next"`` or an
            ``"action"``, nested or not, that is not finite: ``"refuse"`` raises before anything is
            written, ``"count"`` stores and counts them (`non_finite`), ``"pass"`` does not check.
        timeout: Seconds to wait for a process that writes.
        **stock: Arguments of TorchRL's storages, with values that rows in shared host memory can
            honour: `device` None or ``"cpu"``, `ndim` 1, `compilable` False, `cleanup_memmap` True,
            `scratch_dir` None, `auto_cleanup` None or True; `consolidated`, `shared_init` and
            `existsok` either way.

    Raises:
        ConfigError: A setting cannot work, or a stock argument cannot be honoured.
        SegmentSpaceError: The rows do not fit memory; says how many rows would. Raised when the
            rows are known.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.data import PackedReplayStorage
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_unilab.data import PackedReplayWriter
        >>> storage = PackedReplayStorage(1000)
        >>> rb = ReplayBuffer(storage=storage, writer=PackedReplayWriter(), batch_size=4)
        >>> rb.extend(TensorDict({"observation": torch.ones(3, 2)}, [3]))
        tensor([0, 1, 2])
        >>> rb.sample()["observation"].shape, storage.sample(8)["index"].shape
        (torch.Size([4, 2]), torch.Size([8]))
        >>> storage.close()
    """

    _default_checkpointer = PackedReplayCheckpointer
    # What TorchRL looks at

    @property
    def _storage(self) -> TensorDict | None:
        """All rows as views; TorchRL's samplers look for keys here."""
        return None if self._rows is None else self._views

    def __len__(self) -> int:
        """Return how many positions have been written, counted from 0 without a gap.

        At least 1 if any row can be sampled, even if position 0 is empty. `size` counts all rows
        that can be sampled.
        """
        return self._count_readable() or min(1, self.size)

    def _count_readable(self) -> int:
        if not self.initialized:
            return 0
        if self.writers == 1:  # fast: TorchRL asks several times for a batch
            return self.rows.length()
        return self.rows.extent(self.rows.window())[0]

    @property
    def _mutation_revision(self) -> int:
        return self.rows.revision if self.initialized else 0

    def _bump_mutation_revision(self) -> None:
        """Note that rows have been changed through views."""
        if self.initialized:
            self.rows.touch()

    @property
    def _last_cursor_index(self) -> int | None:
        """Position of the newest row, where trajectories are cut apart."""
        head = self.ptr
        if self.writers > 1 or (head and not self.rows.in_order(self.rows.window())):
            raise ConfigError(
                f"slices of a replay with writers={self.writers}: its rows take turns between "
                "writers or environments (expected them in the order of time). Use "
                "PackedSliceSampler, or extend one with writers=1 by whole trajectories."
            )
        return (head - 1) % self.max_size if head else None

    @property
    def _last_cursor(self) -> int | None:
        """The same, plus a multiple of `max_size` that changes whenever rows do.

        Hindsight takes it modulo `max_size`, and keeps the ends of episodes until it changes.
        """
        newest = self._last_cursor_index
        return None if newest is None else newest + self.max_size * self._mutation_revision

    # Writing

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows at positions: new ones at the next positions, others in place.

        Args:
            cursor: An int, or a slice, range, list or tensor of positions.
            data: One row for an int, else rows [n], or a list of rows.
            set_cursor: False to write in place even where rows could be appended.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; nothing was written.
            IndexError: There is no such position.
            UsageError: Positions before these have not been written.
            ConfigError: New rows have a position, but the storage has several shards.
        """
        cursor = ... if cursor is None else cursor
        try:
            data, single, shape = as_rows(data), is_single(cursor), batch_shape(cursor)
            if single or not data.batch_size:
                data = data.unsqueeze(0)
            elif shape is not None and data.batch_size[: len(shape)] == shape:
                data = data.flatten(0, len(shape) - 1)
            length, count = len(self), data.batch_size[0]
            # Stock storages take a mask of all positions, written or not.
            whole = is_mask(cursor) and len(cursor) == self.max_size
            positions = flat_positions(
                [int(cursor)] if single else cursor, self.max_size if whole else length
            )
            if positions.numel() != count:
                raise LayoutShapeError(
                    f"cannot write rows: {count} at {len(positions)} positions (expected as many). "
                    "Check the index."
                )
            if count:
                self._write(positions, data, length, set_cursor)
        except BaseException:
            set_back_writers(self, cursor, self.ptr)
            raise

    def _write(
        self, positions: torch.Tensor, data: TensorDictBase, length: int, set_cursor: bool
    ) -> None:
        """Write rows at positions, int64 [n]; see `set`."""
        first, begin = self.ptr % self.max_size, int(positions[0])
        if set_cursor and begin != first and writers_ahead(self, positions, self.ptr):
            self.continue_at(begin)
            first = self.ptr % self.max_size
        run = set_cursor and self.writers == 1 and is_run(positions, first, self.max_size)
        if not run:
            positions = wrap_negative(positions, length)
        indexed = self._form is not None and "index" in self._form.index
        if indexed and data.get("index", None) is None:
            data = data.copy().set("index", expand_as_right(positions, data))  # as TorchRL does
        if run:
            self.append(data, first)
            return
        newest = last_of_each(positions)
        if len(newest) < len(positions):
            positions, data = positions[newest], data[newest]
        fresh = positions >= length
        if fresh.any():
            if not fresh.all():
                self._appender.check(data)  # all of them, before some are appended
            self._append_at(positions[fresh], data[fresh], length)
            positions, data = positions[~fresh], data[~fresh]
        if len(positions):
            self._appender.rewrite(positions, data)

    def continue_at(self, position: int) -> None:
        """Write the next row at a position, where the writer of a stock checkpoint continues.

        The oldest row lies there then. No effect before all positions have been written.
        """
        if self.writers == 1 and len(self) == self.max_size:
            heads = self.rows.window().heads
            self.rows.continue_at(0, position)
            self._moved = {heads: self.rows.window().heads}

    def _append_at(self, positions: torch.Tensor, data: TensorDictBase, length: int) -> None:
        """Append rows at positions that have not been written, by ascending position."""
        if self.writers > 1:
            raise ConfigError(
                f"replay of writers={self.writers}: new rows at positions (expected rows without). "
                "Use PackedReplayWriter, or make the storage with writers=1."
            )
        ordered, order = positions.sort()
        if int(ordered[-1]) >= self.max_size:
            raise PositionError(
                f"no row {int(ordered[-1])}: the storage takes {self.max_size} (expected a "
                f"position of 0 to {self.max_size - 1}). Check the index."
            )
        if not is_run(ordered, length, self.max_size):
            raise UsageError(
                f"cannot write row {int(ordered[-1])}: {length} are written (expected rows one "
                "after the other). Write through one writer, or use PackedReplayWriter."
            )
        self.append(data[order], length)

    # Reading

    def get(self, index: Any) -> Any:
        """Return rows: views for a key, a slice or an int, and else copies.

        Args:
            index: A key of the rows; an int or a slice; ``...`` for all; None for all, with
                one more dimension; or a range, list, array or tensor (a mask, too) of positions.

        Returns:
            The tensor [len, ...] of a key; else a TensorDict, [] for an int, [*index.shape] for
            an array or tensor of integers, else [n].

        Raises:
            PositionError: There is no such row, or not any more.
            KeyError: There is no such key.
            UsageError: Nothing is known of the rows yet.
            WaitTimeoutError: A row was not complete in time; names the writer.
        """
        self.rows  # noqa: B018  # refuses a closed storage, and one that knows no rows
        views, reader = self._views, self._reader
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        length = self._count_readable()
        if isinstance(index, slice) and (index.step or 1) < 0:
            index = range(*index.indices(length))  # no view counts down
        if index is None or index is ... or isinstance(index, (str, tuple, slice)):
            views = views if length == self.max_size else views[:length]
            return self._all(views) if index == slice(None) else views[index]
        if is_single(index):
            at = int(index)
            check_range(at, at, length, "row", "written")
            return views[at % length]
        batch = reader.at(wrap_negative(flat_positions(index, length), length))
        shape = batch_shape(index)
        return batch if shape is None else batch.view(*shape, *batch.batch_size[1:])

    def _all(self, views: TensorDict) -> TensorDict:
        """Return views of all rows; copies of flags for hindsight, which looks for ends in them.

        PyTorch counts the true ones, then writes that many: not safe where they change meanwhile.
        """
        rows = views.copy()
        if any(isinstance(each, HERReplayBuffer) for each in self._attached_entities):
            for key, column in views.items(include_nested=True, leaves_only=True):
                if column.dtype is torch.bool:
                    rows.set(key, column.clone())
        return rows

    def read_since(self, counted: Sequence[int]) -> tuple[TensorDict, tuple[int, ...]]:
        """Return rows that were written since the last call, and the argument of the next call.

        Args:
            counted: What the last call returned; empty for all rows, as if of another replay.

        Returns:
            Copies of the rows [n], the oldest of a shard first, without those that have been
            overwritten; and how many rows of each shard have been read, counted across checkpoints.
        """
        rows, reader = self.rows, self._reader
        bases, origins, window = rows.lineage()
        if not window.size:  # none can be read now
            return reader.at(rows.positions_in(window)), tuple(counted)
        # A shard's rows are counted across checkpoints by their number plus its shift.
        shifts = [origin - base for origin, base in zip(origins, bases, strict=True)]
        read = tuple(head + shift for head, shift in zip(window.heads, shifts, strict=True))
        # Counts of other shards, or above the rows that there are, are of another replay.
        counted = counted if len(counted) == len(read) else [0] * len(read)
        known = [c if c <= r else 0 for c, r in zip(counted, read, strict=True)]
        heads = tuple(count - shift for count, shift in zip(known, shifts, strict=True))
        window = window.above(self.heads_now(heads))
        positions = rows.positions_in(window)
        batch = reader.at(positions)
        # Where a newer row was read, which the next call returns, its older one is below the floor.
        gone = rows.hidden(positions, Window(rows.load(FLOOR), window.heads))
        return batch[~gone] if gone.any() else batch, read

    def _rand_given_ndim(self, batch_size: int) -> torch.Tensor:
        """Draw positions as any storage does, but none that is being written."""
        rows, window = self.rows, self.rows.readable()
        if self.writers > 1:  # shards may be ahead of each other
            return rows.positions(rows.draw(batch_size, window, self._rng))
        length, hidden = rows.extent(window)
        index = torch.randint(0, max(1, length), (batch_size,), generator=self._rng, device="cpu")
        if hidden:
            bad = rows.hidden(index, window).nonzero().squeeze(1)
            index[bad] = rows.positions(rows.draw(len(bad), window, self._rng))
        return index

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the rows and all that belongs to them. Raises as `dumps`."""
        if not self.initialized:
            return {"header": None, "rows": torch.empty(0, dtype=torch.int32, device="cpu")}
        lineage, width = self.rows.settled_lineage(), sum(self.rows.widths)
        copies = np.empty((lineage.window.size, width), np.int32)

        def write(place: int, words: npt.NDArray[np.int32]) -> None:
            copies[place : place + len(words)] = words

        header = self.header() | save_rows(self.rows, lineage, write)
        return {"header": header, "rows": torch.from_numpy(copies)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace all rows by a `state_dict` of this class, or of a stock one of ``ndim=1``.

        Raises:
            CheckpointError: The storage is not like the one that was saved; it keeps its rows.
        """
        if "header" not in state_dict:
            self.load_rows(rows_of_state_dict(state_dict))
        elif state_dict["header"] is None:
            self._empty()
        else:
            words = state_dict["rows"]
            load_rows(self, state_dict["header"], len(words), lambda at, n: words[at : at + n])

    # Copies and end

    def _leave(self) -> None:
        rows = self._rows
        if rows is not None:
            rows.close()
            # All that holds the mapping, which would outlive the storage's end.
            self._views = self._reader = self._appender = CLOSED
            self._rows = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"size={self.size}"
        return f"{type(self).__name__}(max_size={self.max_size}, writers={self.writers}, {state})"
