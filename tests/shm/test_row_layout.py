from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_unilab.shm.row_layout import RowLayout

DTYPES = [torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128]

fields = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=2).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=6,
)


def blocks(layout: RowLayout, rows: int) -> list[torch.Tensor]:
    return [torch.zeros(rows, width, dtype=torch.int32) for width in layout.widths]


@given(fields)
@settings(max_examples=60, deadline=None)
def test_fields_of_a_row_do_not_overlap(specs):
    layout = RowLayout.of(specs)
    views = layout.views(blocks(layout, 3))
    values = [torch.randint(0, 2, view.shape).to(view.dtype) for view in views]

    for view, value in zip(views, values, strict=True):
        view.copy_(value)

    for view, value, spec in zip(views, values, specs, strict=True):
        assert (tuple(view.shape[1:]), view.dtype) == spec
        assert torch.equal(view, value)


@given(fields)
@settings(max_examples=60, deadline=None)
def test_each_field_is_aligned_in_every_row(specs):
    layout = RowLayout.of(specs)

    for field in layout.fields:
        assert field.offset % field.dtype.itemsize == 0
        assert layout.widths[field.part] * 4 % field.dtype.itemsize == 0


def test_only_the_end_of_a_row_is_padded():
    floats = [((size,), torch.float32) for size in (17, 6, 1, 17)]
    flags = [((1,), torch.bool)] * 6

    assert sum(RowLayout.of([*flags, *floats]).widths) * 4 == 172  # 170 bytes


def test_views_of_every_second_row_are_views_of_the_block():
    layout = RowLayout.of([((2,), torch.int64)])
    (block,) = blocks(layout, 6)

    layout.views([block[1::2]])[0].fill_(7)

    assert layout.views([block])[0][:, 0].tolist() == [0, 7, 0, 7, 0, 7]


def test_small_fields_of_all_rows_lie_close_together():
    layout = RowLayout.of([((17,), torch.float32), ((1,), torch.bool), ((), torch.int64)])

    assert layout.widths == (17, 4)
    assert [field.part for field in layout.fields] == [0, 1, 1]
