from __future__ import annotations

import json

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from torchrl_unilab.data.schema import TensorSchema, leaves
from torchrl_unilab.errors import LayoutDtypeError, LayoutError, LayoutKeyError, LayoutShapeError


def _items(*batch: int) -> TensorDict:
    return TensorDict(
        {
            "observation": torch.rand(*batch, 3),
            "steps": torch.arange(max(1, TensorDict(batch_size=batch).numel())).view(*batch, 1),
            "next": {
                "observation": torch.rand(*batch, 3),
                "done": torch.ones(*batch, 1, dtype=torch.bool),
            },
        },
        batch,
    )


def test_a_schema_has_the_keys_shapes_and_dtypes_of_its_example_in_order():
    schema = TensorSchema.of(_items(2))

    assert schema.batch_size == (2,)
    assert schema.fields == (
        (("observation",), (2, 3), torch.float32),
        (("steps",), (2, 1), torch.int64),
        (("next", "observation"), (2, 3), torch.float32),
        (("next", "done"), (2, 1), torch.bool),
    )
    assert schema.names == ("observation", "steps", "next.observation", "next.done")


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (TensorDict(), LayoutKeyError),
        (TensorDict(x=torch.ones(1), empty=TensorDict()), LayoutKeyError),
        (TensorDict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}), LayoutKeyError),
        (TensorDict(x=torch.ones(1), name=NonTensorData("a")), LayoutDtypeError),
        (TensorDict(x=torch.ones(2), name=NonTensorStack("a", "b")), LayoutDtypeError),
        (TensorDict(x=torch.ones(1).to_sparse()), LayoutDtypeError),
        (
            TensorDict(x=torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)),
            LayoutDtypeError,
        ),
        (torch.ones(1), LayoutDtypeError),
    ],
    ids=[
        "no tensor",
        "empty nest",
        "one name twice",
        "no tensor in an entry",
        "texts in an entry",
        "a sparse tensor",
        "a jagged tensor",
        "no TensorDict",
    ],
)
def test_what_has_no_schema_is_refused(item, error):
    with pytest.raises(error):
        TensorSchema.of(item)


@pytest.mark.parametrize("batch", [(), (5,), (5, 4)])
def test_selected_tensors_are_those_of_the_items_whatever_their_order(batch):
    items = _items(*batch, 2)
    shuffled = TensorDict(
        {key: items[key] for key in ("next", "steps", "observation")}, items.batch_size
    )

    selected = TensorSchema.of(_items(2)).select(shuffled, batch)

    for tensor, expected in zip(selected, leaves(items).values(), strict=True):
        assert tensor is expected


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda items: items.pop("steps"), LayoutKeyError, "missing ['steps']"),
        (lambda items: items.set("more", torch.ones(5, 1)), LayoutKeyError, "unknown ['more']"),
        (lambda items: items.set("steps", torch.ones(5, 2)), LayoutShapeError, "'steps'"),
        (lambda items: items.set("steps", torch.ones(5, 1)), LayoutDtypeError, "'steps'"),
        (lambda items: items.set_non_tensor("more", "x"), LayoutDtypeError, "'more'"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "no tensor"],
)
def test_other_items_are_refused_by_the_name_of_what_differs(change, error, named):
    items = _items(5)
    change(items)

    with pytest.raises(error) as raised:
        TensorSchema.of(_items()).select(items, (5,))

    assert named in str(raised.value)


def test_keys_to_ignore_may_be_there_and_are_left_out():
    schema = TensorSchema.of(_items())
    items = _items(5).set("index", torch.arange(5))

    assert len(schema.select(items, (5,), ignore=[("index",)])) == len(schema.fields)


def test_a_tensordict_of_tensors_shares_their_memory_and_has_their_batch_size():
    items = _items(5, 2)
    schema = TensorSchema.of(_items(2))

    again = schema.tensordict([*leaves(items).values()], (5,))

    assert again.batch_size == (5, 2)
    assert again["next"].batch_size == (5, 2)
    assert leaves(again).keys() == leaves(items).keys()
    assert all(leaves(again)[key] is leaf for key, leaf in leaves(items).items())


def test_nested_tensordicts_keep_the_batch_dimensions_that_are_theirs():
    wheels = TensorDict({"speed": torch.zeros(2, 3, 4)}, [2, 3, 4])
    agents = TensorDict({"x": torch.zeros(2, 3, 5), "wheels": wheels}, [2, 3])
    schema = TensorSchema.of(_items(2).set("agents", agents))

    assert schema.inner == ((("agents",), (3,)), (("agents", "wheels"), (3, 4)))
    items = schema.empty((6,))
    again = schema.tensordict([*leaves(items).values()], (6,))
    for made in (items, again):
        assert made["next"].batch_size == (6, 2)
        assert made["agents"].batch_size == (6, 2, 3)
        assert made["agents", "wheels"].batch_size == (6, 2, 3, 4)
    assert TensorSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


def test_empty_items_have_the_schema_without_memory_too():
    schema = TensorSchema.of(_items(2))

    assert TensorSchema.of(schema.empty((3,))) == TensorSchema.of(_items(3, 2))
    assert TensorSchema.of(schema.empty(device="meta")) == schema


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.uint8])
def test_a_schema_comes_back_from_json(dtype):
    schema = TensorSchema.of(_items(2).set("more", torch.ones(2, 0, dtype=dtype)))

    assert TensorSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"batch_size": [], "fields": 3},
        {"batch_size": ["two"], "fields": []},
        {"batch_size": [], "fields": [[["x"], [1], "torch.load"]]},
    ],
)
def test_json_of_no_schema_is_refused(saved):
    with pytest.raises(LayoutError, match="saved schema"):
        TensorSchema.from_json(saved)
