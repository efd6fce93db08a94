"""All of Gymnasium's MuJoCo v5 tasks, by name, for many simulations at once.

A task is the part of an environment that is not physics: which model, what is
observed, what is rewarded, when an episode terminates, how one starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from torchrl_unilab.envs.gymnasium_arms import Pusher, Reacher
from torchrl_unilab.envs.gymnasium_base import GymnasiumTask
from torchrl_unilab.envs.gymnasium_humanoids import Humanoid, HumanoidStandup
from torchrl_unilab.envs.gymnasium_pendulums import InvertedDoublePendulum, InvertedPendulum
from torchrl_unilab.envs.gymnasium_runners import Ant, HalfCheetah, Hopper, Swimmer, Walker2d
from torchrl_unilab.errors import ConfigError

__all__ = ["TASKS", "GymnasiumTask", "make_task"]

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
"""The tasks by name, with Gymnasium's defaults."""

# what a task is rather than how it is set
_NO_OPTIONS = {"name", "reads", "command_size", "command_steps"}


def make_task(name: str, **options: Any) -> GymnasiumTask:
    """Return the task of a name, one of `TASKS`, with some options set.

    Args:
        name: such as ``"HalfCheetah-v5"``.
        **options: fields of the task: the options of Gymnasium's constructor, but
            that ``xml_file`` is ``model``, and ``max_episode_steps``.

    Raises:
        ConfigError: if there is no such task, or it has no such option.

    Example:
        >>> from torchrl_unilab.envs import make_task
        >>> make_task("Hopper-v5").frame_skip
        4
        >>> make_task("Ant-v5", terminate_when_unhealthy=False).terminate_when_unhealthy
        False
    """
    if name not in TASKS:
        raise ConfigError(
            f"make_task: no task {name!r} (expected one of {', '.join(TASKS)}). "
            "Use one of these names, or pass your own MujocoTask."
        )
    task = TASKS[name]
    known = [field.name for field in fields(task) if field.name not in _NO_OPTIONS]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ConfigError(
            f"make_task: {name} has no option {', '.join(unknown)} (expected some of "
            f"{', '.join(sorted(known))}). Correct the names."
        )
    return replace(task, **options)
