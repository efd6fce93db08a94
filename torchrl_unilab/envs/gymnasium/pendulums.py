"""Gymnasium's MuJoCo v5 tasks of poles on a cart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_unilab.envs.gymnasium.base import NoisyStart, scalar_squares
from torchrl_unilab.envs.task import Array, Fields, Model, Outcome

_MAX_ANGLE = 0.2  # tilt of the single pole beyond which its episode terminates, radians


@dataclass(frozen=True, kw_only=True)
class InvertedPendulum(NoisyStart):
    """InvertedPendulum-v5: keep a pole on a cart upright."""

    name: str = "InvertedPendulum-v5"
    model: Model = "inverted_pendulum.xml"
    frame_skip: int = 2
    reset_noise_scale: float = 0.01

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe positions and velocities."""
        return fields["qpos"], fields["qvel"]

    def outcome(self, fields: Fields, before: Any, action: NDArray[Any], dt: float) -> Outcome:
        """Reward each step that leaves the pole upright; otherwise terminate."""
        qpos, qvel = fields["qpos"], fields["qvel"]
        finite = np.isfinite(qpos).all(axis=1) & np.isfinite(qvel).all(axis=1)
        terminated = ~finite | (np.abs(qpos[:, 1]) > _MAX_ANGLE)
        survive = (~terminated).astype(np.float64)
        return Outcome(survive, terminated, {"reward_survive": survive})


@dataclass(frozen=True, kw_only=True)
class InvertedDoublePendulum(NoisyStart):
    """InvertedDoublePendulum-v5: keep two poles, one upon the other, upright on a cart.

    Attributes:
        healthy_reward: Reward per step that leaves the tip above one metre.
    """

    normal_velocities = True

    name: str = "InvertedDoublePendulum-v5"
    model: Model = "inverted_double_pendulum.xml"
    reads: tuple[str, ...] = ("qfrc_constraint", "site_xpos")
    frame_skip: int = 5
    reset_noise_scale: float = 0.1
    healthy_reward: float = 10.0

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe the cart, the poles' angles, bounded speeds and the force on the cart."""
        angles = fields["qpos"][:, 1:]
        return (
            fields["qpos"][:, :1],
            np.sin(angles),
            np.cos(angles),
            np.clip(fields["qvel"], -10.0, 10.0),
            np.clip(fields["qfrc_constraint"][:, :1], -10.0, 10.0),
        )

    def outcome(self, fields: Fields, before: Any, action: NDArray[Any], dt: float) -> Outcome:
        """Reward a high tip, charge its distance from the top and speed; terminate if low."""
        tip = fields["site_xpos"][:, 0]
        height = tip[:, 2]
        terminated = height <= 1.0
        survive = self.healthy_reward * ~terminated
        distance = 0.01 * scalar_squares(tip[:, 0]) + scalar_squares(height - 2.0)
        first, second = scalar_squares(fields["qvel"][:, 1:3]).T
        speed = 1e-3 * first + 5e-3 * second
        return Outcome(
            survive - distance - speed,
            terminated,
            {"reward_survive": survive, "distance_penalty": -distance, "velocity_penalty": -speed},
        )
