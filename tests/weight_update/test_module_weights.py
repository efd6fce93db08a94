from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from torchrl_unilab.errors import ConfigError
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


def test_leaves_of_a_dictionary_whose_keys_have_dots_are_weights():
    net = nn.Module()
    net.params = TensorDictParams(
        TensorDict({"0.weight": torch.ones(2), "a": {"b": torch.ones(1)}})
    )
    weights = ModuleWeights(net)
    assert weights.names == ["params.0.weight", "params.a.b"]
    weights.make_private()
    assert [t.tolist() for t in weights.tensors(net)] == [[1.0, 1.0], [1.0]]


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
    assert len(weights.tensors(net)) == 2
    net.mean = torch.ones(2)
    assert weights.tensors(net) is None
    weights = ModuleWeights(net)
    assert len(weights.tensors(net)) == 3
    net.mean = None
    assert weights.tensors(net) is None


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
