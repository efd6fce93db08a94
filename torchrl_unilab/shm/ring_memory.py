"""The shared memory of a ring, mapped into one process: words, slots and pipes of tokens.

The memory is a header, the words of each writer, a generation per slot, and the slots. The kernel
frees it and the pipes with the last process. `RingWriter` and `RolloutRing` act on it;
`torchrl_unilab.shm.ring` states the protocol.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.util import Finalize
from typing import Any, Literal

import torch
from typing_extensions import Self

from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.liveness import this_process
from torchrl_unilab.shm.lock import RangeLock
from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.tokens import TokenPipe, pack_token
from torchrl_unilab.shm.words import shared_words, words_nbytes

Overflow = Literal["overwrite", "block"]

CREATOR, READER, CLOSED = range(3)  # words of the ring
HEADER_WORDS = 3
# Words of a writer: its process, and the counters; the reader stores the last three.
PROCESS, COMMITTED, DROPPED, READ, SKIPPED, LOST = range(6)
WRITER_WORDS = 6
RESIGNED = 1 << 62  # in the place of a process: the writer has ended in order; 0: none has come


class RingMemory:
    """The memory of a ring, and how a process attaches to it and leaves it.

    Each side extends `_start_process` with its fields and `_leave` with its last stores.

    Args:
        layout: The layout of a slot.
        slots: Home slots of each writer.
        writers: Largest number of writing processes.
        overflow: What a writer does when it has no free slot.

    Attributes:
        views: For each slot, dotted key to shared tensor. Empty once the ring is closed.
    """

    def __init__(self, layout: BlockLayout, slots: int, writers: int, overflow: Overflow) -> None:
        self.layout, self.slots, self.writers, self.overflow = layout, slots, writers, overflow
        self._segment = SharedSegment(self.nbytes(layout, slots, writers))
        self._start([TokenPipe.create() for _ in range(2 * writers)])
        self._header[CREATOR] = this_process()
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
        payload = torch.from_numpy(buffer)[words_nbytes(len(words)) :]
        blocks = payload.view(-1, layout.nbytes)
        self.views = [dict(zip(layout.keys, layout.views(block), strict=True)) for block in blocks]
        self._registration = RangeLock(self._segment)
        self._start_process()
        self._at_end: Finalize | None = None  # last: `__del__` closes what has it

    def _start_process(self) -> None:
        """Start as a process that has neither written nor read; a forked copy holds no token."""
        self._pid = os.getpid()

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

    def _register(self, action: Callable[[], None], as_what: str) -> None:
        """Run `action`, which makes this process a writer or the reader, alone of all."""
        self._registration.run(0, 1, action, lambda: f"ring: cannot become {as_what}")
        if self._at_end is None:
            # A process that ended in order has not died. Finalizers of multiprocessing run at
            # the end of its workers too, where atexit's may not.
            self._at_end = Finalize(None, _leave, (weakref.ref(self),), exitpriority=0)

    def _leave(self) -> None:
        """Note in shared memory that this process has ended its part."""

    def close(self) -> None:
        """Close the ring in this process, as writer and reader. Idempotent."""
        if self._segment.closed:
            return
        if self._at_end is not None:
            self._at_end.cancel()
        self._leave()
        del self._header, self._words, self._generations
        self.views = []
        self._segment.close()
        for pipe in (*self._free, *self._ready):
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_at_end" in self.__dict__ and not sys.is_finalizing():  # the kernel closes it then
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        self._check_open()
        state = {name: getattr(self, name) for name in ("layout", "slots", "writers", "overflow")}
        ends = [[reduction.DupFd(end) for end in p.ends] for p in (*self._free, *self._ready)]
        return {**state, "_segment": self._segment, "ends": ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ends = state.pop("ends")
        self.__dict__.update(state)
        self._start([TokenPipe((reads.detach(), writes.detach())) for reads, writes in ends])


def _leave(ring: weakref.ref[RingMemory]) -> None:
    alive = ring()
    if alive is not None and not alive.closed:
        alive._leave()  # threads may still use it; the kernel closes the rest
