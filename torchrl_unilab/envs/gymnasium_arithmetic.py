"""Sums, norms and ranges of rows, in the order of operations of Gymnasium's tasks.

Gymnasium computes them for one simulation at a time. The same formula over many
rows may add in another order, and so give other last bits; these do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_unilab.envs.task import Array


def sums_of_squares(values: NDArray[Any]) -> NDArray[Any]:
    """Sum of the squares of each row, in its own dtype.

    Summing the contiguous last axis adds in the order in which ``np.sum`` adds
    one array of any shape; ``einsum`` or a sum over other axes need not.

    Args:
        values: ``(nsim, ...)``.

    Returns:
        ``(nsim,)``, in the dtype of ``values``.
    """
    squares = np.square(values)
    if values.ndim != 2:
        squares = squares.reshape(len(values), -1)
    sums: NDArray[Any] = np.add.reduce(squares, axis=1)
    return sums


def control_cost(action: NDArray[Any], weight: float) -> NDArray[Any]:
    """Weighted sum of squares of each row of ``action``, in its own dtype.

    Args:
        action: ``(nsim, nu)``.
        weight: the factor.

    Returns:
        ``(nsim,)``, in the dtype of ``action``.
    """
    cost: NDArray[Any] = weight * sums_of_squares(action)
    return cost


def norms(vectors: Array) -> Array:
    """Length of each row.

    ``np.linalg.norm`` of one vector is the root of its dot product with itself, and
    so is this: a product of matrices of one row and one column is a dot product.

    Args:
        vectors: ``(nsim, k)``.

    Returns:
        ``(nsim,)``.
    """
    squares: Array = np.matmul(vectors[:, None, :], vectors[:, :, None])
    return np.sqrt(squares[:, 0, 0])


def scalar_squares(values: Array) -> Array:
    """Squares as ``x**2`` gives them for a scalar ``x``, which are not always ``x * x``.

    NumPy calls C's ``pow`` for a scalar, and multiplies for an array.

    Args:
        values: any shape.

    Returns:
        The shape of ``values``.
    """
    squares: Array = np.float_power(values, 2)
    return squares


def mass_centers(masses: Array, positions: Array) -> Array:
    """Mean position of the bodies of each simulation, weighted with their masses.

    Args:
        masses: ``(nsim, nbody)``, kilograms.
        positions: ``(nsim, nbody, 3)``, metres.

    Returns:
        ``(nsim, 3)``, metres.
    """
    weighted: Array = np.einsum("nb,nbj->nj", masses, positions)
    center: Array = weighted / masses.sum(axis=1)[:, None]
    return center


def inside(values: Array, bounds: tuple[float, float]) -> NDArray[np.bool_]:
    """Whether values lie in an open range; NaN does not.

    Args:
        values: any shape.
        bounds: the least and the greatest value, both outside.

    Returns:
        The shape of ``values``.
    """
    low, high = bounds
    within: NDArray[np.bool_] = (low < values) & (values < high)
    return within
