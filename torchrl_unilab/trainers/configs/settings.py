"""What the settings of a run may be: said once for each, as data, and refused otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_unilab.errors import ConfigError

__all__ = ["Allowed", "check_settings", "choice", "flag", "integer", "number", "text", "widths"]

_DEFAULT = "Leave it out for the default."


@dataclass(frozen=True)
class Allowed:
    """Values that a setting may have.

    Attributes:
        words: What they are, for a person.
        admits: Whether a value is one of them.
    """

    words: str
    admits: Callable[[Any], bool] = field(repr=False)

    def or_none(self) -> Allowed:
        """Return what allows None, too."""
        return Allowed(f"{self.words}, or None", lambda v: v is None or self.admits(v))


def integer(least: int | None = 1, most: int | None = None) -> Allowed:
    """Allow integers, but no bool; any below `most` if `least` is None."""
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    words = "an integer" + _bounds(least, most)
    return Allowed(words, lambda v: _is(v, int) and low <= v <= high)


def number(
    least: float | None = None, most: float | None = None, *, above: float | None = None
) -> Allowed:
    """Allow finite numbers from `least`, or above `above`, to `most`; no bool."""

    def admits(value: Any) -> bool:
        return (
            _is(value, (int, float))
            and math.isfinite(value)
            and (least is None or value >= least)
            and (most is None or value <= most)
            and (above is None or value > above)
        )

    words = "a finite number" + (_bounds(least, most) if above is None else f" above {above:g}")
    return Allowed(words, admits)


def choice(*names: str) -> Allowed:
    """Allow one of some words."""
    words = f"one of {names}" if len(names) > 2 else " or ".join(map(repr, names))
    return Allowed(words, lambda v: isinstance(v, str) and v in names)


def flag() -> Allowed:
    """Allow True and False."""
    return Allowed("True or False", lambda v: isinstance(v, bool))


def text() -> Allowed:
    """Allow any text but none."""
    return Allowed("a text", lambda v: isinstance(v, str) and bool(v))


def widths() -> Allowed:
    """Allow a tuple of integers of at least 1, or a list, as JSON has it; also an empty one."""
    return Allowed(
        "a tuple of integers of at least 1",
        lambda v: isinstance(v, (tuple, list)) and all(_is(w, int) and w >= 1 for w in v),
    )


def check_settings(
    settings: Mapping[str, Any], allowed: Mapping[str, Allowed], remedy: str = _DEFAULT
) -> None:
    """Refuse settings that are not as they may be.

    Args:
        settings: Name to value.
        allowed: Name to what is allowed, for some of them.
        remedy: What to do about it.

    Raises:
        ConfigError: Names the first that is not, and what it may be.

    Example:
        >>> check_settings({"lr": 1e-3, "epochs": 0}, {"lr": number(above=0), "epochs": integer()})
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: epochs: 0 (expected an integer of at least 1). ...
    """
    for name, kind in allowed.items():
        if not kind.admits(settings[name]):
            raise ConfigError(f"{name}: {settings[name]!r} (expected {kind.words}). {remedy}")


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether a value is a number of some kind; True and False count as none."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _bounds(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f" of at most {most:g}"
    return f" of at least {least:g}" if most is None else f" within [{least:g}, {most:g}]"
