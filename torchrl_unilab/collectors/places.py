"""What tells the collectors below a distributed one apart: their trajectory ids and seeds.

A collector has a place among them, its ``worker_idx``, and the version of the weights that it
began with, by which one that is started again differs from the one that was lost.
"""

from __future__ import annotations

import numpy as np

_PLACE, _BEGUN = 1 << 40, 1 << 20


def first_trajectory(place: int | None, begun: int) -> int:
    """Return a collector's first trajectory id.

    Args:
        place: Its place; None for a collector by itself.
        begun: The version that it began with.

    Examples:
        >>> from torchrl_unilab.collectors.places import first_trajectory
        >>> first_trajectory(None, 0), first_trajectory(1, 0) >> 40
        (0, 1)
    """
    return 0 if place is None else place * _PLACE + begun % _BEGUN * _BEGUN


def first_seed(seed: int, place: int | None, begun: int, environments: int) -> int:
    """Return the seed of a collector's first environment.

    Args:
        seed: That of all collectors.
        place: As in `first_trajectory`.
        begun: As in `first_trajectory`.
        environments: Of each collector: seeds of those before it are left to them.
    """
    if place is None:
        return seed
    seed += place * environments
    return int(np.random.SeedSequence((seed, begun)).generate_state(1)[0]) if begun else seed
