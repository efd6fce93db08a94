"""Gymnasium's MuJoCo v5 tasks that reward speed along x, except the humanoid's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar

import mujoco
import numpy as np
from numpy.typing import NDArray

from torchrl_unilab.envs.gymnasium.base import (
    NoisyStart,
    contact_forces,
    inside,
    never,
    norms,
    sums_of_squares,
)
from torchrl_unilab.envs.task import Array, Fields, Model, Outcome

_MAX_SPEED = 10.0  # bound on the velocities that Hopper and Walker2d observe


@dataclass(frozen=True, kw_only=True)
class Runner(NoisyStart):
    """Run along x: rewarded for speed, charged for control.

    `axes` is how many of x and y the robot can move along. They lead ``qpos``.

    Attributes:
        forward_reward_weight: Reward per metre per second.
        ctrl_cost_weight: Cost per squared control.
        exclude_current_positions_from_observation: Whether the coordinates along
            `axes` are left out of the observation.
    """

    axes: ClassVar[int] = 1

    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float
    exclude_current_positions_from_observation: bool = True

    def place(self, fields: Fields) -> Array:
        """Return what has to move, ``(nsim, axes)``, metres; by default the leading coordinates."""
        return fields["qpos"][:, : self.axes]

    def before(self, fields: Fields) -> Array:
        """Keep the place."""
        return np.array(self.place(fields))

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe positions and velocities."""
        first = self.axes if self.exclude_current_positions_from_observation else 0
        return fields["qpos"][:, first:], fields["qvel"]

    def progress(self, fields: Fields, before: Array, dt: float) -> tuple[Array, dict[str, Array]]:
        """Return the reward for speed, and the info on position and velocity."""
        velocity = self.place(fields) - before
        velocity /= dt
        position = fields["qpos"][:, : self.axes].copy()
        speed = velocity[:, 0]
        info = {"x_position": position[:, 0], "x_velocity": speed}
        if self.axes == 2:
            info |= {"y_position": position[:, 1], "y_velocity": velocity[:, 1]}
            info["distance_from_origin"] = norms(position)
        return self.forward_reward_weight * speed, info

    def outcome(self, fields: Fields, before: Array, action: NDArray[Any], dt: float) -> Outcome:
        """Reward speed along x, charge for control, and never terminate."""
        forward, info = self.progress(fields, before, dt)
        control = -self.ctrl_cost_weight * sums_of_squares(action)
        terms = {"reward_forward": forward, "reward_ctrl": control}
        return Outcome(forward + control, never(fields), terms, info)


@dataclass(frozen=True, kw_only=True)
class HealthyRunner(Runner):
    """Run along x and stay healthy.

    Attributes:
        healthy_reward: Reward per step that ends in a healthy state.
        terminate_when_unhealthy: Whether an unhealthy state ends the episode.
    """

    healthy_reward: float = 1.0
    terminate_when_unhealthy: bool = True

    @abstractmethod
    def healthy(self, fields: Fields) -> NDArray[np.bool_]:
        """Return whether each simulation is healthy, ``(nsim,)``."""

    def costs(self, fields: Fields, action: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the costs by the names of their reward terms, which are the negative costs."""
        return {"reward_ctrl": self.ctrl_cost_weight * sums_of_squares(action)}

    def outcome(self, fields: Fields, before: Array, action: NDArray[Any], dt: float) -> Outcome:
        """Reward speed along x and health, and charge the costs."""
        forward, info = self.progress(fields, before, dt)
        healthy = self.healthy(fields)
        survive = healthy * self.healthy_reward
        costs = self.costs(fields, action)
        terms = {name: -cost for name, cost in costs.items()}
        return Outcome(
            forward + survive - reduce(add, costs.values()),
            ~healthy if self.terminate_when_unhealthy else never(fields),
            {"reward_forward": forward, "reward_survive": survive, **terms},
            info,
        )


@dataclass(frozen=True, kw_only=True)
class PlanarWalker(HealthyRunner):
    """Run in the vertical plane: ``qpos`` begins with x, z and the pitch.

    Attributes:
        healthy_z_range: Open range of the torso's height, metres.
        healthy_angle_range: Open range of the torso's pitch, radians.
    """

    reads: tuple[str, ...] = ("qpos0",)
    frame_skip: int = 4
    reset_noise_scale: float = 5e-3
    ctrl_cost_weight: float = 1e-3
    healthy_z_range: tuple[float, float]
    healthy_angle_range: tuple[float, float]

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe positions and bounded velocities."""
        qpos, qvel = super().observation(fields)
        return qpos, np.clip(qvel, -_MAX_SPEED, _MAX_SPEED)

    def healthy(self, fields: Fields) -> NDArray[np.bool_]:
        """Return whether height and pitch are in range."""
        qpos = fields["qpos"]
        high = inside(qpos[:, 1], self.healthy_z_range)
        return high & inside(qpos[:, 2], self.healthy_angle_range)

    def progress(self, fields: Fields, before: Array, dt: float) -> tuple[Array, dict[str, Array]]:
        """Add the height to the info."""
        forward, info = super().progress(fields, before, dt)
        height = fields["qpos"][:, 1] - fields["qpos0"][:, 1]
        return forward, {**info, "z_distance_from_origin": height}


@dataclass(frozen=True, kw_only=True)
class HalfCheetah(Runner):
    """HalfCheetah-v5: run forward on two legs, without falling ending the episode."""

    normal_velocities = True

    name: str = "HalfCheetah-v5"
    model: Model = "half_cheetah.xml"
    frame_skip: int = 5
    reset_noise_scale: float = 0.1
    ctrl_cost_weight: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Swimmer(Runner):
    """Swimmer-v5: swim forward by bending two joints, on a plane."""

    axes = 2

    name: str = "Swimmer-v5"
    model: Model = "swimmer.xml"
    frame_skip: int = 4
    reset_noise_scale: float = 0.1
    ctrl_cost_weight: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Hopper(PlanarWalker):
    """Hopper-v5: hop forward on one leg until it falls or leans over.

    Attributes:
        healthy_state_range: Open range of the state past the first two coordinates.
    """

    name: str = "Hopper-v5"
    model: Model = "hopper.xml"
    healthy_state_range: tuple[float, float] = (-100.0, 100.0)
    healthy_z_range: tuple[float, float] = (0.7, float("inf"))
    healthy_angle_range: tuple[float, float] = (-0.2, 0.2)

    def healthy(self, fields: Fields) -> NDArray[np.bool_]:
        """Return whether height, pitch and every coordinate but x and z are in range."""
        bounds = self.healthy_state_range
        return (
            super().healthy(fields)
            & inside(fields["qpos"][:, 2:], bounds).all(axis=1)
            & inside(fields["qvel"], bounds).all(axis=1)
        )


@dataclass(frozen=True, kw_only=True)
class Walker2d(PlanarWalker):
    """Walker2d-v5: walk forward on two legs until it falls or leans over."""

    name: str = "Walker2d-v5"
    model: Model = "walker2d_v5.xml"
    healthy_z_range: tuple[float, float] = (0.8, 2.0)
    healthy_angle_range: tuple[float, float] = (-1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Ant(HealthyRunner):
    """Ant-v5: walk forward on four legs until it jumps or lies down.

    Attributes:
        contact_cost_weight: Cost per squared contact force.
        main_body: The body whose speed is rewarded, by name or number.
        healthy_z_range: Closed range of the torso's height, metres.
        contact_force_range: Bounds on the contact forces observed and charged.
        include_cfrc_ext_in_observation: Whether contact forces are observed.
    """

    axes = 2
    normal_velocities = True

    name: str = "Ant-v5"
    model: Model = "ant.xml"
    reads: tuple[str, ...] = ("cfrc_ext", "time", "xpos")
    frame_skip: int = 5
    reset_noise_scale: float = 0.1
    ctrl_cost_weight: float = 0.5
    contact_cost_weight: float = 5e-4
    main_body: int | str = 1
    healthy_z_range: tuple[float, float] = (0.2, 1.0)
    contact_force_range: tuple[float, float] = (-1.0, 1.0)
    include_cfrc_ext_in_observation: bool = True

    def load_model(self) -> mujoco.MjModel:
        """Compile the model.

        Raises:
            ConfigError: The model has no `main_body`.
            FileNotFoundError: There is no such file.
        """
        model = super().load_model()
        self.body(self.main_body, model)
        return model

    def place(self, fields: Fields) -> Array:
        """Return where the main body is."""
        return fields["xpos"][:, self.body(self.main_body), :2]

    def forces(self, fields: Fields) -> Array:
        """Bounded contact forces, ``(nsim, nbody, 6)``."""
        return np.clip(contact_forces(fields), *self.contact_force_range)

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe positions, velocities and contact forces on all bodies but the world."""
        seen = super().observation(fields)
        if not self.include_cfrc_ext_in_observation:
            return seen
        forces = self.forces(fields)
        return *seen, forces.reshape(len(forces), -1)[:, 6:]

    def healthy(self, fields: Fields) -> NDArray[np.bool_]:
        """Return whether the state is finite and the height in range."""
        low, high = self.healthy_z_range
        z = fields["qpos"][:, 2]
        finite = np.isfinite(fields["qpos"]).all(axis=1) & np.isfinite(fields["qvel"]).all(axis=1)
        return finite & (low <= z) & (z <= high)

    def costs(self, fields: Fields, action: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Charge control and contact forces."""
        contact = self.contact_cost_weight * sums_of_squares(self.forces(fields))
        return {**super().costs(fields, action), "reward_contact": contact}
