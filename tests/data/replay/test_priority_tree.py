"""Priorities by blocks, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.data.replay import priority_tree
from torchrl_unilab.data.replay.priority_tree import BLOCK, PriorityTree

TOP = 32
CAPACITIES = st.sampled_from([1, 5, TOP, TOP + 1, TOP * BLOCK, TOP * BLOCK + 7, TOP * BLOCK**2 - 1])
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def _few_at_the_top():
    """Several levels for few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priority_tree, "TOP", TOP)
        yield


def _filled(capacity: int, seed: int) -> tuple[PriorityTree, np.ndarray]:
    """A tree after some batches of priorities, zeros among them, and these."""
    random = np.random.default_rng(seed)
    values = np.zeros(capacity)
    tree = PriorityTree(capacity, torch.float64)
    for _ in range(random.integers(1, 5)):
        at = random.permutation(capacity)[: random.integers(1, capacity + 1)]
        new = random.integers(0, 5, len(at)).astype(float)
        values[at] = new
        tree[torch.from_numpy(at)] = torch.from_numpy(new)
        if random.integers(2):
            tree.minimum()  # between batches, or not
    return tree, values


@given(capacity=CAPACITIES, seed=SEEDS)
def test_the_least_priority_is_of_rows_that_have_one(capacity, seed):
    tree, values = _filled(capacity, seed)
    assert tree.minimum() == np.where(values > 0, values, np.inf).min()


@given(capacity=CAPACITIES, seed=SEEDS)
def test_a_share_is_found_where_the_sum_up_to_there_exceeds_it(capacity, seed):
    tree, values = _filled(capacity, seed)
    # A power of two in all, so that shares that end at a row, too, are exact.
    values[-1] += 2.0 ** np.ceil(np.log2(values.sum() + 1)) - values.sum()
    tree[torch.tensor([capacity - 1])] = values[-1]
    share = np.append(values.cumsum(), np.random.default_rng(seed).uniform(0, values.sum(), 50))
    share = np.append(share[share < values.sum()], 0.0) / values.sum()
    expected = np.searchsorted(values.cumsum(), share * values.sum(), side="right")
    assert tree.find(torch.from_numpy(share)).tolist() == expected.tolist()


@given(capacity=CAPACITIES, seed=SEEDS)
def test_only_rows_that_have_a_priority_are_found_whatever_is_rounded(capacity, seed):
    random = np.random.default_rng(seed)
    values = 10.0 ** random.uniform(-12, 12, capacity) * random.integers(0, 2, capacity)
    values[random.integers(capacity)] = 1.0
    tree = PriorityTree(capacity, torch.float64)
    tree[torch.arange(capacity)] = torch.from_numpy(values)
    share = np.append(values.cumsum() / values.sum(), np.nextafter(1, 0))
    found = tree.find(torch.from_numpy(np.minimum(share, np.nextafter(1, 0))))
    assert (values[found.numpy()] > 0).all()


@given(capacity=CAPACITIES, seed=SEEDS)
def test_priorities_come_back_in_their_dtype(capacity, seed):
    _, values = _filled(capacity, seed)
    tree, rows = PriorityTree(capacity, torch.float32), torch.arange(capacity)
    tree[rows] = torch.from_numpy(values)
    assert torch.equal(tree[rows], torch.from_numpy(values).float())
    assert tree.values.tolist() == values.tolist()


def test_rows_that_were_given_may_be_written_over():
    capacity = TOP * BLOCK
    tree, rows = PriorityTree(capacity, torch.float64), torch.tensor([capacity - 1])
    tree[rows] = 2.0
    rows.zero_()
    assert tree.minimum() == 2.0
    assert tree.find(torch.tensor([0.5]).double()).tolist() == [capacity - 1]


def test_a_tree_that_is_never_asked_notes_a_bounded_number_of_batches():
    tree = PriorityTree(100, torch.float32)
    for i in range(3000):
        tree[torch.tensor([i % 100])] = float(i)
    assert len(tree._unreduced) <= 1000
    assert (tree.minimum(), tree.values[99]) == (2900.0, 2999.0)
