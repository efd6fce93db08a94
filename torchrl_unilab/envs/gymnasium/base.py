"""What Gymnasium's MuJoCo v5 tasks have in common: models, bodies, initial noise, arithmetic.

Gymnasium computes sums, norms and ranges for one simulation at a time. The same formula
over many rows may add in another order, and so give other last bits; these do not.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import mujoco
import numpy as np
from numpy.typing import NDArray

from torchrl_unilab.checks import as_number, as_range
from torchrl_unilab.envs.task import Array, Fields, MujocoTask, State
from torchrl_unilab.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GymnasiumTask(MujocoTask):
    """A task of Gymnasium's, by default on its model among Gymnasium's assets.

    Its fields are the options of Gymnasium's constructor but for cameras, by the same names, but
    that ``xml_file`` is `model`, which takes all that any task's `model` takes.

    Every formula works on ``(nsim, ...)`` arrays in the order of operations of the
    Gymnasium task of the same name, so that its results are the same bits. The
    parts of the reward and the rest of Gymnasium's ``info`` have its names.

    Examples:
        >>> from torchrl_unilab.envs import make_task
        >>> task = make_task("HalfCheetah-v5", ctrl_cost_weight=0.5)
        >>> task.ctrl_cost_weight, task.max_episode_steps
        (0.5, 1000)
    """

    def __post_init__(self) -> None:
        """Refuse values of another type than the defaults, invalid ranges, and negative noise."""
        super().__post_init__()
        defaults = {field.name: field.default for field in fields(self)}
        for name, value in vars(self).items():
            what, remedy = f"{self.name}: {name}", "Correct this option."
            if name.endswith("_range"):
                as_range(what, value, remedy, "[-inf, inf]")
            elif name == "reset_noise_scale":
                as_number(what, value, remedy, "[0, inf)")
            elif isinstance(defaults.get(name), float):
                as_number(what, value, remedy)
            elif isinstance(defaults.get(name), bool) and not isinstance(value, bool | np.bool_):
                raise ConfigError(f"{what}: {value!r} (expected True or False). {remedy}")

    def model_path(self) -> Path:
        """Return where the model lies; a mere name is looked up among the assets, as in Gymnasium.

        What begins with ``/``, ``.`` or ``~``, or is a `Path`, is a file of its own.
        """
        text = str(self.model)  # a Path would drop a leading "./"
        if isinstance(self.model, Path) or text.startswith(("/", ".", "~")):
            return Path(text).expanduser()
        # find_spec, because importing gymnasium.envs.mujoco loads a renderer
        spec: Any = find_spec("gymnasium")
        return Path(spec.origin).parent / "envs" / "mujoco" / "assets" / text

    @cached_property
    def _body_names(self) -> list[str]:
        return body_names(self.load_model())

    def body(self, body: int | str, model: mujoco.MjModel | None = None) -> int:
        """Return the number of a body of the model.

        Args:
            body: Its name or its number.
            model: The task's, if it has been loaded.

        Raises:
            ConfigError: The model has no such body.
        """
        names = self._body_names if model is None else body_names(model)
        if isinstance(body, str):
            if body and body in names:
                return names.index(body)
        elif 0 <= body < len(names):
            return body
        known = ", ".join(name for name in names if name)
        raise ConfigError(
            f"{self.name}: its model has no body {body!r} (expected one of {known}, or a "
            f"number below {len(names)}). Name another body, or give another model."
        )


def body_names(model: mujoco.MjModel) -> list[str]:
    """Return the names of a model's bodies, empty for those without."""
    return [model.body(i).name for i in range(model.nbody)]


@dataclass(frozen=True, kw_only=True)
class NoisyStart(GymnasiumTask):
    """A task whose episodes start from the default state plus noise.

    Attributes:
        reset_noise_scale: Positions and velocities start with uniform noise in
            ``[-reset_noise_scale, reset_noise_scale)``, or, where
            `normal_velocities` is set, velocities with normal noise of this
            standard deviation.
    """

    normal_velocities: ClassVar[bool] = False

    reset_noise_scale: float

    def initial_state(self, rng: np.random.Generator, qpos: Array, qvel: Array) -> State:
        """Add noise to the default positions and velocities."""
        scale = self.reset_noise_scale
        noisy = qpos + rng.uniform(-scale, scale, len(qpos))
        if self.normal_velocities:
            return noisy, qvel + scale * rng.standard_normal(len(qvel))
        return noisy, qvel + rng.uniform(-scale, scale, len(qvel))


def contact_forces(fields: Fields) -> Array:
    """Return the ``cfrc_ext`` that Gymnasium would show: zero until an episode's first step.

    ``mj_forward``, which ends a reset, does not compute it, so that a batch of
    simulations holds other values there. ``(nsim, nbody, 6)``, torques and forces in the frame of
    the tree's centre of mass, newton metres and newtons; not to be written.
    """
    forces: Array = fields["cfrc_ext"]
    stepped = fields["time"] > 0.0
    return forces if stepped.all() else np.where(stepped[:, None, None], forces, 0.0)


def never(fields: Fields) -> NDArray[np.bool_]:
    """Return False for each simulation, ``(nsim,)``: no episode terminates."""
    return np.zeros(len(fields["qpos"]), dtype=bool)


def sums_of_squares(values: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of squares of each row of ``(nsim, ...)``, in its own dtype, ``(nsim,)``.

    Summing the contiguous last axis adds in the order in which ``np.sum`` adds
    one array of any shape; ``einsum`` or a sum over other axes need not.
    """
    squares = np.square(values)
    if values.ndim != 2:
        squares = squares.reshape(len(values), -1)
    sums: NDArray[Any] = np.add.reduce(squares, axis=1)
    return sums


def norms(vectors: Array) -> Array:
    """Return the length of each row of ``(nsim, k)``, ``(nsim,)``.

    ``np.linalg.norm`` of one vector is the root of its dot product with itself, and
    so is this: a product of matrices of one row and one column is a dot product.
    """
    squares: Array = np.matmul(vectors[:, None, :], vectors[:, :, None])
    return np.sqrt(squares[:, 0, 0])


def scalar_squares(values: Array) -> Array:
    """Return squares as ``x**2`` gives them for a scalar ``x``, which are not always ``x * x``.

    NumPy calls C's ``pow`` for a scalar, and multiplies for an array.
    """
    return np.float_power(values, 2)


def mass_centers(masses: Array, positions: Array) -> Array:
    """Return each simulation's centre of mass, ``(nsim, 3)``.

    Args:
        masses: ``(nsim, nbody)``, kilograms.
        positions: ``(nsim, nbody, 3)``, metres.
    """
    weighted: Array = np.einsum("nb,nbj->nj", masses, positions)
    totals: Array = masses.sum(axis=1)
    return weighted / totals[:, None]


def inside(values: Array, bounds: tuple[float, float]) -> NDArray[np.bool_]:
    """Return whether each of the values lies in an open range; NaN does not."""
    low, high = bounds
    return (low < values) & (values < high)
