"""Quadrupeds whose models differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.envs.randomization import Randomize
from torchrl_unilab.envs.robots.quadruped import QuadrupedWalk

N = 6
TASK = QuadrupedWalk(randomization=())
MODEL = TASK.load_model()
MASS = Randomize(("body_mass", "body_inertia"), 0.5, 1.5, objects=("torso",))
FRICTION = Randomize(("geom_friction[0]",), 0.4, 1.2, objects=("*_foot",), shared=True)
GAIN = Randomize(("actuator_gainprm[0]", "actuator_biasprm[1]"), 0.8, 1.2)
ALL = (MASS, FRICTION, GAIN)


def make(specs: Sequence[Randomize] | None = ALL, **settings: object) -> MujocoBatchEnv:
    """Some of them, by default by all specs."""
    return MujocoBatchEnv(
        TASK, **{"num_envs": N, "seed": 0, "num_threads": 1, "randomization": specs, **settings}
    )


def values(env: MujocoBatchEnv, specs: Sequence[Randomize] = ALL) -> dict[str, np.ndarray]:
    """What each simulation has in the fields of some specs."""
    fields = {field.split("[")[0] for spec in specs for field in spec.fields}
    return {field: env.randomizer.values(field) for field in sorted(fields)}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """The same fields with the same values."""
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
