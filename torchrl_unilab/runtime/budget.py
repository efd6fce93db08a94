"""Budgets of memory and threads, computed before anything is allocated or started. No torch.

The arithmetic of memory is `MemoryBudget`, of numbers alone; its caller reads what is free
(`torchrl_unilab.limits`).
"""

from __future__ import annotations

import mmap
from dataclasses import asdict, dataclass
from typing import Any, Literal

Place = Literal["shared", "private", "device"]
"""Shared segments, a process's own memory, or the learner's accelerator."""


@dataclass(frozen=True)
class MemoryItem:
    """One thing that a run allocates.

    Attributes:
        name: What it is.
        place: Where it lies.
        nbytes: Bytes of all of it.
        settings: What lowers it, the best first; none where a run can do without it.
        estimate: Whether `nbytes` is a measured or rounded figure, and not what is allocated.
        segments: Segments of equal size that `nbytes` are spread over, if it is shared.
    """

    name: str
    place: Place
    nbytes: int
    settings: tuple[str, ...] = ()
    estimate: bool = False
    segments: int = 1

    @property
    def taken(self) -> int:
        """Bytes that are no longer free: each segment takes whole pages."""
        if self.place != "shared":
            return self.nbytes
        pages = -(-self.nbytes // (self.segments * mmap.PAGESIZE))
        return self.segments * pages * mmap.PAGESIZE


@dataclass(frozen=True)
class MemoryLimit:
    """What is free for some places together.

    Attributes:
        name: What is limited.
        nbytes: Bytes that are free.
        places: What lies there.
    """

    name: str
    nbytes: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class MemoryBudget:
    """What a run allocates, and what is free.

    Attributes:
        items: All that it allocates.
        limits: What is free.

    Examples:
        >>> from torchrl_unilab.runtime import MemoryBudget
        >>> from torchrl_unilab.runtime.budget import MemoryItem, MemoryLimit
        >>> budget = MemoryBudget(
        ...     (MemoryItem("replay", "shared", 3 << 20, ("replay_buffer_n",)),),
        ...     (MemoryLimit("memory", 2 << 20, ("shared", "private")),),
        ... )
        >>> [limit.name for limit in budget.exceeded]
        ['memory']
    """

    items: tuple[MemoryItem, ...]
    limits: tuple[MemoryLimit, ...]

    def under(self, limit: MemoryLimit) -> list[MemoryItem]:
        """Return the items that a limit bounds, the largest first."""
        items = [item for item in self.items if item.place in limit.places]
        return sorted(items, key=lambda item: -item.nbytes)

    def needed(self, limit: MemoryLimit) -> int:
        """Return the bytes that the run takes of what a limit bounds."""
        return sum(item.taken for item in self.under(limit))

    @property
    def exceeded(self) -> tuple[MemoryLimit, ...]:
        """The limits that the run exceeds."""
        return tuple(limit for limit in self.limits if self.needed(limit) > limit.nbytes)

    def refusal(self) -> str | None:
        """Return why a run cannot start and what to lower; None if it can."""
        if not self.exceeded:
            return None
        limit = self.exceeded[0]
        needed, largest = self.needed(limit), self.under(limit)[0]
        room = limit.nbytes - (needed - largest.taken)
        share = "and the others alone do not fit either"
        if room > 0:
            share = f"{largest.taken / room:.2f} times what the others leave"
        remedy = f"lower {' or '.join(largest.settings)}" if largest.settings else "do without it"
        return (
            f"memory of the run: {readable(needed)} do not fit {limit.name} (expected at most "
            f"{readable(limit.nbytes)}, which is free). The largest item, {largest.name}, takes "
            f"{readable(largest.taken)}, {share}: {remedy}."
        )

    def table(self) -> str:
        """Return items and limits as lines of text."""
        rows: list[tuple[str, str, str, str]] = [
            (item.place, item.name, ("~" if item.estimate else "") + readable(item.nbytes), "")
            for item in self.items
        ]
        for limit in self.limits:
            needed, too_much = self.needed(limit), ", TOO MUCH" if limit in self.exceeded else ""
            free = f"of {readable(limit.nbytes)} free: {limit.name}{too_much}"
            rows.append(("+".join(limit.places), "in all", readable(needed), free))
        places, names, sizes = (max(len(row[i]) for row in rows) for i in range(3))
        lines = [
            f"  {place:<{places}}  {name:<{names}}  {size:>{sizes}}  {rest}".rstrip()
            for place, name, size, rest in rows
        ]
        if any(item.estimate for item in self.items):
            lines.append("  ~ estimated; all else is computed to the byte")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return items and limits as plain data; sizes in bytes."""
        return {
            "items": [asdict(item) for item in self.items],
            "limits": [asdict(limit) | {"needed": self.needed(limit)} for limit in self.limits],
            "fits": not self.exceeded,
        }


def readable(nbytes: int) -> str:
    """Return bytes as a person reads them.

    Examples:
        >>> readable(512), readable(64 << 20), readable(3 << 29)
        ('512 B', '64.0 MiB', '1.5 GiB')
    """
    if nbytes < 1 << 10:
        return f"{nbytes} B"
    for unit, bits in (("KiB", 10), ("MiB", 20), ("GiB", 30)):
        # What would round to 1024.0 is said in the next unit.
        if nbytes < 1023.95 * (1 << bits):
            return f"{nbytes / (1 << bits):.1f} {unit}"
    return f"{nbytes / (1 << 40):.1f} TiB"


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
            f"{self.cores} core(s): {self.learner_threads} learner thread(s), "
            f"{self.collectors} collector(s) with {self.physics_threads} physics thread(s) each"
        )


def plan_threads(
    cores: int, collectors: int = 1, physics_threads: int | None = None, learner_threads: int = 1
) -> ThreadPlan:
    """Share `cores` out: to the learner what it asks for, to physics all others.

    Small networks run fastest on one thread; physics scales with cores. Up to two cores are
    for physics even if the learner asks for them, too: it waits for data now and then, and a
    collector for its policy, and what one leaves idle the other takes. All counts are positive.

    Examples:
        >>> print(plan_threads(8, collectors=2))
        8 core(s): 1 learner thread(s), 2 collector(s) with 3 physics thread(s) each
    """
    if physics_threads is None:
        for_physics = max(min(cores, 2), cores - learner_threads)
        physics_threads = max(1, for_physics // collectors)
    return ThreadPlan(cores, collectors, learner_threads, physics_threads)
