"""`RolloutRingStorage`: whole rollouts in a shared ring, as a storage of TorchRL.

A rollout is read once: the sample takes it out. Item ``i`` of the storage is the ``i``-th oldest
unread rollout; there are no positions to overwrite. The schema of a rollout is known before the
storage is shared.

Collectors and learners use the slots in place: `claim`, `commit`, `abandon`, `acquire`,
`release`, `recover`. TorchRL's collectors and buffers come through `RolloutRingWriter` and
`RolloutRingSampler`: one copy in, one copy out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_unilab.data.positions import check_range, flat_positions, is_single
from torchrl_unilab.data.schema import TensorField, TensorSchema
from torchrl_unilab.data.shared_storage import SharedStorage, SharedStorageCheckpointer
from torchrl_unilab.data.stock import is_stock_dump
from torchrl_unilab.errors import ConfigError, LayoutShapeError, WaitTimeoutError
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.ring import COUNTERS, Lease, Overflow, RolloutRing, check_ring

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RolloutLease", "RolloutRingCheckpointer", "RolloutRingStorage", "RolloutSampler"]


@dataclass(frozen=True, eq=False)
class RolloutLease:
    """A committed rollout that the reader owns until it releases it.

    A context manager that yields the rollout and releases the lease.

    Attributes:
        rollout: TensorDict of shared views, batch size of the schema. Borrowed: valid until
            the release.
    """

    rollout: TensorDict
    _lease: Lease = field(repr=False)
    _storage: RolloutRingStorage = field(repr=False)

    @property
    def writer(self) -> int:
        """The writer of the rollout."""
        return self._lease.writer

    def __enter__(self) -> TensorDict:
        return self.rollout

    def __exit__(self, *_: object) -> None:
        self._storage.release(self)


class RolloutSampler(Sampler):
    """A sampler that takes out what it draws, by `RolloutRingStorage.draw`.

    No other kind may sample a ring: it would train on rollouts that stay unread.
    """


class RolloutRingCheckpointer(SharedStorageCheckpointer):
    """Saves the unread rollouts of a `RolloutRingStorage`, and its counters, as one file."""

    def dumps(self, storage: RolloutRingStorage, path: str | Path) -> None:
        """Save to ``path/rollouts.pt``; whole or not at all."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        draft = path / "rollouts.pt.part"
        torch.save(storage.state_dict(), draft)
        draft.replace(path / "rollouts.pt")

    def loads(self, storage: RolloutRingStorage, path: str | Path) -> None:
        """Load what `dumps` saved, see `RolloutRingStorage.load_state_dict`."""
        path = Path(path)
        if is_stock_dump(path) and not (path / "rollouts.pt").exists():
            raise _foreign(f"a stock one in {path}")
        storage.load_state_dict(torch.load(path / "rollouts.pt", weights_only=True))


class RolloutRingStorage(SharedStorage):
    """Rollouts in shared memory, written by several processes, read by one, once.

    An item is a whole rollout: a TensorDict of any batch size (``[num_envs, num_steps]``,
    say), nested keys, mixed dtypes, always of one schema. The schema comes from `example`, from a
    spec (`from_spec`), or from the first rollout written; the storage goes to spawned processes
    once it is known. Each of them may write as one writer.

    The reader may hold slots: what it acquired, and what it waited for or looked at (`wait`,
    `get`, `state_dict`) and has not taken out yet. Each is one less for its writer. With
    ``overflow="overwrite"`` a process that is reader and writer skips the oldest such rollout of
    its own before it overwrites or waits.

    A process writes and reads in one thread at a time; replay buffers see to that by a lock.

    Args:
        slots: Rollouts of each writer that fit. With two, an overwriting writer never waits for
            a reader that holds one.
        example: A rollout; only shapes and dtypes are used.
        writers: Largest number of writing processes.
        overflow: What a writer does when it has no free slot: ``"overwrite"`` drops its oldest
            unread rollout, ``"block"`` waits.
        timeout: Seconds a write waits for a slot; without end if None.

    Raises:
        ConfigError: A count or `overflow` cannot work.
        SegmentSpaceError: The slots do not fit the memory that is free.

    Example:
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_unilab.data import RolloutRingSampler, RolloutRingWriter
        >>> storage = RolloutRingStorage(4)
        >>> rb = ReplayBuffer(
        ...     storage=storage,
        ...     sampler=RolloutRingSampler(),
        ...     writer=RolloutRingWriter(),
        ...     batch_size=1,
        ... )
        >>> rollout = TensorDict({"reward": torch.ones(2, 3)}, [2, 3])
        >>> rb.extend(rollout)
        tensor([0])
        >>> [batch["reward"].shape for batch in rb], len(rb)
        ([torch.Size([1, 2, 3])], 0)
        >>> storage.close()
    """

    _default_checkpointer = RolloutRingCheckpointer
    _of_a_process = ("_leased", "_drawn", "_rollouts")

    def __init__(
        self,
        slots: int = 4,
        *,
        example: TensorDictBase | None = None,
        writers: int = 1,
        overflow: Overflow = "overwrite",
        timeout: float | None = 60.0,
    ) -> None:
        check_ring(slots, writers, overflow)
        super().__init__(slots * writers, writers)
        self.slots = slots
        self.overflow: Overflow = overflow
        self.timeout = timeout
        self._ring: RolloutRing | None = None
        self._schema: TensorSchema | None = None
        self._start_process()
        if example is not None:
            self._build(TensorSchema.of(example))

    def _start_process(self) -> None:
        self._leased: dict[int, RolloutLease] = {}  # by slot: what was acquired, maybe released
        self._drawn: torch.Tensor | None = None  # the index that takes rollouts out
        self._rollouts: dict[int, TensorDict] = {}  # views of each slot

    def _build(self, schema: TensorSchema) -> None:
        layout = BlockLayout.of_specs((f.name, f.shape, f.dtype) for f in schema.fields)
        self._ring = RolloutRing(
            layout, slots=self.slots, writers=self.writers, overflow=self.overflow
        )
        self._schema = schema

    @property
    def initialized(self) -> bool:
        """Whether the schema is known and the slots exist."""
        return self._ring is not None

    @property
    def ring(self) -> RolloutRing:
        """The ring itself.

        Raises:
            RuntimeError: The schema is not known yet.
            SegmentClosedError: The storage is closed.
        """
        self._check_open()
        if self._ring is None:
            raise RuntimeError(
                "cannot use rollout storage: its schema is not known (expected an example, or a "
                "rollout written). Build it with example=, or write first."
            )
        return self._ring

    def _rollout(self, slot: int) -> TensorDict:
        if slot not in self._rollouts:
            assert self._schema is not None
            views = list(self.ring.views[slot].values())
            self._rollouts[slot] = self._schema.tensordict(views).lock_()
        return self._rollouts[slot]

    # Counters

    def _count(self, name: str) -> tuple[int, ...]:
        self._check_open()
        counts: tuple[int, ...] = (0,) * self.writers
        return counts if self._ring is None else getattr(self._ring, name)

    @property
    def written(self) -> tuple[int, ...]:
        """Rollouts that each writer has committed."""
        return self._count("written")

    @property
    def dropped(self) -> tuple[int, ...]:
        """Rollouts of each writer that it overwrote unread."""
        return self._count("dropped")

    @property
    def skipped(self) -> tuple[int, ...]:
        """Rollouts of each writer that the reader gave up unread: for newer ones, or emptying."""
        return self._count("skipped")

    @property
    def lost(self) -> tuple[int, ...]:
        """Rollouts of each writer that were committed and went with it when it died."""
        return self._count("lost")

    @property
    def write_count(self) -> int:
        """Rollouts that all writers have committed."""
        return sum(self.written)

    @property
    def read_count(self) -> int:
        """Rollouts that were sampled, or acquired and released."""
        return sum(self._count("read"))

    # Writer

    def use_writer(self, writer: int) -> None:
        """Write as writer `writer` from now on. One process per writer.

        Without it a process becomes the first writer that no process is when it first writes.

        Raises:
            ConfigError: There is no such writer, or another process is it. The writer of a dead
                process is free again after `recover`.
            RuntimeError: A slot is claimed, or the schema is not known yet.
        """
        self._check_writer(writer)
        self.ring.become_writer(writer)

    def claim(self, timeout: float | None = None) -> TensorDict | None:
        """Own a slot to fill, until `commit` or `abandon`.

        Args:
            timeout: Seconds to wait for a slot; the storage's if not given.

        Returns:
            TensorDict of shared views, locked, with what the slot last held; the one already
            claimed if there is one; None after `timeout`.

        Raises:
            PeerGoneError: No slot is free, and the reader has closed the storage or died.
            RuntimeError: The schema is not known yet.
        """
        slot = self._claim(timeout)
        return None if slot is None else self._rollout(slot)

    def _claim(self, timeout: float | None) -> int | None:
        ring = self.ring
        if self.overflow == "overwrite" and not ring.spare():
            unread = [lease for lease in self._unread() if lease.writer == ring.writer]
            if unread:
                self._skip(unread[0])
        with span("claim"):
            return ring.claim(self.timeout if timeout is None else timeout)

    def commit(self) -> int:
        """Hand the claimed slot to the reader; return how many this writer has committed.

        Raises:
            RuntimeError: No slot is claimed.
        """
        with span("commit"):
            return self.ring.commit()

    def abandon(self) -> None:
        """Give the claimed slot back unused; does nothing if none is."""
        self.ring.abandon()

    def write(self, rollout: TensorDictBase, timeout: float | None = None) -> bool:
        """Commit a copy of `rollout`, which lies on any device.

        A rollout that is a lazy stack, as collectors make them, is stacked into the slot.

        Args:
            rollout: The rollout, of the storage's schema.
            timeout: Seconds to wait for a slot; the storage's if not given.

        Returns:
            False if no slot was free in time.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; no slot was touched.
            PeerGoneError: As for `claim`.
        """
        return self._write(self._sources([rollout])[0], timeout)

    def write_all(self, data: TensorDictBase | Sequence[TensorDictBase]) -> int:
        """Commit one rollout, or several in order; return how many.

        Args:
            data: TensorDict of batch size [*batch] or [K, *batch], or a list of the former.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; nothing was written.
            WaitTimeoutError: No slot was free in time.
            RuntimeError: There is no rollout in `data`.
        """
        self._check_open()
        rollouts = data if isinstance(data, list) else [data]
        ndim = None if self._schema is None else len(self._schema.batch_size)
        if isinstance(data, TensorDictBase) and data.ndim - 1 == ndim:
            rollouts = list(data.unbind(0))
        if not rollouts:
            raise RuntimeError(
                "cannot extend rollout storage: no rollout in the data (expected at least one). "
                "Check where the data comes from."
            )
        for written, source in enumerate(self._sources(rollouts)):
            if not self._write(source):
                raise WaitTimeoutError(
                    f"cannot write rollout {written} of {len(rollouts)}: no slot was free for "
                    f"{self.timeout} s (expected the reader to release one). Read faster, use "
                    "more slots, or overflow='overwrite'."
                )
        return len(rollouts)

    def _sources(self, rollouts: Sequence[TensorDictBase]) -> list[_Source]:
        """Return what to copy to the slots, checked; the first rollout decides the schema."""
        self._check_open()
        if self._schema is None:
            self._build(TensorSchema.of(rollouts[0]))
        assert self._schema is not None
        return [_Source.of(rollout, self._schema) for rollout in rollouts]

    def _write(self, source: _Source, timeout: float | None = None) -> bool:
        slot = self._claim(timeout)
        if slot is None:
            return False
        source.copy_to(list(self.ring.views[slot].values()))
        self.commit()
        return True

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Commit what `write_all` takes; `cursor` has no effect.

        Raises:
            RuntimeError: A rollout is replaced, as in ``storage[i] = rollout``.
        """
        if not set_cursor:
            raise RuntimeError(
                f"cannot replace rollout {cursor!r}: rollouts are read once (expected an "
                "extend). Write it as a new one."
            )
        self.write_all(data)

    # Reader

    def filenos(self) -> list[int]:
        """Descriptors to poll with others: one is readable while a rollout waits in the ring.

        Rollouts that the reader holds have left the ring; `wait` knows of them too.
        """
        return self.ring.filenos()

    def wait(self, timeout: float | None = 60.0) -> bool:
        """Wait until there is an unread rollout, and hold it; return whether there is.

        Args:
            timeout: Seconds; without end if None.

        Raises:
            PeerGoneError: There is none and a writer has died; names its process.
            RuntimeError: The schema is not known yet.
        """
        return bool(self._unread()) or self.ring.acquire(timeout) is not None

    def acquire(self, timeout: float | None = 0.0) -> RolloutLease | None:
        """Own the oldest unread rollout until `release`; None if none comes in time.

        Several may be held at once; each is one slot less for its writer.

        Args:
            timeout: Seconds to wait for a rollout; None waits as long as all writers live.

        Raises:
            PeerGoneError: No rollout came, and a writer has died; names its process.
            SegmentError: The slot was written without a claim.
        """
        unread = self._unread()
        lease = unread[0] if unread else self.ring.acquire(timeout)
        if lease is None:
            return None
        self._drawn = None
        acquired = self._leased[lease.slot] = RolloutLease(self._rollout(lease.slot), lease, self)
        return acquired

    @property
    def leases(self) -> list[RolloutLease]:
        """What was acquired and not released, also where an interrupt kept it from the caller."""
        held = [] if self._ring is None else self._ring.leases
        return [self._leased[lease.slot] for lease in held if self._is_acquired(lease)]

    def _is_acquired(self, lease: Lease) -> bool:
        acquired = self._leased.get(lease.slot)
        return acquired is not None and acquired._lease.generation == lease.generation

    def release(self, lease: RolloutLease) -> None:
        """Give a slot back to its writer.

        Raises:
            RuntimeError: It is not held.
            SegmentError: The slot was written while it was held.
        """
        self.ring.release(lease._lease)

    def recover(self, writer: int) -> int:
        """Free the slots that a dead writer held; return how many there were.

        For the process that reads. In whichever step of a claim or a commit the writer died,
        its slots are free again: what it had not committed is never read. Unread rollouts
        stay so, in their order, and leases stay valid. The process that takes the writer's
        place calls `use_writer`.

        Raises:
            ConfigError: There is no such writer.
            RuntimeError: The writer is alive, or another process reads.
        """
        self._check_writer(writer)
        return self.ring.recover(writer)

    def unread(self, writer: int) -> int:
        """Return the number of unread rollouts of a writer."""
        held = sum(lease.writer == writer for lease in self._unread())
        return held + self.ring.available(writer)

    def _unread(self) -> list[Lease]:
        """Rollouts that this process holds unread, oldest first."""
        return [lease for lease in self.ring.leases if not self._is_acquired(lease)]

    def _hold(self, count: int) -> list[Lease]:
        """Hold `count` unread rollouts, or all; return those that are held, oldest first."""
        unread = self._unread()
        while len(unread) < count and (lease := self.ring.acquire()) is not None:
            unread.append(lease)
        return unread

    def _skip(self, lease: Lease) -> None:
        self._drawn = None
        self.ring.release(lease, read=False)

    def draw(self, count: int, *, newest: bool = False, timeout: float = 0.0) -> torch.Tensor:
        """Choose the rollouts that the `get` of the returned index takes out.

        Args:
            count: How many, at least 1.
            newest: The newest ones instead of the oldest; `get` then skips the older ones.
            timeout: Seconds to wait for as many.

        Returns:
            Their positions, int64 of shape [count]. This tensor itself takes them out;
            another of the same content reads copies.

        Raises:
            ConfigError: There are not as many slots.
            WaitTimeoutError: There are not as many unread rollouts in time.
        """
        if not 1 <= count <= self.max_size:
            raise ConfigError(
                f"cannot sample {count} rollouts: the ring has {self.max_size} slots (expected 1 "
                f"to {self.max_size}). Use a smaller batch_size, or more slots."
            )
        until = time.monotonic() + timeout
        held = 0 if self._ring is None else len(self._hold(count))
        while held < count:
            left = max(0.0, until - time.monotonic())
            if not left or self.ring.acquire(left) is None:
                raise WaitTimeoutError(
                    f"cannot sample {count} rollouts: {len(self)} are unread (expected at least "
                    f"{count}). Write first, wait for them, or give the sampler a timeout."
                )
            held += 1
        end = len(self._hold(self.max_size)) if newest else count
        self._drawn = torch.arange(end - count, end)
        return self._drawn

    def get(self, index: Any) -> TensorDict:
        """Return copies of unread rollouts, 0 the oldest, which stay unread.

        The reader then holds all rollouts up to the last one asked for (all there are for a
        slice, or one counted from the end): their slots are not free for writers of other
        processes until they are taken out.

        Args:
            index: An int, or a slice, range, list, array or tensor (a mask, too) of them.

        Returns:
            TensorDict of batch size [*batch] for an int, else [K, *batch].

        Raises:
            IndexError: There is no such rollout.
            RuntimeError: The schema is not known yet.
            ConfigError: A buffer samples by another sampler than a `RolloutSampler`.
        """
        drawn = self._drawn is not None and index is self._drawn
        if not drawn and isinstance(index, torch.Tensor):
            self._check_samplers()
        unread, positions = self._find(index)
        rollouts = [self._rollout(unread[i].slot) for i in positions]
        if is_single(index):
            return rollouts[0].clone()
        assert self._schema is not None
        copy = torch.stack(rollouts) if rollouts else self._schema.empty((0,))
        if drawn:
            self._drawn = None
            for i, lease in enumerate(unread[: positions[-1] + 1]):
                self.ring.release(lease, read=i >= positions[0])
        return copy

    def _check_samplers(self) -> None:
        for buffer in self._attached_entities:
            if isinstance(buffer, ReplayBuffer) and not isinstance(buffer.sampler, RolloutSampler):
                raise ConfigError(
                    f"cannot sample rollouts by a {type(buffer.sampler).__name__} (expected a "
                    "RolloutRingSampler, which takes out what it samples). Give the buffer "
                    "sampler=RolloutRingSampler()."
                )

    def _find(self, index: Any) -> tuple[list[Lease], list[int]]:
        """Return the rollouts held unread, and the positions among them that `index` means."""
        if isinstance(index, slice):
            asked = flat_positions(index, len(self._hold(self.max_size))).tolist()
        else:
            asked = [index] if isinstance(index, int) else flat_positions(index, 0).tolist()
        low, high = min(asked, default=0), max(asked, default=-1)
        unread = self._hold(self.max_size if low < 0 else high + 1)
        check_range(low, high, len(unread), "rollout", "unread")
        return unread, [i % len(unread) for i in asked]

    def __len__(self) -> int:
        """Unread rollouts: those in the ring and those the reader holds unread."""
        self._check_open()
        return 0 if self._ring is None else self._ring.available() + len(self._unread())

    @property
    def _mutation_revision(self) -> int:
        return sum(sum(self._count(name)) for name in COUNTERS)

    @property
    def _last_cursor_index(self) -> None:
        """No rollout has a position of its own."""

    def _empty(self, *, counts: bool = False) -> None:
        """Skip all unread rollouts, and leave the writer to other processes.

        Args:
            counts: Count from zero again.
        """
        if self._ring is None:
            return
        for lease in self._hold(self.max_size):
            self._skip(lease)
        self._ring.resign()
        if counts:
            self._ring.resume_from({})

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the unread rollouts, in order, and the counters.

        The rollouts stay unread; as with `get`, the reader holds their slots from then on.
        """
        self._check_open()
        counts = {name: list(self._count(name)) for name in COUNTERS}
        if self._schema is None:
            return {"schema": None, "rollouts": None, "of": [], "counts": counts}
        rollouts = self.get(slice(None))
        tensors = self._schema.select(rollouts, rollouts.batch_size[:1])
        return {
            "schema": self._schema.to_json(),
            "rollouts": dict(zip(self._schema.names, tensors, strict=True)),
            "of": [lease.writer for lease in self._unread()],
            "counts": counts,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write the rollouts of a `state_dict` and resume from its counters.

        Do so before other processes write. Nothing is changed on error.

        Raises:
            RuntimeError: There are unread rollouts, or leases.
            LayoutError: The rollouts have other keys, shapes or dtypes.
            ConfigError: There are more of them than slots, another number of writers, or it
                is a state of another storage.
        """
        if "of" not in state_dict:
            raise _foreign(f"state dict of {sorted(state_dict)}")
        if len(self) or self.leases:
            raise RuntimeError(
                f"cannot load rollouts: {len(self)} are unread and {len(self.leases)} leased "
                "(expected none). Empty the buffer, or load into a new one."
            )
        counts, of = state_dict["counts"], state_dict["of"]
        if len(counts["written"]) != self.writers:
            raise ConfigError(
                f"cannot load rollouts of {len(counts['written'])} writers (expected "
                f"{self.writers}). Build the storage for as many."
            )
        most = max(Counter(of).values(), default=0)
        if most > self.slots:
            raise ConfigError(
                f"cannot load {most} rollouts of one writer: it has {self.slots} slots (expected "
                f"at least {most}). Use more slots."
            )
        if state_dict["schema"] is None:
            return
        schema = TensorSchema.from_json(state_dict["schema"])
        if self._schema is None:
            self._build(schema)
        assert self._schema is not None
        self._schema.select(schema.meta())
        if schema.batch_size != self._schema.batch_size:
            raise LayoutShapeError(
                f"cannot load rollouts of batch size {list(schema.batch_size)} (expected "
                f"{list(self._schema.batch_size)}). Build the storage from a rollout like them."
            )
        writing = self.ring.writer
        tensors = [state_dict["rollouts"][name] for name in self._schema.names]
        for i, writer in enumerate(of):
            self.ring.become_writer(writer)
            self._write(_Source([tensor[i] for tensor in tensors]))
        self.ring.resign()
        if writing is not None:
            self.ring.become_writer(writing)
        self.ring.resume_from(counts)

    # Copies and end

    def _like(self) -> Self:
        return type(self)(
            self.slots, writers=self.writers, overflow=self.overflow, timeout=self.timeout
        )

    def __getstate__(self) -> dict[str, Any]:
        if not self._closed and self._ring is None:
            raise RuntimeError(
                "cannot share rollout storage: its schema is not known (expected before it goes "
                "to another process). Build it with example=, from_spec, or write once first."
            )
        return super().__getstate__()

    def _leave(self) -> None:
        self._start_process()
        if self._ring is not None:
            self._ring.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"unread={len(self)}"
        return f"{type(self).__name__}(slots={self.slots}, writers={self.writers}, {state})"


@dataclass(frozen=True)
class _Source:
    """Tensors to copy to a slot: one per field, or one per field and part of a lazy stack."""

    tensors: list[torch.Tensor]
    stack_dim: int | None = None

    @classmethod
    def of(cls, rollout: TensorDictBase, schema: TensorSchema) -> _Source:
        """Return the tensors of a rollout, checked."""
        if not isinstance(rollout, LazyStackedTensorDict):
            return cls(schema.select(rollout))
        if tuple(rollout.batch_size) != schema.batch_size:
            raise LayoutShapeError(
                f"batch size of a rollout: {tuple(rollout.batch_size)} (expected "
                f"{schema.batch_size}). Pass rollouts like the first one, or make a new storage."
            )
        dim = rollout.stack_dim

        def part(shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape[:dim] + shape[dim + 1 :]

        fields = tuple(TensorField(f.path, part(f.shape), f.dtype) for f in schema.fields)
        parts = TensorSchema(part(schema.batch_size), fields)
        columns = [parts.select(each) for each in rollout.tensordicts]
        return cls([tensor for field in zip(*columns, strict=True) for tensor in field], dim)

    def copy_to(self, fields: list[torch.Tensor]) -> None:
        """Copy to the tensors of a slot."""
        targets = fields
        if self.stack_dim is not None:
            targets = [part for field in fields for part in field.unbind(self.stack_dim)]
        with torch.no_grad():
            torch._foreach_copy_(targets, self.tensors)


def _foreign(what: str) -> ConfigError:
    return ConfigError(
        f"cannot load rollouts: checkpoint of another storage, {what} (expected one of a "
        "RolloutRingStorage). Load it where it was saved, and extend the ring by each rollout "
        "of it."
    )
