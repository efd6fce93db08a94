from __future__ import annotations

import contextlib
import copy
import os
import pickle
import threading
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn

from tests.support.processes import receive, spawned
from torchrl_unilab.errors import (
    ConfigError,
    ContentionError,
    LayoutDtypeError,
    LayoutError,
    LayoutKeyError,
    LayoutShapeError,
    SegmentClosedError,
    SegmentError,
    SegmentSpaceError,
)
from torchrl_unilab.weight_update import UniLabShmTransport

SHAPES = {"w": (2, 3), "b": (3,)}


def _name() -> str:
    return f"unilab-test-{os.getpid()}"


def _state(value: float) -> dict[str, torch.Tensor]:
    return {key: torch.full(shape, value) for key, shape in SHAPES.items()}


def _read_by_name(pipe: Connection, name: str) -> None:
    with UniLabShmTransport.attach(name, SHAPES) as transport:
        state = _state(-1.0)
        version = transport.read_weights_into(state)
        pipe.send((version, state["w"].tolist(), state["b"].tolist()))


def test_the_version_that_is_returned_is_of_the_weights_that_were_given(monkeypatch):
    with UniLabShmTransport.create(SHAPES) as transport:
        publish = transport.cells[0].publish

        def publish_before_another_thread(tensors, **settings):
            version = publish(tensors, **settings)
            publish([*_state(9.0).values()])
            return version

        monkeypatch.setattr(transport.cells[0], "publish", publish_before_another_thread)
        assert transport.write_weights(_state(1.0)) == 1


def test_an_unrelated_process_reads_by_name_what_was_written():
    with UniLabShmTransport.create(SHAPES, name=_name()) as transport:
        assert transport.version == 0
        assert transport.write_weights(_state(1.0)) == 1
        assert transport.write_weights(_state(2.0)) == 2
        with spawned(_read_by_name, transport.name) as (_, pipe):
            assert receive(pipe) == (2, [[2.0] * 3] * 2, [2.0] * 3)


@pytest.mark.parametrize("shape", [3, "3", [2.0], [-1], [True], np.zeros(3)])
def test_what_is_neither_a_shape_nor_a_tensor_is_refused_by_its_key(shape):
    with pytest.raises(ConfigError, match=r"'w' is .* \(expected a shape or a tensor\)"):
        UniLabShmTransport.create({"w": shape})


@pytest.mark.parametrize("kind", [nn.Module, TensorDict, dict])
def test_a_cell_is_created_and_attached_by_a_module_or_its_weights_of_any_kind(kind):
    module = nn.Sequential(nn.BatchNorm1d(2))
    kinds = {TensorDict: TensorDict.from_module(module), dict: module.state_dict()}
    weights = kinds.get(kind, module)
    with UniLabShmTransport.create(weights, name=_name()) as transport:
        transport.write_weights(module)
        with UniLabShmTransport.attach(transport.name, weights) as attached:
            assert attached.read_weights_into(module) == 1


@pytest.mark.parametrize("shapes", [None, 3, [("w", (3,))]])
def test_what_is_neither_shapes_nor_weights_is_refused(shapes):
    with pytest.raises(ConfigError, match=r"expected a module, a TensorDict or a state dict"):
        UniLabShmTransport.create(shapes)


def test_a_shape_may_have_numbers_of_numpy():
    with UniLabShmTransport.create({"w": (np.int64(2), np.int32(3))}) as transport:
        assert transport.newest(0)[1]["w"].shape == (2, 3)


def test_weights_of_shapes_that_do_not_fit_are_refused_before_any_memory_is_taken():
    with pytest.raises(SegmentSpaceError, match="bytes do not fit"):
        UniLabShmTransport.create({"w": (1 << 50,)})


def test_weights_by_number_are_refused_by_the_number():
    with UniLabShmTransport.create(SHAPES) as transport:
        with pytest.raises(ConfigError, match=r"key 0 \(expected names\)"):
            transport.write_weights({0: _state(1.0)})
        assert transport.version == 0


class OfADevice(torch.Tensor):
    """Passes for a tensor of an accelerator, which comes to the host by a copy."""

    is_cpu = False


def test_what_two_threads_publish_from_a_device_is_each_whole():
    shapes = {"w": (200_000,), "b": (200_000,)}

    def publish(value: float) -> None:
        state = {key: torch.full(shapes[key], value).as_subclass(OfADevice) for key in keys}
        for _ in range(200):
            transport.send_weights(state)

    with UniLabShmTransport.create(shapes) as transport:
        keys = transport.cells[0].layout.keys
        threads = [threading.Thread(target=publish, args=(value,)) for value in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            with contextlib.suppress(ContentionError):  # overtaken, which is no tear
                values = torch.stack([*transport.newest(0)[1].values()])
                assert values.min() == values.max()
        for thread in threads:
            thread.join()
        assert transport.version == 400


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ([torch.ones(1).as_subclass(OfADevice), torch.ones(2)], LayoutShapeError),
        ([torch.ones(2), torch.ones(2, device="meta")], ConfigError),
    ],
)
def test_weights_of_a_device_are_refused_where_one_does_not_fit_or_has_no_values(tensors, error):
    with UniLabShmTransport.create({"w": (2,), "b": (2,)}) as transport:
        with pytest.raises(error):
            transport.send_weights(dict(zip(("w", "b"), tensors, strict=True)))
        assert transport.version == 0


def test_a_published_module_that_has_lost_its_values_is_refused():
    net = torch.nn.Linear(2, 2)
    with UniLabShmTransport({0: net}) as transport:
        transport.send_weights(net)
        with pytest.raises(ConfigError, match="meta device"):
            transport.send_weights(net.to("meta"))
        assert transport.version == 1


def test_what_is_created_from_a_state_dict_holds_it_as_version_1():
    with UniLabShmTransport.from_state_dict(_state(5.0)) as transport:
        state = _state(0.0)
        assert transport.version == transport.read_weights_into(state) == 1
        assert state["b"].tolist() == [5.0] * 3
        assert transport.name is None


@pytest.mark.parametrize(
    "into", [lambda net: net, TensorDict.from_module, lambda net: dict(net.named_parameters())]
)
def test_reading_goes_into_a_modules_own_tensors(into):
    source, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    weight = target.weight
    with UniLabShmTransport.from_state_dict(source.state_dict()) as transport:
        transport.read_weights_into(into(target))
    assert target.weight is weight
    assert torch.equal(target.weight, source.weight)


def test_values_that_differ_are_not_read_into_tied_tensors():
    layer = torch.nn.Linear(2, 2)
    tied, before = torch.nn.Sequential(layer, layer), layer.weight.clone()
    source = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with UniLabShmTransport.from_state_dict(source) as transport:
        with pytest.raises(LayoutError, match=r"^weights: '0.weight' and '1.weight' differ"):
            transport.read_weights_into(tied)
        assert torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"w": torch.zeros(2, 3)}, LayoutKeyError),
        ({"w": torch.zeros(2, 3), "b": torch.zeros(2)}, LayoutShapeError),  # a short tensor
        ({"w": torch.zeros(2, 3), "b": torch.zeros(3).long()}, LayoutDtypeError),
    ],
)
def test_what_does_not_match_is_refused_in_both_directions_and_nothing_is_written(state, error):
    with UniLabShmTransport.from_state_dict(_state(5.0)) as transport:
        with pytest.raises(error):
            transport.write_weights(state)
        assert transport.version == 1
        with pytest.raises(error):
            transport.read_weights_into(state)
        assert not state["w"].any()


@pytest.mark.parametrize(
    ("bad", "message"),
    [(torch.eye(2).to_sparse(), r"\['weight'\]: sparse"), (torch.eye(2, device="meta"), "meta")],
    ids=["sparse", "meta"],
)
def test_of_several_workers_none_gets_weights_where_those_of_one_cannot_be_copied(bad, message):
    initial = {worker: {"weight": torch.zeros(2, 2)} for worker in range(2)}
    with UniLabShmTransport(initial) as transport:
        weights = [{"weight": torch.ones(2, 2)}, {"weight": bad}]
        with pytest.raises(ConfigError, match=message):
            transport.send_each(dict(zip(transport.cells.values(), weights, strict=True)))
        assert [cell.version for cell in transport.cells.values()] == [0, 0]


def test_nothing_is_read_into_a_module_without_memory():
    with UniLabShmTransport.from_state_dict(torch.nn.Linear(2, 2)) as transport:
        with torch.device("meta"):
            module = torch.nn.Linear(2, 2)
        with pytest.raises(ConfigError, match=r"\['weight', 'bias'\], without memory of their"):
            transport.read_weights_into(module)


def test_a_module_without_weights_has_versions():
    with UniLabShmTransport.from_state_dict(torch.nn.Identity()) as transport:
        assert transport.read_weights_into(torch.nn.Identity()) == 1


def test_attaching_with_another_layout_or_to_nothing_is_refused():
    transport = UniLabShmTransport.create(SHAPES, name=_name())
    with pytest.raises(LayoutError, match="the same keys, shapes and dtypes"):
        UniLabShmTransport.attach(transport.name, {"w": (3, 2), "b": (3,)})
    transport.close()
    with pytest.raises(SegmentError, match="no segment"):
        UniLabShmTransport.attach(_name(), SHAPES)


def test_a_closed_transport_refuses_use_and_closes_again():
    transport = UniLabShmTransport.create(SHAPES)
    transport.close()
    transport.cleanup()
    with pytest.raises(SegmentClosedError):
        transport.write_weights(_state(1.0))
    with pytest.raises(SegmentClosedError):
        transport.read_weights_into(_state(1.0))


class _Expanded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("e", torch.zeros(1).expand(5))
        self.register_buffer("z", torch.zeros(2))


def test_tensors_without_memory_of_their_own_are_refused_and_nothing_is_written():
    target = _Expanded()
    with UniLabShmTransport({0: {"w": torch.ones(2), "e": torch.ones(5), "z": torch.ones(2)}}) as t:
        with pytest.raises(ConfigError, match=r"cannot read weights: \['e'\], without memory"):
            t.read_weights_into(target)
        assert not target.w.any()


@pytest.mark.parametrize("nested", [None, TensorDict, dict])
def test_tensors_that_are_stacked_anew_at_each_look_are_refused(nested):
    stacked = lazy_stack([TensorDict(w=torch.zeros(3)), TensorDict(w=torch.zeros(3))])
    into = nested(net=stacked) if nested else stacked
    with (
        UniLabShmTransport({0: {"net.w" if nested else "w": torch.ones(2, 3)}}) as transport,
        pytest.raises(ConfigError, match="cannot read weights: stacked lazily"),
    ):
        transport.read_weights_into(into)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_a_transport_is_copied_for_a_new_process_alone(copied):
    with (
        UniLabShmTransport({0: _state(0.0)}) as transport,
        pytest.raises(SegmentError, match="cannot copy or pickle SharedSegment"),
    ):
        copied(transport)


def test_integers_are_cast_to_no_other_ones():
    with UniLabShmTransport({0: {"n": torch.zeros(2, dtype=torch.int32)}}, casts=True) as transport:
        with pytest.raises(LayoutDtypeError):
            transport.send_weights({"n": torch.ones(2, dtype=torch.int64)})
        assert transport.version == 0
