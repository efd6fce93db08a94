"""How the machine's cores are shared out, computed before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from torchrl_unilab.errors import ConfigError

__all__ = ["ThreadPlan", "available_cores", "plan_threads"]


@dataclass(frozen=True)
class ThreadPlan:
    """Threads of each process: the learner's torch threads, each collector's physics threads."""

    cores: int
    collectors: int
    learner_threads: int
    physics_threads: int

    def __str__(self) -> str:
        """Return the plan as one line for a person."""
        return (
            f"{self.cores} cores: {self.learner_threads} learner thread(s), "
            f"{self.collectors} collector(s) with {self.physics_threads} physics thread(s) each"
        )


def available_cores() -> int:
    """Return the cores this process may run on, by its affinity where there is one."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else psutil.cpu_count() or 1


def plan_threads(
    cores: int,
    collectors: int = 1,
    physics_threads: int | None = None,
    learner_threads: int = 1,
) -> ThreadPlan:
    """Share `cores` out: to the learner what it asks for, to physics all others.

    Small networks run fastest on one thread; physics scales with cores. Up to two cores are
    for physics even if the learner asks for them, too: it waits for data now and then, and a
    collector for its policy, and what one leaves idle the other takes.

    Raises:
        ConfigError: A count is not positive.

    Example:
        >>> print(plan_threads(8, collectors=2))
        8 cores: 1 learner thread(s), 2 collector(s) with 3 physics thread(s) each
    """
    asked = (cores, collectors, learner_threads, 1 if physics_threads is None else physics_threads)
    if min(asked) < 1:
        raise ConfigError(
            f"thread plan: {cores} cores, {collectors} collectors, {physics_threads} physics "
            f"and {learner_threads} learner threads (expected at least 1 each). "
            "Check the process's affinity and the settings."
        )
    if physics_threads is None:
        for_physics = max(min(cores, 2), cores - learner_threads)
        physics_threads = max(1, for_physics // collectors)
    return ThreadPlan(cores, collectors, learner_threads, physics_threads)
