"""Transitions of several processes in shared memory, one packed row each, to sample from.

`PackedReplayStorage` keeps all tensors of a transition side by side in one row of bytes, so a
batch is one gather (two if next observations are derived) into one flat run of memory, and
its tensors are views of that. How rows of several writers stay whole is the business of
`torchrl_unilab.shm.rows`; which row follows which, of `torchrl_unilab.data.packed_links`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_unilab.data.packed_append import NonFinite, RowAppender, check_steps
from torchrl_unilab.data.packed_checkpoint import PackedReplayCheckpointer
from torchrl_unilab.data.packed_form import DONE, REWARD, RowForm, as_rows, key_path
from torchrl_unilab.data.packed_links import RowLinker
from torchrl_unilab.data.packed_sampling import RowGatherer, draw_positions
from torchrl_unilab.data.pipeline.source import ReplaySnapshot
from torchrl_unilab.data.positions import check_range, flat_positions, is_single
from torchrl_unilab.data.shared_storage import SharedStorage
from torchrl_unilab.data.stock import StockArguments, check_stock_arguments, rows_of_state_dict
from torchrl_unilab.errors import (
    CheckpointError,
    ConfigError,
    ContentionError,
    LayoutKeyError,
    LayoutShapeError,
)
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm.place import SharedPlace
from torchrl_unilab.shm.row_copy import is_run
from torchrl_unilab.shm.row_store import RowStore
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.segment import SegmentKind, SharedSegment

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = [
    "PackedReplayStorage",
    "ReplaySnapshot",
]

NextObservation = Literal["stored", "derived"]


class PackedReplayStorage(SharedStorage):
    """`max_size` transitions in shared memory, one contiguous row each.

    A drop-in for ``LazyTensorStorage`` in ``ReplayBuffer`` and ``TensorDictReplayBuffer``:
    same indices, same batches for a seed. Pickle it, or its buffer, to spawned processes, also
    before it knows its rows; each process that writes becomes one of `writers`. With
    `PackedReplayWriter` they need no lock of the buffer between them.

    Rows have the keys, shapes and dtypes of `example`, of a spec (`from_spec`), or of the
    first data. What is read are copies, also ``storage[:]``: in-place changes of them
    (``rb.update_``) do not reach the storage; write rows again instead (``storage[i] = row``).

    With ``next_observation="derived"`` an observation is kept once: the next observation of a
    row is read from its successor. For rows that have none (an episode's last, and until the
    successor has come), it is kept in a table of `final_observations` entries. If the table is
    full, the oldest rows are given up: `size` is then less than ``max_size``. Rows cannot be
    rewritten then.

    Args:
        max_size: Rows.
        example: A transition: shapes and dtypes, not the content.
        writers: Processes that may write at a time. More cost 256 bytes each.
        next_observation: Whether next observations are ``"stored"`` in full or ``"derived"``.
        observation_keys: Keys whose next observations are derived or tell successors; if not
            given, all that are also under ``"next"`` with the same shape and dtype, without
            done, terminated, truncated and reward.
        final_observations: Entries of the table; if not given, one for each 64 rows and 256.
        n_step: Steps a sampled transition takes (Sutton and Barto, 2nd edition, chapter 7):
            the reward is the discounted sum, everything else under ``"next"`` is of the last
            step; fewer where an episode or what was written so far ends. The batch has more
            keys then, those of TorchRL's ``MultiStepTransform``: ``"steps_to_next_obs"``,
            ``"gamma"`` (``gamma ** steps``), ``"nonterminal"``, ``("next", "original_reward")``.
        gamma: Discount of a step.
        non_finite: Rows whose reward or action is not finite: ``"refuse"`` raises before
            anything is written, ``"count"`` stores and counts them (`non_finite`), ``"pass"``
            does not look.
        reuse: Sample into so many batches in turn; a batch is valid for as many samples. 0
            for fresh memory each time.
        kind: Kind of segment; the platform's default if not given.
        timeout: Seconds to wait for a row that another process is writing.
        **stock: What TorchRL's storages take (`StockArguments`), at values that rows in shared
            host memory honour.

    Raises:
        ConfigError: A setting cannot work, or a stock argument cannot be honoured.
        SegmentSpaceError: It does not fit memory; says how many rows would. Raised when the
            rows are known.

    Example:
        >>> from torchrl.data import ReplayBuffer
        >>> storage = PackedReplayStorage(1000)
        >>> rb = ReplayBuffer(storage=storage, writer=PackedReplayWriter(), batch_size=4)
        >>> rb.extend(TensorDict({"observation": torch.ones(3, 2)}, [3]))
        tensor([0, 1, 2])
        >>> rb.sample()["observation"].shape, storage.sample(8)["index"].shape
        (torch.Size([4, 2]), torch.Size([8]))
        >>> storage.close()
    """

    _default_checkpointer = PackedReplayCheckpointer
    _of_a_process = (
        "_writing",
        "_attaching",
        "_attached",
        "_form",
        "_appender",
        "_gatherer",
        "_wanted_writer",
    )

    def __init__(
        self,
        max_size: int,
        *,
        example: TensorDictBase | None = None,
        writers: int = 8,
        next_observation: NextObservation = "stored",
        observation_keys: Sequence[str | tuple[str, ...]] | None = None,
        final_observations: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        non_finite: NonFinite = "refuse",
        reuse: int = 0,
        kind: SegmentKind | None = None,
        timeout: float = 10.0,
        **stock: Unpack[StockArguments],
    ) -> None:
        check_stock_arguments(type(self).__name__, stock)
        if final_observations is None:
            final_observations = min(max_size, max_size // 64 + 256)
        for setting, count, least in (
            ("max_size", max_size, 1),
            ("writers", writers, 1),
            ("final_observations", final_observations, 1),
            ("n_step", n_step, 1),
            ("reuse", reuse, 0),
        ):
            if count < least:
                raise ConfigError(
                    f"replay storage {setting}: {count} (expected at least {least}). Raise it."
                )
        for setting, value, choice in (
            ("next_observation", next_observation, ("stored", "derived")),
            ("non_finite", non_finite, ("refuse", "count", "pass")),
        ):
            if value not in choice:
                raise ConfigError(
                    f"replay storage {setting}: {value!r} (expected one of {choice}). Choose one."
                )
        if not 0.0 <= gamma <= 1.0 or timeout <= 0.0:
            raise ConfigError(
                f"replay storage: gamma {gamma}, timeout {timeout} (expected 0 to 1, above 0). "
                "Check them."
            )
        super().__init__(max_size, writers)
        self._place = SharedPlace(kind, timeout)
        self.next_observation: NextObservation = next_observation
        self.observation_keys = None if observation_keys is None else list(observation_keys)
        self.final_observations = final_observations if next_observation == "derived" else 0
        self.n_step, self.gamma = n_step, gamma
        self.non_finite_policy: NonFinite = non_finite
        self.reuse = reuse
        self.timeout = timeout
        self._start_process()
        if example is not None:
            self._build(example)

    def _start_process(self) -> None:
        self._writing = threading.RLock()
        self._attaching = threading.Lock()  # a process has its rows once, in all threads
        self._attached: SharedRows | None = None
        self._form: RowForm | None = None
        self._appender: RowAppender | None = None
        self._gatherer: RowGatherer | None = None
        self._wanted_writer: int | None = None

    # The rows

    @property
    def rows(self) -> SharedRows:
        """The rows themselves.

        Raises:
            RuntimeError: Nothing is known of them yet.
            SegmentClosedError: The storage is closed.
        """
        if self._attached is not None:
            return self._attached
        if not self.initialized or self._attached is None:
            raise RuntimeError(
                f"cannot use replay storage: 0 of {self.max_size} rows written (expected some, or "
                "an example). Write first, or make it from an example."
            )
        return self._attached

    @property
    def initialized(self) -> bool:
        """Whether keys, shapes and dtypes are known."""
        self._check_open()
        if self._attached is None:
            segment = self._place.find()
            if segment is not None:
                with self._attaching:
                    if self._attached is None:
                        self._attach(segment)
        return self._attached is not None

    def _attach(self, segment: SharedSegment) -> bool:
        """Use the rows that another process, or an earlier user, has made; return if whole."""
        meta = RowStore.read_meta(segment, self.writers)
        if meta is None:
            return False
        self._use(RowForm.from_json(json.loads(meta)), segment)
        return True

    def _build(self, row: TensorDictBase) -> None:
        """Make rows like `row`, unless another process has made some."""
        derived = self.next_observation == "derived"
        links = derived or self.n_step > 1
        keys = self.observation_keys
        linked = None if keys is None else [key_path(key) for key in keys]
        form = RowForm.of(row, links=links, derived=derived, linked=linked)
        if self.n_step > 1 and not {REWARD, DONE} <= {*form.names}:
            raise LayoutKeyError(
                f"rows for n_step={self.n_step}: {list(form.names)} (expected {REWARD!r} and "
                f"{DONE!r} among them). Write these too."
            )
        store = self._store(form)
        with self._place.lock, self._attaching:
            if self._attached is not None:
                return
            segment = self._place.find()
            if segment is None or not self._attach(segment):
                self._use(form, store.build(self._place, json.dumps(form.to_json()).encode()))

    def _store(self, form: RowForm) -> RowStore:
        layout = form.layout(self.max_size + 1 + self.final_observations)
        meta = len(json.dumps(form.to_json()).encode())
        return RowStore(layout, self.max_size, self.writers, self.final_observations, meta)

    def _use(self, form: RowForm, segment: SharedSegment) -> None:
        with torch.inference_mode(False):  # or its views could be written in that mode only
            rows = SharedRows(
                self._store(form), self._place, segment, self.timeout, self._wanted_writer
            )
            self._form = form
            self._gatherer = RowGatherer(rows, form, self.n_step, self.gamma, self.reuse)
            self._appender = RowAppender(rows, form, self.non_finite_policy)
        self._attached = rows

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that all takes: rows, tables, cursors."""
        return self.rows.store.nbytes

    # Counts

    def snapshot(self) -> ReplaySnapshot:
        """Return what there is to sample from now."""
        if not self.initialized:
            return ReplaySnapshot(0, 0)
        seen = self.rows.look()
        return ReplaySnapshot(seen.end, max(0, seen.end - seen.floor))

    @property
    def size(self) -> int:
        """Rows that can be sampled."""
        return self.snapshot().size

    @property
    def ptr(self) -> int:
        """Rows ever written, since the storage was last emptied, up to the first unfinished."""
        return self.snapshot().ptr

    @property
    def non_finite(self) -> int:
        """Rows with a reward or action that is not finite, with ``non_finite="count"``."""
        return self.rows.non_finite if self.initialized else 0

    def __len__(self) -> int:
        """Positions that have been written."""
        if not self.initialized:
            return 0
        seen = self.rows.window()
        return seen.end if seen.head <= self.max_size else self.max_size

    @property
    def _mutation_revision(self) -> int:
        if not self.initialized:
            return 0
        return (self.rows.version << 48) + self.rows.window().head

    @property
    def _last_cursor_index(self) -> int | None:
        head = self.rows.head if self.initialized else 0
        return (head - 1) % self.max_size if head else None

    # Writing

    def use_writer(self, writer: int) -> None:
        """Write as writer `writer` from now on.

        Without it a process becomes the first writer nobody is when it first writes, also in
        place of one whose process has died; what that one left half written is mended.

        Raises:
            ConfigError: There is no such writer, or another process is it.
        """
        self._check_writer(writer)
        self._wanted_writer = writer
        if self.initialized:
            self.rows.use_writer(writer)

    @property
    def links(self) -> RowLinker | None:
        """What links this process's rows to their successors, if rows are linked.

        With its state, a process that has loaded the rows goes on as if it had written them.
        """
        self.rows  # noqa: B018  # refuses a closed storage, and one that knows no rows
        assert self._appender is not None
        return self._appender.linker

    def recover(self, writer: int) -> bool:
        """Mend the rows that a dead writer left half written; return if there were any.

        Complete rows are copied over them. Nobody has to call this: who meets such rows does.

        Raises:
            RuntimeError: The writer is alive.
        """
        return self.rows.recover(writer)

    def add(
        self,
        rows: TensorDictBase,
        *,
        terminal_mask: torch.Tensor | None = None,
        terminal_next_obs: torch.Tensor | TensorDictBase | None = None,
    ) -> int:
        """Append steps of N environments; return the position of the first row.

        Next done is what terminated or truncated are; a row that is both is terminated only,
        so that nothing is bootstrapped from it.

        Args:
            rows: One step [N] or several [N, T]; rows then lie step by step.
            terminal_mask: Rows whose next observation is replaced, bool of the rows' shape.
            terminal_next_obs: What by: as many observations as rows, or as rows masked (in the
                order of ``rows[mask]``); a tensor for the only observation, or a TensorDict of
                observations without ``"next"``.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; nothing was written.
            ConfigError: A reward or action is not finite; nothing was written.
        """
        check_steps(as_rows(rows), terminal_mask, terminal_next_obs)
        with span("commit"), self._writing:
            appender = self._need_appender(rows if rows.ndim == 1 else rows[0])
            return appender.add(rows, terminal_mask, terminal_next_obs) % int(self.max_size)

    def append(self, rows: TensorDictBase, at: int | None = None) -> torch.Tensor:
        """Append rows [n] as they are; return their positions, int64 [n].

        Of rows that are linked, each is followed by a later one, in the same write or the
        writer's next one, that observes its next observation.

        Args:
            rows: The rows.
            at: Position that the first one must have.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; nothing was written.
            ConfigError: A reward or action is not finite; nothing was written.
            RuntimeError: There is no row, or the next position is not `at`.
        """
        rows = as_rows(rows)
        count = rows.batch_size[0] if rows.batch_size else 0
        if not count:
            raise RuntimeError(
                f"cannot append rows: batch size {list(rows.batch_size)} (expected at least one "
                "row). Check where they come from."
            )
        start = self._append(rows, at)
        first = (start + min(count, self.max_size) - count) % self.max_size
        index = torch.arange(first, first + count)
        return index if first + count <= self.max_size else index.remainder_(self.max_size)

    def _append(self, rows: TensorDictBase, at: int | None) -> int:
        with span("commit"), self._writing:
            return self._need_appender(rows).append(rows, at)

    def _need_appender(self, rows: TensorDictBase) -> RowAppender:
        """What appends, to rows like `rows` if there are none yet."""
        if self._appender is None and not self.initialized:
            self._build(rows[0])
        assert self._appender is not None
        return self._appender

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows at positions: new ones at the next positions, others in place.

        Args:
            cursor: An int, or a slice, range, list or tensor of positions.
            data: One row for an int, else rows [n], or a list of rows.
            set_cursor: False to write in place whatever the positions are.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; nothing was written.
            RuntimeError: Positions before these have not been written, or rows with derived
                next observations would be rewritten.
        """
        data = as_rows(data)
        single = is_single(cursor)
        if single:
            data = data.unsqueeze(0)
        count = data.batch_size[0]
        positions = flat_positions([int(cursor)] if single else cursor, len(self))
        if positions.numel() != count:
            raise LayoutShapeError(
                f"cannot write rows: {count} at {len(positions)} positions (expected as many). "
                "Check the index."
            )
        if not count:
            return
        with self._writing:
            head = self.rows.head if self.initialized else 0
            first = head % self.max_size
            if set_cursor and is_run(positions, first, self.max_size):
                self._need_appender(data).append(data, first)
                return
            self._rewrite(positions, data, len(self))

    def _rewrite(self, positions: torch.Tensor, data: TensorDictBase, length: int) -> None:
        if int(positions.max()) >= length:
            raise RuntimeError(
                f"cannot write row {int(positions.max())}: {length} are written (expected rows one "
                "after the other). Write through one writer, or use PackedReplayWriter."
            )
        if self.next_observation == "derived":
            raise RuntimeError(
                f"cannot rewrite {len(positions)} rows: their observations are others' next ones "
                "(expected rows to append). Use next_observation='stored'."
            )
        appender = self._need_appender(data)
        self.rows.rewrite(positions, appender.stage(data).words)
        appender.forget()

    # Reading

    def get(self, index: Any) -> TensorDict:
        """Return copies of rows.

        Args:
            index: An int, or a slice, range, list, array or tensor (a mask, too) of positions.

        Returns:
            TensorDict, [] for an int, [*index.shape] for a tensor of integers, else [n].

        Raises:
            IndexError: There is no such row, or it was given up (see `final_observations`).
            RuntimeError: Nothing is known of the rows yet.
            WaitTimeoutError: A row was not complete in time; names the writer.
        """
        rows = self.rows
        if is_single(index):
            return self.get([int(index)])[0]
        length = len(self)
        positions = flat_positions(index, length)
        if len(positions):
            low, high = (int(bound) for bound in torch.aminmax(positions))
            check_range(low, high, length, "row", "written")
            if low < 0:
                positions = positions.remainder(length)
        assert self._gatherer is not None
        gatherer, memory = self._gatherer, self._gatherer.next_memory(len(positions))
        rows.read_at(positions, gatherer.into(memory))
        batch = gatherer.tensordict(memory, index=False)
        if isinstance(index, torch.Tensor) and index.ndim > 1 and index.dtype is not torch.bool:
            return batch.view(*index.shape, *batch.batch_size[1:])
        return batch

    def _rand_given_ndim(self, batch_size: int) -> torch.Tensor:
        """Draw positions as any storage does, of rows that are not being written."""
        return draw_positions(self.rows, batch_size, self._rng)

    def empty_batch(
        self, count: int, *, pin_memory: bool = False, shared: bool = False
    ) -> TensorDict:
        """Make memory for batches of `count` rows, to `sample` into.

        All tensors are views of one flat run of bytes.

        Args:
            count: Rows.
            pin_memory: Page-lock it.
            shared: Share it with processes it is passed to.
        """
        gatherer = self._need_gatherer()
        flat = torch.zeros(gatherer.nbytes(count), dtype=torch.uint8, pin_memory=pin_memory)
        if shared:
            flat.share_memory_()
        return gatherer.tensordict(gatherer.memory(count, flat), index=True)

    def _need_gatherer(self) -> RowGatherer:
        self.rows  # noqa: B018  # refuses a closed storage, and one that knows no rows
        assert self._gatherer is not None
        return self._gatherer

    def sample(
        self,
        count: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        snapshot: ReplaySnapshot | None = None,
        out: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Sample rows uniformly, with replacement.

        The same seed and snapshot give the same batch, as long as the rows of it are there;
        those overwritten since are drawn again from the rest of the snapshot.

        Args:
            count: Rows, at least 1.
            seed: Seed of the draw.
            generator: Source of the draw if there is no seed; the storage's or the global one
                if not given.
            snapshot: What to sample from; what there is now if not given.
            out: A batch of `empty_batch` to sample into.

        Returns:
            TensorDict [count] with the rows' positions as ``"index"``; `out` if given.

        Raises:
            RuntimeError: There are no rows.
            ContentionError: None of the snapshot's rows is left, or no row was complete
                in time.
            ConfigError: `count` is not positive, or `out` was not made for as many rows.
        """
        if count < 1:
            raise ConfigError(f"rows to sample: {count} (expected at least 1). Ask for some.")
        gatherer, rows = self._need_gatherer(), self.rows
        seen = rows.wait_readable()
        low, high = seen.floor, seen.end
        if snapshot is not None:
            low, high = snapshot.ptr - snapshot.size, snapshot.ptr
        if low >= high or high > seen.head:
            raise RuntimeError(
                f"cannot sample {count} rows: {max(0, high - low)} of {seen.end} can be sampled "
                "(expected at least 1, of those written). Write first, or take a new snapshot."
            )
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        source = self._rng if generator is None else generator
        if out is None:
            memory = gatherer.next_memory(count)
        else:
            memory = gatherer.memory_of(out)
            if len(memory.index) != count:
                raise ConfigError(
                    f"batch to sample {count} rows into: {len(memory.index)} rows (expected "
                    f"{count}). Make one with empty_batch({count})."
                )

        def redraw(number: int) -> torch.Tensor:
            now = rows.wait_readable()
            first, end = max(low, now.floor), now.end if snapshot is None else high
            if first >= end:
                raise ContentionError(
                    f"cannot sample {count} rows: all of the snapshot's {high - low} have been "
                    "overwritten (expected some left). Sample sooner, or make the storage larger."
                )
            return torch.randint(first, end, (number,), generator=source)

        numbers = torch.randint(low, high, (count,), generator=source)
        rows.read_rows(numbers, low, gatherer.into(memory), redraw)
        return gatherer.tensordict(memory, index=True) if out is None else out

    def _empty(self) -> None:
        """Forget all rows."""
        if self.initialized:
            with self._writing, self.rows.frozen(clear=True):
                pass
            if self._appender is not None:
                self._appender.forget()

    # Checkpoints

    @contextmanager
    def saved(self) -> Iterator[tuple[dict[str, Any], list[np.ndarray[Any, Any]]]]:
        """Hold all writers; give what describes the rows, and their bytes as they lie.

        Raises:
            RuntimeError: Nothing is known of the rows yet.
            WaitTimeoutError: Rows were not complete in time; names the writer.
        """
        rows = self.rows
        assert self._form is not None
        with self._writing, rows.frozen():
            head = {
                "form": self._form.to_json(),
                "max_size": self.max_size,
                "final_observations": self.final_observations,
                "cursors": rows.cursors(),
            }
            yield head, rows.parts(head["cursors"]["head"])

    @contextmanager
    def restored(self, head: dict[str, Any]) -> Iterator[list[np.ndarray[Any, Any]]]:
        """Hold all writers; give where the bytes that were saved belong.

        Args:
            head: What described the rows.

        Raises:
            CheckpointError: The storage holds other rows, or as many of other ones.
        """
        form = RowForm.from_json(head["form"])
        mine = {"max_size": self.max_size, "final_observations": self.final_observations}
        if self.initialized:
            mine["form"] = self._form and self._form.to_json()
        elif form.derived == (self.next_observation == "derived"):
            self._build(form.meta())
            mine["form"] = self._form and self._form.to_json()
        other = {key: head[key] for key in mine if head[key] != mine[key]}
        if other or "form" not in mine:
            raise CheckpointError(
                f"cannot load rows: {other} (expected { {key: mine[key] for key in other} }). "
                "Load into a storage made like the one that was saved."
            )
        rows = self.rows
        with self._writing, rows.frozen(clear=True):
            yield rows.parts(head["cursors"]["head"])
            rows.set_cursors(head["cursors"])
        if self._appender is not None:
            self._appender.forget()

    def load_rows(self, rows: TensorDictBase) -> None:
        """Let rows [n], such as those of a stock checkpoint, be all there is, from position 0.

        Raises:
            CheckpointError: They are more than fit.
            LayoutError: Keys, shapes or dtypes differ.
        """
        if len(rows) > self.max_size:
            raise CheckpointError(
                f"cannot load {len(rows)} rows: the storage takes {self.max_size} (expected at "
                f"most as many). Load into a storage of max_size={len(rows)}."
            )
        if len(rows):
            self._need_appender(rows).stage(rows)  # refuses what it cannot write
        self._empty()
        if len(rows):
            self.append(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the rows and all that belongs to them."""
        if not self.initialized:
            return {"head": None, "parts": []}
        with self.saved() as (head, parts):
            return {"head": head, "parts": [torch.from_numpy(part.copy()) for part in parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, of this class or of a stock storage, in place of what there is.

        Raises:
            CheckpointError: The storage holds other rows.
        """
        if "head" not in state_dict:
            self.load_rows(rows_of_state_dict(state_dict))
            return
        if state_dict["head"] is None:
            self._empty()
            return
        with self.restored(state_dict["head"]) as parts:
            for part, saved in zip(parts, state_dict["parts"], strict=True):
                np.copyto(part, saved.numpy())

    # Copies and end

    def _like(self) -> Self:
        return type(self)(
            self.max_size,
            writers=self.writers,
            next_observation=self.next_observation,
            observation_keys=self.observation_keys,
            final_observations=self.final_observations or None,
            n_step=self.n_step,
            gamma=self.gamma,
            non_finite=self.non_finite_policy,
            reuse=self.reuse,
            kind=self._place.kind,
            timeout=self.timeout,
        )

    def _leave(self) -> None:
        if self._attached is not None:
            self._attached.leave()
            self._attached.segment.close()
        self._place.close()
        self._start_process()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"size={self.size}"
        return f"{type(self).__name__}(max_size={self.max_size}, writers={self.writers}, {state})"
