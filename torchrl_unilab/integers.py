"""`as_integer`: an integer, of Python or of NumPy, that is large enough."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from torchrl_unilab.errors import ConfigError


def as_integer(what: str, value: Any, remedy: str, *, least: int = 1) -> int:
    """Return an integer as one of Python's.

    Args:
        what: What it is, for the message.
        value: The integer.
        remedy: What to do about another value.
        least: The smallest that can work.

    Raises:
        ConfigError: It is no integer, as True is none, or smaller.

    Examples:
        >>> as_integer("workers", 0, "Use 1.")
        Traceback (most recent call last):
        ...
        torchrl_unilab.errors.ConfigError: workers: 0 (expected an integer of at least 1). Use 1.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{what}: {value!r} (expected an integer of at least {least}). {remedy}")
    return int(value)
