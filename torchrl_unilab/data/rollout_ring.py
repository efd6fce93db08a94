"""Rollouts of several processes for one learner, as storage, writer and sampler of TorchRL.

`RolloutRingStorage` keeps whole rollouts in the slots of a shared ring
(`torchrl_unilab.shm.ring`). A rollout is read once: whoever samples it takes it out. That
is what on-policy training wants, and why there are no random positions to overwrite: item
``i`` of the storage is the ``i``-th oldest rollout that nobody has read yet.

The storage serves two kinds of users. Workers and a learner that know it claim and lease
slots themselves and copy nothing they do not have to (`RolloutRingStorage.claim`,
`RolloutRingStorage.acquire`). TorchRL's collectors and replay buffers use it through
`RolloutRingWriter` and `RolloutRingSampler`: one copy in, one copy out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_unilab.data.positions import check_range, flat_positions, is_single
from torchrl_unilab.data.ring_books import RingBooks
from torchrl_unilab.data.ring_meeting import RingMeetingPoint
from torchrl_unilab.data.rollout_checkpoint import RolloutRingCheckpointer
from torchrl_unilab.data.rollout_form import RolloutForm, RolloutSource, named_leaves
from torchrl_unilab.data.shared_storage import SharedStorage
from torchrl_unilab.errors import (
    ConfigError,
    LayoutShapeError,
    RingTimeoutError,
    SnapshotContendedError,
)
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.shm.liveness import process_id, process_is_alive, this_process
from torchrl_unilab.shm.ring import Lease, Overflow, RolloutRing
from torchrl_unilab.shm.segment import SegmentKind
from torchrl_unilab.shm.tokens import Token

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "RolloutLease",
    "RolloutRingCheckpointer",
    "RolloutRingStorage",
    "RolloutSampler",
]

_LOCK_SECONDS = 60.0
"""How long a process waits for another one that builds the ring."""


@dataclass(frozen=True)
class RolloutLease:
    """A committed rollout that the reader owns until it releases it.

    Attributes:
        token: What was committed: slot, writer, the writer's count of rollouts.
        rollout: TensorDict of shared views, batch size of the example. Borrowed: valid
            until the release.
    """

    token: Token
    rollout: TensorDict


class RolloutSampler(Sampler):
    """A sampler that takes out what it draws, by `RolloutRingStorage.draw`.

    No other kind may sample a ring: it would train on rollouts that stay unread.
    """


class RolloutRingStorage(SharedStorage):
    """`slots` rollouts in shared memory, written by several processes, read by one, once.

    An item is a whole rollout: a TensorDict of any batch size (``[num_envs, num_steps]``,
    say), nested keys, mixed dtypes, always the same ones. Item ``i`` is the ``i``-th oldest
    unread rollout. Pickle the storage, or the replay buffer it is in, to spawned processes;
    each of them may write as one writer.

    The layout comes from `example`, from a spec (`from_spec`), or from the first rollout
    written. In the last case a process sees what it wrote itself; with ``shared_init=True``
    all processes share one ring, built by whichever writes first.

    The reader may hold slots: what it acquired, and what it waited for or looked at (`wait`,
    `get`, `state_dict`) and has not taken out yet. Each is one less for the writers. With
    ``overflow="overwrite"`` a process that is reader and writer drops the oldest rollout it
    holds before it waits.

    A process writes and reads in one thread at a time; replay buffers see to that by a lock.

    Args:
        slots: How many rollouts. With one per writer, one for the reader and one to spare,
            no writer ever waits.
        example: A rollout; only shapes and dtypes are used.
        writers: How many processes may write.
        overflow: What a writer does when no slot is free: ``"overwrite"`` drops the oldest
            unread rollout, ``"block"`` waits.
        name: Name of the segment; anonymous if not given.
        kind: Kind of segment; the platform's default if not given.
        shared_init: Without an example, let any process build the ring for all of them.
        timeout: Seconds a write waits for a slot; without end if None.

    Raises:
        ConfigError: A count, `overflow` or `kind` cannot work.
        SegmentSpaceError: It does not fit shared memory; says how many slots would.

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
    _of_a_process = ("_books", "_writer", "_writer_pid", "_held", "_leased", "_drawn", "_rollouts")

    def __init__(
        self,
        slots: int = 4,
        *,
        example: TensorDictBase | None = None,
        writers: int = 1,
        overflow: Overflow = "overwrite",
        name: str | None = None,
        kind: SegmentKind | None = None,
        shared_init: bool = False,
        timeout: float | None = 60.0,
    ) -> None:
        # A ring of nothing: refuses what the real one would, before there is a layout.
        RolloutRing({}, slots=slots, writers=writers, overflow=overflow).close()
        if shared_init and kind == "anonymous":
            raise ConfigError(
                "rollout ring: kind 'anonymous' with shared_init (expected 'named'). "
                "Leave out kind, or give an example."
            )
        super().__init__(slots, writers, kind, _LOCK_SECONDS)
        self.overflow: Overflow = overflow
        self.timeout = timeout
        self.shared_init = shared_init
        self._name = name
        self._kind: SegmentKind | None = kind
        self._place.build(RingBooks.nbytes(writers))
        self._start_process()
        self._ring: RolloutRing | None = None
        self._form: RolloutForm | None = None
        self._meeting: RingMeetingPoint | None = None
        if example is not None:
            self._build(RolloutForm.of(example))
        elif shared_init:
            self._meeting = RingMeetingPoint(
                name or f"unilab-rollouts-{os.getpid()}-{secrets.token_hex(6)}"
            )

    def _start_process(self) -> None:
        segment = self._place.find()
        assert segment is not None
        self._books = RingBooks(segment.buffer.data.cast("q"), self.writers)
        self._writer, self._writer_pid = 0, 0
        self._forget_reading()

    def _forget_reading(self) -> None:
        self._held: deque[Lease] = deque()  # taken from the ring, still unread, oldest first
        self._leased: dict[Token, Lease] = {}  # acquired and not released
        self._drawn: torch.Tensor | None = None  # the index that takes rollouts out
        self._rollouts: dict[int, TensorDict] = {}  # views of each slot

    # The ring

    @property
    def ring(self) -> RolloutRing:
        """The ring itself.

        Raises:
            RuntimeError: It has not been built yet.
            SegmentClosedError: The storage is closed.
        """
        self._check_open()
        if not self.initialized:
            raise RuntimeError(
                "cannot use rollout storage: no rollout has been written (expected one, or an "
                "example). Build it from an example, or write first."
            )
        assert self._ring is not None
        return self._ring

    @property
    def initialized(self) -> bool:
        """Whether the layout is known and the slots exist."""
        if self._ring is None and self._meeting is not None and not self._closed:
            found = self._meeting.find()
            if found is not None:
                self._use(*found)
        return self._ring is not None

    def _build(self, form: RolloutForm) -> None:
        """Make the ring; if processes share the making of it, make it or find it."""
        settings: dict[str, Any] = {
            "slots": self.max_size,
            "writers": self.writers,
            "overflow": self.overflow,
        }
        if self._meeting is None:
            ring = RolloutRing(form.meta(), name=self._name, kind=self._kind, **settings)
            self._use(ring, form)
            return
        with self._locked():
            self._use(*(self._meeting.find() or self._meeting.build(form, **settings)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Be alone among all processes that have the storage."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._place.lock)
            except SnapshotContendedError as error:
                raise RingTimeoutError(
                    "cannot use rollout storage: another process has been building or recovering "
                    f"the ring for {_LOCK_SECONDS:g} s (expected it to be done). Start all "
                    "processes again."
                ) from error
            yield

    def _use(self, ring: RolloutRing, form: RolloutForm) -> None:
        self._ring, self._form = ring, form
        if self._writer_pid == os.getpid():
            ring.use_writer(self._writer)

    def _views(self, slot: int, tensors: Iterable[torch.Tensor]) -> TensorDict:
        rollout = self._rollouts.get(slot)
        if rollout is None:
            assert self._form is not None
            rollout = self._rollouts[slot] = self._form.tensordict(tensors).lock_()
        return rollout

    # Counts

    def _counted(self) -> RolloutRing | None:
        """The ring, if there is anything to count yet."""
        self._check_open()
        return self._ring if self.initialized else None

    @property
    def written(self) -> tuple[int, ...]:
        """Rollouts that each writer has committed."""
        return self._books.written(self._counted())

    @property
    def dropped(self) -> tuple[int, ...]:
        """Rollouts of each writer that made room for newer ones before they were read."""
        return self._books.dropped(self._counted())

    @property
    def write_count(self) -> int:
        """Rollouts that all writers have committed."""
        return sum(self.written)

    @property
    def read_count(self) -> int:
        """Rollouts that were sampled, or acquired and released."""
        return self._books.read(self._counted())

    @property
    def skipped(self) -> int:
        """Rollouts that were given up unread for newer ones, or by emptying the buffer."""
        return self._books.skipped

    @property
    def lost(self) -> int:
        """Committed rollouts that went unread with a process that died; known once recovered."""
        return self._books.lost(self._counted())

    @property
    def recovered(self) -> int:
        """Slots that dead processes left and that `recover` has freed."""
        return self._books.recovered

    def _set_counts(self, counts: dict[str, Any]) -> None:
        """Let the counts be these from now on."""
        self._books.load_state_dict(counts, self._counted())

    def _give_up(self, lease: Lease, *, dropped: bool) -> None:
        """Release an unread rollout, and count it as such."""
        self.ring.release(lease)
        self._books.give_up(lease.token.writer, dropped=dropped)

    # Writer

    def use_writer(self, writer: int) -> None:
        """Write as writer `writer` from now on. One process per writer.

        Without it a process becomes the first writer nobody is when it first writes, also
        in place of one whose process has died; what that one left half written is freed.

        Raises:
            ConfigError: There is no such writer, or another process is it.
            RuntimeError: A slot is claimed.
        """
        self._check_writer(writer)
        self._become([writer])

    def _become(self, choice: Sequence[int]) -> None:
        """Become the first writer of `choice` that no living process is."""
        own = this_process()
        with self._locked():
            taken = self._books.owners(choice)
            free = [w for w, pid in taken.items() if pid in (0, own) or not process_is_alive(pid)]
            if not free:
                raise ConfigError(
                    f"cannot write as rollout writer {list(choice)}: taken by processes "
                    f"{[process_id(pid) for pid in taken.values()]} (expected a free one). "
                    f"Build the storage for more than {self.writers} writers."
                )
            writer = free[0]
            if self._ring is not None:
                if taken[writer] not in (0, own):
                    self._ring.take_over(writer)
                self._ring.use_writer(writer)
            self._stop_writing()
            self._books.set_owner(writer, own)
        self._writer, self._writer_pid = writer, os.getpid()

    def _stop_writing(self) -> None:
        """Let another process be the writer that this one was."""
        if self._writer_pid == os.getpid():
            self._books.set_owner(self._writer, 0)
            self._writer_pid = 0

    def _claim(self, timeout: float | None) -> bool:
        """Claim a slot in the ring, with room made by the reader's half of this process."""
        ring = self.ring
        if self._writer_pid != os.getpid():
            self._become(range(self.writers))
        if ring.overflow == "overwrite" and self._held:
            if len(self) + len(self._leased) >= ring.slots:
                self._drop_held()
            while self._held and ring.claim(0.0) is None:
                self._drop_held()
        with span("claim"):
            return ring.claim(self.timeout if timeout is None else timeout) is not None

    def _drop_held(self) -> None:
        self._drawn = None
        self._give_up(self._held.popleft(), dropped=True)

    def claim(self, timeout: float | None = None) -> TensorDict | None:
        """Own a slot to fill, until `commit` or `abandon`.

        Args:
            timeout: Seconds to wait for a slot; the storage's if not given.

        Returns:
            TensorDict of shared views, locked, with what the slot last held; the one already
            claimed if there is one; None after `timeout`.

        Raises:
            RuntimeError: No layout is known yet.
            PeerGoneError: Every slot is taken and the reader has closed or died.
        """
        if not self._claim(timeout):
            return None
        return self._views(self.ring.write_slot, self.ring.write_buffer.values())

    def commit(self) -> int:
        """Hand the claimed slot to the reader; return how many this writer has committed.

        Raises:
            RuntimeError: No slot is claimed.
        """
        with span("commit"):
            self.ring.signal_write_done()
        return self.written[self._writer]

    def abandon(self) -> None:
        """Give the claimed slot back unused; does nothing if none is."""
        self.ring.abandon_write()

    def write(self, rollout: TensorDictBase, timeout: float | None = None) -> bool:
        """Commit a copy of `rollout`, which lies on any device.

        A rollout that is a lazy stack, as collectors make them, is stacked into the slot.

        Args:
            rollout: The rollout, of batch size and keys of the example.
            timeout: Seconds to wait for a slot; the storage's if not given.

        Returns:
            False if no slot was to be had in time.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; no slot was touched.
            PeerGoneError: As for `claim`.
        """
        self._check_open()
        if not self.initialized:
            self._build(RolloutForm.of(rollout))
        return self._write(RolloutSource.of(rollout, self.ring.layout), timeout)

    def _write(self, source: RolloutSource, timeout: float | None = None) -> bool:
        if not self._claim(timeout):
            return False
        source.copy_to(self.ring.write_buffer.values())
        self.commit()
        return True

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Commit what `write_all` takes; `cursor` has no effect.

        Raises:
            RuntimeError: A rollout is to be replaced, as in ``storage[i] = rollout``.
        """
        if not set_cursor:
            raise RuntimeError(
                f"cannot replace rollout {cursor!r}: rollouts are read once (expected an "
                "extend). Write it as a new one."
            )
        self.write_all(data)

    def write_all(self, data: TensorDictBase | Sequence[TensorDictBase]) -> int:
        """Commit one rollout, or several in order; return how many.

        Args:
            data: TensorDict of batch size [*batch] or [K, *batch], or a list of the former.

        Raises:
            LayoutError: Keys, shapes or dtypes differ; nothing was written.
            RingTimeoutError: No slot was to be had in time.
            RuntimeError: There is no rollout in `data`.
        """
        self._check_open()
        rollouts = self._split(data)
        if not rollouts:
            raise RuntimeError(
                "cannot extend rollout storage: no rollout in the data (expected at least one). "
                "Check where the data comes from."
            )
        if not self.initialized:
            self._build(RolloutForm.of(rollouts[0]))
        layout = self.ring.layout
        sources = [RolloutSource.of(rollout, layout) for rollout in rollouts]
        for written, source in enumerate(sources):
            if not self._write(source):
                raise RingTimeoutError(
                    f"cannot write rollout {written} of {len(rollouts)}: no slot was free for "
                    f"{self.timeout} s (expected the reader to release one). Read faster, use "
                    "more slots, or overflow='overwrite'."
                )
        return len(rollouts)

    def _split(self, data: Any) -> Sequence[TensorDictBase]:
        if isinstance(data, list):
            return data
        several = (
            isinstance(data, TensorDictBase)
            and self.initialized
            and self._form is not None
            and data.ndim == len(self._form.batch_size) + 1
        )
        return data.unbind(0) if several else [data]

    def recover(self, writer: int | None = None, *, timeout: float = 1.0) -> int:
        """Free the slots that dead processes left; return how many there were.

        For the process that reads, between two of its reads. In whichever step of a claim or
        a commit the writer died, its slot is free again: what it had not committed is never
        read. Unread rollouts stay so, in their order; as with `get`, the reader holds them
        from then on. Other writers may be at work meanwhile, and leases stay valid. Who takes
        the place of the dead one calls `use_writer` and counts on from there.

        Args:
            writer: One that has died and been waited for; if not given, whoever has died, be
                it a reader that this process takes the place of.
            timeout: Seconds to wait for living writers that claim or commit at this moment.

        Raises:
            ConfigError: There is no such writer.
            RuntimeError: The writer is alive, or another living process reads.
            RingTimeoutError: A living writer is stopped while it claims or commits. Nothing
                is lost: recover again.
        """
        self._check_open()
        if writer is not None:
            self._check_writer(writer)
        if not self.initialized:
            return 0
        with self._locked():  # nobody takes the place of the dead meanwhile
            found = self.ring.recover(writer, timeout)
            self._books.recover(found)
        self._lease(self.max_size)
        return found

    # Reader

    def fileno(self) -> int:
        """A descriptor that is readable when a rollout waits in the ring, to poll with others.

        Rollouts that the reader holds have left the ring; `wait` knows of them too.
        """
        self._check_open()
        if self._meeting is not None:
            return self._meeting.ready.ends[0]
        return self.ring.fileno()

    def wait(self, timeout: float | None = 60.0) -> bool:
        """Wait until there is an unread rollout, and hold it; return whether there is.

        Args:
            timeout: Seconds; without end if None.

        Raises:
            PeerGoneError: There is none and a writer has died; names its process.
            RuntimeError: Nothing can come: the storage has no layout and shares none.
        """
        self._check_open()
        return bool(self._held) or self._wait(timeout)

    def _wait(self, timeout: float | None) -> bool:
        """Wait for one more than those that are held, and hold it."""
        until = None if timeout is None else time.monotonic() + timeout
        if not self.initialized and self._meeting is not None:
            poll = select.poll()
            poll.register(self._meeting.ready.ends[0], select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1e3):
                return False
        left = None if until is None else max(0.0, until - time.monotonic())
        return self.ring.wait_for_data(left) and self._lease(len(self._held) + 1)

    def acquire(self) -> RolloutLease | None:
        """Own the oldest unread rollout until `release`; None if there is none.

        Several may be held at once; each is one less for the writers.

        Raises:
            SegmentError: Someone wrote to borrowed memory.
        """
        if not self._lease(1):
            return None
        self._drawn = None
        lease = self._held.popleft()
        self._leased[lease.token] = lease
        return RolloutLease(lease.token, self._rollout(lease))

    def release(self, lease: RolloutLease) -> None:
        """Give a slot back to the writers.

        Raises:
            RuntimeError: It is not held.
            SegmentError: The slot was written while it was held.
        """
        ring = self.ring
        if lease.token not in self._leased:
            raise RuntimeError(
                f"cannot release {lease.token}: it is not held (expected one that was acquired). "
                "Release each lease once, in the process that acquired it."
            )
        ring.release(self._leased.pop(lease.token))

    @property
    def unread_writers(self) -> frozenset[int]:
        """Writers of the unread rollouts that this process holds; after `recover`, of all."""
        return frozenset(lease.token.writer for lease in self._held)

    def _lease(self, count: int) -> bool:
        """Hold the `count` oldest unread rollouts; return whether there are as many."""
        self._check_open()
        while len(self._held) < count and self.initialized:
            lease = self.ring.acquire()
            if lease is None:
                break
            self._held.append(lease)
        return len(self._held) >= count

    def _rollout(self, lease: Lease) -> TensorDict:
        return self._views(lease.token.slot, lease.views.values())

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
            RingTimeoutError: There are not as many unread rollouts in time.
        """
        if not 1 <= count <= self.max_size:
            raise ConfigError(
                f"cannot sample {count} rollouts: the ring has {self.max_size} slots (expected 1 "
                f"to {self.max_size}). Use a smaller batch_size, or more slots."
            )
        until = time.monotonic() + timeout
        while not self._lease(count):
            left = max(0.0, until - time.monotonic())
            if not left or not self._wait(left):
                raise RingTimeoutError(
                    f"cannot sample {count} rollouts: {len(self)} are unread (expected at least "
                    f"{count}). Write first, wait for them, or give the sampler a timeout."
                )
        if newest:
            self._lease(self.max_size)
        end = len(self._held) if newest else count
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
            RuntimeError: No layout is known yet.
            ConfigError: A buffer samples by another sampler than a `RolloutSampler`.
        """
        drawn = self._drawn is not None and index is self._drawn
        if not drawn and isinstance(index, torch.Tensor):
            self._check_samplers()
        self.ring  # noqa: B018  # refuses a closed storage, and one without a layout
        positions = self._positions(index)
        rollouts = [self._rollout(self._held[i]) for i in positions]
        assert self._form is not None
        copy = rollouts[0].clone() if is_single(index) else self._form.stack(rollouts)
        if drawn:
            self._drawn = None
            for _ in range(positions[0]):
                self._give_up(self._held.popleft(), dropped=False)
            for _ in positions:
                self.ring.release(self._held.popleft())
        return copy

    def _check_samplers(self) -> None:
        for buffer in self._attached_entities:
            if isinstance(buffer, ReplayBuffer) and not isinstance(buffer.sampler, RolloutSampler):
                raise ConfigError(
                    f"cannot sample rollouts by a {type(buffer.sampler).__name__} (expected a "
                    "RolloutRingSampler, which takes out what it samples). Give the buffer "
                    "sampler=RolloutRingSampler()."
                )

    def _positions(self, index: Any) -> list[int]:
        """What an index means, of rollouts that are held: writers may drop others meanwhile."""
        if isinstance(index, slice):
            self._lease(self.max_size)
        asked = [index]
        if not isinstance(index, int):
            asked = flat_positions(index, len(self._held)).tolist()
        low, high = min(asked, default=0), max(asked, default=-1)
        self._lease(self.max_size if low < 0 else high + 1)
        unread = len(self._held)
        check_range(low, high, unread, "rollout", "unread")
        return [i % unread for i in asked]

    def __len__(self) -> int:
        """Unread rollouts: those in the ring and those the reader holds unread."""
        self._check_open()
        return self.ring.available() + len(self._held) if self.initialized else 0

    @property
    def _mutation_revision(self) -> int:
        if not self.initialized:
            return 0
        ring = self.ring
        return ring.write_count + sum(ring.dropped) + ring.read_count + ring.lost

    @property
    def _last_cursor_index(self) -> None:
        """No rollout has a position of its own."""

    def _empty(self) -> None:
        """Skip all unread rollouts."""
        self._drawn = None
        self._lease(self.max_size)
        while self._held:
            self._give_up(self._held.popleft(), dropped=False)
        self._stop_writing()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the unread rollouts, in order, and the counters.

        The rollouts stay unread; as with `get`, the reader holds their slots from then on.
        """
        self._check_open()
        form = self._form if self.initialized else None
        return {
            "form": None if form is None else form.to_json(),
            "rollouts": None if form is None else named_leaves(self.get(slice(None))),
            "counts": self._books.state_dict(self._counted()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write the rollouts of a `state_dict` and go on counting from its counters.

        Do so before other processes write. Nothing is changed on error.

        Raises:
            RuntimeError: There are unread rollouts, or leases.
            LayoutError: The rollouts have other keys, shapes or dtypes.
            ConfigError: There are more of them than slots, another number of writers, or it
                is a state of another storage.
        """
        if "rollouts" not in state_dict:
            raise self.foreign_checkpoint(f"state dict of {sorted(state_dict)}")
        if len(self) or self._leased:
            raise RuntimeError(
                f"cannot load rollouts: {len(self)} are unread and {len(self._leased)} leased "
                "(expected none). Empty the buffer, or load into a new one."
            )
        counts = state_dict["counts"]
        if len(counts["written"]) != self.writers:
            raise ConfigError(
                f"cannot load rollouts of {len(counts['written'])} writers (expected "
                f"{self.writers}). Build the storage for as many."
            )
        if state_dict["form"] is not None:
            self._load(RolloutForm.from_json(state_dict["form"]), state_dict["rollouts"])
        self._set_counts(counts)

    @staticmethod
    def foreign_checkpoint(what: str) -> ConfigError:
        """Return the error for a checkpoint of another kind of storage."""
        return ConfigError(
            f"cannot load rollouts: checkpoint of another storage, {what} (expected one of a "
            "RolloutRingStorage). Load it where it was saved, and extend the ring by each rollout "
            "of it."
        )

    def _load(self, form: RolloutForm, saved: dict[str, torch.Tensor]) -> None:
        unread = len(next(iter(saved.values())))
        if unread > self.max_size:
            raise ConfigError(
                f"cannot load {unread} rollouts: the ring has {self.max_size} slots (expected at "
                f"least {unread}). Use more slots."
            )
        if not self.initialized:
            self._build(form)
        self.ring.layout.select(form.meta())
        assert self._form is not None
        if form.batch_size != self._form.batch_size:
            raise LayoutShapeError(
                f"cannot load rollouts of batch size {list(form.batch_size)} (expected "
                f"{list(self._form.batch_size)}). Build the storage from a rollout like them."
            )
        writing = self._writer_pid == os.getpid()
        for i in range(unread):
            self._write(RolloutSource([saved[key][i] for key in self.ring.layout.keys]))
        if not writing:
            self._stop_writing()

    # Copies and end

    def _like(self) -> Self:
        return type(self)(
            self.max_size,
            writers=self.writers,
            overflow=self.overflow,
            kind=self._kind,
            shared_init=self.shared_init,
            timeout=self.timeout,
        )

    def _leave(self) -> None:
        self._stop_writing()
        self._forget_reading()
        if self._ring is not None:
            self._ring.close()
        if self._meeting is not None:
            self._meeting.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._ring is not None and self._form is not None:
            self._use(self._ring, self._form)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"unread={len(self)}"
        return f"{type(self).__name__}(slots={self.max_size}, writers={self.writers}, {state})"
