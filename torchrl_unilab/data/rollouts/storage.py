"""`RolloutRingStorage`: whole rollouts in a shared ring, as a storage of TorchRL.

A rollout is read once: the sample takes it out. Item ``i`` of the storage is the ``i``-th oldest
unread rollout; there are no positions to overwrite. The schema of a rollout is known before the
storage is shared.

TorchRL's collectors and buffers come through `RolloutRingWriter` and `RolloutRingSampler`: one
copy in, one copy out. Collectors and learners use the slots in place, by what is in
`torchrl_unilab.data.rollouts.shared`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_unilab.checks import as_integer
from torchrl_unilab.data.positions import check_range, flat_positions, is_mask, is_single
from torchrl_unilab.data.rollouts.checkpoint import RolloutRingCheckpointer, check_state
from torchrl_unilab.data.rollouts.shared import SharedRollouts
from torchrl_unilab.data.schema import TensorField, TensorSchema
from torchrl_unilab.data.shared_storage import SharedStorageWriter
from torchrl_unilab.errors import ConfigError, LayoutShapeError, UsageError, WaitTimeoutError
from torchrl_unilab.shm.ring import COUNTERS, Lease

_Source = tuple[list[torch.Tensor], int | None]
"""Tensors to copy to a slot, one per field; or one per field and part of a lazy stack, and the
dimension along which the parts lie."""


class RolloutSampler(Sampler):
    """A sampler that takes out what it draws, by `RolloutRingStorage.draw`.

    No other kind may sample a ring: it would train on rollouts that stay unread.
    """


class RolloutRingStorage(SharedRollouts):
    """Rollouts in shared memory, written by several processes, read by one, once.

    An item is a whole rollout: a TensorDict of any batch size (for example
    ``[num_envs, num_steps]``), with nested keys and mixed dtypes, always of one schema; names of
    dimensions are not kept. The schema comes from `example`, from a spec (`from_spec`), or from the
    first rollout written; once the schema is known, the storage can be sent to spawned processes.
    Each of them may write as one writer.

    What is read is a copy, and unread rollouts do not change: ``buffer["reward"] = x`` of a stock
    buffer changes its copy, without an error; a `RolloutReplayBuffer` refuses it.

    The reader may hold slots: those that it acquired, and those that it waited for or looked at
    (`wait`, `get`, `state_dict`) and has not taken out yet. Each leaves its writer one slot less.
    With ``overflow="overwrite"`` a process that is reader and writer skips the oldest such rollout
    of its own before it overwrites or waits.

    A process writes and reads in one thread at a time; replay buffers ensure that with a lock.

    Args:
        slots: Slots of each writer. With two, an overwriting writer never waits for a reader that
            holds one.
        example: A rollout; only shapes and dtypes are used.
        writers: Largest number of writing processes.
        overflow: What a writer does when it has no free slot: ``"overwrite"`` drops its oldest
            unread rollout, ``"block"`` waits.
        timeout: Seconds a write waits for a slot; without end if None.

    Raises:
        ConfigError: A count or `overflow` cannot work.
        SegmentSpaceError: The slots do not fit the memory that is free.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.data import RolloutRingStorage
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

    # Copies in

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
            UsageError: There is no rollout in `data`.
        """
        self._check_open()
        rollouts = data if isinstance(data, list) else [data]
        ndim = None if self._schema is None else len(self._schema.batch_size)
        if isinstance(data, TensorDictBase) and data.ndim - 1 == ndim:
            rollouts = list(data.unbind(0))
        if not rollouts:
            raise UsageError(
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
        schema = self._schema or self._build(TensorSchema.of(rollouts[0]))
        return [_source(rollout, schema) for rollout in rollouts]

    def _write(self, source: _Source, timeout: float | None = None) -> bool:
        slot = self._claim(timeout)
        if slot is None:
            return False
        (tensors, dim), targets = source, list(self.ring.views[slot].values())
        if dim is not None:
            targets = [part for field in targets for part in field.unbind(dim)]
        with torch.no_grad():
            torch._foreach_copy_(targets, tensors)
        self.commit()
        return True

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Commit what `write_all` takes; `cursor` has no effect.

        Raises:
            UsageError: A rollout is replaced, as in ``storage[i] = rollout``.
            ConfigError: A buffer writes by another writer than a `RolloutRingWriter`.
        """
        if not set_cursor:
            raise UsageError(
                f"cannot replace rollout {cursor!r}: rollouts are read once (expected an "
                "extend). Write it as a new one."
            )
        for buffer in self._buffers():
            if not isinstance(buffer.writer, SharedStorageWriter):
                raise ConfigError(
                    f"cannot write rollouts by a {type(buffer.writer).__name__} (expected a "
                    "RolloutRingWriter: others take each environment for an item). Give the "
                    "buffer writer=RolloutRingWriter()."
                )
        self.write_all(data)

    def _bump_mutation_revision(self) -> None:
        """Refuse ``set_``, ``set_at_`` and ``update_`` of buffers, which change what they read."""
        raise UsageError(
            "cannot change unread rollouts: a buffer reads copies of them (expected an extend). "
            "Change a rollout before you write it, or once it is sampled."
        )

    # Copies out

    def draw(self, count: int, *, newest: bool = False, timeout: float = 0.0) -> torch.Tensor:
        """Choose rollouts; a `get` with the returned tensor takes them out.

        Args:
            count: How many, at least 1.
            newest: The newest ones instead of the oldest; `get` then skips the older ones.
            timeout: Seconds to wait for that many.

        Returns:
            Their positions, int64 of shape [count]. This tensor itself takes them out;
            another of the same content reads copies.

        Raises:
            ConfigError: There are fewer slots than `count`.
            WaitTimeoutError: There were not enough unread rollouts in time.
        """
        remedy = "Change batch_size, or use more slots."
        count = as_integer("rollouts to sample", count, remedy, most=self.max_size)
        unbuilt = self._ring is None and not timeout
        if unbuilt or len(self._hold(count, timeout)) < count:
            raise WaitTimeoutError(
                f"cannot sample {count} rollouts: {len(self)} are unread (expected at least "
                f"{count}). Write first, wait for them, or give the sampler a timeout."
            )
        end = len(self._hold(self.max_size)) if newest else count
        self._drawn = torch.arange(end - count, end, device="cpu")
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
            UsageError: The schema is not known yet.
            ConfigError: A buffer samples by another sampler than a `RolloutSampler`.
        """
        drawn = self._drawn is not None and index is self._drawn
        if not drawn and isinstance(index, torch.Tensor):
            self._check_samplers()
        unread, positions = self._find(index)
        rollouts = [self._rollout(unread[i].slot) for i in positions]
        assert self._schema is not None
        # Stacked even if it is one: TensorDict.clone fails for dtypes that torch cannot add.
        copy = torch.stack(rollouts) if rollouts else self._schema.empty((0,))
        if drawn:
            self._drawn = None
            for i, lease in enumerate(unread[: positions[-1] + 1]):
                self.ring.release(lease, read=i >= positions[0])
        return copy[0] if is_single(index) else copy

    def _buffers(self) -> list[ReplayBuffer]:
        return [each for each in self._attached_entities if isinstance(each, ReplayBuffer)]

    def _check_samplers(self) -> None:
        for buffer in self._buffers():
            if not isinstance(buffer.sampler, RolloutSampler):
                raise ConfigError(
                    f"cannot sample rollouts by a {type(buffer.sampler).__name__} (expected a "
                    "RolloutRingSampler, which takes out what it samples). Give the buffer "
                    "sampler=RolloutRingSampler()."
                )

    def _find(self, index: Any) -> tuple[list[Lease], list[int]]:
        """Return the rollouts held unread, and the positions among them that `index` means."""
        if is_single(index):
            asked = [int(index)]
        else:
            needs_length = index is ... or isinstance(index, slice) or is_mask(index)
            length = len(self._hold(self.max_size)) if needs_length else 0
            asked = flat_positions(index, length).tolist()
        low, high = min(asked, default=0), max(asked, default=-1)
        unread = self._hold(self.max_size if low < 0 else high + 1)
        check_range(low, high, len(unread), "rollout", "unread")
        return unread, [i % len(unread) for i in asked]

    @property
    def _mutation_revision(self) -> int:
        return sum(sum(self._count(name)) for name in COUNTERS)

    def _empty(self, *, counts: bool = False) -> None:
        """Skip all unread rollouts, and leave the writer to other processes.

        Args:
            counts: Count from zero again.
        """
        if self._ring is None:
            return
        for lease in self._hold(self.max_size):
            self._skip(lease)
        self._ring.resign(replaced=True)
        if counts:
            self._ring.resume_from({})

    # Checkpoints

    def loads(self, path: Any) -> None:
        """Load what `dumps` saved, see `load_state_dict`."""
        self.checkpointer.loads(self, path)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the unread rollouts, in order, and the counters.

        The rollouts stay unread; as with `get`, the reader holds their slots from then on.
        """
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
            UsageError: There are unread rollouts, or leases.
            LayoutError: The rollouts have other keys, shapes or dtypes.
            ConfigError: There are more of them than slots, another number of writers, or it
                is a state of another storage; or another process is one of the writers.
        """
        check_state(self, state_dict)
        if state_dict["schema"] is None:
            return
        schema, count = TensorSchema.from_json(state_dict["schema"]), len(state_dict["of"])
        saved = [state_dict["rollouts"][name] for name in schema.names]
        own = self._schema or schema
        tensors = own.select(schema.tensordict(saved, (count,)), (count,))
        if schema.batch_size != own.batch_size:
            raise LayoutShapeError(
                f"cannot load rollouts of batch size {list(schema.batch_size)} (expected "
                f"{list(own.batch_size)}). Build the storage from a rollout like them."
            )
        if self._schema is None:
            self._build(schema)
        writing = self.ring.writer
        try:
            for writer in {*state_dict["of"]}:  # refused before one is written
                self.ring.become_writer(writer)
            for i, writer in enumerate(state_dict["of"]):
                self.ring.become_writer(writer)
                self._write(([tensor[i] for tensor in tensors], None))
        finally:
            self.ring.resign(replaced=True)
            if writing is not None:
                self.ring.become_writer(writing)
        self.ring.resume_from(state_dict["counts"])

    # Copies and end

    def _empty_copy(self) -> Self:
        return type(self)(
            self.slots, writers=self.writers, overflow=self.overflow, timeout=self.timeout
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"unread={len(self)}"
        return f"{type(self).__name__}(slots={self.slots}, writers={self.writers}, {state})"


def _source(rollout: TensorDictBase, schema: TensorSchema) -> _Source:
    """Return what to copy of a rollout, checked before a slot is claimed."""
    if not isinstance(rollout, LazyStackedTensorDict):
        return schema.select(rollout), None
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
    return [tensor for field in zip(*columns, strict=True) for tensor in field], dim
