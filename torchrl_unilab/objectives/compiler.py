"""`torch.compile` as updates call it, with its failures in our words."""

from __future__ import annotations

import functools
import os
import shutil
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from torchrl_unilab.errors import ConfigError

_IN_PYTHON = ("AUTOGRAD_SAVED_TENSORS_HOOKS", "DUPLICATE_INPUT", "SHAPE_ENV")
"""Kinds of guards that call Python. Those of sizes, none dynamic, are in C++."""
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
    # The processor says which vectors it has: a trial build for each kind takes two seconds.
    options["options"] = {"cpp.vec_isa_ok": True} | options.get("options", {})
    whole = torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return whole(*args, **kwargs)
        except BackendCompilerFailed as error:
            reason = str(error.inner_exception).partition("\n")[0]
            raise ConfigError(f"compile: {reason} (expected compiled code). {_REMEDY}") from error

    return call


def compiled_method(owner: object, name: str, **options: Any) -> Callable[..., Any]:
    """Return an object's method, `compiled` so that no Ctrl-C is lost in it.

    PyTorch calls guards before compiled code, and takes an error in one for a refusal: an
    interrupt in a guard that calls Python is lost. There is none of them here. As they tell apart
    objects whose parts are one from those whose parts are two, each object has code of its own.

    Args:
        owner: The object. Which of the tensors that the method reads are one does not change.
        name: Its method, which is called without gradients.
        **options: The compiler's.
    """
    of_all = getattr(type(owner), name)
    parts = of_all.__globals__, name, of_all.__defaults__, of_all.__closure__
    own = types.FunctionType(of_all.__code__.replace(), *parts)
    options["guard_filter_fn"] = _without_python
    return compiled(types.MethodType(own, owner), dynamic=False, options=options)


def _without_python(guards: Sequence[Any]) -> list[bool]:
    """Choose the guards that call no Python: none of their own, and no audit hook.

    Hooks, such as filelock's, are told of each read of a function's defaults, which stay.
    """
    return [
        guard.guard_type not in _IN_PYTHON and "defaults__" not in guard.name for guard in guards
    ]
