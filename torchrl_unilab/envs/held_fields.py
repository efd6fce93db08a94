"""Fields that the physics derives, as they were saved, until it derives them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mujoco.batch import DATA_FIELDS
from numpy.typing import NDArray

__all__ = ["HeldFields"]


class HeldFields:
    """A batch's fields, of which some show what was loaded where the physics has not run since.

    A simulation is its state, from which the physics derives the rest: after a step, what
    holds one substep before the state. From the state alone it cannot be had again, and the
    batch lets nobody write it.

    Args:
        fields: name to live ``(nsim, ...)`` array, all that the task reads.
    """

    def __init__(self, fields: Mapping[str, NDArray[Any]]) -> None:
        self._live = fields
        self._held: dict[str, NDArray[Any]] = {}
        self._derived = tuple(
            name
            for name, field in fields.items()
            if name in DATA_FIELDS and not field.flags.writeable
        )

    @property
    def seen(self) -> Mapping[str, NDArray[Any]]:
        """All fields, as they are to be read."""
        return {**self._live, **self._held} if self._held else self._live

    def derived(self) -> dict[str, NDArray[Any]]:
        """Copies of what the physics derives, by name."""
        seen = self.seen
        return {name: seen[name].copy() for name in self._derived}

    def hold(self, derived: Mapping[str, NDArray[Any]]) -> None:
        """Show what `derived` returned, here or in an environment like this one."""
        self._held = {name: field.copy() for name, field in derived.items()}

    def release(self, rows: NDArray[np.intp] | slice) -> None:
        """Show what the physics derives where it has run; a slice is all simulations."""
        if isinstance(rows, slice):
            self._held = {}
        for name, held in self._held.items():
            held[rows] = self._live[name][rows]

    def close(self) -> None:
        """Let go of the views, which keep the simulations alive."""
        self._live, self._held = {}, {}
