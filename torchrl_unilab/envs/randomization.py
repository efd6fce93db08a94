"""Models that differ: physical parameters drawn for each simulation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import mujoco
import numpy as np
from mujoco import mjtObj
from mujoco.batch import MODEL_FIELDS, Batch
from numpy.typing import NDArray

from torchrl_unilab.checks import as_choice, as_names, as_range
from torchrl_unilab.errors import ConfigError

Ids = NDArray[np.intp]

_INPUTS = frozenset(mujoco.MjModel._setconst_inputs)
_DERIVED = frozenset(mujoco.MjModel._setconst_outputs) - _INPUTS
# the kind of object to which a field's rows belong, by the field's prefix
_OBJECTS = {
    "actuator": mjtObj.mjOBJ_ACTUATOR,
    "body": mjtObj.mjOBJ_BODY,
    "cam": mjtObj.mjOBJ_CAMERA,
    "dof": mjtObj.mjOBJ_JOINT,
    "eq": mjtObj.mjOBJ_EQUALITY,
    "geom": mjtObj.mjOBJ_GEOM,
    "jnt": mjtObj.mjOBJ_JOINT,
    "light": mjtObj.mjOBJ_LIGHT,
    "mat": mjtObj.mjOBJ_MATERIAL,
    "pair": mjtObj.mjOBJ_PAIR,
    "sensor": mjtObj.mjOBJ_SENSOR,
    "site": mjtObj.mjOBJ_SITE,
    "tendon": mjtObj.mjOBJ_TENDON,
}
_TARGET = re.compile(r"([\w.]+?)(?:\[(\d+)\])?")
_UNIT = re.compile("quat$|^jnt_axis$")  # fields of unit vectors
_HOW: Mapping[str, Callable[..., Any]] = {"scale": np.multiply, "add": np.add, "set": np.full_like}
"""What `Randomize.how` makes of a model's own values and the numbers drawn."""


@dataclass(frozen=True)
class Randomize:
    """How one quantity of the model differs between simulations.

    A number is drawn uniformly for each chosen object and applied to the model's own value, never
    to one drawn before. All named fields and all of their columns get the same number, so that
    related values stay consistent: for example ``("actuator_gainprm[0]", "actuator_biasprm[1]")``
    for the gain of a position servo, and ``("body_mass", "body_inertia")`` for a body that gets
    heavier without changing shape.

    Attributes:
        fields: One or more fields of ``MjModel``, of floating-point numbers, with the
            same objects; ``"geom_friction[0]"`` is a field's first column, and
            ``"opt.gravity[2]"`` one of ``MjOption``.
        low: Least number drawn.
        high: Bound of the numbers drawn.
        how: ``"scale"`` multiplies the model's value, ``"add"`` adds to it, ``"set"``
            replaces it.
        objects: Names of the objects meant, which may be patterns such as
            ``"*_foot"``; the names of ``dof_`` fields are those of joints. None for
            all objects.
        shared: Whether all chosen objects get the same number.
        when: ``"start"`` draws once, when the environment is made or seeded;
            ``"reset"`` at the start of each episode.

    Raises:
        ConfigError: The range is not finite and in order.

    Examples:
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.envs.randomization import Randomize
        >>> slippery = Randomize("geom_friction[0]", 0.5, 1.0, shared=True)
        >>> env = MujocoBatchEnv("Hopper-v5", num_envs=3, seed=0, randomization=[slippery])
        >>> env.randomizer.values("geom_friction").shape
        (3, 5, 3)
        >>> env.close()
    """

    fields: str | tuple[str, ...]
    low: float
    high: float
    how: Literal["scale", "add", "set"] = "scale"
    objects: tuple[str, ...] | None = None
    shared: bool = False
    when: Literal["start", "reset"] = "start"

    def __post_init__(self) -> None:
        """Refuse what no number can be drawn from."""
        fields = (self.fields,) if isinstance(self.fields, str) else self.fields
        as_names(f"Randomize {self.fields}: fields", fields)
        as_names(f"Randomize {self.fields}: objects", self.objects or ())
        as_range(f"Randomize {self.fields}: low and high", (self.low, self.high), "Correct them.")
        as_choice(f"Randomize {self.fields}: how", self.how, _HOW, "Use one of them.")
        as_choice(f"Randomize {self.fields}: when", self.when, ("start", "reset"), "Use one.")


# the object that a row of a field belongs to: its kind (None without names) and number
_Owner = tuple[mjtObj | None, int]


class _Target(NamedTuple):
    """Where one field of a `Randomize` lies."""

    field: str
    rows: Ids  # of the chosen objects, (k,)
    draws: Ids  # which of the numbers drawn each row gets, (k,)
    column: int | None  # the only one meant, if not all are


class _Plan(NamedTuple):
    """A `Randomize` looked up in a model: ``size`` numbers go to the targets."""

    spec: Randomize
    size: int
    targets: list[_Target]


class ModelRandomizer:
    """The randomised fields of a batch's models, one row per simulation.

    Everything is looked up before the batch is changed. Numbers come from generators
    that are the simulations' own and used for nothing else, so that the models of one
    simulation follow from its seed alone, and initial states and commands are those
    without randomisation.

    Args:
        batch: The simulations.
        specs: What to randomise; where several change the same numbers, each is
            applied to what those before it made of the model's value.
        name: Name of the task, for messages.
        reads: Fields that the task reads; some may follow from those that are randomised.

    Raises:
        ConfigError: The model has no such field or object, or MuJoCo derives the field from
            others. The batch is unchanged.
    """

    def __init__(
        self, batch: Batch, specs: Sequence[Randomize], name: str, reads: Sequence[str] = ()
    ) -> None:
        self._plans = [_look_up(batch.model, spec, name) for spec in specs]
        targets = [target for plan in self._plans for target in plan.targets]
        fields = dict.fromkeys(target.field for target in targets)
        self._batch: Batch | None = batch if fields else None
        # A number of MjOption has one column.
        self._values = {field: columns(batch.expand(field)) for field in fields}
        self._defaults = {field: _default(batch.model, field) for field in fields}
        # kept: a reset draws some numbers anew, and applies those drawn at the start again
        self._numbers = [np.zeros((batch.nsim, plan.size)) for plan in self._plans]
        self._units = [(t.field, t.rows) for t in targets if _UNIT.search(t.field)]
        self._at_reset = any(spec.when == "reset" for spec in specs)
        self._derives = not _INPUTS.isdisjoint(fields)
        if self._derives:
            for field in MODEL_FIELDS.intersection(reads):
                batch.expand(field)  # now: else it has one row for all until it changes
        self._rngs: list[np.random.Generator] = []

    def values(self, field: str) -> NDArray[np.float64]:
        """Return a copy of a randomised field's values.

        Returns:
            ``(nsim, ...)``; ``(nsim, 1)`` for a single number.

        Raises:
            KeyError: The field is not randomised.
        """
        values: NDArray[np.float64] = self._values[field].copy()
        return values

    def seed(self, rngs: Iterable[np.random.Generator]) -> None:
        """Take generators from the simulations' own, and draw all models anew.

        Args:
            rngs: One per simulation; their numbers to come are not changed.
        """
        if self._batch is None:
            return
        self._rngs = [rng.spawn(1)[0] for rng in rngs]
        self._draw(np.arange(len(self._rngs)), ("start", "reset"))

    def reset(self, ids: Ids) -> None:
        """Draw what each episode has anew, in simulations ``ids``, sorted; nothing once closed."""
        if self._at_reset and self._batch is not None:
            self._draw(ids, ("reset",))

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers drawn, and the generators of those to come."""
        return {
            "of": [f"{s.how} {s.fields} of {s.objects}" for s, *_ in self._plans],
            "numbers": [numbers.copy() for numbers in self._numbers],
            "generators": [rng.bit_generator.state for rng in self._rngs],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give the models the numbers that `state_dict` returned.

        Raises:
            ConfigError: The numbers are of another randomisation. Nothing has changed then.
        """
        own = self.state_dict()
        found, expected = _signature({**own, **state_dict}), _signature(own)  # older: no "of"
        if found != expected:
            raise ConfigError(
                f"ModelRandomizer: what is drawn, shapes and generators are {found} (expected "
                f"{expected}). Load them where the same is randomized in as many simulations."
            )
        for mine, numbers in zip(self._numbers, state_dict["numbers"], strict=True):
            mine[...] = numbers
        for rng, generator in zip(self._rngs, state_dict["generators"], strict=True):
            rng.bit_generator.state = generator
        if self._batch is not None:
            self._write_models(np.arange(self._batch.nsim))

    def close(self) -> None:
        """Drop the views of the models, which keep the simulations alive."""
        self._batch = None
        self._values = {}

    def _draw(self, ids: Ids, when: tuple[str, ...]) -> None:
        for plan, numbers in zip(self._plans, self._numbers, strict=True):
            if plan.spec.when in when:
                for i in ids:
                    numbers[i] = self._rngs[i].uniform(plan.spec.low, plan.spec.high, plan.size)
        self._write_models(ids)

    def _write_models(self, ids: Ids) -> None:
        """Write what follows from the drawn numbers to the models of simulations ``ids``."""
        assert self._batch is not None
        for field, values in self._values.items():
            values[ids] = self._defaults[field]
        for plan, numbers in zip(self._plans, self._numbers, strict=True):
            for target in plan.targets:
                _apply(self._values[target.field], ids, target, plan.spec.how, numbers[ids])
        for field, rows in self._units:  # normalise, as MuJoCo's compiler does
            units = self._values[field][np.ix_(ids, rows)]
            lengths = np.linalg.norm(units, axis=-1, keepdims=True)
            self._values[field][np.ix_(ids, rows)] = units / np.maximum(lengths, mujoco.mjMINVAL)
        if self._derives:
            self._batch.set_const(ids)


def columns(values: NDArray[Any]) -> NDArray[Any]:
    """Return one number per simulation, ``(nsim,)``, as ``(nsim, 1)``; other arrays as they are."""
    return values[:, None] if values.ndim == 1 else values


def _signature(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the states of two randomisers must have in common."""
    return state["of"], [numbers.shape for numbers in state["numbers"]], len(state["generators"])


def _apply(
    values: NDArray[np.float64], ids: Ids, target: _Target, how: str, numbers: NDArray[np.float64]
) -> None:
    """Apply numbers ``(len(ids), count)`` to the rows of a target in simulations ``ids``."""
    drawn = numbers[:, target.draws]
    where: tuple[Any, ...] = np.ix_(ids, target.rows)
    if target.column is not None:
        where = (*where, target.column)
    else:
        drawn = drawn.reshape(*drawn.shape, *(1,) * (values.ndim - 2))
    values[where] = _HOW[how](values[where], drawn)


def _look_up(model: mujoco.MjModel, spec: Randomize, name: str) -> _Plan:
    """Look a `Randomize` up in a model.

    Raises:
        ConfigError: The model has no such field, column or object.
    """
    fields = (spec.fields,) if isinstance(spec.fields, str) else spec.fields
    parts = [_part(model, text, name) for text in fields]
    chosen = [_matching_rows(model, owners, spec.objects, name) for _, _, owners in parts]
    objects = [list(dict.fromkeys(rows.values())) for rows in chosen]
    if not objects or not objects[0] or any(other != objects[0] for other in objects):
        raise ConfigError(
            f"randomization of {name}: {fields} have not the same objects (expected fields of "
            "the same, at least one). Randomize them one by one."
        )
    draws = {owner: 0 if spec.shared else i for i, owner in enumerate(objects[0])}
    targets = [
        _Target(field, np.array(list(rows)), np.array([draws[o] for o in rows.values()]), column)
        for (field, column, _), rows in zip(parts, chosen, strict=True)
    ]
    for target in targets:
        _check_masses(model, spec, target, name)
        _check_frames(model, target, name)
    return _Plan(spec, 1 if spec.shared else len(draws), targets)


def _part(model: mujoco.MjModel, text: str, name: str) -> tuple[str, int | None, dict[int, _Owner]]:
    """Parse a field such as ``"geom_friction[0]"``.

    Returns:
        The field; the column, if one is meant; and the owner of each row of the field.
    """
    match = _TARGET.fullmatch(text)
    field, index = match.groups() if match else (text, None)
    column = None if index is None else int(index)
    known = field in MODEL_FIELDS and field != "opt.timestep"
    value = _default(model, field) if known else np.empty(0)
    if field == "geom_aabb" or field in _DERIVED:
        raise ConfigError(
            f"randomization of {name}: MuJoCo derives {field} from other fields (expected one that "
            "it does not). Randomize those."
        )
    option = field.startswith("opt.")
    width = value.shape[-1] if value.ndim == 2 or option else 0
    if value.dtype.kind != "f" or not value.size or (column is not None and column >= width):
        raise ConfigError(
            f"randomization of {name}: {text!r} (expected a field of floating-point numbers of "
            "MjModel that the model has, such as 'body_mass', 'geom_friction[0]' or "
            "'opt.gravity[2]', but not the timestep). Correct fields."
        )
    if option:  # it has no objects: its numbers are the rows
        rows = range(len(value)) if column is None else [column]
        return field, None, {row: (None, row) for row in rows}
    prefix = field.split("_")[0]
    owners = model.dof_jntid.tolist() if prefix == "dof" else range(len(value))
    return field, column, {row: (_OBJECTS.get(prefix), own) for row, own in enumerate(owners)}


def _matching_rows(
    model: mujoco.MjModel, owners: dict[int, _Owner], patterns: tuple[str, ...] | None, name: str
) -> dict[int, _Owner]:
    """Keep the rows whose owner's name matches one of the patterns."""
    if patterns is None:
        return owners
    names = {
        row: mujoco.mj_id2name(model, kind, number) or ""
        for row, (kind, number) in owners.items()
        if kind is not None
    }
    chosen: set[int] = set()
    for pattern in patterns:
        matching = {row for row, known in names.items() if fnmatchcase(known, pattern)}
        if not matching:
            raise ConfigError(
                f"randomization of {name}: no object {pattern!r} (expected one of "
                f"{[*dict.fromkeys(filter(None, names.values()))]}). Correct objects."
            )
        chosen |= matching
    return {row: owner for row, owner in owners.items() if row in chosen}


def _check_masses(model: mujoco.MjModel, spec: Randomize, target: _Target, name: str) -> None:
    """Refuse a range that can make a positive mass or inertia zero or negative."""
    if target.field not in ("body_mass", "body_inertia"):
        return
    own = _default(model, target.field)[target.rows]
    own = own if target.column is None else own[:, target.column]
    least = _HOW[spec.how](own, spec.low)
    if (least[own > 0] <= 0).any():
        raise ConfigError(
            f"randomization of {name}: {target.field} can become {least.min()} (expected masses "
            "and inertias above 0). Correct the range."
        )


def _check_frames(model: mujoco.MjModel, target: _Target, name: str) -> None:
    """Refuse to move the centre of mass of a body that MuJoCo takes to lie at its frame."""
    if target.field not in ("body_ipos", "body_iquat"):
        return
    if simple := [model.body(i).name for i in target.rows if model.body_simple[i]]:
        raise ConfigError(
            f"randomization of {name}: {target.field} of {simple}, which the model has compiled as "
            'simple (expected bodies that are not). Give them simple="false" in the model.'
        )


def _default(model: mujoco.MjModel, field: str) -> NDArray[np.float64]:
    """Return a copy of the model's own value of a field, at least one-dimensional."""
    option, _, attribute = field.rpartition(".")
    return np.atleast_1d(np.array(getattr(model.opt if option else model, attribute)))
