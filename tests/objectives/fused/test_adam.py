from __future__ import annotations

from copy import deepcopy
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.objectives.fused.adam import FlatAdam, _move_rate, rate_of


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 2), (3,), ())]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": torch.tensor(1e-2)},
        {"lr": 0.1},
        {"betas": (0.5, 0.6)},
        {"eps": 0.1},
        {"weight_decay": 0.1},
    ],
    ids=str,
)
def test_a_step_is_that_of_its_optimiser_to_the_bit_with_the_settings_that_it_has_then(settings):
    ours, theirs = _parameters(), _parameters()
    flat, same = FlatAdam(ours, 1e-2), FlatAdam(theirs, 1e-2)
    for i in range(3):
        for adam in (flat, same):
            adam.optimizer.param_groups[0].update(settings)
            adam.grad.copy_(torch.randn(10, generator=torch.Generator().manual_seed(i)))
        flat.step()
        same.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_parameters_and_gradients_are_views_of_one_tensor_each_and_keep_their_values():
    parameters, before = _parameters(), _parameters()
    flat = FlatAdam(parameters, 1e-2)
    flat.grad.fill_(2.0)
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    assert all((p.grad == 2.0).all() for p in parameters)
    flat.flat.zero_()
    assert not any(p.any() for p in parameters)


@pytest.mark.parametrize("drop", [lambda p: None, lambda p: p.grad + 1.0], ids=["none", "other"])
def test_gradients_that_others_dropped_or_replaced_are_views_again(drop):
    parameters = _parameters()
    flat = FlatAdam(parameters, 1e-2)
    flat.grad.fill_(2.0)
    expected = [drop(p) for p in parameters]
    for parameter, gradient in zip(parameters, expected, strict=True):
        parameter.grad = gradient
    flat.optimizer.zero_grad()  # drops that of the one tensor
    flat.check()
    assert (flat.grad == (0.0 if expected[0] is None else 3.0)).all()
    for parameter in parameters:
        parameter.grad.fill_(4.0)
    assert (flat.grad == 4.0).all()
    (group,) = flat.optimizer.param_groups
    assert group["params"][0].grad is flat.grad


MOVES = {
    "clone": lambda ps: setattr(ps[1], "data", ps[1].data.clone()),
    "dtype": lambda ps: setattr(ps[0], "data", ps[0].data.double()),
    "another": lambda ps: FlatAdam(ps, 1e-2),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_parameter_whose_memory_has_moved_is_refused(move):
    parameters = _parameters()
    flat = FlatAdam(parameters, 1e-2)
    flat.check()
    move(parameters)
    with pytest.raises(ConfigError, match=r"parameter of shape \(3.*: its memory has moved"):
        flat.check()


def test_a_parameter_that_was_frozen_since_is_refused():
    parameters = _parameters()
    flat = FlatAdam(parameters, 1e-2)
    parameters[1].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"parameter of shape .*: frozen since .*fused=False"):
        flat.check()


@pytest.mark.parametrize("other", ["amsgrad", "maximize", "decoupled_weight_decay"])
def test_an_optimiser_that_is_to_be_another_than_adam_is_refused(other):
    flat = FlatAdam(_parameters(), 1e-2)
    flat.optimizer.param_groups[0][other] = True
    with pytest.raises(ConfigError, match=rf"optimizer: \['{other}'\] .*fused=False"):
        flat.check()


def test_another_group_of_parameters_is_refused():
    flat = FlatAdam(_parameters(), 1e-2)
    flat.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    with pytest.raises(ConfigError, match=r"optimizer: 2 groups of parameters \(expected 1"):
        flat.check()


def test_a_copy_whose_parameters_are_no_views_is_refused():
    copy = deepcopy(FlatAdam(_parameters(), 1e-2))
    with pytest.raises(ConfigError, match="its memory has moved"):
        copy.check()


def test_moments_of_a_silent_unit_end_at_zero_without_denormal_numbers():
    flat = FlatAdam([nn.Parameter(torch.ones(4))], 1e-2)
    (state,) = flat.optimizer.state.values()
    # A gradient whose square is denormal, one whose moments decay to such, one that goes on, NaN.
    flat.grad.copy_(torch.tensor([1e-20, 1e-6, 1.0, float("nan")]))
    for i in range(2000):
        flat.step()
        flat.grad[:2] = 0.0
        moments = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
        if i >= 32:
            assert not ((moments != 0) & (moments.abs() < torch.finfo(torch.float32).tiny)).any()
    assert (moments[:, 2] > 0.8).all()
    assert moments[:, 3].isnan().all()
    assert moments[0, :2].tolist() == [0.0, 0.0]


def test_an_optimizer_that_is_loaded_continues_bit_for_bit_with_moments_that_decay():
    whole, other = (FlatAdam([nn.Parameter(torch.ones(2))], 1e-2) for _ in range(2))
    whole.grad.copy_(torch.tensor([1e-33, 1.0]))  # of the first the moment becomes 0 on the way
    for i in range(200):
        whole.step()
        whole.grad.zero_()
        if i == 40:  # between two looks at the moments
            other.flat.copy_(whole.flat)
            other.optimizer.load_state_dict(deepcopy(whole.optimizer.state_dict()))
        elif i > 40:
            other.step()
            for one, same in zip(*map(_moments, (whole, other)), strict=True):
                assert torch.equal(one, same)


def _moments(flat: FlatAdam) -> list[torch.Tensor]:
    (state,) = flat.optimizer.state.values()
    return [state["exp_avg"], state["exp_avg_sq"]]


def test_a_learning_rate_that_is_loaded_comes_to_the_device_of_the_parameters():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=torch.tensor(1e-3))
    _move_rate(torch.device("meta"), optimizer)
    assert optimizer.param_groups[0]["lr"].device.type == "meta"


def test_a_learning_rate_is_moved_when_a_state_is_loaded(monkeypatch):
    flat = FlatAdam(_parameters(), 1e-2)
    moved = Mock()
    monkeypatch.setattr("torchrl_unilab.objectives.fused.adam._move_rate", moved)
    flat.optimizer.load_state_dict(deepcopy(flat.optimizer.state_dict()))
    moved.assert_called_once_with(flat.flat.device, flat.optimizer)


@pytest.mark.usefixtures("double_precision")
def test_a_rate_that_becomes_a_tensor_within_a_step_is_of_single_precision_and_changed_outside():
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=1e-3)
    with torch.inference_mode():
        rate = rate_of(optimizer)
    assert rate.dtype == torch.float32
    rate.mul_(0.5)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(5e-4)
    assert rate_of(optimizer) is rate
