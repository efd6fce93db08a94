"""MuJoCo environments for TorchRL, many simulations at a time."""

from torchrl_unilab.envs.gymnasium_tasks import TASKS, GymnasiumTask
from torchrl_unilab.envs.mujoco_batch import MujocoBatchEnv
from torchrl_unilab.envs.named_tasks import EXAMPLES, make_task
from torchrl_unilab.envs.quadruped import QuadrupedWalk
from torchrl_unilab.envs.randomization import Randomize
from torchrl_unilab.envs.robot_task import (
    RobotTask,
    Stride,
    joint_addresses,
    projected_gravity,
    to_body_frame,
    tracking,
)
from torchrl_unilab.envs.task import MujocoTask, Outcome
from torchrl_unilab.envs.transforms import ActionDelay, ObservationDelay, ObservationNoise

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
