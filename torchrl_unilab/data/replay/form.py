"""The form of a replay's rows: a schema, and where its tensors lie in a row. Pure.

A row of a replay of n-step returns has one more field, which its schema does not show: the
trajectory that the row belongs to (`torchrl_unilab.data.replay.trajectories`). The storage
makes the form; appending, gathering and budgets read it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrl_unilab.data.schema import Path, TensorSchema
from torchrl_unilab.errors import LayoutDtypeError, LayoutKeyError
from torchrl_unilab.shm.layout import dotted
from torchrl_unilab.shm.row_layout import RowLayout

REWARD = "next.reward"
DONE, TERMINATED, TRUNCATED = "next.done", "next.terminated", "next.truncated"
ONE_STEP_REWARD = ("next", "original_reward")
EXTRA = {"steps_to_next_obs": torch.int64, "gamma": torch.float32, "nonterminal": torch.bool}
"""Further entries of n-step batches, besides `ONE_STEP_REWARD`, the first step's reward."""
SIGNALS = ("done", "terminated", "truncated", "reward")


def is_learnt_from(path: Path) -> bool:
    """Return whether a field is a reward or an action, of one agent or of several.

    Examples:
        >>> is_learnt_from(("agents", "action")), is_learnt_from(("next", "agents", "reward"))
        (True, True)
    """
    return "action" in path or (path[0] == "next" and "reward" in path)


@dataclass(frozen=True)
class RowForm:
    """A schema, and the settings of a replay that decide how its rows lie.

    Attributes:
        schema: Tensors of a transition.
        n_step: Steps that a sampled transition takes.
        observed: Keys whose entry under ``"next"`` the next row of a trajectory observes;
            empty for one step.
    """

    schema: TensorSchema
    n_step: int = 1
    observed: tuple[Path, ...] = ()

    @classmethod
    def of(
        cls, schema: TensorSchema, n_step: int = 1, observed: Sequence[Path] | None = None
    ) -> RowForm:
        """Return the form of rows of a schema.

        Args:
            schema: Tensors of a transition.
            n_step: Steps that a sampled transition takes.
            observed: For more than one: as the attribute; if not given, all keys that are also
                under ``"next"`` with the same shape and dtype, without done, terminated,
                truncated and reward.

        Raises:
            LayoutKeyError: Several steps need a key that is not there, or write one that is.
            LayoutDtypeError: Several steps cannot discount rewards of the dtype.
        """
        if n_step == 1:
            return cls(schema)
        if not {REWARD, DONE} <= {*schema.names}:
            raise LayoutKeyError(
                f"rows for n_step={n_step}: {[*schema.names]} (expected {REWARD!r} and {DONE!r} "
                "among them). Write these too."
            )
        kinds = {field.path: (field.shape, field.dtype) for field in schema.fields}
        dtype = kinds["next", "reward"][1]
        if not dtype.is_floating_point:
            raise LayoutDtypeError(
                f"rewards for n_step={n_step}: {dtype} (expected a floating-point one, as a "
                "discounted sum is). Write rewards of float32."
            )
        taken = [path for path in kinds if path[0] in EXTRA or path[:2] == ONE_STEP_REWARD]
        if taken:
            raise LayoutKeyError(
                f"rows for n_step={n_step}: {[*map(dotted, taken)]} (expected none of what batches "
                f"get: {[*EXTRA, dotted(ONE_STEP_REWARD)]}). Rename or leave them out."
            )
        both = [path for path in kinds if kinds.get(("next", *path)) == kinds[path]]
        if observed is None:
            observed = [path for path in both if path[-1] not in SIGNALS]
        if not observed or not {*observed} <= {*both}:
            raise LayoutKeyError(
                f"observation keys for n_step={n_step}: {[*map(dotted, observed)]} (expected keys "
                f"that are also under 'next', of one shape and dtype: {[*map(dotted, both)]}). "
                "Name them with observation_keys."
            )
        return cls(schema, n_step, tuple(observed))

    @functools.cached_property
    def layout(self) -> RowLayout:
        """Where the schema's tensors lie in a row; last, if there is one, the trajectory."""
        specs = [(field.shape, field.dtype) for field in self.schema.fields]
        if self.n_step > 1:
            specs.append(((), torch.int64))
        return RowLayout.of(specs)

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Dotted key to the place of a field in the schema and the layout."""
        return {name: i for i, name in enumerate(self.schema.names)}

    @functools.cached_property
    def observations(self) -> tuple[str, ...]:
        """Dotted keys of what rows have both before and after a step, as it is after."""
        after = [f"next.{name}" for name in self.index if name.split(".")[-1] not in SIGNALS]
        return tuple(name for name in after if name in self.index)
