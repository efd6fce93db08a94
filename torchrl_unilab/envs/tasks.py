"""Gymnasium's MuJoCo v5 tasks, restated for many simulations at once.

A task is the part of an environment that is not physics: which model, what is
observed, what is rewarded, when an episode terminates, how one starts. Every
formula works on ``(nsim, ...)`` arrays in the order of operations of the
Gymnasium task of the same name, so that its results are the same bits.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray
from torchrl import logger as torchrl_logger

Array = NDArray[np.float64]
Fields = Mapping[str, Array]


class Outcome(NamedTuple):
    """What a control step led to, one row per simulation.

    Attributes:
        reward: ``(nsim,)`` float64.
        terminated: ``(nsim,)`` bool.
        terms: the parts of the reward by Gymnasium's ``info`` names, ``(nsim,)``.
    """

    reward: Array
    terminated: NDArray[np.bool_]
    terms: dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class MujocoTask(ABC):
    """A task on one MuJoCo model. Subclass it to define a task.

    The methods take ``fields``, which maps names of ``MjData`` fields to
    ``(nsim, ...)`` float64 arrays: always ``qpos`` and ``qvel``, and those the
    task lists in `derived`. The arrays are live: results must not be views of
    them. As in Gymnasium, derived fields are one substep behind ``qpos``.

    Attributes:
        name: the name of the task, also in messages.
        model_file: an MJCF file; a relative path is looked up among the assets
            that Gymnasium ships.
        frame_skip: physics steps per control step.
        reset_noise_scale: size of the noise on the initial state.
        max_episode_steps: control steps after which an episode is truncated.
        derived: further ``MjData`` fields that the task reads, such as ``xpos``.
            They must be ones that ``mj_step`` computes for the model.

    Example:
        >>> from dataclasses import replace
        >>> from torchrl_unilab.envs import make_task
        >>> task = replace(make_task("HalfCheetah-v5"), ctrl_cost_weight=0.5)
        >>> task.max_episode_steps
        1000
    """

    name: str
    model_file: str
    frame_skip: int
    reset_noise_scale: float
    max_episode_steps: int = 1000
    derived: tuple[str, ...] = ()

    def load_model(self) -> mujoco.MjModel:
        """Compile the model.

        Raises:
            FileNotFoundError: if the file, or Gymnasium's assets, are missing.
        """
        path = Path(self.model_file)
        if not path.is_absolute():
            # find_spec, because importing gymnasium.envs.mujoco loads a renderer
            spec = find_spec("gymnasium")
            if spec is None or spec.origin is None:
                raise FileNotFoundError(
                    f"model of {self.name}: gymnasium is not installed (expected its "
                    f"asset {self.model_file}). Install gymnasium, or give an "
                    "absolute model_file."
                )
            path = Path(spec.origin).parent / "envs" / "mujoco" / "assets" / path
        if not path.is_file():
            raise FileNotFoundError(
                f"model of {self.name}: no file {path} (expected an MJCF file). "
                "Correct model_file, or install gymnasium 1.0 or later."
            )
        with _logged_warnings():
            return mujoco.MjModel.from_xml_path(str(path))

    def noise(self, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]:
        """Draw the noise that one episode's initial state adds to the model's.

        Args:
            rng: the simulation's own generator.
            nq: length of ``qpos``.
            nv: length of ``qvel``.

        Returns:
            ``(nq,)`` and ``(nv,)`` float64. By default both are uniform in
            ``[-reset_noise_scale, reset_noise_scale)``.
        """
        scale = self.reset_noise_scale
        return rng.uniform(-scale, scale, nq), rng.uniform(-scale, scale, nv)

    def progress(self, fields: Fields) -> Array:
        """What `outcome` compares before and after the step.

        Returns:
            A new ``(nsim, ...)`` array; by default the first coordinate of
            ``qpos``, the forward position.
        """
        x: Array = fields["qpos"][:, 0].copy()
        return x

    @abstractmethod
    def observation(self, fields: Fields) -> Array:
        """Observe the state; a new ``(nsim, nobs)`` float64 array."""

    @abstractmethod
    def outcome(self, fields: Fields, before: Array, action: NDArray[Any], dt: float) -> Outcome:
        """Judge a control step from the state it led to.

        Args:
            fields: the fields after the step.
            before: `progress` before the step.
            action: ``(nsim, nu)``, contiguous, in the dtype in which it was
                given: like Gymnasium, its cost is computed in that precision.
            dt: seconds of simulated time that the step took.
        """


@dataclass(frozen=True, kw_only=True)
class _Runner(MujocoTask):
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

    def observation(self, fields: Fields) -> Array:
        """Observe all positions but x, and bounded velocities."""
        speed = np.clip(fields["qvel"], -self.max_speed, self.max_speed)
        return np.concatenate((fields["qpos"][:, 1:], speed), axis=1)

    def outcome(self, fields: Fields, before: Array, action: NDArray[Any], dt: float) -> Outcome:
        """Reward speed along x and health, charge for control."""
        healthy = self.healthy(fields)
        forward = self.forward_reward_weight * ((fields["qpos"][:, 0] - before) / dt)
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
class HalfCheetah(MujocoTask):
    """HalfCheetah-v5: run forward on two legs, without falling ending the episode.

    Attributes:
        forward_reward_weight: reward per metre per second.
        ctrl_cost_weight: cost per squared control.
    """

    name: str = "HalfCheetah-v5"
    model_file: str = "half_cheetah.xml"
    frame_skip: int = 5
    reset_noise_scale: float = 0.1
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.1

    def noise(self, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]:
        """Draw positions uniformly and velocities from a normal distribution."""
        scale = self.reset_noise_scale
        return rng.uniform(-scale, scale, nq), scale * rng.standard_normal(nv)

    def observation(self, fields: Fields) -> Array:
        """Observe all positions but x, and velocities."""
        return np.concatenate((fields["qpos"][:, 1:], fields["qvel"]), axis=1)

    def outcome(self, fields: Fields, before: Array, action: NDArray[Any], dt: float) -> Outcome:
        """Reward speed along x, charge for control, and never terminate."""
        forward = self.forward_reward_weight * ((fields["qpos"][:, 0] - before) / dt)
        cost = control_cost(action, self.ctrl_cost_weight)
        return Outcome(
            forward - cost,
            np.zeros(len(forward), dtype=bool),
            {"reward_forward": forward, "reward_ctrl": -cost},
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
    model_file: str = "hopper.xml"
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
    model_file: str = "walker2d_v5.xml"
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
class InvertedPendulum(MujocoTask):
    """InvertedPendulum-v5: keep a pole on a cart upright.

    Attributes:
        max_angle: the pole's tilt beyond which the episode terminates, radians.
    """

    name: str = "InvertedPendulum-v5"
    model_file: str = "inverted_pendulum.xml"
    frame_skip: int = 2
    reset_noise_scale: float = 0.01
    max_angle: float = 0.2

    def observation(self, fields: Fields) -> Array:
        """Observe positions and velocities."""
        return np.concatenate((fields["qpos"], fields["qvel"]), axis=1)

    def outcome(self, fields: Fields, before: Array, action: NDArray[Any], dt: float) -> Outcome:
        """Reward each step that leaves the pole upright, and terminate if none."""
        finite = np.isfinite(self.observation(fields)).all(axis=1)
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


TASKS: Mapping[str, MujocoTask] = MappingProxyType(
    {task.name: task for task in (HalfCheetah(), Hopper(), Walker2d(), InvertedPendulum())}
)
"""The tasks by name."""


@contextlib.contextmanager
def _logged_warnings() -> Iterator[None]:
    """Log MuJoCo's warnings, which it would print and write to the working directory."""
    handler = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: torchrl_logger.debug("mujoco: %s", message))
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(handler)


def make_task(name: str) -> MujocoTask:
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
