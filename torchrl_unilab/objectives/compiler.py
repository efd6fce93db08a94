"""`torch.compile` as updates call it, with its failures in our words."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from torchrl_unilab.errors import ConfigError

_REMEDY = "Install g++ and Python's headers, name another compiler by CXX, or leave compile off."


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function that `torch.compile` compiles when it is called.

    Args:
        function: What to compile.
        **options: As for `torch.compile`.

    Raises:
        ConfigError: There is no C++ compiler; the function raises it where that one fails.

    Examples:
        >>> from torchrl_unilab.objectives.compiler import compiled
        >>> double = compiled(lambda x: 2 * x)  # compiles for the first tensor that it is given
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"compile: no {compiler!r} on the path (expected one). {_REMEDY}")
    whole = torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return whole(*args, **kwargs)
        except BackendCompilerFailed as error:
            reason = str(error.inner_exception).partition("\n")[0]
            raise ConfigError(f"compile: {reason} (expected compiled code). {_REMEDY}") from error

    return call
