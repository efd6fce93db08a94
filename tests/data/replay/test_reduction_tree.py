"""Sums and minima by blocks, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.data.replay.reduction_tree import BLOCK, ReductionTree

CAPACITIES = st.sampled_from([1, 5, BLOCK, BLOCK + 1, BLOCK**2, BLOCK**2 + 7])
SEEDS = st.integers(0, 2**32 - 1)


def _filled(capacity: int, seed: int, reduce: str) -> tuple[ReductionTree, np.ndarray]:
    """A tree after some batches of values, zeros among them, and its values."""
    random = np.random.default_rng(seed)
    values = np.full(capacity, 0.0 if reduce == "sum" else np.inf)
    tree = ReductionTree(capacity, torch.float64, reduce)
    for _ in range(random.integers(1, 5)):
        at = random.permutation(capacity)[: random.integers(1, capacity + 1)]
        new = random.integers(0, 5, len(at)).astype(float)
        values[at] = new
        tree[torch.from_numpy(at)] = torch.from_numpy(new)
        if random.integers(2):
            tree.query(0, capacity)  # between batches, or not
    return tree, values


@pytest.mark.parametrize("reduce", ["sum", "min"])
@given(capacity=CAPACITIES, seed=SEEDS, share=st.floats(0, 1), first=st.floats(0, 1))
def test_a_query_reduces_the_values_of_its_range(reduce, capacity, seed, share, first):
    tree, values = _filled(capacity, seed, reduce)
    start = int(first * (capacity - 1))
    end = start + 1 + int(share * (capacity - start - 1))
    expected = values[start:end].sum() if reduce == "sum" else values[start:end].min()
    assert tree.query(start, end) == expected


@given(capacity=CAPACITIES, seed=SEEDS)
def test_a_mass_is_found_where_the_sum_up_to_there_exceeds_it(capacity, seed):
    tree, values = _filled(capacity, seed, "sum")
    if values.sum():
        random = np.random.default_rng(seed)
        # Sums themselves, too, which belong to the next value.
        mass = np.concatenate([random.uniform(0, values.sum(), 50), values.cumsum(), [0.0]])
        mass = mass[mass < values.sum()]
        found = tree.scan_lower_bound(torch.from_numpy(mass))
        assert found.tolist() == np.searchsorted(values.cumsum(), mass, side="right").tolist()


@given(capacity=CAPACITIES, seed=SEEDS)
def test_values_come_back_in_their_dtype(capacity, seed):
    _, values = _filled(capacity, seed, "sum")
    tree = ReductionTree(capacity, torch.float32, "sum")
    tree[torch.arange(capacity)] = torch.from_numpy(values)
    assert torch.equal(tree[torch.arange(capacity)], torch.from_numpy(values).float())
    assert tree[capacity - 1] == values[-1]


def test_one_value_is_set_at_one_position():
    tree = ReductionTree(100, torch.float32, "min")
    tree[7], tree[torch.tensor(70)] = 3.0, torch.tensor(2.0)
    assert (tree.query(0, 100), tree.query(0, 70)) == (2.0, 3.0)
