"""A task of your own, in four steps.

1. Write the model: MJCF or URDF, text or a file.
2. Subclass `RobotTask`: `actor` says what is observed, `rewards` what is rewarded.
3. Optional: `critic` observes more, `failed` ends an episode, `commands` are drawn per episode.
4. Hand it to `MujocoBatchEnv`, or train: ``train_appo("Ball", create_env=create_ball, ...)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrl_unilab.envs import MujocoBatchEnv, RobotTask

MODEL = """
<mujoco>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 1"><joint name="z" type="slide" axis="0 0 1"/><geom size=".1" mass="1"/></body>
  </worldbody>
  <actuator><motor joint="z" ctrlrange="-20 20"/></actuator>
</mujoco>
"""


@dataclass(frozen=True, kw_only=True)
class Ball(RobotTask):
    """A ball that is rewarded for being high up, and pays for its effort."""

    name: str = "Ball"
    model: Any = MODEL
    weights: Mapping[str, float] = field(default_factory=lambda: {"height": 1.0, "effort": -0.01})

    def actor(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Observe height and velocity."""
        return {"height": fields["qpos"], "velocity": fields["qvel"]}

    def rewards(self, transition: Any) -> Mapping[str, Any]:
        """Return the terms of the reward; `weights` adds them up."""
        return {
            "height": transition.fields["qpos"][:, 0],
            "effort": np.abs(transition.action[:, 0]),
        }


def create_ball() -> MujocoBatchEnv:
    """Make eight balls; a module-level function, so that workers can make them, too."""
    return MujocoBatchEnv(Ball(), num_envs=8, num_threads=1, seed=0)
