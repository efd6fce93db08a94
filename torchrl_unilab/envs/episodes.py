"""How far the episodes of many simulations are, and which of them have ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]


class Episodes:
    """One episode for each of `n` simulations, truncated after `limit` steps.

    Args:
        n: Simulations.
        limit: Steps after which an episode is truncated.

    Attributes:
        elapsed: Steps of each episode, ``(n,)``.
        terminated: ``(n,)`` bool.
        truncated: The same.

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
        self.elapsed = np.zeros(n, dtype=np.int64)
        self.terminated, self.truncated = np.zeros((2, n), dtype=bool)

    def __len__(self) -> int:
        return len(self.elapsed)

    @property
    def done(self) -> Flags:
        """Whether each has ended, one way or the other: a new array, ``(n,)``."""
        return self.terminated | self.truncated

    def advance(self, terminated: Flags, ids: NDArray[np.intp] | None = None) -> None:
        """Count a step.

        Args:
            terminated: Which of the states that it led to are terminal, ``(n,)``.
            ids: The simulations that made it; None for all.
        """
        rows = slice(None) if ids is None else ids
        self.elapsed[rows] += 1
        self.terminated[rows] = terminated[rows]
        self.truncated = self.elapsed >= self.limit

    def start(self, ids: NDArray[np.intp], elapsed: NDArray[np.int64] | int = 0) -> None:
        """Start the episodes of simulations `ids` anew, as if `elapsed` steps had been taken."""
        self.elapsed[ids] = elapsed
        self.terminated[ids] = self.truncated[ids] = False

    def flags(self) -> tuple[Flags, Flags, Flags]:
        """Return whether each is done, terminated and truncated: three new arrays, ``(n, 1)``."""
        return self.done[:, None], self.terminated[:, None].copy(), self.truncated[:, None].copy()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that there is to know."""
        return {
            "elapsed": self.elapsed.copy(),
            "terminated": self.terminated.copy(),
            "truncated": self.truncated.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned for the same number of simulations."""
        self.elapsed, self.terminated = state["elapsed"].copy(), state["terminated"].copy()
        self.truncated = state["truncated"] & (self.elapsed >= self.limit)  # the limit may differ
