from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    vtrace_advantage_estimate,
)

from torchrl_unilab.errors import LayoutDtypeError, LayoutShapeError
from torchrl_unilab.objectives import timeout_bootstrap, vtrace

# Seven steps of ten operations each on numbers below 100: 70 * 100 * 2**-53 < 1e-12.
ROUNDING = {"rtol": 0.0, "atol": 1e-12}
# TorchRL multiplies it by an integer tensor: a Python number would be rounded to float32.
double = partial(torch.tensor, dtype=torch.float64)


def _inputs(seed: int, off_policy: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, time = 3, 7

    def normal() -> torch.Tensor:
        return torch.randn(batch, time, generator=generator, dtype=torch.float64)

    done = torch.rand(batch, time, generator=generator) < 0.3
    v_tm1 = normal()
    v_t = torch.cat([v_tm1[:, 1:], normal()[:, :1]], 1)
    return {
        "log_rho": off_policy * normal(),
        "v_tm1": v_tm1,
        "v_t": torch.where(done, normal(), v_t),
        "r_t": normal(),
        "done_t": done,
        "terminated_t": done & (torch.rand(batch, time, generator=generator) < 0.5),
    }


@pytest.mark.parametrize(
    ("done", "terminated", "earned"),
    [(True, False, 0.75 * 8.0), (True, True, 0.0), (False, False, 0.0)],
)
def test_only_an_episode_that_was_cut_short_would_have_earned_more(done, terminated, earned):
    value = torch.tensor([[8.0, 8.0]], dtype=torch.float64)
    flags = (torch.tensor([[flag, False]]) for flag in (done, terminated))
    extra = timeout_bootstrap(value, *flags, gamma=0.75)
    assert extra.dtype is torch.float64
    assert extra.tolist() == [[earned, 0.0]]


BOUND = st.floats(0.5, 2.0)


@given(
    st.integers(0, 1000),
    st.floats(0.5, 1.0),
    st.fixed_dictionaries({}, optional={"rho_bar": BOUND, "c_bar": BOUND}),
)
def test_it_equals_torchrls_estimate_without_decay(seed, gamma, bounds):
    x = _inputs(seed, off_policy=0.5)
    targets, advantages = vtrace(**x, gamma=gamma, **bounds)
    log_rho, *others = (value.unsqueeze(-1) for value in x.values())
    behaviour = torch.zeros_like(log_rho)
    rho_thresh, c_thresh = (double(bounds.get(name, 1.0)) for name in ("rho_bar", "c_bar"))
    expected_advantages, expected_targets = vtrace_advantage_estimate(
        double(gamma), log_rho, behaviour, *others, rho_thresh=rho_thresh, c_thresh=c_thresh
    )
    torch.testing.assert_close(targets, expected_targets.squeeze(-1), **ROUNDING)
    torch.testing.assert_close(advantages, expected_advantages.squeeze(-1), **ROUNDING)


@given(st.integers(0, 1000), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_on_policy_it_is_generalised_advantage_estimation(seed, gamma, lambda_):
    x = _inputs(seed, off_policy=0.0)
    targets, advantages = vtrace(**x, gamma=gamma, lambda_=lambda_)
    _, *others = (value.unsqueeze(-1) for value in x.values())
    expected_advantages, expected_targets = generalized_advantage_estimate(
        double(gamma), double(lambda_), *others
    )
    torch.testing.assert_close(advantages, expected_advantages.squeeze(-1), **ROUNDING)
    torch.testing.assert_close(targets, expected_targets.squeeze(-1), **ROUNDING)


@pytest.mark.parametrize("name", ["v_tm1", "v_t", "r_t", "done_t", "terminated_t"])
def test_tensors_of_another_shape_are_refused_by_name(name):
    inputs = _inputs(0, 1.0)
    inputs[name] = inputs[name][:, :1]
    with pytest.raises(LayoutShapeError, match=rf"{name} has shape \(3, 1\) \(expected \(3, 7\)\)"):
        vtrace(**inputs, gamma=0.9)


@pytest.mark.parametrize("name", ["done_t", "terminated_t"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_flags_that_are_not_bool_are_refused_by_name(name, dtype):
    inputs = _inputs(0, 1.0)
    inputs[name] = inputs[name].to(dtype)
    with pytest.raises(LayoutDtypeError, match=rf"vtrace: {name} is {dtype} \(expected"):
        vtrace(**inputs, gamma=0.9)
    flags = {flag: inputs[flag] for flag in ("done_t", "terminated_t")}
    with pytest.raises(LayoutDtypeError, match=rf"timeout_bootstrap: {name} is {dtype} \("):
        timeout_bootstrap(inputs["v_t"], **flags, gamma=0.9)


@pytest.mark.parametrize("name", ["log_rho", "v_t", "done_t", "terminated_t"])
def test_arrays_are_refused_by_name(name):
    inputs = _inputs(0, 1.0)
    inputs[name] = inputs[name].numpy()
    with pytest.raises(LayoutDtypeError, match=rf"vtrace: {name} is ndarray \(expected a tensor"):
        vtrace(**inputs, gamma=0.9)
    if name != "log_rho":
        names = ("v_t", "done_t", "terminated_t")
        with pytest.raises(LayoutDtypeError, match=rf"timeout_bootstrap: {name} is ndarray"):
            timeout_bootstrap(**{each: inputs[each] for each in names}, gamma=0.9)


def test_values_of_another_shape_than_the_flags_are_refused():
    flags = torch.tensor([True, False])
    with pytest.raises(LayoutShapeError, match=r"done_t has shape \(2,\) \(expected \(2, 1\)\)"):
        timeout_bootstrap(torch.ones(2, 1), flags, flags, gamma=0.9)


@pytest.mark.parametrize(
    ("part", "shape"),
    [(np.s_[:, :0], r"\(3, 0\)"), (np.s_[0, 0], r"\(\)")],
    ids=["empty", "scalar"],
)
def test_rollouts_without_a_step_are_refused(part, shape):
    inputs = {name: tensor[part] for name, tensor in _inputs(0, 1.0).items()}
    with pytest.raises(LayoutShapeError, match=rf"shape {shape} .*with a step"):
        vtrace(**inputs, gamma=0.9)


def test_what_is_not_finite_after_a_terminal_state_reaches_no_target():
    v_t = torch.tensor([[2.0, torch.nan, 1.0, torch.inf]])
    done = torch.tensor([[False, True, False, True]])
    kept = vtrace(*_ending(v_t.nan_to_num(0.0, 0.0), done), gamma=0.9, lambda_=0.9)
    assert timeout_bootstrap(v_t, done, done, gamma=0.5).tolist() == [[0.0] * 4]
    for found, expected in zip(
        vtrace(*_ending(v_t, done), gamma=0.9, lambda_=0.9), kept, strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["log_rho", "v_tm1", "v_t"])
def test_targets_and_advantages_have_no_gradient(name):
    inputs = _inputs(0, 1.0)
    inputs[name].requires_grad_()
    assert not any(tensor.requires_grad for tensor in vtrace(**inputs, gamma=0.9))


def _ending(v_t: torch.Tensor, done: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A rollout of one environment whose episodes end in terminal states."""
    zeros = torch.zeros_like(v_t)
    return zeros, zeros + 1.0, v_t, zeros + 1.0, done, done
