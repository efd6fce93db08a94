from __future__ import annotations

import signal
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn
from torchrl.weight_update import WeightStrategy

from torchrl_unilab.errors import ConfigError, LayoutKeyError
from torchrl_unilab.weight_update.module_weights import ModuleWeights, is_expanded, named_tensors


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


def test_private_tensors_leave_shared_memory_and_keep_value_kind_and_ties():
    net = _tied().share_memory()
    net[0].bias.requires_grad_(False)
    shared = {k: v.clone() for k, v in net.state_dict().items()}
    kinds = {k: (type(v), v.requires_grad) for k, v in net.named_parameters()}
    known = list(net.parameters())  # as a module may keep beside its registry
    ModuleWeights(net).make_private()
    assert all(one is other for one, other in zip(known, net.parameters(), strict=True))
    assert not any(t.is_shared() for t in net.state_dict().values())
    assert net[2].weight is net[0].weight
    assert {k: (type(v), v.requires_grad) for k, v in net.named_parameters()} == kinds
    for key, value in net.state_dict().items():
        assert torch.equal(value, shared[key])


def test_a_lazy_module_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'0.weight' is lazy"):
        ModuleWeights(nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_module_of_torch_jit_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"module '1': compiled by torch\.jit \(expected"):
        ModuleWeights(nn.Sequential(nn.Tanh(), torch.jit.script(nn.Linear(2, 1))))


def test_leaves_of_a_dictionary_whose_keys_have_dots_are_weights():
    net = nn.Module()
    net.params = TensorDictParams(
        TensorDict({"0.weight": torch.ones(2), "a": {"b": torch.ones(1)}})
    )
    weights = ModuleWeights(net)
    assert weights.names == ["params.0.weight", "params.a.b"]
    weights.make_private()
    assert [t.tolist() for t in weights.tensors()] == [[1.0, 1.0], [1.0]]


def test_a_buffer_whose_items_share_one_place_gets_memory_for_each():
    net = nn.Module()
    net.register_buffer("scale", torch.tensor(2.0).expand(3))
    ModuleWeights(net).make_private()
    net.scale[0] = 1.0
    assert net.scale.tolist() == [1.0, 2.0, 2.0]


def test_a_module_is_to_be_looked_up_anew_once_a_tensor_came_or_went():
    net = nn.Linear(2, 1)
    net.register_buffer("mean", None)
    weights = ModuleWeights(net)
    assert len(weights.tensors()) == 2
    net.mean = torch.ones(2)
    assert weights.tensors() is None
    weights = ModuleWeights(net)
    assert len(weights.tensors()) == 3
    net.mean = None
    assert weights.tensors() is None


@pytest.mark.parametrize("add", [nn.Module.register_buffer, nn.Module.register_parameter])
def test_a_module_is_to_be_looked_up_anew_once_it_has_another_name(add):
    net = nn.Linear(2, 1)
    weights = ModuleWeights(net)

    add(net, "scale", nn.Parameter(torch.ones(1)))

    assert weights.tensors() is None


def test_a_layer_in_two_places_has_weights_under_both_names_detached():
    layer = nn.Linear(2, 1, bias=False)

    named = ModuleWeights(nn.Sequential(layer, layer)).named()

    assert [*named] == ["0.weight", "1.weight"]
    assert not any(tensor.requires_grad for tensor in named.values())


def test_parameters_that_leave_the_meta_device_keep_kind_flag_and_ties():
    net = _tied().to("meta")
    net[0].bias.requires_grad_(False)
    net[2].weight = net[0].weight

    ModuleWeights(net).make_private()

    assert net[2].weight is net[0].weight
    assert not any(tensor.is_meta for tensor in net.state_dict().values())
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == ["0.bias"]


class _Stateful(nn.Module):
    """Its extra state is whatever it is told."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize("state", [None, True, 3, 0.1, {"a": {"b": False}, "c": 2}])
def test_extra_state_arrives_with_its_own_types_and_values(state):
    sent, received = nn.Sequential(_Stateful(state)), nn.Sequential(_Stateful(None))

    ModuleWeights(received).set_extra_state(ModuleWeights(sent).extra_state())

    assert repr(received[0].state) == repr(state)


def test_extra_state_as_torchrls_strategy_extracts_it_is_that_of_the_module():
    net = _Stateful({"mean": torch.ones(1)})

    named = named_tensors(WeightStrategy().extract_weights(net))

    assert named == ModuleWeights(net).extra_state() == {"_extra_state.mean": torch.ones(1)}


class _Warning(_Stateful):
    """Warns when it is asked for its extra state."""

    def get_extra_state(self) -> object:
        warnings.warn("no statistics yet", self.category, stacklevel=2)
        return self.state


def test_extra_state_is_taken_without_the_warning_that_there_are_no_statistics_yet():
    net = _Warning(3)
    net.category = UserWarning
    assert [*ModuleWeights(net).extra_state()] == ["_extra_state#int"]
    net.category = DeprecationWarning  # of which the user is to hear
    with pytest.warns(DeprecationWarning, match="no statistics"):
        ModuleWeights(net)


class _Yielding(_Stateful):
    """Lets other threads run before it returns its extra state."""

    def get_extra_state(self) -> object:
        time.sleep(0)
        return self.state


def test_extra_state_taken_in_several_threads_silences_no_later_warning():
    before = [*warnings.filters]

    def take() -> None:
        for _ in range(200):
            ModuleWeights(_Yielding(3))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [*warnings.filters] == before


def test_extra_state_is_copied_from_the_tensors_that_are_given():
    net, values = _Stateful({"mean": torch.zeros(1)}), {"_extra_state.mean": torch.ones(1)}
    ModuleWeights(net).set_extra_state(values)

    values["_extra_state.mean"].fill_(9.0)

    assert net.state["mean"].item() == 1.0


def test_extra_state_that_is_one_tensor_arrives_detached():
    net, sent = _Stateful(torch.zeros(1)), _Stateful(torch.ones(1, requires_grad=True))

    ModuleWeights(net).set_extra_state(ModuleWeights(sent).extra_state())

    assert (net.state.item(), net.state.requires_grad) == (1.0, False)


@pytest.mark.parametrize("state", ["high", [1], np.float64(0.5), signal.SIGINT])
@pytest.mark.parametrize("nested", [False, True])
def test_extra_state_that_would_not_arrive_as_what_it_is_is_refused_by_its_type(state, nested):
    at, given = (".statistics.mean", {"statistics": {"mean": state}}) if nested else ("", state)
    with pytest.raises(ConfigError, match=f"'_extra_state{at}': {type(state).__name__} .expected"):
        ModuleWeights(_Stateful(given))


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, LayoutKeyError, "'a.b' comes twice"),
        ({"a": {"b": "high"}}, ConfigError, r"'a.b' is a str \(expected a tensor\)"),
    ],
)
def test_weights_that_are_ambiguous_or_no_tensors_are_refused_by_their_key(weights, error, message):
    with pytest.raises(error, match=message):
        named_tensors(weights)


@pytest.mark.parametrize(
    ("tensor", "expanded"),
    [
        (torch.zeros(2, 3), False),
        (torch.zeros(()).expand(1), False),
        (torch.zeros(1, 2).expand(0, 2), False),
        (torch.zeros(1).expand(5), True),
        (torch.zeros(3, 1).expand(3, 2), True),
    ],
)
def test_a_tensor_is_expanded_if_two_of_its_items_share_a_place(tensor, expanded):
    assert is_expanded(tensor) is expanded


@pytest.mark.parametrize("weights", [None, [torch.zeros(1)], torch.zeros(1)])
def test_what_are_no_weights_is_refused_by_its_type(weights):
    with pytest.raises(ConfigError, match=rf"weights: {type(weights).__name__} \(expected a mod"):
        named_tensors(weights)
