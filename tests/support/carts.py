"""A cart with a pole, and the simplest task on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.envs.robots.task import RobotTask, Stride

CART = """
<mujoco>
  <option timestep="0.01" gravity="0 0 0"/>
  <worldbody>
    <body name="cart">
      <joint name="x" type="slide" axis="1 0 0"/>
      <geom size=".1" mass="1"/>
      <body name="pole">
        <joint name="hinge" axis="0 1 0"/>
        <geom type="capsule" fromto="0 0 0 0 0 .5" size=".02" mass=".1"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor name="push" joint="x" ctrlrange="-1 1"/></actuator>
  <keyframe><key name="home" qpos="0.5 0.25" qvel="1 0"/></keyframe>
</mujoco>
"""


@dataclass(frozen=True, kw_only=True)
class Cart(RobotTask):
    """Is pushed, and rewarded for its speed."""

    name: str = "Cart"
    model: str | Path | mujoco.MjSpec = CART
    weights: Mapping[str, float] = field(default_factory=lambda: {"speed": 2.0, "effort": -0.5})
    commands: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"speed": (-1.0, 1.0), "height": (3.0, 3.0)}
    )

    def actor(self, fields: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        return {"x": fields["qpos"][:, 0], "command": fields["command"]}

    def rewards(self, stride: Stride) -> Mapping[str, NDArray[Any]]:
        return {
            "effort": np.abs(stride.action - stride.before["ctrl"]),
            "speed": stride.fields["qvel"][:, 0],
        }


def make(task: RobotTask, **settings: Any) -> MujocoBatchEnv:
    """Three simulations of a task."""
    return MujocoBatchEnv(task, **{"num_envs": 3, "seed": 0, "num_threads": 1, **settings})
