"""How far the episodes of many simulations are, and which of them have ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]


class Episodes:
    """One episode for each of `n` simulations, truncated after `limit` steps.

    It keeps the time at which each episode began, not how long it has lasted: a step then
    counts one number, and looks at all episodes only when one of them can have ended.

    Args:
        n: Simulations.
        limit: Steps after which an episode is truncated.

    Attributes:
        terminated: ``(n,)`` bool, not to be written.
        truncated: The same.
        any_done: Whether an episode has ended, one way or the other.

    Examples:
        >>> import numpy as np
        >>> from torchrl_unilab.envs.episodes import Episodes
        >>> episodes = Episodes(2, limit=2)
        >>> episodes.advance(np.array([False, True]))
        >>> episodes.start(np.array([1]))
        >>> episodes.advance(np.array([False, False]))
        >>> episodes.elapsed, episodes.truncated
        (array([2, 1]), array([ True, False]))
    """

    def __init__(self, n: int, limit: int) -> None:
        self.limit = limit
        self._now = 0
        self._began = np.zeros(n, dtype=np.int64)
        self._due = limit  # when the first of them may be truncated
        self.terminated = self.truncated = np.zeros(n, dtype=bool)
        self.any_done = False

    def __len__(self) -> int:
        return len(self._began)

    @property
    def elapsed(self) -> NDArray[np.int64]:
        """Steps of each episode, ``(n,)``."""
        return self._now - self._began

    def advance(self, terminated: Flags, ids: NDArray[np.intp] | None = None) -> None:
        """Count a step.

        Args:
            terminated: Which of the states that it led to are terminal, ``(n,)``.
            ids: The simulations that made it; None for all.
        """
        self._now += 1
        if ids is not None:
            others = np.ones(len(self), dtype=bool)
            others[ids] = False
            self._begin(others, self._began[others] + 1)
            terminated = np.where(others, self.terminated, terminated)
        self.terminated = np.asarray(terminated, dtype=bool)
        if self._now >= self._due:
            self.truncated = self.elapsed >= self.limit
        self._set_any_done()

    def start(self, ids: NDArray[np.intp], elapsed: NDArray[np.int64] | int = 0) -> None:
        """Start the episodes of simulations `ids` anew, as if `elapsed` steps had been taken."""
        going = np.ones(len(self), dtype=bool)
        going[ids] = False
        self.terminated, self.truncated = self.terminated & going, self.truncated & going
        self._begin(ids, self._now - elapsed)
        self._set_any_done()

    def flags(self) -> tuple[Flags, Flags, Flags]:
        """Return whether each is done, terminated and truncated: three new arrays, ``(n, 1)``."""
        shape = (len(self), 1)
        if not self.any_done:
            return np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape, bool)
        terminated, truncated = self.terminated[:, None], self.truncated[:, None]
        return terminated | truncated, terminated.copy(), truncated.copy()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that there is to know."""
        return {
            "elapsed": self.elapsed,
            "terminated": self.terminated.copy(),
            "truncated": self.truncated.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned for the same number of simulations."""
        self._begin(slice(None), self._now - state["elapsed"])
        self.terminated = state["terminated"].copy()
        self.truncated = state["truncated"] & (self.elapsed >= self.limit)  # the limit may differ
        self._set_any_done()

    def _begin(self, rows: Flags | NDArray[np.intp] | slice, times: Any) -> None:
        self._began[rows] = times
        self._due = int(self._began.min()) + self.limit

    def _set_any_done(self) -> None:
        # before it is due no episode is truncated, for a truncated one keeps it due
        self.any_done = bool(
            np.count_nonzero(self.terminated)
            or (self._now >= self._due and np.count_nonzero(self.truncated))
        )
