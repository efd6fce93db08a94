"""MuJoCo environments for TorchRL, many simulations at a time."""

from __future__ import annotations

from torchrl_unilab.envs.mujoco_batch import MujocoBatchEnv
from torchrl_unilab.envs.tasks import TASKS, MujocoTask, make_task

__all__ = ["TASKS", "MujocoBatchEnv", "MujocoTask", "make_task"]
