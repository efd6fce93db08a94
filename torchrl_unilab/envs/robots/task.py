"""A task for the user's own robot, put together from named terms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mujoco
import numpy as np
from mujoco import mjtJoint
from numpy.typing import NDArray

from torchrl_unilab.checks import as_choice, as_instance, as_names, as_number, as_range
from torchrl_unilab.envs.randomization import columns
from torchrl_unilab.envs.task import Array, Fields, MujocoTask, Outcome, State
from torchrl_unilab.errors import ConfigError, LayoutKeyError


@dataclass(frozen=True)
class JointAddresses:
    """Where joints lie in the state.

    Attributes:
        names: The joints, in the order of the addresses.
        qpos: Indices into ``qpos``; a hinge or slide has one, a ball 4, a free
            joint 7 (position, then unit quaternion).
        qvel: Indices into ``qvel``; 1, 3 and 6.
    """

    names: tuple[str, ...]
    qpos: NDArray[np.intp]
    qvel: NDArray[np.intp]


def joint_addresses(model: mujoco.MjModel, names: Sequence[str] | None = None) -> JointAddresses:
    """Look up joints by name.

    Args:
        model: The model.
        names: The joints, in the wanted order; None for all hinges and slides.

    Raises:
        ConfigError: The model has no joint of a name.

    Examples:
        >>> from torchrl_unilab.envs import make_task
        >>> from torchrl_unilab.envs.robots.task import joint_addresses
        >>> model = make_task("Hopper-v5").load_model()
        >>> joint_addresses(model, ["leg_joint", "foot_joint"]).qpos.tolist()
        [4, 5]
    """
    all_names = [model.joint(i).name for i in range(model.njnt)]  # "" where it has none
    known = {name: i for i, name in enumerate(all_names)}
    if names is None:
        one_dof = (mjtJoint.mjJNT_HINGE, mjtJoint.mjJNT_SLIDE)
        joints = [i for i in range(model.njnt) if mjtJoint(model.jnt_type[i]) in one_dof]
    elif unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"joint_addresses: the model has no joints {unknown} (expected some of "
            f"{list(known)}). Correct the names."
        )
    else:
        joints = [known[name] for name in names]
    # a joint's numbers end where the next joint's begin
    qpos, qvel = (
        np.array([i for joint in joints for i in range(ends[joint], ends[joint + 1])], np.intp)
        for ends in ([*model.jnt_qposadr, model.nq], [*model.jnt_dofadr, model.nv])
    )
    return JointAddresses(tuple(all_names[joint] for joint in joints), qpos, qvel)


class _Remembered(dict[str, NDArray[Any]]):
    """Fields from before a step, by name."""

    def __missing__(self, name: str) -> NDArray[Any]:
        raise LayoutKeyError(
            f"field {name!r}: not kept from before the step (expected one of {[*self]}). Add it to "
            "`remembers`."
        )


@dataclass(frozen=True)
class Stride:
    """One control step, as reward terms see it.

    Attributes:
        fields: The fields after the step.
        before: Copies of those that the task `remembers`, from before the step.
        action: ``(nsim, nu)``, contiguous, in the dtype in which it was given.
        dt: Seconds of simulated time that the step took.
    """

    fields: Fields
    before: Fields
    action: NDArray[Any]
    dt: float


@dataclass(frozen=True, kw_only=True)
class RobotTask(MujocoTask):
    """A task whose observations, rewards and commands have names.

    Subclass it and define `actor` and `rewards`, and, where needed, `critic`, `failed`,
    `initial_state` and `before`. Each returns new or live arrays with one row per simulation; a
    term of one number may be ``(nsim,)``.

    The reward is the sum of the terms times their weights; a step's `MujocoBatchEnv.reward_terms`
    are the weighted terms. The actor's terms form ``observation``. If there are terms for the
    critic, ``critic_observation`` consists of the actor's terms and these.

    Attributes:
        weights: A factor for each reward term; `rewards` must return these names.
        commands: Range of each commanded number, by name, from which it is drawn uniformly;
            ``fields["command"]`` holds the numbers in this order.
        home: Name of the keyframe in whose pose and velocity episodes start, with no control in
            effect; None for the model's default pose.
        joint_names: The joints that `joint_positions` and `joint_velocities` cover; None for all
            hinges and slides.
        remembers: Fields that are copied before the step, for the reward terms; by default
            ``ctrl``, which holds the previous action.

    Raises:
        ConfigError: A command's range is not two finite numbers in order, a weight is no number,
            or one text is given for several names.

    Examples:
        >>> from dataclasses import dataclass, field
        >>> import numpy as np
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.envs.robots.task import RobotTask, tracking
        >>> CART = '''<mujoco><worldbody><body><joint name="x" type="slide" axis="1 0 0"/>
        ...   <geom size=".1" mass="1"/></body></worldbody>
        ...   <actuator><motor joint="x" ctrlrange="-1 1"/></actuator></mujoco>'''
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Cart(RobotTask):
        ...     name: str = "Cart"
        ...     model: str = CART
        ...     weights: dict = field(default_factory=lambda: {"speed": 1.0, "effort": -0.1})
        ...     commands: dict = field(default_factory=lambda: {"speed": (-1.0, 1.0)})
        ...
        ...     def actor(self, fields):
        ...         return {"velocity": fields["qvel"], "command": fields["command"]}
        ...
        ...     def rewards(self, stride):
        ...         error = stride.fields["qvel"] - stride.fields["command"]
        ...         return {"speed": tracking(error, 0.5), "effort": stride.action**2}
        >>> env = MujocoBatchEnv(Cart(), num_envs=2, seed=0)
        >>> env.rollout(3)["observation"].shape
        torch.Size([2, 3, 2])
        >>> sorted(env.reward_terms)
        ['effort', 'speed']
        >>> env.close()
    """

    weights: Mapping[str, float]
    commands: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    home: str | None = None
    joint_names: tuple[str, ...] | None = None
    remembers: tuple[str, ...] = ("ctrl",)

    def __post_init__(self) -> None:
        """Count the commands, and read what is remembered."""
        super().__post_init__()
        as_names(f"{self.name}: remembers", self.remembers)
        as_names(f"{self.name}: joint_names", self.joint_names or ())
        for what in ("weights", "commands"):
            as_instance(f"{self.name}: {what}", getattr(self, what), Mapping, "Name each number.")
        for name, weight in self.weights.items():
            as_number(f"{self.name}: weight of {name!r}", weight, "Use 0 to turn it off.")
        for name, bounds in self.commands.items():
            remedy = "Use for example (-1.0, 1.0)."
            as_range(f"{self.name}: range of command {name!r}", bounds, remedy)
        object.__setattr__(self, "command_size", len(self.commands))
        always = ("qpos", "qvel", "command")
        read = dict.fromkeys((*self.reads, *self.remembers))
        object.__setattr__(self, "reads", tuple(name for name in read if name not in always))

    @abstractmethod
    def actor(self, fields: Fields) -> Mapping[str, NDArray[Any]]:
        """Return what the actor observes: named terms, ``(nsim, k)`` or ``(nsim,)``."""

    def critic(self, fields: Fields) -> Mapping[str, NDArray[Any]]:
        """Return what the critic observes beyond that; by default nothing."""
        return {}

    @abstractmethod
    def rewards(self, stride: Stride) -> Mapping[str, NDArray[Any]]:
        """Return the reward terms without weights: ``(nsim,)``, ``(nsim, 1)``, or a constant."""

    def failed(self, fields: Fields) -> NDArray[np.bool_]:
        """Return whether each episode is over, ``(nsim,)``; by default never."""
        return np.zeros(len(fields["qpos"]), dtype=bool)

    @cached_property
    def _compiled(self) -> tuple[JointAddresses, Array, Array]:
        """Addresses of the joints, and the pose and velocity in which episodes start."""
        model = self.load_model()
        if self.home is None:
            qpos, qvel = model.qpos0.copy(), np.zeros(model.nv)
        else:
            keys = {model.key(i).name: i for i in range(model.nkey)}
            remedy = "Name a keyframe of the model, or leave home out."
            as_choice(f"{self.name}: home", self.home, keys, remedy)
            key = keys[self.home]
            if model.key_act[key].any():
                raise ConfigError(
                    f"{self.name}: keyframe {self.home!r} has activations {model.key_act[key]} "
                    "(expected none: episodes start with 0). Take a keyframe without."
                )
            bodies = np.flatnonzero(model.body_mocapid >= 0)
            places = model.key_mpos[key].reshape(-1, 3), model.key_mquat[key].reshape(-1, 4)
            own = model.body_pos[bodies], model.body_quat[bodies]
            if not all(map(np.allclose, places, own)):
                raise ConfigError(
                    f"{self.name}: keyframe {self.home!r} moves mocap bodies (expected them where "
                    "the model has them, where they stay). Place them in the model."
                )
            qpos, qvel = model.key_qpos[key].copy(), model.key_qvel[key].copy()
        qpos.flags.writeable = qvel.flags.writeable = False
        return joint_addresses(model, self.joint_names), qpos, qvel

    @property
    def joints(self) -> JointAddresses:
        """Where the joints of `joint_names` lie in the state."""
        return self._compiled[0]

    def joint_positions(self, fields: Fields) -> Array:
        """Return positions of the joints relative to the pose of `home`, ``(nsim, k)``."""
        joints, home, _ = self._compiled
        return fields["qpos"][:, joints.qpos] - home[joints.qpos]

    def joint_velocities(self, fields: Fields) -> Array:
        """Return velocities of the joints, ``(nsim, k)``."""
        return fields["qvel"][:, self.joints.qvel]

    def initial_state(self, rng: np.random.Generator, qpos: Array, qvel: Array) -> State:
        """Start in the pose of `home`."""
        _, home_qpos, home_qvel = self._compiled
        return home_qpos, home_qvel

    def command(self, rng: np.random.Generator) -> Array:
        """Draw each number uniformly from its range."""
        low, high = np.array(list(self.commands.values()), dtype=np.float64).T
        drawn: Array = rng.uniform(low, high)
        return drawn

    def before(self, fields: Fields) -> Fields:
        """Return copies of what the task `remembers`."""
        return _Remembered({name: fields[name].copy() for name in self.remembers})

    def observation(self, fields: Fields) -> Sequence[NDArray[Any]]:
        """Return the terms of `actor`."""
        return self._parts("actor", self.actor(fields))

    def observations(self, fields: Fields) -> dict[str, Sequence[NDArray[Any]]]:
        """Return the actor's group, and the critic's if it has further terms."""
        seen = self.observation(fields)
        more = self._parts("critic", self.critic(fields))
        return {"observation": seen} | ({"critic_observation": [*seen, *more]} if more else {})

    def _parts(self, method: str, terms: Any) -> list[NDArray[Any]]:
        return [columns(np.asarray(term)) for term in self._named(method, terms).values()]

    def _named(self, method: str, terms: Any) -> Mapping[str, Any]:
        if not isinstance(terms, Mapping):
            raise ConfigError(
                f"{self.name}: `{method}` returned {type(terms).__name__} (expected terms by "
                'name). Return a dictionary, such as {"height": ...}.'
            )
        return terms

    def outcome(self, fields: Fields, before: Any, action: NDArray[Any], dt: float) -> Outcome:
        """Weight and sum the reward terms.

        Raises:
            ConfigError: The terms are not those that have weights, or not one number
                per simulation each.
        """
        terms = self._named("rewards", self.rewards(Stride(fields, before, action, dt)))
        if terms.keys() != self.weights.keys():
            raise ConfigError(
                f"{self.name}: rewards returned the terms {sorted(terms)} (expected those with "
                f"weights, {sorted(self.weights)}). Give each term a weight; 0 turns it off."
            )
        n = len(fields["qpos"])
        weighted = {
            name: weight * self._per_simulation(name, terms[name], n)
            for name, weight in self.weights.items()
        }
        return Outcome(sum(weighted.values(), np.zeros(n)), self.failed(fields), weighted)

    def _per_simulation(self, name: str, term: Any, n: int) -> Array:
        """Return a reward term as ``(n,)``; a constant counts for all simulations."""
        if type(term) in (float, int, bool):  # no NumPy scalar, such as a mean over simulations
            return np.full(n, float(term))
        values = np.asarray(term)
        if values.shape not in ((n,), (n, 1)) or values.dtype.kind not in "fiub":
            raise ConfigError(
                f"{self.name}: the reward term {name!r} has shape {values.shape} of {values.dtype} "
                f"(expected ({n},), a real number per simulation). Correct `rewards`."
            )
        return values.reshape(n).astype(np.float64, copy=False)


def to_body_frame(quaternion: Array, vector: Array) -> Array:
    """Turn vectors from the world's frame into the frame of bodies.

    Args:
        quaternion: Orientations of the bodies, ``(nsim, 4)``, units, ``w`` first, such
            as ``qpos[:, 3:7]`` of a free joint.
        vector: ``(nsim, 3)`` or ``(3,)``.

    Returns:
        ``(nsim, 3)``.

    Examples:
        >>> import numpy as np
        >>> from torchrl_unilab.envs.robots.task import to_body_frame
        >>> quarter_turn_about_z = np.array([[0.5**0.5, 0.0, 0.0, 0.5**0.5]])
        >>> to_body_frame(quarter_turn_about_z, np.array([0.0, 1.0, 0.0])).round(3) + 0.0
        array([[1., 0., 0.]])
    """
    # by columns: np.cross takes several times as long
    w, x, y, z = quaternion.T
    vx, vy, vz = vector.T
    # v - 2w (a x v) + 2a x (a x v), the rotation by the conjugate, where a = (x, y, z)
    cx, cy, cz = 2.0 * (y * vz - z * vy), 2.0 * (z * vx - x * vz), 2.0 * (x * vy - y * vx)
    turned_x = vx - w * cx + y * cz - z * cy
    turned_y = vy - w * cy + z * cx - x * cz
    turned_z = vz - w * cz + x * cy - y * cx
    return np.stack((turned_x, turned_y, turned_z), axis=1)


def projected_gravity(quaternion: Array) -> Array:
    """Return where down is in a body's frame, ``(nsim, 3)``: ``(0, 0, -1)`` if it is upright.

    The quaternion is that of `to_body_frame`, and the result of unit length.
    """
    w, x, y, z = quaternion.T
    return np.stack(
        (2.0 * (w * y - x * z), -2.0 * (w * x + y * z), 2.0 * (x * x + y * y) - 1.0), axis=1
    )


def tracking(error: NDArray[Any], scale: float) -> NDArray[Any]:
    """Return a reward for small errors: ``exp(-|error|² / scale²)``, 1 without error.

    Args:
        error: ``(nsim,)``, or ``(nsim, k)`` for a vector.
        scale: The length of an error for which ``1 / e`` is left.

    Returns:
        ``(nsim,)``.

    Examples:
        >>> import numpy as np
        >>> from torchrl_unilab.envs.robots.task import tracking
        >>> tracking(np.array([[0.0, 0.0], [3.0, 4.0]]), 5.0).round(4).tolist()
        [1.0, 0.3679]
    """
    squares: NDArray[Any] = np.square(columns(error)).sum(axis=1)
    return np.exp(-squares / scale**2)
