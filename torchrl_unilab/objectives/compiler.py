"""`torch.compile` as updates call it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TypeVar

import torch

from torchrl_unilab.errors import ConfigError

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F, **options: object) -> _F:
    """Return a function compiled by `torch.compile`, for each size of its tensors when it comes.

    Args:
        function: What to compile.
        **options: As for `torch.compile`.

    Raises:
        ConfigError: There is no C++ compiler.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.objectives.compiler import compiled
        >>> double = compiled(lambda x: 2 * x)  # compiles in its first call
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"compile: {compiler!r} is not on the path (expected a C++ compiler). Install g++, "
            "name another one by the variable CXX, or leave compile off."
        )
    return torch.compile(function, **options)  # type: ignore[call-overload, no-any-return]
