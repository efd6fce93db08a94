"""Tasks by name: Gymnasium's, the example of an own robot, and those of any module.

`MujocoBatchEnv` and the command line look tasks up here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from torchrl_unilab.checks import as_instance
from torchrl_unilab.configs.settings import nearest
from torchrl_unilab.envs.gymnasium.arms import Pusher, Reacher
from torchrl_unilab.envs.gymnasium.base import GymnasiumTask
from torchrl_unilab.envs.gymnasium.humanoids import Humanoid, HumanoidStandup
from torchrl_unilab.envs.gymnasium.pendulums import InvertedDoublePendulum, InvertedPendulum
from torchrl_unilab.envs.gymnasium.runners import Ant, HalfCheetah, Hopper, Swimmer, Walker2d
from torchrl_unilab.envs.robots.quadruped import QuadrupedWalk
from torchrl_unilab.envs.task import MujocoTask
from torchrl_unilab.errors import ConfigError

TASKS: Mapping[str, GymnasiumTask] = MappingProxyType(
    {
        task.name: task
        for task in (
            Ant(),
            HalfCheetah(),
            Hopper(),
            Humanoid(),
            HumanoidStandup(),
            InvertedDoublePendulum(),
            InvertedPendulum(),
            Pusher(),
            Reacher(),
            Swimmer(),
            Walker2d(),
        )
    }
)
"""Gymnasium's tasks by name, with its defaults."""

EXAMPLES: Mapping[str, MujocoTask] = MappingProxyType({"QuadrupedWalk": QuadrupedWalk()})
"""The example of an own robot, by name."""


# fields that define a task; all others are options
_NO_OPTIONS = {"name", "reads", "command_size", "command_steps"}


def make_task(name: str, **options: Any) -> MujocoTask:
    """Return the task of a name, with some options set.

    Args:
        name: One of `TASKS`, such as ``"HalfCheetah-v5"``; one of `EXAMPLES`; or ``"module:Name"``
            for a task of your own in a module that can be imported, where ``Name`` is a task, or
            makes one from the options, as the class of a task does.
        **options: Fields of the task. For a Gymnasium task: the options of its constructor, except
            that ``xml_file`` is called ``model`` and cameras are `MujocoBatchEnv`'s, and
            ``max_episode_steps``.

    Raises:
        ConfigError: There is no such task, or it has no such option.

    Examples:
        >>> from torchrl_unilab.envs.registry import make_task
        >>> make_task("Hopper-v5").frame_skip
        4
        >>> make_task("torchrl_unilab.envs.robots.quadruped:QuadrupedWalk", frame_skip=8).frame_skip
        8
    """
    as_instance("make_task name", name, str, "Use for example 'Hopper-v5'.")
    module, colon, attribute = name.partition(":")
    if colon:
        return _imported(module, attribute, options)
    known: dict[str, MujocoTask] = {**TASKS, **EXAMPLES}
    if name.endswith((".xml", ".mjb")):
        raise ConfigError(
            f"make_task: {name!r} is a model (expected a task, which has rewards, too). Derive one "
            "from RobotTask in a module of yours, and name it: 'module:Name'."
        )
    if name not in known:
        raise ConfigError(
            f"make_task: no task {name!r} (expected one of {', '.join(known)})."
            f"{nearest(name, known)} Use one of these names, or name your own, 'module:Name', or "
            "pass your own MujocoTask."
        )
    task = known[name]
    settable = {field.name for field in fields(task)} - _NO_OPTIONS
    unknown = [option for option in options if option not in settable]
    if unknown:
        raise ConfigError(
            f"make_task: {name} has no option {', '.join(unknown)} (expected some of "
            f"{', '.join(sorted(settable))}).{nearest(unknown[0], settable)} Correct the names."
        )
    return replace(task, **options)


def _imported(module: str, attribute: str, options: Mapping[str, Any]) -> MujocoTask:
    def refusal(reason: object) -> ConfigError:
        return ConfigError(
            f"make_task: no task '{module}:{attribute}', {reason} (expected the name of a module "
            "that can be imported, and of a task in it). Correct the name, or put the module's "
            "directory on PYTHONPATH."
        )

    if not all(name.isidentifier() for name in (*module.split("."), attribute)):
        raise refusal("which is no name")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module itself failed: the traceback says where
        raise refusal(error) from error
    try:
        found = getattr(imported, attribute)
    except AttributeError as error:
        raise refusal(error) from error
    try:
        if isinstance(found, MujocoTask):
            return replace(found, **options)
        task = found(**options) if callable(found) else found
    except TypeError as error:
        called = error.__traceback__
        if not options and called is not None and called.tb_next is not None:
            raise  # the task itself failed: the traceback says where
        given = f"with {sorted(options)}" if options else "without options"
        raise ConfigError(
            f"make_task: '{module}:{attribute}' {given}, {error} (expected one that can be made "
            "so). Correct the names, or the class."
        ) from error
    remedy = "Name a task or its class; other environments train by train_appo(create_env=...)."
    what = f"make_task: '{module}:{attribute}' gives"
    made: MujocoTask = as_instance(what, task, MujocoTask, remedy)
    return made
