"""Trajectory ids and seeds that keep the collectors of a distributed collector apart.

They follow from a collector's number, its ``worker_idx``, and from the version of the weights that
it started with: a collector that is started again has a newer one than the one that was lost.
"""

from __future__ import annotations

import numpy as np

_STARTS, _IDS_OF_START = 1 << 20, 1 << 20
_IDS_OF_COLLECTOR = _STARTS * _IDS_OF_START


def first_trajectory(worker_idx: int | None, first_version: int) -> int:
    """Return a collector's first trajectory id.

    Args:
        worker_idx: Its number; None for a collector by itself.
        first_version: The version of the weights that it started with.

    Examples:
        >>> from torchrl_unilab.collectors.seeding import first_trajectory
        >>> first_trajectory(None, 0), first_trajectory(1, 0) >> 40
        (0, 1)
    """
    if worker_idx is None:
        return 0
    return worker_idx * _IDS_OF_COLLECTOR + first_version % _STARTS * _IDS_OF_START


def first_seed(seed: int, worker_idx: int | None, first_version: int, environments: int) -> int:
    """Return the seed of a collector's first environment, given the seed of all collectors.

    Each collector has `environments` environments; the seeds of those before it are skipped.
    """
    if worker_idx is None:
        return seed
    seed += worker_idx * environments
    return random_seed(seed, first_version) if first_version else seed


def random_seed(*entropy: int) -> int:
    """Return a seed that follows from `entropy`, or from the operating system's without any.

    It has 31 bits: environments count on from theirs, which has to stay a seed for NumPy.
    """
    return int(np.random.SeedSequence(entropy or None).generate_state(1)[0]) >> 1
