"""MuJoCo environments for TorchRL, many simulations at a time."""

from torchrl_unilab.envs.batch_env import MujocoBatchEnv
from torchrl_unilab.envs.randomization import Randomize
from torchrl_unilab.envs.registry import TASKS, make_task
from torchrl_unilab.envs.robots.task import RobotTask
from torchrl_unilab.envs.robots.transforms import ActionDelay, ObservationDelay, ObservationNoise
from torchrl_unilab.envs.task import MujocoTask, Outcome

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
