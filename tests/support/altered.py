"""Modules that may do something else than those which they were."""

from __future__ import annotations

from types import new_class

from torch import nn


def altered(module: nn.Module, **parts: object) -> None:
    """Give a module other parts."""
    for name, part in parts.items():
        setattr(module, name, part)


def subclassed(module: nn.Module) -> None:
    """Make a module one of a subclass, which might compute anything."""
    kind = type(module)
    object.__setattr__(module, "__class__", new_class(f"Other{kind.__name__}", (kind,)))


def hook(*_: object) -> None:
    """For a module that has a hook on its passes."""
