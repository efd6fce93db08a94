"""MuJoCo environments for TorchRL, many simulations at a time."""

from torchrl_unilab.envs.batch_env import MujocoBatchEnv
from torchrl_unilab.envs.gymnasium.base import GymnasiumTask
from torchrl_unilab.envs.randomization import Randomize
from torchrl_unilab.envs.registry import EXAMPLES, TASKS, make_task
from torchrl_unilab.envs.robots.quadruped import QuadrupedWalk
from torchrl_unilab.envs.robots.task import (
    RobotTask,
    Stride,
    joint_addresses,
    projected_gravity,
    to_body_frame,
    tracking,
)
from torchrl_unilab.envs.robots.transforms import ActionDelay, ObservationDelay, ObservationNoise
from torchrl_unilab.envs.task import MujocoTask, Outcome

__all__ = [
    "EXAMPLES",
    "TASKS",
    "ActionDelay",
    "GymnasiumTask",
    "MujocoBatchEnv",
    "MujocoTask",
    "ObservationDelay",
    "ObservationNoise",
    "Outcome",
    "QuadrupedWalk",
    "Randomize",
    "RobotTask",
    "Stride",
    "joint_addresses",
    "make_task",
    "projected_gravity",
    "to_body_frame",
    "tracking",
]
