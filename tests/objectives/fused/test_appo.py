from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn.utils import prune
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import SACLoss

from tests.support.altered import altered, hook, subclassed
from tests.support.appo import ACT, OBS, fused, make_loss, make_pool
from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.errors import ConfigError, LayoutShapeError
from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic
from torchrl_unilab.modules.gaussian import GaussianActor
from torchrl_unilab.objectives import APPOLoss, FusedAPPOUpdate
from torchrl_unilab.objectives.fused.appo import STATISTICS
from torchrl_unilab.trainers.loss_updates import APPOStepper

NETWORKS = [((), ()), ((8,), (8,)), ((16, 16), (16, 16)), ((8, 4), (6,)), ((4, 4, 4), (7, 9))]
SETTINGS = [
    {"value_clip": None},
    {"value_clip": 0.0},
    {"value_clip": 0.1, "entropy_coeff": 0.01},
    {"value_clip": 0.5, "critic_coeff": 0.7, "clip_epsilon": 0.03},
    {"value_clip": None, "rho_bar": 0.8, "clip_epsilon": 1.5},
]


def _learnt(loss: APPOLoss) -> dict[str, nn.Parameter]:
    return {name: p for name, p in loss.named_parameters() if not name.startswith("target_")}


def _assert_equals_autograd(loss: APPOLoss, pool: TensorDict) -> None:
    other = deepcopy(loss)
    losses = other(pool)
    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    update = fused(loss, max_grad_norm=float("inf"))
    statistics = update.step(update.prepare(pool))
    expected = torch.stack([losses[key].detach().double() for key in STATISTICS])
    torch.testing.assert_close(statistics[:4], expected[:4], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(statistics[4:], expected[4:], rtol=1e-6, atol=0.0)  # were float32
    for name, parameter in _learnt(other).items():
        gradient = loss.get_parameter(name).grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("hidden", NETWORKS, ids=str)
def test_gradients_and_statistics_equal_those_of_the_loss(hidden, settings, size):
    loss = make_loss(hidden=hidden, **settings)
    _assert_equals_autograd(loss, make_pool(loss, size))


def test_coefficients_that_change_hold_from_the_next_pool_on():
    loss = make_loss(value_clip=0.1, entropy_coeff=0.01)
    update = fused(loss, max_grad_norm=float("inf"))
    pool = make_pool(loss, 8)
    loss.critic_coeff, loss.entropy_coeff, loss.clip_epsilon, loss.value_clip = 3.0, 0.5, 0.05, 0.7
    losses = deepcopy(loss)(pool)
    statistics = update.step(update.prepare(pool))
    expected = [losses[key].detach().double() for key in STATISTICS]
    torch.testing.assert_close(statistics, torch.stack(expected), rtol=1e-6, atol=1e-12)


def test_rollouts_of_another_dtype_are_learnt_from_in_that_of_the_networks():
    loss = make_loss(dtype=torch.float32)
    pool = make_pool(loss, 8)
    update = fused(loss)
    columns = update.prepare(pool)
    for key in ("action", "action_log_prob"):
        pool[key] = pool[key].double()
    torch.testing.assert_close(update.prepare(pool), columns)


def test_the_pools_of_these_tests_clip_ratios_and_values():
    loss = make_loss(value_clip=0.1)
    losses = loss(make_pool(loss, 64))
    assert 0.1 < losses["clip_fraction"] < 0.9
    assert 0.1 < losses["rho_clip_fraction"] < 0.9
    assert (
        loss(make_pool(loss, 64))["loss_critic"]
        > make_loss(value_clip=None)(make_pool(loss, 64))["loss_critic"]
    )


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("max_grad_norm", [0.05, 100.0])
def test_many_steps_equal_those_of_the_stepper(dtype, rtol, max_grad_norm):
    settings = {"value_clip": 0.2, "entropy_coeff": 0.01, "tau": 0.5, "target_update_freq": 4}
    loss = make_loss(dtype=dtype, **settings)
    other = deepcopy(loss)
    pool = make_pool(loss, 40, stale=0.1)
    update = fused(loss, max_grad_norm=max_grad_norm)
    stepper = APPOStepper(other, APPOConfig(lr=1e-3, max_grad_norm=max_grad_norm))
    columns = update.prepare(pool)
    rates = []
    for i in range(0, 40, 2):
        update.step(columns[:, i : i + 16])
        stepper.step(None, pool[i : i + 16])
        torch.testing.assert_close(update.lr, stepper.lr, rtol=0.0, atol=0.0)
        rates.append(update.lr.item())
    assert len(set(rates)) > 3
    assert loss.steps == other.steps == 20
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(loss.get_parameter(name), parameter, rtol=rtol, atol=rtol)


def test_a_step_of_the_stepper_after_a_fused_one_takes_its_own_gradient_alone():
    loss = make_loss()
    other, pool = deepcopy(loss), make_pool(loss, 16)
    update = fused(loss, max_grad_norm=1e9)
    alone = fused(other, max_grad_norm=1e9)
    config = APPOConfig(max_grad_norm=1e9)
    for one in (update, alone):
        one.step(one.prepare(pool))
    for parameter in other.parameters():
        parameter.grad = None
    APPOStepper(loss, config, update).step(None, pool)
    APPOStepper(other, config, alone).step(None, pool)
    for name, parameter in _learnt(other).items():
        torch.testing.assert_close(loss.get_parameter(name), parameter, msg=name)


def test_memory_of_few_sizes_of_minibatches_is_kept():
    loss = make_loss()
    update = fused(loss, max_grad_norm=1.0)
    columns = update.prepare(make_pool(loss, 40))
    for size in (*range(1, 40), 1):
        update.step(columns[:, :size])
    assert len(update._actor._buffers) == len(update._critic._buffers) == 16


def test_a_hook_that_comes_after_the_update_is_refused():
    loss = make_loss()
    update, pool = fused(loss, max_grad_norm=1.0), make_pool(loss, 8)
    loss.actor_network[0].log_std.register_hook(torch.zeros_like)
    with pytest.raises(ConfigError, match=r"hook on a network or a parameter: .* fused=False"):
        update.prepare(pool)


def test_a_pool_is_shuffled_into_chunks_the_last_one_smaller():
    loss = make_loss()
    update, pool = fused(loss), make_pool(loss, 20)
    columns = update.prepare(pool)
    torch.manual_seed(3)
    chunks = update.shuffled(columns, 3)
    assert [chunk.shape[1] for chunk in chunks] == [7, 7, 6]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat(chunks, dim=1), update.prepare(pool[order]))
    assert not torch.equal(order, torch.arange(20))
    for chunk in chunks:
        assert update.step(chunk).isfinite().all()


def test_the_order_follows_the_global_seed():
    columns = torch.arange(100.0).unsqueeze(0)
    torch.manual_seed(1)
    first = FusedAPPOUpdate.shuffled(columns, 2)
    torch.manual_seed(1)
    second = FusedAPPOUpdate.shuffled(columns, 2)
    third = FusedAPPOUpdate.shuffled(columns, 2)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], third[0])


def test_the_modules_see_every_step_and_copies_of_them_do_not():
    loss = make_loss()
    update, pool = fused(loss, lr=1e-2), make_pool(loss, 16)
    before, copied = loss.critic_network(pool.clone())["state_value"], deepcopy(loss)
    update.step(update.prepare(pool))
    assert not torch.equal(loss.critic_network(pool.clone())["state_value"], before)
    assert torch.equal(copied.critic_network(pool.clone())["state_value"], before)


def test_statistics_are_ordinary_tensors():
    loss = make_loss()
    update = fused(loss)
    statistics = update.step(update.prepare(make_pool(loss, 4)))
    assert not statistics.is_inference()
    assert not statistics.requires_grad
    assert statistics.shape == (len(STATISTICS),)


class _StateDependent(nn.Module):
    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return observation[..., :ACT], observation[..., :ACT].exp()


def _of_torchrl(loss: APPOLoss) -> None:
    """Give a loss TorchRL's own actor, of the same head."""
    keys = {"in_keys": ["loc", "scale"], "distribution_class": IndependentNormal}
    head = loss.actor_network[0]
    altered(loss, actor_network=ProbabilisticActor(head, **keys, return_log_prob=True))


def _state_dependent(loss: APPOLoss) -> None:
    head = TensorDictModule(_StateDependent(), in_keys=["observation"], out_keys=["loc", "scale"])
    altered(loss, actor_network=GaussianActor(head))


UNSUPPORTED: dict[str, Callable[[Any], object]] = {
    "relu": lambda loss: altered(
        loss.critic_network, net=nn.Sequential(nn.Linear(OBS, 4), nn.ReLU(), nn.Linear(4, 1))
    ),
    "no bias": lambda loss: altered(
        loss.actor_network[0], net=nn.Sequential(nn.Linear(OBS, ACT, bias=False))
    ),
    "ends in tanh": lambda loss: altered(
        loss.actor_network[0], net=nn.Sequential(nn.Linear(OBS, ACT), nn.Tanh())
    ),
    "not sequential": lambda loss: altered(loss.actor_network[0], net=nn.Linear(OBS, ACT)),
    "two values": lambda loss: altered(loss.critic_network, net=nn.Sequential(nn.Linear(OBS, 2))),
    "unknown normaliser": lambda loss: altered(loss.critic_network, normalizer=nn.LayerNorm(OBS)),
    "state-dependent deviation": _state_dependent,
    "shared trunk": lambda loss: loss.critic_network.net.__setitem__(
        0, loss.actor_network[0].net[0]
    ),
    "a layer twice": lambda loss: loss.critic_network.net.__setitem__(
        4, loss.critic_network.net[2]
    ),
    "a weight twice": lambda loss: altered(
        loss.critic_network.net[4], weight=loss.critic_network.net[2].weight
    ),
    "spectral norm": lambda loss: nn.utils.spectral_norm(loss.critic_network.net[0]),
    "mask": lambda loss: prune.random_unstructured(loss.critic_network.net[0], "bias", 0.5),
    "parametrisation": lambda loss: nn.utils.parametrizations.weight_norm(
        loss.critic_network.net[0]
    ),
    "hook": lambda loss: loss.critic_network.net[0].register_forward_hook(hook),
    "hook before": lambda loss: loss.critic_network.net[0].register_forward_pre_hook(hook),
    "hook of the actor": lambda loss: loss.actor_network.register_forward_hook(hook),
    "hook on gradients": lambda loss: loss.critic_network.net.register_full_backward_hook(hook),
    "hook on a parameter": lambda loss: loss.actor_network[0].log_std.register_hook(
        torch.zeros_like
    ),
    "frozen": lambda loss: loss.actor_network[0].log_std.requires_grad_(False),
    "mixed dtypes": lambda loss: loss.critic_network.double(),
    "other actor": _of_torchrl,
    "other critic": lambda loss: altered(loss, critic_network=ValueOperator(nn.Linear(OBS, 1))),
    "subclass": subclassed,
}


def test_a_pool_of_several_dimensions_is_refused_with_what_to_do():
    loss = make_loss()
    with pytest.raises(LayoutShapeError, match=r"\(2, 3\) \(expected one dimension\).*reshape"):
        fused(loss).prepare(TensorDict(batch_size=[2, 3]))


@pytest.mark.parametrize("loss", [None, Mock(SACLoss)])
def test_another_loss_is_refused(loss):
    with pytest.raises(ConfigError, match=r"^FusedAPPOUpdate: .* \(expected APPOLoss of "):
        fused(loss)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_other_networks_are_refused(case):
    loss = make_loss(hidden=((8,), (8, 8, 8)), dtype=torch.float32)
    UNSUPPORTED[case](loss)
    assert not FusedAPPOUpdate.supports(loss)
    with pytest.raises(ConfigError, match="APPOStepper"):
        fused(loss)


def test_networks_without_a_normaliser_share_one_copy_of_the_observations():
    loss = APPOLoss(make_actor(OBS, ACT), make_critic(OBS))
    update = fused(loss)
    pool = make_pool(loss, 8)
    columns = update.prepare(pool)
    assert torch.equal(columns[:OBS], pool["observation"].t())
    normalised = make_loss(dtype=torch.float32)
    assert fused(normalised).prepare(make_pool(normalised, 8)).shape == columns.shape


@pytest.mark.parametrize("normalizer", [nn.Identity(), ObservationNormalizer(OBS)], ids=str)
def test_a_critic_may_normalise_in_its_own_way(normalizer):
    loss = make_loss()
    loss.critic_network.normalizer = normalizer.double()
    _assert_equals_autograd(loss, make_pool(loss, 7))


def test_a_critic_may_read_another_observation():
    loss = make_loss()
    loss.critic_network.in_keys = ("state",)
    loss.critic_network.normalizer = ObservationNormalizer(2)
    loss.critic_network.net[0] = nn.Linear(2, 16, dtype=torch.float64)
    pool = make_pool(loss, 7)
    pool["state"] = torch.randn(7, 2, dtype=torch.float64)
    _assert_equals_autograd(loss, pool)


@pytest.mark.gpu
def test_a_step_on_a_gpu_does_not_wait_for_it(gpu_refuses_to_wait):
    loss = make_loss(dtype=torch.float32, target_update_freq=2).to("cuda")
    update = fused(loss)
    columns = update.prepare(make_pool(loss, 32))
    for _ in range(4):  # lets the libraries set themselves up, and captures
        update.step(columns)
    with gpu_refuses_to_wait():
        statistics = [update.step(columns) for _ in range(3)]
        update._graphs = None
        statistics.append(update.step(columns))
    assert torch.stack(statistics).isfinite().all()


@pytest.mark.parametrize("bound", ["desired_kl", "max_grad_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_not_above_0_is_refused(bound, value):
    with pytest.raises(ConfigError, match=rf"{bound}: {value} \(expected a number in \(0, inf\]"):
        fused(make_loss(), **{bound: value})


@pytest.mark.parametrize("count", [0, 9, 1.5, True])
def test_a_pool_is_not_shuffled_into_empty_chunks(count):
    with pytest.raises(ConfigError, match=f"minibatches: {count} .expected an integer of 1 to 8"):
        FusedAPPOUpdate.shuffled(torch.ones(2, 8), count)
