"""Tasks by name: Gymnasium's, the example of an own robot, and those of any module."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torchrl_unilab.envs import gymnasium_tasks
from torchrl_unilab.envs.quadruped import QuadrupedWalk
from torchrl_unilab.envs.task import MujocoTask
from torchrl_unilab.errors import ConfigError

__all__ = ["EXAMPLES", "make_task"]

EXAMPLES: Mapping[str, MujocoTask] = MappingProxyType({"QuadrupedWalk": QuadrupedWalk()})
"""The example of an own robot, by name."""


def make_task(name: str, **options: Any) -> MujocoTask:
    """Return the task of a name, with some options set.

    Args:
        name: one of `TASKS`, such as ``"HalfCheetah-v5"``; one of `EXAMPLES`; or where a
            task of one's own is found, ``"module:Name"``, of a module that can be
            imported. There ``Name`` is a task, or makes one from the options, as the
            class of a task does.
        **options: fields of the task.

    Raises:
        ConfigError: if there is no such task, or Gymnasium's has no such option.

    Example:
        >>> from torchrl_unilab.envs.named_tasks import make_task
        >>> make_task("Hopper-v5").frame_skip
        4
        >>> make_task("torchrl_unilab.envs.quadruped:QuadrupedWalk", frame_skip=8).frame_skip
        8
    """
    module, colon, attribute = name.partition(":")
    if colon:
        return _imported(module, attribute, options)
    if name in EXAMPLES:
        return replace(EXAMPLES[name], **options)
    if name not in gymnasium_tasks.TASKS:
        raise ConfigError(
            f"make_task: no task {name!r} (expected one of "
            f"{', '.join((*gymnasium_tasks.TASKS, *EXAMPLES))}). Use one of these names, or name "
            "your own, 'module:Name', or pass your own MujocoTask."
        )
    return gymnasium_tasks.make_task(name, **options)


def _imported(module: str, attribute: str, options: Mapping[str, Any]) -> MujocoTask:
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"make_task: no task '{module}:{attribute}', {error} (expected the name of a module "
            "that can be imported, and of a task in it). Correct the name, or put the module's "
            "directory on PYTHONPATH."
        ) from error
    if not callable(found) and not isinstance(found, MujocoTask):
        raise ConfigError(
            f"make_task: '{module}:{attribute}' is {type(found).__name__} (expected a MujocoTask "
            "or what makes one). Name a task or its class."
        )
    task = replace(found, **options) if isinstance(found, MujocoTask) else found(**options)
    if not isinstance(task, MujocoTask):
        raise ConfigError(
            f"make_task: '{module}:{attribute}' makes {type(task).__name__} (expected a "
            "MujocoTask). Name a task or its class."
        )
    return task
