"""Settings as dataclass fields: each is one line with type, default, help text and constraint.

`Settings` checks every field on construction, so an instance holds values that can work. The
command line reads its flags and its help from the same fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchrl_unilab.errors import ConfigError

__all__ = [
    "REQUIRED",
    "Constraint",
    "Settings",
    "choice",
    "device",
    "flag",
    "integer",
    "names",
    "nearest",
    "number",
    "setting",
    "text",
    "widths",
]

REQUIRED: Any = dataclasses.MISSING
"""The default of a setting that has none."""


@dataclass(frozen=True)
class Constraint:
    """The values that a setting may have.

    Attributes:
        kind: Their type for a person: "an integer".
        accepts: Whether a value is one of them.
        range: Their bounds: "of at least 1"; empty without.
    """

    kind: str
    accepts: Callable[[Any], bool] = dataclasses.field(repr=False)
    range: str = ""

    def __str__(self) -> str:
        """Return the values in words: "an integer of at least 1"."""
        return f"{self.kind} {self.range}".rstrip()

    def or_none(self) -> Constraint:
        """Return the constraint that accepts None, too."""
        return Constraint(
            f"None or {self.kind}", lambda v: v is None or self.accepts(v), self.range
        )

    def check(self, name: str, value: Any, remedy: str = "Change it.") -> None:
        """Refuse a value outside the constraint.

        Raises:
            ConfigError: Names the setting, the value, and what is expected.

        Examples:
            >>> integer().check("epochs", 0)
            Traceback (most recent call last):
            ...
            torchrl_unilab.errors.ConfigError: epochs: 0 (expected an integer of at least 1). ...
        """
        if not self.accepts(value):
            raise ConfigError(f"{name}: {value!r} (expected {self}). {remedy}")


def setting(default: Any, description: str, constraint: Constraint) -> Any:
    """Return a dataclass field that carries its description and its constraint.

    Args:
        default: Its default, or `REQUIRED`.
        description: What it means, with its unit.
        constraint: What it may be.
    """
    metadata = {"help": description, "constraint": constraint}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Base of settings classes: every field comes from `setting` and is checked.

    Raises:
        ConfigError: A value is outside its constraint.

    Examples:
        >>> @dataclass(frozen=True)
        ... class Example(Settings):
        ...     epochs: int = setting(5, "passes over the data", integer())
        >>> Example(epochs=0)
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: epochs: 0 (expected an integer of at least 1). ...
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            constraint: Constraint = field.metadata["constraint"]
            value, remedy = getattr(self, field.name), "Change it."
            if field.default is not REQUIRED:
                remedy = f"Leave it out for the default, {field.default!r}."
            constraint.check(field.name, value, remedy)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question after the known name most like one; empty if none is like it.

    Examples:
        >>> nearest("epoch", ["epochs", "lr"])
        ' Did you mean epochs?'
    """
    names = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {names[0]}?" if names else ""


def integer(least: float | None = 1, most: float = math.inf) -> Constraint:
    """Accept integers, but no bool, from `least` (None: no bound) to `most`."""
    low = -math.inf if least is None else least
    return Constraint(
        "an integer", lambda v: _is_number(v, int) and low <= v <= most, _range(low, most)
    )


def number(
    least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf
) -> Constraint:
    """Accept finite numbers from `least`, or above `above`, to `most`; no bool."""

    def accepts(value: Any) -> bool:
        finite = _is_number(value, (int, float)) and math.isfinite(value)
        return finite and least <= value <= most and value > above

    bounds = _range(least, most) if math.isinf(above) else f"above {above}"
    return Constraint("a finite number", accepts, bounds)


def choice(words: Any) -> Constraint:
    """Accept the words of a `Literal`."""
    names = typing.get_args(words)
    return Constraint(" or ".join(map(repr, names)), lambda v: isinstance(v, str) and v in names)


def names(words: Any) -> Constraint:
    """Accept some words of a `Literal`, each once, with commas between."""
    known = typing.get_args(words)

    def accepts(value: Any) -> bool:
        given = value.split(",") if isinstance(value, str) else [None]
        return set(given) <= set(known) and len(set(given)) == len(given)

    return Constraint(f"some of {', '.join(known)}, with commas between", accepts)


def flag() -> Constraint:
    """Accept True and False."""
    return Constraint("True or False", lambda v: isinstance(v, bool))


def device() -> Constraint:
    """Accept names of devices; whether this machine has one is checked when a run starts."""
    name = re.compile(r"cpu|cuda(:\d+)?")
    return Constraint(
        "cpu, cuda or cuda:N", lambda v: isinstance(v, str) and bool(name.fullmatch(v))
    )


def text() -> Constraint:
    """Accept any text except the empty one."""
    return Constraint("a text", lambda v: isinstance(v, str) and bool(v))


def widths() -> Constraint:
    """Accept a tuple or a list of integers of at least 1; it may be empty."""
    width = integer()
    return Constraint(
        "a tuple of integers",
        lambda v: isinstance(v, (tuple, list)) and all(map(width.accepts, v)),
        width.range,
    )


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _range(least: float, most: float) -> str:
    if math.isinf(least):
        return ""
    return f"of at least {least}" if math.isinf(most) else f"within [{least}, {most}]"
