"""MuJoCo environments for TorchRL, many simulations at a time.

Tasks need no torch; what is TorchRL's is imported when it is first asked for.
"""

import typing

from torchrl_unilab.envs.randomization import Randomize
from torchrl_unilab.envs.registry import TASKS, make_task
from torchrl_unilab.envs.robots.task import RobotTask
from torchrl_unilab.envs.task import MujocoTask, Outcome

if typing.TYPE_CHECKING:
    from torchrl_unilab.envs.batch_env import MujocoBatchEnv
    from torchrl_unilab.envs.robots.transforms import (
        ActionDelay,
        ObservationDelay,
        ObservationNoise,
    )

__all__ = [
    "TASKS",
    "ActionDelay",
    "MujocoBatchEnv",
    "MujocoTask",
    "ObservationDelay",
    "ObservationNoise",
    "Outcome",
    "Randomize",
    "RobotTask",
    "make_task",
]


def __getattr__(name: str) -> typing.Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrl_unilab.envs import batch_env
    from torchrl_unilab.envs.robots import transforms

    return getattr(batch_env if name == "MujocoBatchEnv" else transforms, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
