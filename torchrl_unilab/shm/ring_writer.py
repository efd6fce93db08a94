"""The writer's side of a ring: register, claim, commit, abandon.

The token of the claimed slot is in `_hand`. `_counts` holds what the counters are if the take
succeeded, so a call after an interrupt stores the same numbers. `RolloutRing` extends it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from torchrl_unilab.errors import ConfigError, PeerGoneError, UsageError
from torchrl_unilab.shm.liveness import process_id, process_is_alive, this_process
from torchrl_unilab.shm.ring_memory import (
    CLOSED,
    COMMITTED,
    CREATOR,
    DROPPED,
    PROCESS,
    READER,
    RESIGNED,
    WRITER_WORDS,
    RingMemory,
)
from torchrl_unilab.shm.tokens import pack_token, unpack_token, waits


class RingWriter(RingMemory):
    """A ring, as a process writes it."""

    def _start_process(self) -> None:
        self.writer: int | None = None
        self._own = 0  # where the words of the own writer begin
        self._hand: list[bytes] = []  # the token of the claimed slot
        self._counts = (0, 0)  # rollouts committed and dropped, if the take succeeded
        self._claimed: int | None = None  # the slot, once the claim is complete
        super()._start_process()

    def become_writer(self, writer: int | None = None) -> int:
        """Write as writer `writer`, or as the first one that no process is; return its number.

        Raises:
            ConfigError: There is no such writer, or another process is it. The writer of a dead
                process is free again after `recover`.
            WaitTimeoutError: Another process has been registering for seconds.
            UsageError: A slot is claimed.
        """
        self._check_open()
        choice = range(self.writers) if writer is None else range(writer, writer + 1)
        if writer is not None and not 0 <= writer < self.writers:
            raise ConfigError(
                f"ring writer: {writer} (expected 0 to {self.writers - 1}). "
                "Make the ring for more writers."
            )
        if self._hand:
            raise UsageError(
                f"cannot become writer {writer}: a slot is claimed (expected none). "
                "Commit or abandon it first."
            )
        self._register(partial(self._take_writer, choice), "a writer")
        assert self.writer is not None
        return self.writer

    def _take_writer(self, choice: Sequence[int]) -> None:
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

    def resign(self, *, replaced: bool = False) -> None:
        """Stop being a writer, so that another process may be the same one.

        Args:
            replaced: Whether the reader goes on waiting for one.
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
            PeerGoneError: No slot is free, and the reader has closed the ring or died.
        """
        self._check_open()
        if not (self._hand or self._take_to_fill() or self._wait_to_fill(timeout)):
            return None
        self._complete_claim()
        return self._claimed

    def spare(self) -> int:
        """Return the number of free slots of this writer."""
        self._check_open()
        return 0 if self.writer is None else len(self._free[self.writer])

    def _take_to_fill(self) -> bool:
        if self.writer is None:
            self.become_writer()
        writer: int = self.writer  # type: ignore[assignment]
        self._claimed = None
        # Counts are stored as what they become if the take succeeds: an interrupt repeats none.
        committed, dropped = self._words[self._own + COMMITTED], self._words[self._own + DROPPED]
        self._counts = committed, dropped
        if self._free[writer].take(self._hand):
            return True
        if self.overflow == "block":
            return False
        self._counts = committed, dropped + 1
        return self._ready[writer].take(self._hand)

    def _wait_to_fill(self, timeout: float | None) -> bool:
        pipes = [self._free[self.writer]]  # type: ignore[index]
        if self.overflow == "overwrite":
            pipes.append(self._ready[self.writer])  # type: ignore[index]
        for _ in waits(pipes, timeout):
            if self._take_to_fill():
                return True
            reader = self._header[READER] or self._header[CREATOR]
            if self._header[CLOSED] or not process_is_alive(reader):
                raise PeerGoneError(
                    f"ring writer {self.writer}: no slot is free and the reader, process "
                    f"{process_id(reader)}, is gone (expected it to read). Stop writing."
                )
        return False

    def _complete_claim(self) -> None:
        """Store what is so while the slot in hand is claimed, also after an interrupted commit."""
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

    def _leave(self) -> None:
        self.resign()
        super()._leave()
