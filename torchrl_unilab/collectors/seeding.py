"""Trajectory ids and seeds of a collector; those of a distributed collector's do not overlap.

What keeps them apart follows from a collector's number, its ``worker_idx``, and from its start: the
version of the weights that it starts with, or a drawn number if Ray has restarted its process, for
the learner may have published nothing since the start before.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np

from torchrl_unilab.checks import as_integer

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
    start = random_seed() if _is_restarted() else first_version
    return worker_idx * _IDS_OF_COLLECTOR + start % _STARTS * _IDS_OF_START


def first_seed(seed: int, worker_idx: int | None, first_version: int, environments: int) -> int:
    """Return the seed of a collector's first environment, given the seed of all collectors.

    Each collector has `environments` environments; the seeds of those before it are skipped.
    """
    if worker_idx is None:
        return seed
    seed += worker_idx * environments
    if _is_restarted():
        return random_seed()
    return random_seed(seed, first_version) if first_version else seed


def _is_restarted() -> bool:
    """Return whether Ray has restarted the actor that this process is."""
    ray: Any = sys.modules.get("ray")  # an actor has imported it
    if ray is None or not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Ray deprecates and calls here
        return bool(context.was_current_actor_reconstructed)


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
