"""Which rows may be read, and what their numbers count from, as one reader has loaded it.

`torchrl_unilab.shm.shards` loads both from shared memory, and says how.
"""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """The readable rows of each shard: ``floor <= row < head``."""

    floors: tuple[int, ...]
    heads: tuple[int, ...]

    @property
    def size(self) -> int:
        """Rows of all shards."""
        return sum(self.heads) - sum(self.floors)

    def above(self, floors: tuple[int, ...]) -> Window:
        """Return the rows that are not below `floors` either."""
        bounded = map(min, map(max, self.floors, floors), self.heads)
        return Window(tuple(bounded), self.heads)


class Lineage(NamedTuple):
    """A window, and where the numbers of each shard begin.

    ``number - base + origin`` counts the rows of a shard across checkpoints.

    Attributes:
        bases: The number of the first row since all were cleared.
        origins: What that number would be if no checkpoint had been loaded.
        window: The readable rows.
    """

    bases: tuple[int, ...]
    origins: tuple[int, ...]
    window: Window

    @property
    def written(self) -> int:
        """Rows written since all were last cleared."""
        return max(0, sum(self.window.heads) - sum(self.bases))  # no heads while all are replaced
