"""Settings as flags of argparse; names, types and help texts come from dataclass fields.

The parser is argparse because tyro prints errors as boxes of four to nine lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torchrl_unilab.configs.settings import Settings

_NONE = object()
"""Stands for None as a flag's value; None itself means that the flag was not given."""


def add_settings(
    add_argument: Callable[..., object],
    kind: type[Settings],
    defaults: Mapping[str, Any],
    skip: Collection[str] = (),
) -> None:
    """Add a flag per setting, by a parser's method; a flag that is not given is None."""
    types, kinds = typing.get_type_hints(kind), kind.kinds()
    for field in dataclasses.fields(kind):
        if field.name in skip:
            continue
        arguments = argument(types[field.name])
        default = defaults[field.name]
        text = f"{field.metadata['help']}; {kinds[field.name]}"
        if default is not dataclasses.MISSING:
            text += f" (default: {default})"
        flag = "--" + field.name.rstrip("_").replace("_", "-")
        add_argument(flag, dest=field.name, default=None, help=text, **arguments)


def argument(kind: Any) -> dict[str, Any]:
    """Return how argparse reads a value of a type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": typing.get_args(kind)}
    if typing.get_origin(kind) is tuple:
        return argument(int) | {"nargs": "+"}
    scalar, *others = typing.get_args(kind) or (kind,)

    def read(text: str) -> Any:
        if others and text.lower() == "none":
            return _NONE
        try:
            return scalar(text)
        except ValueError:
            if scalar is int and float(text).is_integer():
                return int(float(text))  # 1e6
            raise

    read.__name__ = scalar.__name__  # argparse names it in errors
    return {"type": read, "metavar": scalar.__name__.upper()}


def given(options: argparse.Namespace, kind: type[Settings]) -> dict[str, Any]:
    """Return the settings of a kind that were given."""
    values = {name: getattr(options, name, None) for name in kind.kinds()}
    return {
        name: None if value is _NONE else tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }
