from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_unilab.errors import LayoutDtypeError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.shm.layout import BlockLayout, align, dotted
from torchrl_unilab.shm.words import LINE

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12).map(
    lambda specs: [(f"k{i}", shape, dtype) for i, (shape, dtype) in enumerate(specs)]
)


@given(SPECS)
def test_fields_are_aligned_apart_and_inside_the_block(specs):
    layout = BlockLayout.of_specs(specs)
    end = 0
    for field in layout.fields:
        assert field.offset % LINE == 0
        assert field.offset >= end
        end = field.offset + field.nbytes
    assert end <= layout.nbytes
    assert layout.nbytes % LINE == 0
    assert layout.nbytes >= LINE


@given(SPECS)
def test_views_hold_what_was_copied_in_bit_for_bit(specs):
    layout = BlockLayout.of_specs(specs)
    block = torch.zeros(layout.nbytes, dtype=torch.uint8)
    values = [torch.randn(shape).mul(100).to(dtype) for _, shape, dtype in specs]
    for view, value in zip(layout.views(block), values, strict=True):
        view.copy_(value)
    for view, value in zip(layout.views(block), values, strict=True):
        assert view.dtype is value.dtype
        assert torch.equal(view, value)


@given(SPECS)
def test_views_of_a_part_of_a_larger_block_lie_in_that_part(specs):
    layout = BlockLayout.of_specs(specs)
    whole = torch.zeros(LINE + layout.nbytes + 1, dtype=torch.uint8)
    part = whole[LINE:]
    for view in layout.views(part):
        view.fill_(1)
    assert not whole[:LINE].any()
    for view in layout.views(part.clone()):
        assert (view == 1).all()


@given(SPECS, SPECS)
def test_digests_are_equal_exactly_for_equal_layouts(one, other):
    one, other = BlockLayout.of_specs(one), BlockLayout.of_specs(other)
    assert (one.digest == other.digest) == (one == other)


@given(st.integers(0, 10_000), st.sampled_from([1, 8, 64, 4096]))
def test_align_gives_the_next_multiple(offset, alignment):
    aligned = align(offset, alignment)
    assert aligned % alignment == 0
    assert offset <= aligned < offset + alignment


def test_nested_and_dotted_keys_name_the_same_field():
    assert dotted(("a", "0", "w")) == dotted("a.0.w") == "a.0.w"


def test_a_key_that_comes_twice_is_refused():
    with pytest.raises(LayoutKeyError, match=r"'a\.b' comes twice"):
        BlockLayout.of_specs([("a.b", (1,), torch.bool), ("a.b", (1,), torch.bool)])


LAYOUT = BlockLayout.of({"w": torch.zeros(2, 3), "n": torch.tensor(0)})


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"w": torch.zeros(2, 3)}, LayoutKeyError, r"missing \['n'\], unknown \[\]"),
        (
            {"w": torch.zeros(2, 3), "n": torch.tensor(0), "x": torch.zeros(1)},
            LayoutKeyError,
            r"missing \[\], unknown \['x'\]",
        ),
        (
            {"w": torch.zeros(3), "n": torch.tensor(0)},
            LayoutShapeError,
            r"'w': \(3,\) \(expected \(2, 3\)\)",
        ),
        (
            {"w": torch.zeros(2, 3), "n": torch.tensor(0.0)},
            LayoutDtypeError,
            r"'n': torch.float32 \(expected torch.int64\)",
        ),
        (
            {"w": torch.zeros(2, 3), "n": torch.tensor(0.0, dtype=torch.float64)},  # as wide
            LayoutDtypeError,
            r"'n': torch.float64 \(expected torch.int64\)",
        ),
    ],
)
def test_tensors_that_do_not_match_are_refused_by_name(tensors, error, message):
    with pytest.raises(error, match=message):
        LAYOUT.select(tensors)


def test_matching_tensors_come_in_the_layouts_order():
    n, w = torch.tensor(1), torch.ones(2, 3)
    first, second = LAYOUT.select({"n": n, "w": w})
    assert first is w
    assert second is n


@pytest.mark.parametrize(
    ("fields", "shown"), [(2, r"k0, k1\)"), (9, r"k0, k1, k2, k3, k4, k5, k6, k7, \.\.\.\)")]
)
def test_as_many_tensors_as_fields_are_asked_for_by_the_first_names(fields, shown):
    layout = BlockLayout.of({f"k{i}": torch.zeros(1) for i in range(fields)})
    with pytest.raises(LayoutKeyError, match=rf"tensors: 1 \(expected {fields}: {shown}"):
        layout.check([torch.zeros(1)])
