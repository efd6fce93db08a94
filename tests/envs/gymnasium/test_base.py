from __future__ import annotations

import mujoco
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.envs.gymnasium.arms import Reacher
from torchrl_unilab.envs.gymnasium.base import mass_centers, norms, scalar_squares, sums_of_squares

SEEDS = st.integers(0, 2**32 - 1)


def draw(seed: int, *shape: int) -> np.ndarray:
    """Values of very different sizes, whose sums depend on the order."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, shape)


@given(
    shape=st.lists(st.integers(1, 20), min_size=2, max_size=3),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=SEEDS,
)
def test_sums_of_squares_add_each_row_as_np_sum_adds_an_array(shape, dtype, seed):
    values: np.ndarray = draw(seed, *shape).astype(dtype)
    expected = np.array([np.sum(np.square(row)) for row in values])
    # as a batch lays out the field of a state: rows apart
    apart = np.zeros((shape[0], 3 + values[0].size), dtype)
    apart[:, 3:] = values.reshape(shape[0], -1)
    for given_values in (values, apart[:, 3:].reshape(shape)):
        sums = sums_of_squares(given_values)
        assert sums.dtype == dtype
        np.testing.assert_array_equal(sums, expected)


@given(n=st.integers(1, 30), k=st.sampled_from([2, 3]), seed=SEEDS)
def test_norms_are_those_of_one_vector(n: int, k: int, seed: int) -> None:
    values = draw(seed, n, k + 4)[:, 2 : k + 2]
    expected = [np.linalg.norm(np.array(row)) for row in values]
    np.testing.assert_array_equal(norms(values), expected)


def test_powers_are_those_of_scalars_which_differ_from_products() -> None:
    values = draw(0, 50_000)
    expected = np.array([value**2 for value in values])
    np.testing.assert_array_equal(scalar_squares(values), expected)
    strided = np.stack((values, values), axis=1)[:, 1:]
    np.testing.assert_array_equal(scalar_squares(strided)[:, 0], expected)
    assert (expected != values * values).any()


@given(n=st.integers(1, 20), bodies=st.integers(1, 20), own=st.booleans(), seed=SEEDS)
def test_mass_centers_are_those_of_one_simulation(n, bodies, own, seed):
    masses = np.abs(draw(seed, n if own else 1, bodies))
    positions = draw(seed + 1, n, bodies, 3)
    rows = np.broadcast_to(masses, (n, bodies))
    expected = [
        np.einsum("b,bj->j", row.copy(), place) / row.copy().sum()
        for row, place in zip(rows, positions, strict=True)
    ]
    np.testing.assert_array_equal(mass_centers(rows, positions), expected)


class Loaded(Reacher):
    """A reacher whose model gets a further body as it is loaded."""

    def load_model(self) -> mujoco.MjModel:
        spec = self.load_spec()
        spec.body("body0").add_body(name="payload").add_geom(size=[0.01, 0, 0])
        return spec.compile()


def test_bodies_are_those_of_the_model_that_a_task_loads() -> None:
    task = Loaded()
    assert task.body("target") == task.load_model().body("target").id
