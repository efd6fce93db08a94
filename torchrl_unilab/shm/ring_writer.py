"""A ring's shared memory, and the writer's side: register, claim, commit, abandon.

The memory is a header, the words of each writer, a generation per slot, and the slots. The kernel
frees it and the pipes with the last process. `RolloutRing` extends `RingWriter` by the reader's
side; `torchrl_unilab.shm.ring` states the protocol.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, Literal, TypeVar, get_args

import torch

from torchrl_unilab.checks import as_choice, as_integer
from torchrl_unilab.errors import ConfigError, PeerGoneError, UsageError
from torchrl_unilab.owner import Owner
from torchrl_unilab.processes import process_id, process_is_alive, this_process
from torchrl_unilab.shm.handover import check_spawning, handed_over
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.lock import RangeLock
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.tokens import TokenPipe, pack_token, unpack_token, waits
from torchrl_unilab.shm.words import shared_words, words_nbytes

T = TypeVar("T")

Overflow = Literal["overwrite", "block"]

MAX_SLOTS = 128  # of one writer: their tokens fit the smallest pipe, of two pages
MAX_WRITERS = 1024

CREATOR, READER = range(2)  # words of the ring: processes
HEADER_WORDS = 2
# Words of a writer: its process, and the counters; the reader stores the last three.
PROCESS, COMMITTED, DROPPED, READ, SKIPPED, LOST = range(6)
WRITER_WORDS = 6
RESIGNED = 1 << 62  # value of PROCESS after a writer has resigned; 0: no process is the writer


def check_ring(slots: int, writers: int, overflow: str) -> None:
    """Refuse settings of a ring that cannot work.

    Raises:
        ConfigError: A count or `overflow` is out of its range.
    """
    for name, count, most in (("slots", slots, MAX_SLOTS), ("writers", writers, MAX_WRITERS)):
        as_integer(f"ring {name}", count, "Use for example 2.", most=most)
    remedy = "Use 'overwrite' to drop the oldest unread rollout, 'block' to wait."
    as_choice("ring overflow", overflow, get_args(Overflow), remedy)


class RingWriter(Owner):
    """A ring without its reader: attach, register, claim, commit, abandon, leave.

    The token of the claimed slot is in `_hand`. `_counts` holds the counters as they are if that
    token was taken, so that a call after an interrupt stores the same numbers. Args as
    `RolloutRing`.

    Attributes:
        views: For each slot, dotted key to shared tensor. Empty once the ring is closed.
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        slots: int = 2,
        writers: int = 1,
        overflow: Overflow = "overwrite",
    ) -> None:
        check_ring(slots, writers, overflow)
        self.layout, self.slots, self.writers, self.overflow = layout, slots, writers, overflow
        self._segment = SharedSegment(self.nbytes(layout, slots, writers))
        self._start([TokenPipe.create() for _ in range(2 * writers)])
        self._header[CREATOR] = this_process()
        self._leave_at_end()
        for slot in range(slots * writers):
            self._free[slot // slots].put([pack_token(0, slot)])

    def _start(self, pipes: Sequence[TokenPipe]) -> None:
        """Map the memory, as a process that has neither written nor read."""
        writers, slots, layout = self.writers, self.slots * self.writers, self.layout
        self._free, self._ready = pipes[:writers], pipes[writers:]
        buffer, first_slot = self._segment.buffer, HEADER_WORDS + writers * WRITER_WORDS
        words = shared_words(buffer, first_slot + slots)
        self._header, self._words = words[:HEADER_WORDS], words[HEADER_WORDS:first_slot]
        self._generations = words[first_slot:]
        with torch.inference_mode(False):  # or the views could be written in that mode only
            payload = torch.from_numpy(buffer)[words_nbytes(len(words)) :]
            self.views = [*map(layout.named_views, payload.view(-1, layout.nbytes))]
        self._registration = RangeLock(self._segment)
        self._start_process()

    def _start_process(self) -> None:
        """Start as a process that has neither written nor read; a forked copy holds no token."""
        self.writer: int | None = None
        self._own = 0  # index of the first word of this process's writer
        self._hand: list[bytes] = []  # the token of the claimed slot
        self._counts = (0, 0)  # rollouts committed and dropped, if the take succeeded
        self._claimed: int | None = None  # the slot, once the claim is complete
        self._pid = os.getpid()
        self._at_end: Finalize | None = None  # last: `__del__` closes what has it

    @staticmethod
    def nbytes(layout: BlockLayout, slots: int, writers: int) -> int:
        """Return the bytes of shared memory that a ring takes."""
        words = HEADER_WORDS + writers * (WRITER_WORDS + slots)
        return words_nbytes(words) + slots * writers * layout.nbytes

    @property
    def closed(self) -> bool:
        """Whether this process has closed the ring."""
        return self._segment.closed

    def _check_open(self) -> None:
        if not self.views:
            _ = self._segment.buffer  # refuses a closed ring
        if self._pid != os.getpid():
            self._start_process()

    def _register(self, action: Callable[[], T], what: str) -> T:
        """Run `action`, which gives this process a part in the ring, under the ring's lock."""
        self._leave_at_end()
        return self._registration.run(0, 1, action, lambda: f"ring: cannot {what}")

    def _leave_at_end(self) -> None:
        """Resign when this process ends normally; only then is it not taken for a dead one."""
        # Finalizers of multiprocessing also run in its workers, where atexit's may not. A worker
        # forgets those that it made as it unpickled its arguments.
        if self._at_end is None:
            self._at_end = Finalize(None, _leave, (weakref.ref(self),), exitpriority=0)

    # Writing

    def become_writer(self, writer: int | None = None) -> int:
        """Become writer `writer`, or the first free one; return its number.

        Raises:
            ConfigError: There is no such writer, or another process has it. That of a dead process
                is free again after `recover`.
            WaitTimeoutError: Another process has been registering for seconds.
            UsageError: A slot is claimed.
        """
        self._check_open()
        choice = range(self.writers) if writer is None else [self._known_writer(writer)]
        if self._hand:
            raise UsageError(
                f"cannot become writer {writer}: a slot is claimed (expected none). "
                "Commit or abandon it first."
            )
        return self._register(partial(self._take_writer, choice), "become a writer")

    def _known_writer(self, writer: int) -> int:
        remedy = "Make the ring for more writers."
        return as_integer("ring writer", writer, remedy, least=0, most=self.writers - 1)

    def _take_writer(self, choice: Sequence[int]) -> int:
        me, owners = this_process(), self._words[PROCESS::WRITER_WORDS].tolist()
        mine = [number for number in choice if owners[number] == me]
        free = mine or [number for number in choice if owners[number] in (0, RESIGNED)]
        if not free:
            taken = {number: process_id(owners[number]) for number in choice}
            raise ConfigError(
                f"cannot become a ring writer: each is taken, by processes {taken} (expected a "
                "free one). Make the ring for more writers, or recover those of the dead."
            )
        self.resign(replaced=True)
        self._own = free[0] * WRITER_WORDS
        self._words[self._own + PROCESS] = me
        self.writer = free[0]
        return free[0]

    def resign(self, *, replaced: bool = False) -> None:
        """Give up this process's writer, so that another process can become it.

        Args:
            replaced: Whether the reader keeps waiting for that process.
        """
        if self.writer is not None and self._words[self._own + PROCESS] == this_process():
            self.abandon()
            self._words[self._own + PROCESS] = 0 if replaced else RESIGNED
        self.writer = None

    def claim(self, timeout: float | None = None) -> int | None:
        """Own a slot to fill, until `commit` or `abandon`.

        Args:
            timeout: Seconds to wait for a slot; None waits as long as the reader lives.

        Returns:
            The slot, an index of `views`: the one already claimed if there is one. None after
            `timeout`.

        Raises:
            PeerGoneError: No slot is free, and the reader has closed the ring or died. Before any
                process has read, the creator counts as the reader.
        """
        self._check_open()
        if not (self._hand or self._try_claim() or self._wait_for_slot(timeout)):
            return None
        self._complete_claim()
        return self._claimed

    def spare(self) -> int:
        """Return the number of slots that this writer could fill now: free, or claimed."""
        self._check_open()
        return 0 if self.writer is None else len(self._free[self.writer]) + len(self._hand)

    def _try_claim(self) -> bool:
        writer = self.become_writer() if self.writer is None else self.writer
        self._claimed = None
        # The counts after the take are kept before it: an interrupted claim counts nothing twice.
        committed, dropped = self._words[self._own + COMMITTED], self._words[self._own + DROPPED]
        self._counts = committed, dropped
        if self._free[writer].take(self._hand):
            return True
        if self.overflow == "block":
            return False
        self._counts = committed, dropped + 1
        return self._ready[writer].take(self._hand)

    def _wait_for_slot(self, timeout: float | None) -> bool:
        for _ in waits([self._free[self.writer]], timeout):  # type: ignore[index]
            if self._try_claim():
                return True
            reader = self._header[READER] or self._header[CREATOR]
            if not process_is_alive(reader):
                raise PeerGoneError(
                    f"ring writer {self.writer}: no slot is free and the reader, process "
                    f"{process_id(reader)}, is gone (expected it to read). Make a new ring."
                )
        return False

    def _complete_claim(self) -> None:
        """Record that the slot in hand is claimed, also after an interrupted commit."""
        slot = unpack_token(self._hand[0])[1]
        self._generations[slot] = 0
        self._words[self._own + COMMITTED], self._words[self._own + DROPPED] = self._counts
        self._claimed = slot

    def commit(self) -> int:
        """Hand the claimed slot to the reader; return how many this writer has committed.

        Raises:
            UsageError: No slot is claimed.
        """
        self._check_open()
        slot = self._claimed
        if slot is None or not self._hand:
            raise UsageError("ring commit: no slot is claimed (expected one). Call claim first.")
        generation, count = time.monotonic_ns(), self._counts[0] + 1
        self._generations[slot] = generation
        self._hand[0] = pack_token(generation, slot)
        self._words[self._own + COMMITTED] = count  # first: a rollout is lost, never invented
        self._ready[self.writer].put(self._hand)  # type: ignore[index]
        return count

    def abandon(self) -> None:
        """Give the claimed slot back uncommitted; does nothing if none is claimed."""
        self._check_open()
        if self._hand:
            self._complete_claim()
            self._free[self.writer].put(self._hand)  # type: ignore[index]

    # Lifetime

    def _leave(self) -> None:
        """Record in shared memory that this process no longer reads or writes."""
        for word in (CREATOR, READER):
            if self._header[word] == this_process():
                self._header[word] |= RESIGNED  # the word of no living process
        self.resign()

    def close(self) -> None:
        """Close the ring in this process, as writer and reader. Idempotent."""
        if self.views:
            if self._at_end is not None:
                self._at_end.cancel()
            self._leave()
        self.views = []  # a second call, after an interrupt, continues here
        self._segment.close()
        for words in ("_header", "_words", "_generations"):
            self.__dict__.pop(words, None)
        for pipe in (*self._free, *self._ready):
            pipe.close()

    def __del__(self) -> None:
        if "_at_end" in self.__dict__ and not sys.is_finalizing():  # the kernel closes it then
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        self._check_open()
        check_spawning(self)
        state = {name: getattr(self, name) for name in ("layout", "slots", "writers", "overflow")}
        pipes = (*self._free, *self._ready)
        ends = [[handed_over(end, separate=True) for end in pipe.ends] for pipe in pipes]
        return {**state, "_segment": self._segment, "ends": ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ends = state.pop("ends")
        self.__dict__.update(state)
        self._start([TokenPipe((reads.detach(), writes.detach())) for reads, writes in ends])


def _leave(ring: weakref.ref[RingWriter]) -> None:
    alive = ring()
    if alive is not None and not alive.closed:
        alive._leave()  # threads may still use it; the kernel closes the rest
