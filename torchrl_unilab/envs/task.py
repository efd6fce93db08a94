"""What a task on a MuJoCo model is: everything of an environment but the physics."""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import mujoco
import numpy as np
from numpy.typing import DTypeLike, NDArray

from torchrl_unilab.checks import as_names
from torchrl_unilab.envs.mujoco_engine import CONTACT_FIELDS, add_contact_forces, logger
from torchrl_unilab.envs.randomization import Randomize
from torchrl_unilab.errors import ConfigError

Array = NDArray[np.float64]
State: TypeAlias = tuple[Array, Array]
Fields = Mapping[str, NDArray[Any]]
Model: TypeAlias = str | Path | mujoco.MjSpec

_KEYS = frozenset(
    ("action", "done", "next", "pixels", "reward", "reward_terms", "terminated", "truncated")
)
"""Keys of an environment's other entries, which no observation may have."""


def observation_shapes(
    task: str, groups: Mapping[str, Sequence[Any]], nsim: int
) -> dict[str, tuple[int, int]]:
    """Return the shape of each observation of a task, whose parts are ``(nsim, width)`` each.

    Raises:
        ConfigError: A part has another shape, or an observation the name of another entry.
    """
    if not isinstance(groups, Mapping) or not _KEYS.isdisjoint(groups):
        raise ConfigError(
            f"MujocoBatchEnv: `observations` of {task} returned {list(groups)} (expected groups by "
            f"name, none of them {sorted(_KEYS)}). Correct the task."
        )
    for key, parts in groups.items():
        shapes = [np.shape(part) for part in parts]
        if not shapes or any(len(shape) != 2 or shape[0] != nsim for shape in shapes):
            raise ConfigError(
                f"MujocoBatchEnv: {key!r} of {task} has parts of shapes {shapes} (expected at "
                f"least one, each ({nsim}, width), a row per simulation). Correct the task."
            )
    return {k: (nsim, sum(np.shape(part)[1] for part in parts)) for k, parts in groups.items()}


def join_observation(
    task: str, key: str, parts: Sequence[NDArray[Any]], shape: tuple[int, int], dtype: DTypeLike
) -> NDArray[Any]:
    """Return the parts of an observation side by side, ``(nsim, width)`` of `dtype`.

    Raises:
        ConfigError: The parts are of another shape, or no numbers.
    """
    try:  # cast while they are put together: one copy out of the physics
        array = np.concatenate(parts, axis=1, dtype=dtype, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"MujocoBatchEnv: {key!r} of {task} cannot be observed, {error} (expected numbers, a "
            "row per simulation). Correct the task."
        ) from error
    if array.shape != shape:
        raise ConfigError(
            f"MujocoBatchEnv: {key!r} of {task} has shape {array.shape} (expected {shape}, as when "
            "the environment was made). Always observe the same number of values."
        )
    return array


@dataclass(frozen=True)
class Outcome:
    """What a control step led to, one row per simulation.

    Attributes:
        reward: ``(nsim,)`` float64.
        terminated: ``(nsim,)`` bool.
        terms: The named parts of the reward, ``(nsim,)`` each.
        info: Further quantities, ``(nsim, ...)`` each, such as a speed. Copies, like the parts of
            the reward: a reset changes the fields.

    Examples:
        >>> import numpy as np
        >>> from torchrl_unilab.envs import Outcome
        >>> speed, fallen = np.array([0.5, 2.0]), np.array([False, True])
        >>> Outcome(speed, fallen, {"speed": speed}).terminated
        array([False,  True])
    """

    reward: Array
    terminated: NDArray[np.bool_]
    terms: dict[str, NDArray[Any]]
    info: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MujocoTask(ABC):
    """A task on one MuJoCo model. Subclass it to define a task.

    The methods take ``fields``, which maps names to ``(nsim, ...)`` arrays: always ``qpos`` and
    ``qvel``, those the task lists in `reads`, and ``command`` where the task has commands. The
    arrays are live: copy what a method keeps. As in Gymnasium, fields that the physics derives are
    one substep behind ``qpos``.

    A task is a plain value: it keeps no state of its episodes, so one object serves any number of
    environments and processes.

    Attributes:
        name: The name of the task, also in messages.
        model: An MJCF or URDF file, the text of one (it begins with ``<``), or an
            ``mujoco.MjSpec``. A spec is kept as its text, so that tasks can be sent to other
            processes; MuJoCo writes numbers there with six digits.
        assets: Files that the model names, such as meshes, by name, for a model
            that is not given as a file; those of an MjSpec are added.
        frame_skip: Physics steps per control step.
        max_episode_steps: Control steps after which an episode is truncated.
        reads: Further fields that the task reads: of ``MjData``, such as
            ``xpos``, which `mj_step` must compute for the model (it computes ``cfrc_ext``,
            ``cfrc_int`` and ``cacc`` where they are read, but not in `mj_forward`; others,
            such as ``subtree_linvel``, for a sensor that needs them), or of
            ``MjModel``, such as ``body_mass`` or ``opt.timestep``, which hold each
            simulation's own values where these are randomised.
        command_size: Numbers in a simulation's command; 0 for none.
        command_steps: Control steps for which a command holds; None for a whole
            episode.
        randomization: How the models of its simulations differ, unless the
            environment has another setting.

    Examples:
        >>> import numpy as np
        >>> from torchrl_unilab.envs import MujocoBatchEnv, MujocoTask, Outcome, make_task
        >>> class Still(MujocoTask):
        ...     def observation(self, fields):
        ...         return fields["qpos"], fields["qvel"]
        ...     def outcome(self, fields, before, action, dt):
        ...         speed = np.abs(fields["qvel"]).sum(axis=1)
        ...         return Outcome(-speed, speed > 10.0, {"speed": -speed})
        >>> task = Still(name="Still", model=make_task("InvertedPendulum-v5").model_path())
        >>> env = MujocoBatchEnv(task, num_envs=2)
        >>> env.rollout(3)["observation"].shape
        torch.Size([2, 3, 4])
        >>> env.close()
    """

    name: str
    model: Model
    assets: Mapping[str, bytes] = field(default_factory=dict)
    frame_skip: int = 1
    max_episode_steps: int = 1000
    reads: tuple[str, ...] = ()
    command_size: int = 0
    command_steps: int | None = None
    randomization: tuple[Randomize, ...] = ()

    def __post_init__(self) -> None:
        """Turn an MjSpec into its text."""
        as_names(f"{self.name}: reads", self.reads)
        if isinstance(self.model, mujoco.MjSpec):
            spec = self.model.copy()
            with self._compiler_messages():
                spec.compile()
            if spec.modelfiledir:  # the text does not contain it
                spec.meshdir = str(Path(spec.modelfiledir, spec.meshdir).absolute())
                spec.texturedir = str(Path(spec.modelfiledir, spec.texturedir).absolute())
            object.__setattr__(self, "model", spec.to_xml())
            object.__setattr__(self, "assets", {**spec.assets, **self.assets})

    def load_model(self) -> mujoco.MjModel:
        """Compile the model.

        Raises:
            ConfigError: MuJoCo does not compile it.
            FileNotFoundError: There is no such file.
        """
        spec = self.load_spec()
        with self._compiler_messages():
            return spec.compile()

    def load_spec(self) -> mujoco.MjSpec:
        """Parse the model, and have its steps compute contact forces if these are read.

        Raises:
            ConfigError: MuJoCo does not parse it.
            FileNotFoundError: There is no such file.
        """
        with self._compiler_messages():
            spec = self._parse()
        if not CONTACT_FIELDS.isdisjoint(self.reads):
            add_contact_forces(spec)
        return spec

    def _parse(self) -> mujoco.MjSpec:
        if isinstance(self.model, str) and self.model.lstrip().startswith("<"):
            return mujoco.MjSpec.from_string(self.model, assets=dict(self.assets))
        path = self.model_path()
        if not path.is_file():
            raise FileNotFoundError(
                f"model of {self.name}: no file {path.absolute()} (expected an MJCF or URDF "
                "file). Correct model, which a Path(__file__).parent makes independent of the "
                "working directory, or give the file's text or an MjSpec."
            )
        return mujoco.MjSpec.from_file(str(path))

    @contextlib.contextmanager
    def _compiler_messages(self) -> Iterator[None]:
        """Refuse a model with errors; log warnings, which MuJoCo would print and write to a file.

        Raises:
            ConfigError: There is an error.
        """
        handler = mujoco.get_mju_user_warning()
        mujoco.set_mju_user_warning(lambda message: logger.debug("mujoco: %s", message))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
        except ValueError as error:
            raise self._refusal(error) from error
        finally:
            mujoco.set_mju_user_warning(handler)
        for warning in caught:
            logger.debug("mujoco: %s", warning.message)

    def _refusal(self, error: ValueError) -> ConfigError:
        reason = " ".join(str(error).split()).rstrip(".")
        if isinstance(self.model, mujoco.MjSpec):
            what = "the MjSpec"
        else:
            text = str(self.model).lstrip().startswith("<")
            what = "its text" if text else str(self.model_path())
        return ConfigError(
            f"model of {self.name}: {reason} (expected one that MuJoCo compiles). Correct {what}."
        )

    def model_path(self) -> Path:
        """Return where the model's file lies, if the model is given as one."""
        return Path(str(self.model))

    def initial_state(self, rng: np.random.Generator, qpos: Array, qvel: Array) -> State:
        """Draw the state in which one episode starts.

        Args:
            rng: The simulation's own generator.
            qpos: The model's default positions, ``(nq,)``; not to be written.
            qvel: The model's default velocities, ``(nv,)``; not to be written.

        Returns:
            ``(nq,)`` and ``(nv,)`` float64; by default the model's defaults.
        """
        return qpos, qvel

    def command(self, rng: np.random.Generator) -> Array:
        """Draw what one simulation is asked to do, ``(command_size,)``.

        Called after `initial_state`, and again every `command_steps`, where
        `command_size` is not 0.
        """
        raise NotImplementedError(
            f"{self.name}: it has commands of size {self.command_size} and no way to draw "
            "them (expected a method `command`). Define `command` in the task."
        )

    def before(self, fields: Fields) -> Any:
        """Keep what `outcome` compares with, from the state before the step.

        Returns:
            New arrays, which `outcome` gets as ``before``; by default None.
        """
        return None

    @abstractmethod
    def observation(self, fields: Fields) -> Sequence[NDArray[Any]]:
        """Observe the state.

        Returns:
            The ``(nsim, k)`` parts of the observation, in order. They may be views of the fields:
            they are copied, and cast, at once.
        """

    def observations(self, fields: Fields) -> Mapping[str, Sequence[NDArray[Any]]]:
        """Observe the state for every reader: parts by key, as in `observation`.

        By default one group, ``"observation"``. A task whose critic may see what the actor cannot
        observe adds another group, such as ``"critic_observation"``.
        """
        return {"observation": self.observation(fields)}

    @abstractmethod
    def outcome(self, fields: Fields, before: Any, action: NDArray[Any], dt: float) -> Outcome:
        """Judge a control step from the state it led to.

        Args:
            fields: The fields after the step.
            before: What `before` returned before the step.
            action: ``(nsim, nu)``, contiguous, in the dtype in which it was
                given: like Gymnasium, its cost is computed in that precision.
            dt: Seconds of simulated time that the step took.
        """


def checked_outcome(
    task: MujocoTask, fields: Fields, before: Any, action: NDArray[Any], dt: float
) -> Outcome:
    """Return a task's `MujocoTask.outcome`, checked.

    Raises:
        ConfigError: It is no `Outcome`, or lacks a number per simulation in one of its arrays.
    """
    outcome, n = task.outcome(fields, before, action, dt), len(action)
    if not isinstance(outcome, Outcome):  # each step checks it: a call would cost more
        raise ConfigError(
            f"outcome of {task.name}: {type(outcome).__name__} (expected Outcome). Return one."
        )
    checked = ("rewards", outcome.reward), ("terminations", outcome.terminated)
    for name, value in (*checked, *outcome.terms.items()):
        if not isinstance(value, np.ndarray) or value.shape != (n,):
            raise ConfigError(
                f"MujocoBatchEnv.step: {name} of {task.name} are {type(value).__name__} of shape "
                f"{tuple(np.shape(value))} (expected an array of shape {(n,)}). Correct the task's "
                "`outcome`, or `failed`."
            )
    for name, value in outcome.info.items():
        if not isinstance(value, np.ndarray) or value.shape[:1] != (n,):
            raise ConfigError(
                f"MujocoBatchEnv.step: info {name!r} of {task.name} is {type(value).__name__} of "
                f"shape {np.shape(value)} (expected an array, {n} simulations first). Correct the "
                "task's `outcome`."
            )
    if (kind := outcome.terminated.dtype) != np.bool_:
        raise ConfigError(
            f"MujocoBatchEnv.step: terminations of {task.name} are of {kind} (expected "
            "bool). Compare in the task's `outcome`, or `failed`."
        )
    return outcome
