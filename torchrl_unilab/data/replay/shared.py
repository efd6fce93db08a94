"""Transitions in shared memory: their schema, their memory, their counts; add, append, sample.

This is the surface of a replay that our collectors and pipelines use, without a buffer.
`PackedReplayStorage` adds what TorchRL's buffers, samplers and writers use. How rows stay whole
is the business of `torchrl_unilab.shm.rows`.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Self, get_args

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_unilab.checks import as_choice, as_integer, as_number, as_seconds
from torchrl_unilab.data.replay.append import Finals, NonFinite, RowAppender, as_rows, check_steps
from torchrl_unilab.data.replay.form import RowForm
from torchrl_unilab.data.replay.gather import ReplaySnapshot, RowReader
from torchrl_unilab.data.schema import TensorSchema
from torchrl_unilab.data.shared_storage import SharedStorage
from torchrl_unilab.data.stock import STORAGE_ARGUMENTS, check_stock_arguments
from torchrl_unilab.errors import CheckpointError, ConfigError, SegmentSpaceError, UsageError
from torchrl_unilab.owner import Closed
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.segment import SharedSegment, free_bytes

CLOSED = Closed("PackedReplayStorage", "Build it again.")


class SharedReplay(SharedStorage):
    """The rows of a `PackedReplayStorage`; its docstring has the arguments."""

    _process_local = ("_building", "_rows", "_appender", "_reader", "_views", "_moved")
    _reader: RowReader | Closed
    _appender: RowAppender | Closed
    _views: Any

    def __init__(
        self,
        max_size: int,
        *,
        example: TensorDictBase | None = None,
        writers: int = 1,
        n_step: int = 1,
        gamma: float = 0.99,
        observation_keys: Sequence[str | tuple[str, ...]] | None = None,
        non_finite: NonFinite = "refuse",
        timeout: float = 10.0,
        **stock: Any,
    ) -> None:
        check_stock_arguments(type(self).__name__, stock, STORAGE_ARGUMENTS)
        writers = as_integer("replay storage writers", writers, "Use 1.")
        remedy = "Use at least one row per writer."
        max_size = as_integer("replay storage max_size", max_size, remedy, least=writers)
        n_step = as_integer("replay storage n_step", n_step, "Use 1 for one-step returns.")
        as_choice("replay storage non_finite", non_finite, get_args(NonFinite), "Choose one.")
        gamma = as_number("replay storage gamma", gamma, "Use 0.99.", "[0, 1]")
        if isinstance(observation_keys, str):
            raise ConfigError(
                f"replay storage observation_keys: {observation_keys!r} (expected a list of keys). "
                f"Give [{observation_keys!r}]."
            )
        timeout = as_seconds("replay storage timeout", timeout)
        super().__init__(max_size - max_size % writers, writers)
        self.n_step, self.gamma, self.timeout = n_step, gamma, timeout
        self.observation_keys = None if observation_keys is None else [*observation_keys]
        self.non_finite_policy: NonFinite = non_finite
        self._segment: SharedSegment | None = None
        self._form: RowForm | None = None
        self._start_process()
        if example is not None:
            row = as_rows(example)
            self.initialize(TensorSchema.of(row, row.names))

    def _empty_copy(self) -> Self:
        other = type(self)(
            self.max_size,
            writers=self.writers,
            n_step=self.n_step,
            gamma=self.gamma,
            observation_keys=self.observation_keys,
            non_finite=self.non_finite_policy,
            timeout=self.timeout,
        )
        if self._form is not None:
            other.initialize(self._form.schema)  # of which a state has no names of dimensions
        return other

    def _start_process(self) -> None:
        self._building = threading.RLock()
        self._rows: SharedRows | None = None
        if self._segment is not None:
            self._attach(self._segment)

    # The rows

    def initialize(self, schema: TensorSchema) -> None:
        """Allocate memory for rows of a schema, unless it is allocated.

        Raises:
            LayoutKeyError: `n_step` needs keys that are not there.
            SegmentSpaceError: The memory does not fit; says how many rows would.
        """
        with self._building:
            if self.initialized:
                return
            form, size = self._form_of(schema), self.max_size // self.writers
            nbytes, free = SharedRows.nbytes(form.layout.widths, self.writers, size), free_bytes()
            if nbytes > free:
                fixed = SharedRows.nbytes(form.layout.widths, self.writers, 1)
                fit = max(0, free - fixed) * self.max_size // nbytes
                raise SegmentSpaceError(
                    f"cannot create {self.max_size} shared rows: {nbytes} bytes do not fit "
                    f"(expected at most {free}). About {fit} rows would."
                )
            segment = SharedSegment(nbytes)
            self._form = form
            self._segment = segment  # first: a storage with rows is copied with their memory
            self._attach(segment)

    def _form_of(self, schema: TensorSchema) -> RowForm:
        keys = self.observation_keys
        paths = None if keys is None else [(k,) if isinstance(k, str) else tuple(k) for k in keys]
        return RowForm.of(schema, self.n_step, paths)

    def _attach(self, segment: SharedSegment) -> None:
        form, size = self._form, self.max_size // self.writers
        assert form is not None, "rows come with their form"
        with torch.inference_mode(False):  # or the views could be written in that mode only
            rows = SharedRows(segment, form.layout.widths, self.writers, size, self.timeout)
            views = form.layout.views(rows.blocks)[: len(form.schema.fields)]
            self._views = form.schema.tensordict(views, (self.max_size,))
        self._reader = RowReader(rows, form, self.gamma)
        self._appender = RowAppender(rows, form, self.non_finite_policy)
        self._moved: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._rows = rows

    @property
    def initialized(self) -> bool:
        """Whether keys, shapes and dtypes are known."""
        if self._rows is None:
            self._check_open()
        return self._rows is not None

    @property
    def rows(self) -> SharedRows:
        """The rows in shared memory.

        Raises:
            UsageError: Nothing is known of them yet.
            SegmentClosedError: The storage is closed.
        """
        if self._rows is None:
            self._check_open()
            raise self._schema_unknown("use")
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self.rows.segment.nbytes

    # Counts

    def snapshot(self) -> ReplaySnapshot:
        """Return the rows that can be sampled now."""
        if not self.initialized:
            return ReplaySnapshot(0, 0)
        lineage = self.rows.lineage()
        return ReplaySnapshot(lineage.written, lineage.window.size, lineage.window)

    def heads_now(self, heads: tuple[int, ...]) -> tuple[int, ...]:
        """Return what heads loaded before `continue_at` have become; others stay as they are.

        Rows below the result were already there when `heads` were loaded.
        """
        return self._moved.get(heads, heads)

    @property
    def size(self) -> int:
        """Rows that can be sampled."""
        return self.rows.window().size if self.initialized else 0

    @property
    def ptr(self) -> int:
        """Rows written since the storage was last emptied."""
        return self.rows.lineage().written if self.initialized else 0

    @property
    def _is_full(self) -> bool:
        """Whether all positions have been written; writers of TorchRL's ask in their `repr`."""
        return not self.closed and len(self) == self.max_size

    @property
    def non_finite(self) -> int:
        """Rows with a reward or action that is not finite, with ``non_finite="count"``."""
        return self.rows.counted if self.initialized else 0

    # Writing

    def use_writer(self, writer: int) -> None:
        """Write to shard `writer` from now on.

        Without it, a process claims the first shard that no living process writes to when it
        first writes, or shares one.

        Raises:
            ConfigError: There is no such shard, or another living process writes to it.
            UsageError: Nothing is known of the rows yet.
        """
        remedy = "Build the storage for more writers."
        self.rows.claim(as_integer("replay writer", writer, remedy, least=0, most=self.writers - 1))

    def add(
        self,
        rows: TensorDictBase,
        *,
        terminal_mask: torch.Tensor | None = None,
        terminal_next_obs: Finals = None,
    ) -> int:
        """Append steps of N environments; return the position of the first row.

        ``("next", "done")`` becomes ``terminated | truncated``; of rows with only one of the two,
        ``done | that one``. A row that is both becomes terminated only: it does not bootstrap.

        Args:
            rows: One step [N] or several [N, T]; rows then lie step by step.
            terminal_mask: Rows whose next observation is replaced, bool of the rows' shape.
            terminal_next_obs: The replacements, for all rows or for the masked ones (in the order
                of ``rows[mask]``): a tensor if rows have one observation, or a TensorDict of
                observations without ``"next"``.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; nothing was written.
            ConfigError: A reward or action is not finite, or another process writes to the
                shard of a replay of several steps; nothing was written.
        """
        rows = as_rows(rows)
        check_steps(rows, terminal_mask, terminal_next_obs)
        with span("commit"):
            appender = self._appender_for(rows if rows.ndim == 1 else rows[:, 0])
            return self._position(appender.add(rows, terminal_mask, terminal_next_obs))

    def append(self, rows: TensorDictBase, at: int | None = None) -> torch.Tensor:
        """Append rows [n] as they are; return their positions, int64 [n].

        With ``n_step > 1`` the rows are either one trajectory after the other, or one step of
        several environments, which follows the step of the last call. Which of the two is inferred
        from their observations, and from ``("collector", "traj_ids")`` if they have it; a step that
        could also be one trajectory is taken for a trajectory. `add` does not have to guess.

        Args:
            rows: The rows.
            at: Position that the first one must have.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; nothing was written.
            ConfigError: As for `add`.
            UsageError: There is no row, or the next position is not `at`.
        """
        rows = as_rows(rows)
        count = rows.batch_size[0] if rows.batch_size else 0
        if not count:
            raise UsageError(
                f"cannot append rows: batch size {list(rows.batch_size)} (expected at least one "
                "row). Check where they come from."
            )
        with span("commit"):
            first = self._appender_for(rows).append(rows, at)
        start, step = self._position(first), self.writers
        index = torch.arange(start, start + count * step, step, device="cpu")
        fits = start + count * step <= self.max_size
        return index if fits else index.remainder_(self.max_size)

    def _position(self, number: int) -> int:
        rows = self.rows
        return number % rows.shard_rows * rows.shards + rows.shard

    def _appender_for(self, rows: TensorDictBase) -> RowAppender | Closed:
        """Return the appender; make it for rows like `rows` [n] if there are none yet."""
        if not self.initialized:
            self.initialize(TensorSchema.of(rows[0], rows.names[1:]))
        return self._appender

    # Content as a whole

    def _empty(self) -> None:
        """Forget all rows."""
        if self.initialized:
            self.rows.clear()

    def load_rows(self, rows: TensorDictBase) -> None:
        """Replace all content by rows [n], such as those of a stock checkpoint.

        Raises:
            CheckpointError: There are more rows than fit.
            LayoutError: Keys, shapes or dtypes differ.
        """
        room = self.max_size // self.writers
        if len(rows) > room:
            raise CheckpointError(
                f"cannot load {len(rows)} rows: a writer's part of the storage takes {room} "
                f"(expected at most as many). Load into one of max_size={len(rows)}, writers=1."
            )
        if len(rows):
            self._appender_for(rows).replace(rows)
        else:
            self._empty()

    def header(self, schema: TensorSchema | None = None) -> dict[str, Any]:
        """Return what a checkpoint says about the rows, of `schema` if none is known, for JSON."""
        form = self._form if self._form is not None or schema is None else self._form_of(schema)
        assert form is not None
        return {
            "schema": form.schema.to_json(),
            "words": sum(form.layout.widths),
            "max_size": self.max_size,
            "writers": self.writers,
            "n_step": self.n_step,
        }

    # Sampling

    def empty_batch(self, count: int, *, pin_memory: bool = False) -> TensorDict:
        """Make memory for batches of `count` rows, to `sample` into.

        All tensors are views of one flat run of bytes.

        Args:
            count: Rows.
            pin_memory: Page-lock it.

        Raises:
            ConfigError: `count` is not positive, or so many rows do not fit memory.
        """
        count = as_integer("rows to sample", count, "Sample 1 row or more.")
        self.rows  # noqa: B018  # refuses a closed storage, and one that knows no rows
        return self._reader.empty(count, pin_memory=pin_memory)

    def sample(
        self,
        count: int,
        *,
        seed: int | None = None,
        snapshot: ReplaySnapshot | None = None,
        out: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Sample rows uniformly, with replacement.

        The same seed and snapshot give the same batch, as long as the rows of it are there;
        those overwritten since are drawn again from the rest of the snapshot.

        Args:
            count: Rows, at least 1.
            seed: Seed of the draw; without one the storage's generator or the global one draws.
            snapshot: The rows to sample from; by default the current ones.
            out: A batch that `empty_batch` has made in this process, to sample into.

        Returns:
            TensorDict [count] with the rows' positions as ``"index"``; `out` if given.

        Raises:
            UsageError: There are no rows.
            ContentionError: None of the snapshot's rows is left.
            WaitTimeoutError: A writer did not finish in time; names it.
            ConfigError: `count` is not positive, or `out` was made for another number of rows.
        """
        count = as_integer("rows to sample", count, "Sample 1 row or more.")
        rows, reader = self.rows, self._reader
        window = rows.readable()
        if snapshot is not None and snapshot.window:
            window = snapshot.window
        if window.size < 1:
            raise UsageError(
                f"cannot sample {count} rows: 0 of {self.ptr} can be sampled (expected at least "
                "1, of those written). Write first, or take a new snapshot."
            )
        source = self._rng
        if seed is not None:
            source = torch.Generator().manual_seed(operator.index(seed))
        memory = reader.memory(count) if out is None else reader.memory_of(out)
        if memory["index"].shape[0] != count:
            raise ConfigError(
                f"batch to sample {count} rows into: {len(memory['index'])} rows (expected "
                f"{count}). Make one with empty_batch({count})."
            )

        def redraw(number: int) -> torch.Tensor:
            now = rows.readable()
            left = now if snapshot is None else window.above(now.floors)
            return rows.draw(number, left, source)

        rows.read(window, rows.draw(count, window, source), partial(reader.gather, memory), redraw)
        return reader.tensordict(memory, index=True) if out is None else out
