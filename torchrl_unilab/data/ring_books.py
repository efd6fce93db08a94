"""Who writes to a rollout ring, and what is counted of it: shared words of the storage's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_unilab.shm.ring import RolloutRing

__all__ = ["RingBooks"]

_READ, _LOST, _SKIPPED, _RECOVERED, _PIDS = range(5)
"""What to take off the ring's counts of rollouts read and lost; rollouts skipped and slots
recovered; and, one for each writer from there on, its process, what to take off the ring's
counts of those it has written, and of those of its that were dropped."""


class RingBooks:
    """Counts that go on where a checkpoint's ended, and the process that each writer is.

    The ring counts what it does since it was built. What differs from that is in the words:
    all counts are the ring's, less these. A ring that is yet to be built (None) has counted
    nothing.

    Args:
        words: int64, shared, zero at first, of `nbytes` bytes.
        writers: How many processes may write.
    """

    def __init__(self, words: memoryview, writers: int) -> None:
        self._words = words
        self._writers = writers

    @staticmethod
    def nbytes(writers: int) -> int:
        """Bytes of the words."""
        return 8 * (_PIDS + 3 * writers)

    # Writers

    def owners(self, writers: Sequence[int]) -> dict[int, int]:
        """Process that each of `writers` is; 0 if none has been, or it has stopped."""
        return {writer: self._words[_PIDS + writer] for writer in writers}

    def set_owner(self, writer: int, pid: int) -> None:
        """Let a process be `writer`; 0 for none."""
        self._words[_PIDS + writer] = pid

    # Counts

    def written(self, ring: RolloutRing | None) -> tuple[int, ...]:
        """Rollouts that each writer has committed."""
        return self._since([0] * self._writers if ring is None else ring.written, 1)

    def dropped(self, ring: RolloutRing | None) -> tuple[int, ...]:
        """Rollouts of each writer that made room for newer ones."""
        return self._since([0] * self._writers if ring is None else ring.dropped, 2)

    def _since(self, counts: Sequence[int], part: int) -> tuple[int, ...]:
        first = _PIDS + part * self._writers
        base = self._words[first : first + self._writers]
        return tuple(count - off for count, off in zip(counts, base, strict=True))

    def read(self, ring: RolloutRing | None) -> int:
        """Rollouts that were read."""
        return (0 if ring is None else ring.read_count) - self._words[_READ]

    def lost(self, ring: RolloutRing | None) -> int:
        """Rollouts that went with a process that died."""
        return (0 if ring is None else ring.lost) - self._words[_LOST]

    @property
    def skipped(self) -> int:
        """Rollouts that were given up unread."""
        return self._words[_SKIPPED]

    @property
    def recovered(self) -> int:
        """Slots that dead processes left and that were freed."""
        return self._words[_RECOVERED]

    def recover(self, slots: int) -> None:
        """Count slots that were freed."""
        self._words[_RECOVERED] += slots

    def give_up(self, writer: int, *, dropped: bool) -> None:
        """Count a rollout of `writer`, which the ring counts as read, as dropped or skipped."""
        self._words[_READ] += 1
        if dropped:
            self._words[_PIDS + 2 * self._writers + writer] -= 1
        else:
            self._words[_SKIPPED] += 1

    def state_dict(self, ring: RolloutRing | None) -> dict[str, Any]:
        """Return the counts."""
        return {
            "written": list(self.written(ring)),
            "dropped": list(self.dropped(ring)),
            "read": self.read(ring),
            "lost": self.lost(ring),
            "skipped": self.skipped,
        }

    def load_state_dict(self, counts: dict[str, Any], ring: RolloutRing | None) -> None:
        """Let the counts be these from now on."""
        pairs = [*zip(self.written(ring), counts["written"], strict=True)]
        pairs += zip(self.dropped(ring), counts["dropped"], strict=True)
        for i, (now, then) in enumerate(pairs, start=_PIDS + self._writers):
            self._words[i] += now - then
        self._words[_READ] += self.read(ring) - counts["read"]
        self._words[_LOST] += self.lost(ring) - counts["lost"]
        self._words[_SKIPPED] = counts["skipped"]
