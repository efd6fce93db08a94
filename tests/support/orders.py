"""Every order in which processors may see the steps of a writer and of a reader.

Between two fences a thread's steps take place in any order, but those at one address; stores are
seen by all others at once, as on AArch64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Step = tuple[str, object, int]
"""("load" or "store", address, value), or a fence."""

FENCE: Step = ("fence", "", 0)


def without_fence(steps: Sequence[Step], *which: int) -> list[Step]:
    """Leave out fences, by their number among the fences."""
    fences = [i for i, step in enumerate(steps) if step == FENCE]
    left_out = {fences[number] for number in which}
    return [step for i, step in enumerate(steps) if i not in left_out]


def strongly_ordered(steps: Sequence[Step]) -> list[Step]:
    """The steps as x86-64 takes them: one after the other."""
    return [each for step in steps for each in (step, FENCE)]


def outcomes(
    writer: Sequence[Step],
    reader: Sequence[Step],
    start: Mapping[Any, int],
    find: Callable[[Any, tuple[Any, ...]], Any],
) -> set[tuple[int, ...]]:
    """What a reader may load, in the order of its loads, in any order of all steps.

    Args:
        writer: Steps of the writer.
        reader: Steps of the reader.
        start: What is in memory first, by address.
        find: Gives the address of a load, given what each step has loaded so far; None if that
            depends on a load to come.
    """
    at = {address: i for i, address in enumerate(start)}
    before_write, before_read = _needed_before(writer), _needed_before(reader)
    loads = [i for i, step in enumerate(reader) if step[0] == "load"]
    found: set[tuple[int, ...]] = set()
    stack = [(0, 0, (*start.values(),), (None,) * len(reader))]
    seen = {*stack}
    while stack:
        wrote, read, memory, loaded = stack.pop()
        if read == (1 << len(reader)) - 1:
            found.add(tuple(loaded[i] for i in loads))
            continue
        new: list[Any] = []
        for i in _next_steps(wrote, before_write):
            kind, address, value = writer[i]
            after = list(memory)
            if kind == "store":
                after[at[address]] = value
            new.append((wrote | 1 << i, read, tuple(after), loaded))
        for i in _next_steps(read, before_read):
            kind, address, _ = reader[i]
            values: list[Any] = list(loaded)
            if kind == "load":
                if (place := find(address, loaded)) is None:
                    continue
                values[i] = memory[at[place]]
            new.append((wrote, read | 1 << i, memory, tuple(values)))
        stack += {*new} - seen
        seen.update(new)
    return found


def _needed_before(steps: Sequence[Step]) -> list[int]:
    """For each step a mask of those that have to come before it."""
    masks = []
    for i, (kind, address, _) in enumerate(steps):
        fences = [j for j in range(i) if steps[j] == FENCE]
        same = [j for j in range(i) if steps[j][1] == address]
        masks.append(sum(1 << j for j in (range(i) if kind == "fence" else {*same, *fences[-1:]})))
    return masks


def _next_steps(done: int, needed: list[int]) -> list[int]:
    return [i for i, mask in enumerate(needed) if not done >> i & 1 and done & mask == mask]
