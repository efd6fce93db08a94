"""Gymnasium's MuJoCo v5 tasks, restated for many simulations at once.

A task is the part of an environment that is not physics: which model, what is
observed, what is rewarded, when an episode terminates, how one starts. Every
formula works on ``(nsim, ...)`` arrays in the order of operations of the
Gymnasium task of the same name, so that its results are the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_unilab.envs.task import Array, Fields, MujocoTask, Outcome


@dataclass(frozen=True, kw_only=True)
class GymnasiumTask(MujocoTask):
    """A task of Gymnasium's, on a model among Gymnasium's assets.

    Attributes:
        reset_noise_scale: size of the noise on the initial state.

    Example:
        >>> from dataclasses import replace
        >>> from torchrl_unilab.envs import make_task
        >>> task = replace(make_task("HalfCheetah-v5"), ctrl_cost_weight=0.5)
        >>> task.max_episode_steps
        1000
    """

    reset_noise_scale: float

    def model_path(self) -> Path:
        """Where the model lies; a relative path is looked up among the assets.

        Raises:
            FileNotFoundError: if Gymnasium is not installed.
        """
        path = Path(str(self.model))
        if path.is_absolute():
            return path
        # find_spec, because importing gymnasium.envs.mujoco loads a renderer
        spec = find_spec("gymnasium")
        if spec is None or spec.origin is None:
            raise FileNotFoundError(
                f"model of {self.name}: gymnasium is not installed (expected its "
                f"asset {self.model}). Install gymnasium, or give an absolute path."
            )
        return Path(spec.origin).parent / "envs" / "mujoco" / "assets" / path

    def initial_state(
        self, rng: np.random.Generator, qpos: Array, qvel: Array
    ) -> tuple[Array, Array]:
        """Add uniform noise in ``[-reset_noise_scale, reset_noise_scale)`` to both."""
        scale = self.reset_noise_scale
        noisy = qpos + rng.uniform(-scale, scale, len(qpos))
        return noisy, qvel + rng.uniform(-scale, scale, len(qvel))

    def before(self, fields: Fields) -> Array:
        """The first coordinate of ``qpos``, the forward position, ``(nsim,)``."""
        x: Array = fields["qpos"][:, 0].copy()
        return x


@dataclass(frozen=True, kw_only=True)
class _Runner(GymnasiumTask):
    """Run along x: rewarded for speed and for staying healthy, charged for control.

    Attributes:
        forward_reward_weight: reward per metre per second.
        ctrl_cost_weight: cost per squared control.
        healthy_reward: reward per step in a healthy state.
        max_speed: bound on the observed ``qvel``.
    """

    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float
    healthy_reward: float = 1.0
    max_speed: float = 10.0

    @abstractmethod
    def healthy(self, fields: Fields) -> NDArray[np.bool_]:
        """Whether each simulation may go on, ``(nsim,)``."""

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe all positions but x, and bounded velocities."""
        speed = np.clip(fields["qvel"], -self.max_speed, self.max_speed)
        return fields["qpos"][:, 1:], speed

    def outcome(self, fields: Fields, before: Array, action: NDArray[Any], dt: float) -> Outcome:
        """Reward speed along x and health, charge for control."""
        healthy = self.healthy(fields)
        x = fields["qpos"][:, 0]
        speed = (x - before) / dt
        forward = self.forward_reward_weight * speed
        survive = healthy * self.healthy_reward
        cost = control_cost(action, self.ctrl_cost_weight)
        return Outcome(
            forward + survive - cost,
            ~healthy,
            {
                "reward_forward": forward,
                "reward_ctrl": -cost,
                "reward_survive": survive,
            },
        )


@dataclass(frozen=True, kw_only=True)
class HalfCheetah(GymnasiumTask):
    """HalfCheetah-v5: run forward on two legs, without falling ending the episode.

    Attributes:
        forward_reward_weight: reward per metre per second.
        ctrl_cost_weight: cost per squared control.
    """

    name: str = "HalfCheetah-v5"
    model: str = "half_cheetah.xml"
    frame_skip: int = 5
    reset_noise_scale: float = 0.1
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.1

    def initial_state(
        self, rng: np.random.Generator, qpos: Array, qvel: Array
    ) -> tuple[Array, Array]:
        """Add uniform noise to positions and normal noise to velocities."""
        scale = self.reset_noise_scale
        noisy = qpos + rng.uniform(-scale, scale, len(qpos))
        return noisy, qvel + scale * rng.standard_normal(len(qvel))

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe all positions but x, and velocities."""
        return fields["qpos"][:, 1:], fields["qvel"]

    def outcome(self, fields: Fields, before: Array, action: NDArray[Any], dt: float) -> Outcome:
        """Reward speed along x, charge for control, and never terminate."""
        x = fields["qpos"][:, 0]
        speed = (x - before) / dt
        forward = self.forward_reward_weight * speed
        cost = control_cost(action, self.ctrl_cost_weight)
        return Outcome(
            forward - cost,
            np.zeros(len(forward), dtype=bool),
            {"reward_forward": forward, "reward_ctrl": -cost},
            {"x_position": x.copy(), "x_velocity": speed},
        )


@dataclass(frozen=True, kw_only=True)
class Hopper(_Runner):
    """Hopper-v5: hop forward on one leg until it falls or leans over.

    Attributes:
        healthy_state_range: open range of the state past the first two coordinates.
        healthy_z_range: open range of the torso's height, metres.
        healthy_angle_range: open range of the torso's pitch, radians.
    """

    name: str = "Hopper-v5"
    model: str = "hopper.xml"
    frame_skip: int = 4
    reset_noise_scale: float = 5e-3
    ctrl_cost_weight: float = 1e-3
    healthy_state_range: tuple[float, float] = (-100.0, 100.0)
    healthy_z_range: tuple[float, float] = (0.7, float("inf"))
    healthy_angle_range: tuple[float, float] = (-0.2, 0.2)

    def healthy(self, fields: Fields) -> NDArray[np.bool_]:
        """Whether height, pitch and every coordinate but x and z are in range."""
        qpos, qvel = fields["qpos"], fields["qvel"]
        bounds = self.healthy_state_range
        return (
            _inside(qpos[:, 2:], bounds).all(axis=1)
            & _inside(qvel, bounds).all(axis=1)
            & _inside(qpos[:, 1], self.healthy_z_range)
            & _inside(qpos[:, 2], self.healthy_angle_range)
        )


@dataclass(frozen=True, kw_only=True)
class Walker2d(_Runner):
    """Walker2d-v5: walk forward on two legs until it falls or leans over.

    Attributes:
        healthy_z_range: open range of the torso's height, metres.
        healthy_angle_range: open range of the torso's pitch, radians.
    """

    name: str = "Walker2d-v5"
    model: str = "walker2d_v5.xml"
    frame_skip: int = 4
    reset_noise_scale: float = 5e-3
    ctrl_cost_weight: float = 1e-3
    healthy_z_range: tuple[float, float] = (0.8, 2.0)
    healthy_angle_range: tuple[float, float] = (-1.0, 1.0)

    def healthy(self, fields: Fields) -> NDArray[np.bool_]:
        """Whether height and pitch are in range."""
        qpos = fields["qpos"]
        return _inside(qpos[:, 1], self.healthy_z_range) & _inside(
            qpos[:, 2], self.healthy_angle_range
        )


@dataclass(frozen=True, kw_only=True)
class InvertedPendulum(GymnasiumTask):
    """InvertedPendulum-v5: keep a pole on a cart upright.

    Attributes:
        max_angle: the pole's tilt beyond which the episode terminates, radians.
    """

    name: str = "InvertedPendulum-v5"
    model: str = "inverted_pendulum.xml"
    frame_skip: int = 2
    reset_noise_scale: float = 0.01
    max_angle: float = 0.2

    def observation(self, fields: Fields) -> Sequence[Array]:
        """Observe positions and velocities."""
        return fields["qpos"], fields["qvel"]

    def outcome(self, fields: Fields, before: Array, action: NDArray[Any], dt: float) -> Outcome:
        """Reward each step that leaves the pole upright, and terminate if none."""
        finite = np.isfinite(fields["qpos"]).all(axis=1) & np.isfinite(fields["qvel"]).all(axis=1)
        terminated = ~finite | (np.abs(fields["qpos"][:, 1]) > self.max_angle)
        survive = (~terminated).astype(np.float64)
        return Outcome(survive, terminated, {"reward_survive": survive})


def control_cost(action: NDArray[Any], weight: float) -> NDArray[Any]:
    """Weighted sum of squares of each row of ``action``, in its own dtype.

    Summing the contiguous last axis adds in the order in which ``np.sum`` adds
    one vector; ``einsum`` or a sum over another axis need not.

    Args:
        action: ``(nsim, nu)``, contiguous.
        weight: the factor.

    Returns:
        ``(nsim,)``, in the dtype of ``action``.
    """
    cost: NDArray[Any] = weight * np.square(action).sum(axis=1)
    return cost


def _inside(value: Array, bounds: tuple[float, float]) -> NDArray[np.bool_]:
    """Whether values lie in an open range; NaN does not."""
    low, high = bounds
    inside: NDArray[np.bool_] = (low < value) & (value < high)
    return inside


TASKS: Mapping[str, GymnasiumTask] = MappingProxyType(
    {task.name: task for task in (HalfCheetah(), Hopper(), Walker2d(), InvertedPendulum())}
)
"""The tasks by name."""


def make_task(name: str) -> GymnasiumTask:
    """Return the task of a name, one of `TASKS`.

    Args:
        name: such as ``"HalfCheetah-v5"``.

    Raises:
        ValueError: if there is no such task.

    Example:
        >>> from torchrl_unilab.envs import make_task
        >>> make_task("Hopper-v5").frame_skip
        4
    """
    if name not in TASKS:
        raise ValueError(
            f"make_task: no task {name!r} (expected one of {', '.join(TASKS)}). "
            "Use one of these names, or pass your own MujocoTask."
        )
    return TASKS[name]
