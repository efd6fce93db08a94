"""A small four-legged robot that walks at a commanded speed: the example of an own robot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_unilab.envs.randomization import Randomize
from torchrl_unilab.envs.robots.task import RobotTask, Stride, projected_gravity, to_body_frame
from torchrl_unilab.envs.task import Array, Fields, State

QUADRUPED = Path(__file__).parent / "assets" / "quadruped.xml"
"""The robot: 4.7 kg, 40 cm long, eight position servos."""


@dataclass(frozen=True, kw_only=True)
class QuadrupedWalk(RobotTask):
    """Walk forward at the speed asked for, straight ahead and upright.

    The actor observes what such a robot's sensors tell: turning rates, where down
    is, and joint positions and velocities; and the command and a clock. The critic
    also knows velocity and height of the torso.

    Being rewarded for lifting its feet by the clock keeps the robot from shuffling
    along on the noise of its exploration, which it would not have later. Standing
    still earns 0 on average over the commands.

    Attributes:
        reset_noise: Bound of the uniform noise on the joints' initial positions,
            radians.
        stride_rate: How often per second the clock goes round that the robot has to
            keep its strides by.
        step_height: How far feet are rewarded for being lifted in turn, metres.
        min_height: Height of the torso below which the robot has fallen, metres.
        max_tilt: Cosine of the torso's tilt below which it has fallen.
    """

    name: str = "QuadrupedWalk"
    model: str | Path = QUADRUPED
    frame_skip: int = 4
    max_episode_steps: int = 500
    command_steps: int | None = 250
    commands: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"forward": (0.2, 0.8)}
    )
    weights: Mapping[str, float] = field(
        default_factory=lambda: {
            "forward": 1.0,
            "lift": 0.5,
            "sideways": -0.5,
            "turning": -0.1,
            "tilt": -0.5,
            "action_rate": -0.02,
        }
    )
    reads: tuple[str, ...] = ("time", "sensordata")
    randomization: tuple[Randomize, ...] = (
        Randomize(("body_mass", "body_inertia"), 0.8, 1.2, objects=("torso",)),
        Randomize("geom_friction[0]", 0.6, 1.2, objects=("*_foot",), shared=True),
        Randomize(("actuator_gainprm[0]", "actuator_biasprm[1]"), 0.8, 1.2),
    )
    reset_noise: float = 0.1
    stride_rate: float = 2.0
    step_height: float = 0.04
    min_height: float = 0.13
    max_tilt: float = 0.7

    def phase(self, fields: Fields) -> Array:
        """Return the clock, radians, ``(nsim,)``."""
        return 2.0 * np.pi * self.stride_rate * fields["time"]

    def actor(self, fields: Fields) -> Mapping[str, Array]:
        """Return what the robot's own sensors measure, and the command."""
        qpos, qvel = fields["qpos"], fields["qvel"]
        phase = self.phase(fields)
        return {
            "turning": 0.25 * qvel[:, 3:6],
            "gravity": projected_gravity(qpos[:, 3:7]),
            "joint_positions": self.joint_positions(fields),
            "joint_velocities": 0.05 * self.joint_velocities(fields),
            "command": fields["command"],
            "clock": np.stack((np.sin(phase), np.cos(phase)), axis=1),
        }

    def critic(self, fields: Fields) -> Mapping[str, Array]:
        """Return velocity and height of the torso, which the robot cannot measure."""
        qpos, qvel = fields["qpos"], fields["qvel"]
        return {"velocity": to_body_frame(qpos[:, 3:7], qvel[:, :3]), "height": qpos[:, 2]}

    def rewards(self, stride: Stride) -> Mapping[str, NDArray[Any]]:
        """Reward the commanded speed and steps; charge other motion and hasty actions."""
        qpos, qvel = stride.fields["qpos"], stride.fields["qvel"]
        velocity = to_body_frame(qpos[:, 3:7], qvel[:, :3])
        error = np.abs(velocity[:, 0] - stride.fields["command"][:, 0])
        # two diagonal pairs of feet take turns; the sensors are the feet's positions
        swing = np.maximum(np.sin(self.phase(stride.fields))[:, None] * [1.0, -1.0, -1.0, 1.0], 0.0)
        lift = np.clip((stride.fields["sensordata"][:, 2::3] - 0.02) / self.step_height, 0.0, 1.0)
        return {
            "forward": 1.0 - 2.0 * error,
            "lift": (swing * lift).sum(axis=1),
            "sideways": np.square(velocity[:, 1]),
            "turning": np.square(qvel[:, 5]),
            "tilt": np.square(projected_gravity(qpos[:, 3:7])[:, :2]).sum(axis=1),
            "action_rate": np.square(stride.fields["ctrl"] - stride.before["ctrl"]).sum(axis=1),
        }

    def failed(self, fields: Fields) -> NDArray[np.bool_]:
        """Return whether the torso is too low or too tilted."""
        qpos = fields["qpos"]
        upright = -projected_gravity(qpos[:, 3:7])[:, 2]
        return (qpos[:, 2] < self.min_height) | (upright < self.max_tilt)

    def initial_state(self, rng: np.random.Generator, qpos: Array, qvel: Array) -> State:
        """Stand, the joints a little off."""
        start = qpos.copy()
        legs = self.joints.qpos
        start[legs] += rng.uniform(-self.reset_noise, self.reset_noise, len(legs))
        return start, qvel
