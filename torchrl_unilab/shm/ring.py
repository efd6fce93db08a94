"""A ring of shared rollout slots for several writers and one reader; a slot has one owner.

Each writer has home slots and two pipes of tokens: ``free``, slots to fill, and ``ready``,
committed slots, oldest first. A slot is in its writer's hands, in its writer's pipes, or leased
by the reader; it never reaches another writer. Hence what a dead writer held is what is in
neither of its pipes and not leased (`recover`). The kernel's lock in a pipe orders memory:
the process that takes a token sees what the last owner of the slot wrote.

- *claim*: take a token from ``free``. If there is none, ``overflow="overwrite"`` takes the
  writer's own oldest from ``ready`` (the rollout is dropped and counted); ``"block"`` waits.
- *commit*: give the slot a new generation and put its token into ``ready``.
- *acquire*: take the oldest token of all ``ready`` pipes, by the generations that writers publish.
- *release*: put the token into the ``free`` pipe of the slot's writer.

An interrupt between any two lines leaves each token in a pipe or in a hand, and counts that
the next call completes. `ring_memory` maps what is shared, `ring_writer` claims and commits,
`ring_reader` acquires, releases and recovers. `RolloutRingStorage` is the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.ring_memory import COMMITTED, WRITER_WORDS, Overflow
from torchrl_unilab.shm.ring_reader import Lease, RingReader
from torchrl_unilab.shm.ring_writer import RingWriter

__all__ = ["COUNTERS", "Lease", "Overflow", "RolloutRing", "check_ring"]

OVERFLOWS: tuple[Overflow, ...] = ("overwrite", "block")
MAX_SLOTS = 128  # of one writer: as many tokens fit two pages, the smallest pipe there is
MAX_WRITERS = 1024
COUNTERS = ("written", "dropped", "read", "skipped", "lost")


def _counter(name: str, doc: str) -> Any:
    word = COMMITTED + COUNTERS.index(name)
    return property(lambda ring: ring._of_writers(word), doc=doc)


def check_ring(slots: int, writers: int, overflow: str) -> None:
    """Refuse settings of a ring that cannot work.

    Raises:
        ConfigError: A count or `overflow` is out of its range.
    """
    for name, count, most in (("slots", slots, MAX_SLOTS), ("writers", writers, MAX_WRITERS)):
        if not 1 <= count <= most:
            raise ConfigError(f"ring {name}: {count} (expected 1 to {most}). Use for example 2.")
    if overflow not in OVERFLOWS:
        raise ConfigError(
            f"ring overflow: {overflow!r} (expected one of {OVERFLOWS}). "
            "Leave it out to drop the oldest unread rollout."
        )


class RolloutRing(RingWriter, RingReader):
    """`slots` shared slots of one layout for each of `writers` writers, and one reader.

    Pickle the ring to spawned processes. Each may be one writer (`become_writer`); the first
    process that acquires is the reader. A process uses the ring in one thread at a time. For
    each writer, once all is read, ``written == read + skipped + dropped + lost``.

    Args:
        layout: The layout of a slot.
        slots: Home slots of each writer. An overwriting writer never waits while the reader
            leases fewer of them.
        writers: Largest number of writing processes.
        overflow: What a writer does when it has no free slot: ``"overwrite"`` drops its oldest
            unread rollout, ``"block"`` waits.

    Raises:
        ConfigError: A count or `overflow` is not one of the above.
        SegmentSpaceError: The slots do not fit the memory that is free.

    Examples:
        >>> from torchrl_unilab.shm import BlockLayout, RolloutRing
        >>> import torch
        >>> layout = BlockLayout.of({"reward": torch.zeros(2, 3)})
        >>> with RolloutRing(layout, slots=2) as ring:
        ...     slot = ring.claim()
        ...     _ = ring.views[slot]["reward"].fill_(2.0)
        ...     count = ring.commit()
        ...     lease = ring.acquire()
        ...     print(count, lease.views["reward"].sum().item())
        ...     ring.release(lease)
        1 12.0
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
        super().__init__(layout, slots, writers, overflow)

    # Counters

    written = _counter("written", "Rollouts that each writer has committed.")
    dropped = _counter("dropped", "Rollouts of each writer that it has overwritten unread.")
    read = _counter("read", "Rollouts of each writer that were released as read.")
    skipped = _counter("skipped", "Rollouts of each writer that were released unread.")
    lost = _counter("lost", "Rollouts that each writer had committed when it died in handing over.")

    def _of_writers(self, word: int) -> tuple[int, ...]:
        self._check_open()
        self._settle()
        return tuple(self._words[word::WRITER_WORDS])

    def resume_from(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Replace the counters by those of an earlier ring. Before any other process writes.

        Args:
            counts: Name of each counter to one number per writer; 0 if left out. Rollouts that
                are unread or leased now count as written in addition.
        """
        for writer in range(self.writers):
            first = writer * WRITER_WORDS
            gone = [counts[name][writer] if name in counts else 0 for name in COUNTERS[1:]]
            there = self.available(writer) + sum(lease.writer == writer for lease in self.leases)
            for word, count in enumerate((there + sum(gone), *gone), COMMITTED):
                self._words[first + word] = count
