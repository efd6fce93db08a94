"""Both halves of the copying of rows do the same, and the native one takes only what it may."""

from __future__ import annotations

import shutil
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_unilab.data.packed_replay import PackedReplayStorage
from torchrl_unilab.shm import row_copy
from torchrl_unilab.shm.row_copy import RowCopy, RowFinder, is_run, native_rows
from torchrl_unilab.shm.row_layout import RowLayout

DTYPES = [torch.bool, torch.uint8, torch.float16, torch.int32, torch.float32, torch.int64]
FIELDS = [
    (("x",), (3,), torch.float32),
    (("next", "reward"), (1,), torch.float64),
    (("next", "done"), (1,), torch.bool),
]


def rows(count: int = 4) -> TensorDict:
    return TensorDict(
        {
            "x": torch.rand(count, 3),
            "next": {
                "reward": torch.rand(count, 1, dtype=torch.float64),
                "done": torch.zeros(count, 1, dtype=torch.bool),
            },
        },
        [count],
    )


def finder(*finite: str) -> RowFinder:
    return RowFinder(TensorDict, FIELDS, [tuple(key.split(".")) for key in finite])


def test_rows_are_copied_natively_where_there_is_a_compiler() -> None:
    assert native_rows() or not (shutil.which("cc") or shutil.which("gcc"))


@settings(max_examples=200)
@given(st.data())
def test_native_and_torch_copies_are_the_same_bits(data: st.DataObject) -> None:
    sizes = st.sampled_from([(), (1,), (2,), (3,), (5, 7), (17,), (33,), (64,), (70,)])
    specs = data.draw(st.lists(st.tuples(sizes, st.sampled_from(DTYPES)), min_size=1, max_size=12))
    fields = [(f"f{i}", shape, dtype) for i, (shape, dtype) in enumerate(specs)]
    layout = RowLayout.of([], fields)
    capacity = data.draw(st.integers(1, 150))
    count = data.draw(st.integers(1, capacity))
    at = data.draw(st.integers(0, capacity - 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    tensors = {
        name: torch.randint(0, 2, (count, *shape), generator=generator).to(dtype)
        if dtype is torch.bool
        else torch.randint(0, 100, (count, *shape), generator=generator).to(dtype)
        for name, shape, dtype in fields
    }
    found = RowFinder(
        TensorDict, [((name,), shape, dtype) for name, shape, dtype in fields], []
    ).find(TensorDict(tensors, [count]), count)
    assert (found is not None) == native_rows()
    blocks = [torch.full((capacity, layout.words), -1, dtype=torch.int32) for _ in range(2)]
    RowCopy(layout, blocks[0], list(tensors)).put(list(tensors.values()), at)
    if found is not None:
        RowCopy(layout, blocks[1], list(tensors)).put_found(found, count, at)
        assert torch.equal(*blocks)
    views = layout.views(blocks[0])
    places = torch.arange(at, at + count).remainder(capacity)
    for name, tensor in tensors.items():
        assert torch.equal(views[name][places], tensor)


def test_found_tensors_are_those_of_the_rows_in_the_order_of_the_fields() -> None:
    if not native_rows():
        assert finder().find(rows(), 4) is None
        return
    given_ = rows()
    other = TensorDict({"next": given_["next"].select("done", "reward"), "x": given_["x"]}, [4])
    for some in (given_, other):
        found = finder("next.reward").find(some, 4)
        assert found is not None
        for tensor, (key, _, _) in zip(found[0], FIELDS, strict=True):
            assert tensor is given_[key]
        assert struct.unpack("=3q", found[1]) == tuple(t.data_ptr() for t in found[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x", torch.rand(4, 2)),
        ("x", torch.rand(4, 3).double()),
        ("x", torch.rand(3, 4).t()),
        ("x", torch.rand(1, 3).expand(4, 3)),
        ("x", torch._neg_view(torch.rand(4, 3))),
        ("x", torch.nn.Parameter(torch.rand(4, 3))),
        ("x", torch.rand(4, 3, device="meta")),
        ("x", TensorDict({"y": torch.rand(4, 3)}, [4])),
        (("next", "more"), torch.rand(4, 3)),
        ("more", torch.rand(4, 3)),
        ("next", torch.rand(4, 3)),
        (("next", "reward"), torch.full((4, 1), torch.nan, dtype=torch.float64)),
        (("next", "reward"), torch.full((4, 1), torch.inf, dtype=torch.float64)),
        ("x", torch.tensor([[0.0, 0.0, 0.0]] * 3 + [[0.0, 0.0, -torch.inf]])),
        ("x", torch.tensor([[0.0, torch.nan, 0.0]] + [[0.0, 0.0, 0.0]] * 3)),
    ],
)
def test_rows_that_need_a_second_look_are_not_found(key: str, value: object) -> None:
    changed = rows()
    assert (finder("next.reward", "x").find(changed, 4) is not None) == native_rows()
    changed[key] = value
    assert finder("next.reward", "x").find(changed, 4) is None


def test_tensors_without_memory_are_left_to_torch() -> None:
    freed = torch.rand(4, 3)
    freed.untyped_storage().resize_(0)
    for x in (freed, torch._efficientzerotensor(4, 3)):
        for keys in ((), ("x",)):
            assert finder(*keys).find(rows().set("x", x), 4) is None
    storage = PackedReplayStorage(8)
    storage.append(rows())
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        storage.append(rows().set("x", freed))
    zeros = storage.append(rows().set("x", torch._efficientzerotensor(4, 3)))
    assert not storage.get(zeros)["x"].any()
    storage.close()


def test_a_missing_key_another_count_and_another_class_are_not_found() -> None:
    assert finder().find(rows().exclude("x"), 4) is None
    assert finder().find(rows().exclude(("next", "done")), 4) is None
    assert finder().find(rows(), 3) is None
    assert finder().find(TensorDict.lazy_stack([rows()[i] for i in range(4)]), 4) is None
    assert finder().find(None, 4) is None


def test_values_need_be_finite_only_where_asked() -> None:
    infinite = rows()
    infinite["x"][0, 0] = torch.inf
    assert (finder("next.reward").find(infinite, 4) is not None) == native_rows()
    largest = rows()
    largest["x"].fill_(torch.finfo(torch.float32).max)
    largest["next", "reward"].fill_(-torch.finfo(torch.float64).max)
    assert (finder("next.reward", "x").find(largest, 4) is not None) == native_rows()


def test_dtypes_that_cannot_be_looked_at_are_left_to_torch() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        short = RowFinder(TensorDict, [(("x",), (), dtype)], [("x",)])
        assert short.find(TensorDict({"x": torch.ones(2).to(dtype)}, [2]), 2) is None
    conjugated = RowFinder(TensorDict, [(("x",), (), torch.complex64)], [])
    values = torch.ones(2, dtype=torch.complex64).conj()
    assert conjugated.find(TensorDict({"x": values}, [2]), 2) is None


@settings(max_examples=200)
@given(st.integers(1, 40), st.data())
def test_a_run_is_what_counts_up_in_a_circle(capacity: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 2 * capacity))
    first = data.draw(st.integers(0, capacity - 1))
    run = torch.arange(first, first + count).remainder(capacity)
    assert is_run(run, first, capacity)
    wrong = run.clone()
    i = data.draw(st.integers(0, count - 1))
    wrong[i] = data.draw(st.integers(-3, capacity + 3).filter(lambda value: value != run[i]))
    assert not is_run(wrong, first, capacity)
    assert is_run(run.repeat_interleave(2)[::2], first, capacity)


@pytest.mark.parametrize(
    ("fields", "capacity", "at", "count", "sources"),
    [
        (struct.pack("=3q", 0, 4, 0), 4, 4, 1, b"\0" * 8),
        (struct.pack("=3q", 0, 4, 0), 4, -1, 1, b"\0" * 8),
        (struct.pack("=3q", 0, 4, 0), 4, 0, 5, b"\0" * 8),
        (struct.pack("=3q", 0, 4, 0), 4, 0, -1, b"\0" * 8),
        (struct.pack("=3q", 0, 4, 0), 4, 0, 1, b"\0" * 16),
        (struct.pack("=3q", 0, 4, 1), 4, 0, 1, b"\0" * 8),
        (b"", 4, 0, 1, b"\0" * 8 * 300),
    ],
)
def test_what_lies_outside_the_block_is_not_written(
    fields: bytes, capacity: int, at: int, count: int, sources: bytes
) -> None:
    if row_copy._native is None:
        return
    with pytest.raises((ValueError, IndexError), match=r"cannot put rows: .* \(expected"):
        row_copy._native.put(fields, 0, 4, capacity, at, count, sources)


def test_a_storage_keeps_the_same_rows_without_the_native_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = []
    for native in (row_copy._native, None):
        monkeypatch.setattr(row_copy, "_native", native)
        generator = torch.Generator().manual_seed(0)
        with PackedReplayStorage(10) as storage:
            for count in (4, 5, 3, 10, 7):
                some = rows(count)
                some["x"].uniform_(generator=generator)
                some["next", "reward"].uniform_(generator=generator)
                storage.set(torch.arange(storage.ptr, storage.ptr + count) % 10, some)
            kept.append(storage.rows.block.numpy().copy())
    np.testing.assert_array_equal(*kept)
