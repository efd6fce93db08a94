"""Arguments of TorchRL's storages: `PackedReplayStorage` honours them or refuses them by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torchrl.data import Composite, LazyMemmapStorage, LazyTensorStorage, Unbounded

from tests.support.transitions import replay_of, transitions
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.errors import ConfigError


def keyword_defaults(cls: type) -> dict[str, Any]:
    """The keyword-only arguments of a class, each at its default."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("stock", [LazyTensorStorage, LazyMemmapStorage])
def test_every_keyword_of_a_stock_storage_is_accepted_at_its_default(stock):
    with PackedReplayStorage(4, **keyword_defaults(stock)) as storage:
        assert storage.max_size == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", None),
        ("device", "cpu"),
        ("device", torch.device("cpu")),
        ("consolidated", True),
        ("shared_init", True),
        ("existsok", True),
        ("auto_cleanup", True),
    ],
)
def test_a_value_that_shared_rows_honour_changes_nothing(name, value):
    with replay_of(transitions(3), 4, **{name: value}) as storage:
        assert (storage.device, storage.ndim, len(storage)) == (torch.device("cpu"), 1, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "cuda:1"),
        ("device", torch.device("meta")),
        ("device", "auto"),
        ("ndim", 2),
        ("compilable", True),
        ("cleanup_memmap", False),
        ("scratch_dir", "/tmp/rows"),
        ("auto_cleanup", False),
    ],
)
def test_a_value_that_shared_rows_cannot_honour_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"PackedReplayStorage {name}: .*{value}.* \(expected"):
        PackedReplayStorage(4, **{name: value})


def test_an_unknown_argument_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match=r"PackedReplayStorage.* unexpected .*'capacity'"):
        PackedReplayStorage(4, capacity=4)


def test_a_storage_of_a_spec_takes_them_too():
    with PackedReplayStorage.from_spec(Composite(a=Unbounded(2)), 4, device="cpu") as storage:
        assert storage.initialized
