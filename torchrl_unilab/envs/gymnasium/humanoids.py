"""Gymnasium's MuJoCo v5 tasks of a humanoid: to walk, and to stand up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_unilab.envs.gymnasium.base import (
    NoisyStart,
    contact_forces,
    inside,
    mass_centers,
    never,
    sums_of_squares,
)
from torchrl_unilab.envs.gymnasium.runners import HealthyRunner
from torchrl_unilab.envs.task import Array, Fields, Model, Outcome

_READS = (
    "cfrc_ext",
    "cinert",
    "ctrl",
    "cvel",
    "qfrc_actuator",
    "ten_length",
    "ten_velocity",
    "time",
)


@dataclass(frozen=True, kw_only=True)
class HumanoidBody(NoisyStart):
    """What both tasks observe.

    Attributes:
        ctrl_cost_weight: Cost per squared control, which is summed in float64.
        exclude_current_positions_from_observation: Whether x and y are left out.
        include_cinert_in_observation: Whether inertias and masses of the bodies
            about the centre of mass are observed.
        include_cvel_in_observation: Whether the bodies' velocities are observed.
        include_qfrc_actuator_in_observation: Whether the forces of the actuators
            on the joints are observed.
        include_cfrc_ext_in_observation: Whether contact forces are observed.
    """

    frame_skip: int = 5
    reset_noise_scale: float = 1e-2
    ctrl_cost_weight: float = 0.1
    exclude_current_positions_from_observation: bool = True
    include_cinert_in_observation: bool = True
    include_cvel_in_observation: bool = True
    include_qfrc_actuator_in_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe positions and velocities, and what is included of all bodies but the world."""
        first = 2 if self.exclude_current_positions_from_observation else 0
        seen = [fields["qpos"][:, first:], fields["qvel"]]
        if self.include_cinert_in_observation:
            seen.append(_without_world(fields["cinert"]))
        if self.include_cvel_in_observation:
            seen.append(_without_world(fields["cvel"]))
        if self.include_qfrc_actuator_in_observation:
            seen.append(fields["qfrc_actuator"][:, 6:])  # no actuator moves the free joint
        if self.include_cfrc_ext_in_observation:
            seen.append(_without_world(contact_forces(fields)))
        return seen


@dataclass(frozen=True, kw_only=True)
class Humanoid(HumanoidBody, HealthyRunner):
    """Humanoid-v5: walk forward on two legs until it falls.

    Attributes:
        contact_cost_weight: Cost per squared contact force.
        contact_cost_range: Bounds on that cost.
        healthy_z_range: Open range of the torso's height, metres.
    """

    axes = 2

    name: str = "Humanoid-v5"
    model: Model = "humanoid.xml"
    reads: tuple[str, ...] = (*_READS, "body_mass", "xipos")
    forward_reward_weight: float = 1.25
    contact_cost_weight: float = 5e-7
    contact_cost_range: tuple[float, float] = (float("-inf"), 10.0)
    healthy_reward: float = 5.0
    healthy_z_range: tuple[float, float] = (1.0, 2.0)

    def place(self, fields: Fields) -> Array:
        """Return where the centre of mass is."""
        return mass_centers(fields["body_mass"], fields["xipos"])[:, :2]

    def healthy(self, fields: Fields) -> NDArray[np.bool_]:
        """Return whether the height is in range."""
        return inside(fields["qpos"][:, 2], self.healthy_z_range)

    def costs(self, fields: Fields, action: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Charge control and contact forces."""
        contact = self.contact_cost_weight * sums_of_squares(contact_forces(fields))
        return {
            "reward_ctrl": self.ctrl_cost_weight * sums_of_squares(fields["ctrl"]),
            "reward_contact": np.clip(contact, *self.contact_cost_range),
        }

    def progress(self, fields: Fields, before: Array, dt: float) -> tuple[Array, dict[str, Array]]:
        """Add the tendons to the info."""
        forward, info = super().progress(fields, before, dt)
        return forward, {**info, **_tendons(fields)}


@dataclass(frozen=True, kw_only=True)
class HumanoidStandup(HumanoidBody):
    """HumanoidStandup-v5: get up from lying on the back.

    Attributes:
        uph_cost_weight: Without effect, as in Gymnasium.
        impact_cost_weight: Cost per squared contact force.
        impact_cost_range: Bounds on that cost.
    """

    name: str = "HumanoidStandup-v5"
    model: Model = "humanoidstandup.xml"
    reads: tuple[str, ...] = (*_READS, "opt.timestep", "qpos0")
    uph_cost_weight: float = 1.0
    impact_cost_weight: float = 0.5e-6
    impact_cost_range: tuple[float, float] = (float("-inf"), 10.0)

    def outcome(self, fields: Fields, before: Any, action: NDArray[Any], dt: float) -> Outcome:
        """Reward height, charge control and contact forces, and never terminate."""
        qpos, start = fields["qpos"], fields["qpos0"]
        height = qpos[:, 2] / fields["opt.timestep"]
        control = self.ctrl_cost_weight * sums_of_squares(fields["ctrl"])
        impact = self.impact_cost_weight * sums_of_squares(contact_forces(fields))
        impact = np.clip(impact, *self.impact_cost_range)
        return Outcome(
            height - control - impact + 1.0,
            never(fields),
            {"reward_linup": height, "reward_quadctrl": -control, "reward_impact": -impact},
            {
                "x_position": qpos[:, 0].copy(),
                "y_position": qpos[:, 1].copy(),
                "z_distance_from_origin": qpos[:, 2] - start[:, 2],
                **_tendons(fields),
            },
        )


def _without_world(values: NDArray[Any]) -> NDArray[Any]:
    """Return ``(nsim, nbody, k)`` values as rows, without those of the first body, the world."""
    n, _, width = values.shape
    return values.reshape(n, -1)[:, width:]


def _tendons(fields: Fields) -> dict[str, NDArray[Any]]:
    """Return lengths and velocities of the tendons, ``(nsim, ntendon)``."""
    return {
        "tendon_length": fields["ten_length"].copy(),
        "tendon_velocity": fields["ten_velocity"].copy(),
    }
