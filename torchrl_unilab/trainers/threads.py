"""How many torch threads the learner takes: those whose updates measure fastest.

On idle cores two threads update faster than one. Beside a busy program they are several times
slower, as each waits, spinning, for the one that is not scheduled. So `ThreadChoice` tries all
counts at first, again when updates become slow, and now and then in case they could be fast.
It only decides; `OffPolicyTrainer` times its ticks and sets the count.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["ThreadChoice", "thread_counts"]

_GAIN = 1.1  # more threads, which others may miss, have to be faster by so much
_SLOW = 1.5  # a tick so much slower than the best count's ends a trial, or begins one


def thread_counts(most: int) -> list[int]:
    """Return counts worth trying, ascending: the powers of two below `most`, and `most`.

    Examples:
        >>> from torchrl_unilab.trainers.threads import thread_counts
        >>> thread_counts(6)
        [1, 2, 4, 6]
    """
    return [*(1 << i for i in range((most - 1).bit_length())), most]


class ThreadChoice:
    """Chooses among thread counts by how long equal pieces of work take.

    Args:
        counts: To choose from, ascending.
        trial: Pieces of work that a count is tried for; the first is not counted.
        rest: Pieces of work between trials.

    Attributes:
        count: Threads for the next piece of work.
        most: The highest count.

    Examples:
        >>> from torchrl_unilab.trainers.threads import ThreadChoice
        >>> choice = ThreadChoice([1, 2], trial=3)
        >>> for _ in range(6):
        ...     choice.took(seconds=1.0 / choice.count)
        >>> choice.count
        2
    """

    def __init__(self, counts: Sequence[int], *, trial: int = 6, rest: int = 200) -> None:
        self._counts, self._trial, self._rest = tuple(counts), trial, rest
        self.most = self._counts[-1]
        self._begin()

    def _begin(self) -> None:
        """Try all counts, one after the other."""
        self._to_try = list(self._counts)
        self._medians: dict[int, float] = {}
        self._try_next()

    def _try_next(self) -> None:
        self.count = self._to_try.pop(0)
        self._times: list[float] = []

    def took(self, seconds: float) -> None:
        """Note how long a piece of work took with `count` threads."""
        self._times.append(seconds)
        if len(self._counts) == 1:
            return
        if self.count not in self._medians:
            self._judge_trial()
        elif len(self._times) >= self._rest or self._is_slow():
            self._begin()

    def _judge_trial(self) -> None:
        counted = self._times[1:]
        best = min(self._medians.values(), default=float("inf"))
        if len(self._times) < self._trial and min(counted, default=0.0) < _SLOW * best:
            return
        self._medians[self.count] = statistics.median(counted)
        if self._to_try:
            self._try_next()
            return
        self.count, self._times = self._counts[0], []
        for more in self._counts[1:]:
            if self._medians[more] * _GAIN < self._medians[self.count]:
                self.count = more

    def _is_slow(self) -> bool:
        """Whether the newest pieces of work took much longer than in the trial."""
        newest = self._times[-self._trial :]
        return (
            len(newest) == self._trial
            and statistics.median(newest) > _SLOW * self._medians[self.count]
        )
