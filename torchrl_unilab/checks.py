"""Arguments, checked: numbers, names and choices, of Python or of NumPy, and objects by kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, SupportsFloat, TypeVar

from torchrl_unilab.errors import ConfigError, LayoutKeyError

T = TypeVar("T")

_MOST = (1 << 63) - 1
FINITE = "(-inf, inf)"


def as_integer(what: str, value: Any, remedy: str, *, least: int = 1, most: int = _MOST) -> int:
    """Return an integer, checked, as a Python int.

    Args:
        what: What it is, for the message.
        value: The integer.
        remedy: What to do about another value.
        least: The smallest that can work.
        most: The largest.

    Raises:
        ConfigError: The value is no integer (True is none), or out of range.

    Examples:
        >>> as_integer("workers", 0, "Use 1.")
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: workers: 0 (expected an integer of at least 1). Use 1.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
        limited = most < _MOST or (whole and value > most)
        bound = f"{least} to {most}" if limited else f"at least {least}"
        raise ConfigError(f"{what}: {value!r} (expected an integer of {bound}). {remedy}")
    return int(value)


def as_indices(what: str, given: int | Iterable[int]) -> list[int]:
    """Return one index, or several, as Python's integers of at least 0; else a ConfigError.

    Examples:
        >>> as_indices("workers", 1), as_indices("workers", range(2))
        ([1], [0, 1])
    """
    several = given if isinstance(given, Iterable) else [given]
    return [as_integer(what, index, "Number them from 0.", least=0) for index in several]


def as_number(what: str, value: Any, remedy: str, interval: str = FINITE) -> float:
    """Return a number of an interval, as a Python float.

    Args:
        what: What it is, for the message.
        value: The number; a text or True is none.
        remedy: What to do about another value.
        interval: Such as ``"[0, 1)"``, without 1; by default all finite numbers.

    Raises:
        ConfigError: The value is no number (NaN is none), or not in the interval.

    Examples:
        >>> as_number("tau", 2, "Use 0.005.", "[0, 1]")
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: tau: 2 (expected a number in [0, 1]). Use 0.005.
    """
    found = float("nan")
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):  # an array or tensor of several
            found = float(value)
    low, high = map(float, interval[1:-1].split(","))
    above = low < found or (low == found and interval[0] == "[")
    below = found < high or (found == high and interval[-1] == "]")
    if not (above and below):
        expected = "a finite number" if interval == FINITE else f"a number in {interval}"
        raise ConfigError(f"{what}: {value!r} (expected {expected}). {remedy}")
    return found


def as_range(what: str, value: Any, remedy: str, interval: str = FINITE) -> tuple[float, float]:
    """Return two numbers of an interval (`as_number`), low first; else a ConfigError.

    Examples:
        >>> as_range("speed", (1, 0), "Exchange them.")
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: speed: (1, 0) (expected two numbers, low first). Exch...
    """
    several = isinstance(value, tuple | list)
    numbers = [as_number(what, each, remedy, interval) for each in (value if several else ())]
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise ConfigError(f"{what}: {value!r} (expected two numbers, low first). {remedy}")
    return numbers[0], numbers[1]


def as_names(what: str, value: Sequence[str]) -> Sequence[str]:
    """Return a sequence of names; else a ConfigError: a text alone is no sequence of its letters.

    Examples:
        >>> as_names("objects", "torso")
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: objects: 'torso' (expected a tuple of names). Give ('...
    """
    several = isinstance(value, Sequence) and not isinstance(value, str)
    if not several or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{what}: {value!r} (expected a tuple of names). Give ({value!r},).")
    return value


def as_seconds(what: str, value: Any, *, zero: bool = False) -> float:
    """Return seconds above 0, which may be infinite, as a Python float.

    Args:
        what: What they are, for the message.
        value: The seconds.
        zero: Whether 0, which means not to wait, is allowed.

    Raises:
        ConfigError: The value is no number (NaN is none), or not above 0.

    Examples:
        >>> as_seconds("timeout", 2)
        2.0
    """
    seconds = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
    if not (seconds > 0.0 or (zero and seconds == 0.0)):
        bound = "of at least 0" if zero else "above 0"
        raise ConfigError(f"{what}: {value!r} (expected seconds {bound}). Use 10.0, for example.")
    return seconds


def as_choice(what: str, value: T, choices: Iterable[T], remedy: str) -> T:
    """Return a value that is one of several; else a ConfigError, which names them.

    Examples:
        >>> as_choice("take", "all", ("oldest", "newest"), "Choose one.")
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: take: 'all' (expected 'oldest' or 'newest'). Choose one.
    """
    known = [*choices]
    if value not in known:
        *others, last = map(repr, known) if known else ("none: there are none to choose from",)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"{what}: {value!r} (expected {expected}). {remedy}")
    return value


def entry_of(what: str, entries: Any, key: Any, remedy: str) -> Any:
    """Return an entry of a TensorDict or mapping; else a LayoutKeyError, which names what is there.

    Examples:
        >>> entry_of("batch", {"reward": 1.0}, "action", "Store it.")
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.LayoutKeyError: batch: no 'action' among ['reward'] (expected it). ...
    """
    if (value := entries.get(key, None)) is None:
        known = sorted(map(str, entries.keys()))
        raise LayoutKeyError(f"{what}: no {key!r} among {known} (expected it). {remedy}")
    return value


def as_instance(what: str, value: T, kind: type[Any], remedy: str) -> T:
    """Return a value that is of a kind; else a ConfigError, which names both.

    Examples:
        >>> as_instance("workers", "two", int, "Use 1.")
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: workers: str (expected int). Use 1.
    """
    if not isinstance(value, kind):
        found = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise ConfigError(f"{what}: {found} (expected {kind.__name__}). {remedy}")
    return value
