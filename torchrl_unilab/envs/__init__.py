"""MuJoCo environments for TorchRL, many simulations at a time."""

from __future__ import annotations

from torchrl_unilab.envs.gymnasium_tasks import TASKS, GymnasiumTask, make_task
from torchrl_unilab.envs.mujoco_batch import MujocoBatchEnv
from torchrl_unilab.envs.task import MujocoTask, Outcome

__all__ = ["TASKS", "GymnasiumTask", "MujocoBatchEnv", "MujocoTask", "Outcome", "make_task"]
