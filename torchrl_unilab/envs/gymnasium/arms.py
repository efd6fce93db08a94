"""Gymnasium's MuJoCo v5 tasks of an arm with a goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_unilab.envs.gymnasium.base import GymnasiumTask, never, norms, sums_of_squares
from torchrl_unilab.envs.task import Array, Fields, Model, Outcome, State

_SPEED_NOISE = 0.005  # bound on the initial velocities of the joints


@dataclass(frozen=True, kw_only=True)
class Arm(GymnasiumTask):
    """Bring something to a goal, which lies elsewhere in each episode.

    Attributes:
        reward_dist_weight: Cost per metre between the object and the goal.
        reward_control_weight: Cost per squared control.
    """

    reads: tuple[str, ...] = ("xpos",)
    reward_dist_weight: float = 1.0
    reward_control_weight: float

    def position(self, fields: Fields, body: str) -> Array:
        """Return where a body is, ``(nsim, 3)``, metres."""
        return fields["xpos"][:, self.body(body)]


@dataclass(frozen=True, kw_only=True)
class Reacher(Arm):
    """Reacher-v5: bring the tip of an arm with two joints to a target, on a plane."""

    name: str = "Reacher-v5"
    model: Model = "reacher.xml"
    frame_skip: int = 2
    max_episode_steps: int = 50
    reward_control_weight: float = 1.0

    def initial_state(self, rng: np.random.Generator, qpos: Array, qvel: Array) -> State:
        """Draw joints within 0.1 rad of the default and a target within 0.2 m of the base."""
        start = rng.uniform(-0.1, 0.1, len(qpos)) + qpos
        target = rng.uniform(-0.2, 0.2, 2)
        while np.linalg.norm(target) >= 0.2:
            target = rng.uniform(-0.2, 0.2, 2)
        start[-2:] = target
        speed = qvel + rng.uniform(-_SPEED_NOISE, _SPEED_NOISE, len(qvel))
        speed[-2:] = 0.0
        return start, speed

    def _tip_to_target(self, fields: Fields) -> Array:
        return self.position(fields, "fingertip") - self.position(fields, "target")

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe the joints, the target, and what separates the tip from it."""
        angles = fields["qpos"][:, :2]
        return (
            np.cos(angles),
            np.sin(angles),
            fields["qpos"][:, 2:],
            fields["qvel"][:, :2],
            self._tip_to_target(fields)[:, :2],
        )

    def outcome(self, fields: Fields, before: Any, action: NDArray[Any], dt: float) -> Outcome:
        """Charge the distance to the target and control, and never terminate."""
        distance = -norms(self._tip_to_target(fields)) * self.reward_dist_weight
        control = -self.reward_control_weight * sums_of_squares(action)
        terms = {"reward_dist": distance, "reward_ctrl": control}
        return Outcome(distance + control, never(fields), terms)


@dataclass(frozen=True, kw_only=True)
class Pusher(Arm):
    """Pusher-v5: push an object to a goal with an arm of seven joints.

    Attributes:
        reward_near_weight: Cost per metre between the arm's tip and the object.
    """

    name: str = "Pusher-v5"
    model: Model = "pusher_v5.xml"
    frame_skip: int = 5
    max_episode_steps: int = 100
    reward_near_weight: float = 0.5
    reward_control_weight: float = 0.1

    def initial_state(self, rng: np.random.Generator, qpos: Array, qvel: Array) -> State:
        """Draw where the object lies, more than 0.17 m from the goal, and joint velocities."""
        place = np.zeros(2)
        while np.linalg.norm(place) <= 0.17:
            place = np.array([rng.uniform(-0.3, 0.0), rng.uniform(-0.2, 0.2)])
        start = qpos.copy()
        start[-4:-2] = place
        start[-2:] = 0.0
        speed = qvel + rng.uniform(-_SPEED_NOISE, _SPEED_NOISE, len(qvel))
        speed[-4:] = 0.0
        return start, speed

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe the joints and the positions of the tip, the object and the goal."""
        places = [self.position(fields, body) for body in ("tips_arm", "object", "goal")]
        return fields["qpos"][:, :7], fields["qvel"][:, :7], *places

    def outcome(self, fields: Fields, before: Any, action: NDArray[Any], dt: float) -> Outcome:
        """Charge the object's distances from the goal and the tip, and control."""
        object_position = self.position(fields, "object")
        near = -norms(object_position - self.position(fields, "tips_arm")) * self.reward_near_weight
        distance = -norms(object_position - self.position(fields, "goal")) * self.reward_dist_weight
        control = -self.reward_control_weight * sums_of_squares(action)
        return Outcome(
            distance + control + near,
            never(fields),
            {"reward_dist": distance, "reward_ctrl": control, "reward_near": near},
        )
