"""Trajectory ids and seeds of a collector; those of a distributed collector's do not overlap.

What keeps them apart follows from a collector's number, its ``worker_idx``, and from the version of
the weights that it started with: a collector that is started again has a newer one than the one
that was lost.
"""

from __future__ import annotations

import numpy as np

from torchrl_unilab.scalars import as_integer

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


def as_seed(seed: int | None) -> int:
    """Return a seed, a random one for None; a ConfigError unless it is an integer of at least 0."""
    given = random_seed() if seed is None else seed
    return as_integer("seed", given, "Use 0, for example.", least=0)


def worker_seeds(seed: int, workers: int, environments: int) -> list[tuple[int, int]]:
    """Return the seeds of each worker's first environment and of its noise.

    Args:
        seed: Of the first environment of all.
        workers: How many.
        environments: How many each has; 0 for one seed of all.
    """
    noise = [np.random.SeedSequence((seed, worker)) for worker in range(workers)]
    return [
        (seed + worker * environments, int(entropy.generate_state(1, np.uint64)[0]))
        for worker, entropy in enumerate(noise)
    ]
