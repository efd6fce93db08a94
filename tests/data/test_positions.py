"""What an index of a storage means, against what the same index means in a list or a tensor."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.data.positions import (
    batch_shape,
    check_range,
    flat_positions,
    is_mask,
    is_single,
    last_of_each,
)
from torchrl_unilab.errors import PositionError

bounds = st.none() | st.integers(-12, 12)
slices = st.builds(slice, bounds, bounds, st.none() | st.integers(-4, 4).filter(bool))


@given(slices | st.just(...), st.integers(0, 9))
def test_a_slice_means_what_it_does_in_an_array(index, length):
    found = flat_positions(index, length)
    assert (found.dtype, found.tolist()) == (torch.int64, np.arange(length)[index].tolist())
    assert flat_positions((index,), length).tolist() == found.tolist()


@given(st.lists(st.integers(-9, 9)), st.sampled_from([torch.int64, torch.int32, torch.int8]))
def test_the_same_positions_in_any_form_are_the_same(positions, dtype):
    for index in (
        positions,
        tuple(positions) if len(positions) != 1 else (positions,),
        np.array(positions, dtype=np.int64),
        torch.tensor(positions, dtype=dtype),
        torch.tensor(positions, dtype=dtype).unsqueeze(0),
    ):
        found = flat_positions(index, 9)
        assert (found.dtype, found.ndim, found.tolist()) == (torch.int64, 1, positions)


@given(st.lists(st.booleans(), min_size=1))
def test_a_mask_in_any_form_is_where_it_is_true(mask):
    expected = [i for i, chosen in enumerate(mask) if chosen]
    array, tensor = np.array(mask), torch.tensor(mask)
    bytes_ = (array.astype(np.uint8), list(array.astype(np.uint8)), tensor.to(torch.uint8))
    for index in (mask, array, tensor, *bytes_):
        assert is_mask(index)
        assert batch_shape(index) is None
        assert flat_positions(index, len(mask)).tolist() == expected


@pytest.mark.parametrize(
    "index",
    [[[0, 1], [2, 3]], [(0, 1), (2, 3)], [range(2)], [[[0], [1]]], [[], []], [np.arange(2)]],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy:UserWarning")
def test_lists_of_lists_are_positions_of_that_shape(index):
    expected = np.array(index, dtype=np.int64)
    assert batch_shape(index) == expected.shape
    assert flat_positions(index, 9).tolist() == expected.flatten().tolist()


@given(st.lists(st.integers(0, 9), max_size=20))
def test_of_equal_positions_the_last_is_named(positions):
    last = {position: i for i, position in enumerate(positions)}
    named = last_of_each(torch.tensor(positions, dtype=torch.int64))
    assert named.tolist() == sorted(last.values())


def test_positions_that_need_no_change_are_not_copied():
    positions = torch.arange(3)
    assert flat_positions(positions, 3) is positions


@pytest.mark.parametrize(
    ("kind", "indices"),
    [
        (r"(torch\.)?float\d*", (0.0, 1.5, [0.0], np.array([1.0]))),
        ("list: .*", (["x"], [None], [[0], [1, 2]], [[0], "x"])),
    ],
)
def test_positions_that_are_no_integers_are_refused_by_what_they_are(kind, indices):
    for index in indices:
        with pytest.raises(PositionError, match=rf"positions of {kind} \(expected integers or"):
            flat_positions(index, 3)


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_mask_of_another_shape_than_the_items_is_refused(length, dtype):
    for shape in ((), (length, 1), (1, length), (length + 1,)):
        mask = np.ones(shape, dtype)
        for index in (mask, torch.as_tensor(mask)):
            with pytest.raises(PositionError, match=rf"expected \[{length}\], one flag per item"):
                flat_positions(index, length)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float32"])
def test_a_mask_or_a_fraction_of_no_dimension_is_no_position(dtype):
    for index in (np.array(1, dtype), torch.as_tensor(np.array(1, dtype))):
        with pytest.raises(PositionError, match=rf"positions of (torch\.)?{dtype} \(expected"):
            is_single(index)


def test_one_position_is_single_and_what_may_be_several_is_not():
    assert all(map(is_single, (0, -1, np.array(1), torch.tensor(1))))
    assert not any(
        map(is_single, ([0], (0,), slice(1), range(1), np.array([1]), torch.tensor([1])))
    )


@pytest.mark.parametrize("length", range(4))
def test_a_range_is_refused_where_a_list_refuses_an_end_of_it(length):
    items = list(range(length))
    for low, high in itertools.combinations_with_replacement(range(-5, 5), 2):
        try:
            items[low], items[high]
        except IndexError:
            with pytest.raises(IndexError, match=f"{length} are there .expected at least"):
                check_range(low, high, length, "thing", "there")
        else:
            check_range(low, high, length, "thing", "there")


@pytest.mark.parametrize(
    ("low", "high", "length", "named", "least"),
    [(0, 3, 3, 3, 4), (-4, 2, 3, -4, 4), (-4, 3, 3, -4, 4), (0, 0, 0, 0, 1), (-1, -1, 0, -1, 1)],
)
def test_the_position_that_is_not_there_and_how_many_it_takes_are_named(
    low, high, length, named, least
):
    message = rf"^no row {named}: {length} are written \(expected at least {least}\)\. Write first"
    with pytest.raises(IndexError, match=message):
        check_range(low, high, length, "row", "written")
