from __future__ import annotations

import io
import math
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import TD3Loss

from tests.support.off_policy import StockStepper, assert_equal_parameters, make_transitions
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.modules.q_value import make_q_value
from torchrl_unilab.modules.squashed import SquashedPoint, make_td3_actor
from torchrl_unilab.objectives.fused_td3 import FusedTD3Update

OBS, ACT, STATE = 5, 2, 7
LRS = {"actor_network_params": 1e-3, "qvalue_network_params": 2e-3}


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _loss(
    *,
    hidden=((16, 16), (16, 8)),
    layer_norm=False,
    normalized=False,
    state=False,
    bounds=(-1.0, 1.0),
    **kwargs,
) -> TD3Loss:
    torch.manual_seed(0)
    normalizer = None
    if normalized:
        normalizer = ObservationNormalizer(OBS, clip=2.0)
        normalizer.update(torch.randn(50, OBS) * 3 + 1)
    low, high = bounds
    common = {"layer_norm": layer_norm}
    actor = make_td3_actor(
        OBS, ACT, low=low, high=high, normalizer=normalizer, hidden=hidden[0], **common
    )
    if state:
        common |= {"in_key": "state", "normalizer": None}
    elif normalized != "actor":
        common |= {"normalizer": normalizer}
    critic = make_q_value(STATE if state else OBS, ACT, hidden=hidden[1], **common)
    loss = TD3Loss(actor, critic, bounds=bounds, **kwargs)
    loss.make_value_estimator(gamma=0.9)
    with torch.no_grad():  # gains differ too, and targets from what they follow
        for parameter in loss.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return loss


def _update(loss: TD3Loss, *, tau: float = 0.1, **kwargs) -> FusedTD3Update:
    rates = dict(zip(("lr_actor", "lr_critic"), LRS.values(), strict=True))
    return FusedTD3Update(loss, tau=tau, **{**rates, **kwargs})


def _stock(loss: TD3Loss) -> StockStepper:
    other = deepcopy(loss)
    # TD3Loss shows its critics what its actor reads, and no more.
    actor, critic = other.actor_network, other.qvalue_network
    actor.in_keys = list(dict.fromkeys([actor.in_keys[0], critic.in_keys[0]]))
    return StockStepper(other, LRS, 0.1)


def _transitions(loss: TD3Loss, size: int, seed: int) -> TensorDict:
    state = STATE if loss.qvalue_network.in_keys[0] == "state" else 0
    return make_transitions(size, OBS, ACT, state=state, seed=seed)


CASES = {
    "plain": {},
    "layer norm": {"layer_norm": True},
    "normalised": {"normalized": True},
    "layer norm, normalised": {"layer_norm": True, "normalized": True},
    "bounds per dimension": {"bounds": (torch.tensor([-1.0, 0.5]), torch.tensor([0.3, 4.0]))},
    "critics that do not normalise": {"normalized": "actor"},
    "privileged critics": {"state": True, "normalized": True},
    "three and one layers": {"hidden": ((4, 5, 6), (9,))},
    "linear": {"hidden": ((), ())},
    "squares": {"loss_function": "l2"},
    "much noise, often clipped": {"policy_noise": 1.5, "noise_clip": 0.7},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_the_loss_adam_and_soft_update(case):
    loss = _loss(**CASES[case])
    stock = _stock(loss)
    update = _update(loss)
    for i in range(5):
        batch = _transitions(loss, 32, seed=i)
        packed = update.prepare(batch)
        torch.manual_seed(i)
        expected = stock.step(batch)
        torch.manual_seed(i)
        observed = dict(zip(update.statistics, update.step(packed), strict=True))
        for key in ("loss_qvalue", "loss_actor"):
            torch.testing.assert_close(observed[key], expected[key], rtol=1e-9, atol=1e-10)
        values, target = expected["pred_value"], expected["target_value"]
        torch.testing.assert_close(observed["q_value"], values.mean())
        torch.testing.assert_close(observed["td_error"], (values - target).abs().mean())
        torch.testing.assert_close(update.td_error, batch["td_error"], rtol=1e-9, atol=1e-10)
        for name, parameter in stock.loss.named_parameters():
            torch.testing.assert_close(
                loss.get_parameter(name).grad, parameter.grad, rtol=1e-8, atol=1e-11, msg=name
            )
        assert_equal_parameters(loss, stock.loss)


def test_several_steps_to_the_next_observation_and_priority_weights_count_as_in_the_loss():
    loss = _loss()
    stock, update = _stock(loss), _update(loss)
    batch = _transitions(loss, 32, seed=1)
    batch["steps_to_next_obs"] = torch.randint(1, 5, (32, 1))
    batch["priority_weight"] = torch.rand(32) + 0.1
    packed = update.prepare(batch)
    torch.manual_seed(1)
    stock.step(batch)
    update.step(packed, generator=torch.Generator().manual_seed(1))
    assert_equal_parameters(loss, stock.loss)


def test_single_precision_follows_the_stock_loss():
    torch.set_default_dtype(torch.float32)
    loss = _loss(layer_norm=True, normalized=True)
    stock, update = _stock(loss), _update(loss)
    for i in range(5):
        batch = _transitions(loss, 32, seed=i)
        packed = update.prepare(batch)
        torch.manual_seed(i)
        stock.step(batch)
        torch.manual_seed(i)
        observed = update.step(packed)
    assert packed.dtype == observed.dtype == torch.float32
    assert_equal_parameters(loss, stock.loss, rtol=2e-3, atol=2e-4)


def _linear() -> TD3Loss:
    """One observation, one action within [-2, 2]; all networks linear and known; no noise."""
    actor = make_td3_actor(1, 1, low=-2.0, high=2.0, hidden=())
    settings = {"loss_function": "l2", "policy_noise": 0.0, "bounds": (-2.0, 2.0)}
    loss = TD3Loss(actor, make_q_value(1, 1, hidden=()), **settings)
    loss.make_value_estimator(gamma=0.9)
    values = {
        "actor_network_params": ([[0.0]], [0.0]),
        "target_actor_network_params": ([[0.0]], [math.atanh(0.25)]),
        "qvalue_network_params": ([[[1.0, 2.0]], [[1.0, 2.0]]], [[0.5], [0.3]]),
        "target_qvalue_network_params": ([[[1.0, 1.0]], [[1.0, 1.0]]], [[0.4], [0.6]]),
    }
    state = loss.state_dict()
    for prefix, (weight, bias) in values.items():
        state[f"{prefix}.net.0.weight"] = torch.tensor(weight)
        state[f"{prefix}.net.0.bias"] = torch.tensor(bias)
    loss.load_state_dict(state)
    return loss


@pytest.mark.parametrize(
    ("terminated", "done", "target"),
    [(False, False, 3.61), (False, True, 3.61), (True, True, 1.0)],
    ids=["goes on", "cut off", "terminated"],
)
def test_losses_and_first_step_of_linear_networks_are_those_computed_by_hand(
    terminated, done, target
):
    # The target actor acts 2 * 0.25; the target critics see 2 + 0.5 + 0.4 and 2 + 0.5 + 0.6;
    # 1 + 0.9 * 2.9 = 3.61. The critics say 1 + 2 * 0.5 + 0.5 = 2.5 and 2.3, and of the
    # policy's action, 0, the first one says 1.5.
    loss = _linear()
    update = _update(loss, tau=0.25)
    batch = make_transitions(1, 1, 1)
    batch["observation"], batch["action"] = torch.tensor([[1.0]]), torch.tensor([[0.5]])
    batch["next", "observation"] = torch.tensor([[2.0]])
    batch["next", "reward"] = torch.tensor([[1.0]])
    batch["next", "terminated"] = torch.tensor([[terminated]])
    batch["next", "done"] = torch.tensor([[done]])
    statistics = update.step(update.prepare(batch)).tolist()
    errors = 2.5 - target, 2.3 - target
    assert dict(zip(update.statistics, statistics, strict=True)) == pytest.approx(
        {
            "loss_qvalue": errors[0] ** 2 + errors[1] ** 2,
            "q_value": 2.4,
            "td_error": (abs(errors[0]) + abs(errors[1])) / 2,
            "loss_actor": -1.5,
        }
    )
    assert update.td_error.tolist() == pytest.approx([max(error**2 for error in errors)])
    # Adam's first step is of the learning rate's size, against the gradient.
    moved = 2e-3 if not terminated else -2e-3
    bias = loss.qvalue_network_params["net", "0", "bias"].flatten().tolist()
    assert bias == pytest.approx([0.5 + moved, 0.3 + moved], abs=1e-9)
    follower = loss.target_qvalue_network_params["net", "0", "bias"].flatten().tolist()
    followed = [0.75 * 0.4 + 0.25 * (0.5 + moved), 0.75 * 0.6 + 0.25 * (0.3 + moved)]
    assert follower == pytest.approx(followed, abs=1e-9)
    assert loss.actor_network.net[0].bias.tolist() == pytest.approx([1e-3], abs=1e-9)
    target_bias = loss.target_actor_network_params["net", "0", "bias"].tolist()
    assert target_bias == pytest.approx([0.75 * math.atanh(0.25) + 0.25 * 1e-3], abs=1e-9)


def test_target_actions_are_noisy_within_the_clip_and_the_bounds():
    loss = _linear()
    loss.policy_noise, loss.noise_clip = 5.0, 1.8
    update = _update(loss)
    batch = make_transitions(200, 1, 1)
    batch["next", "terminated"].zero_()
    seen = []
    update._target_critics.forward = lambda x: seen.append(x) or torch.zeros(2, len(x), 1)
    update.step(update.prepare(batch))
    # 0.5 - 1.8, and 0.5 + 1.8 cut off at 2
    actions = seen[0][:, 1].unique()
    assert (actions.min().item(), actions.max().item()) == (pytest.approx(-1.3), 2.0)
    assert len(actions) > 10  # some are within


def test_without_the_policys_turn_the_actor_stays_and_all_targets_move():
    loss = _loss(normalized=True)
    update = _update(loss)
    packed = update.prepare(_transitions(loss, 32, 0))
    observed = dict(zip(update.statistics, update.step(packed, update_policy=False), strict=True))
    assert [key for key, value in observed.items() if value.isnan()] == ["loss_actor"]
    first = update.step(packed)  # leaves gradients and momentum behind
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    again = update.step(packed, update_policy=False)
    moved = {k for k, v in loss.state_dict().items() if not torch.equal(v, before[k])}
    learnt = {key for key in before if ".net." in key}
    assert moved == {key for key in learnt if not key.startswith("actor_network_params")}
    assert first[3] == again[3]  # the policy's, of when it last moved
    assert not torch.equal(first[:3], again[:3])


def test_the_losss_target_actor_normalises_by_the_statistics_of_the_moment():
    loss = _loss(normalized=True)
    update = _update(loss)
    normalizer = loss.actor_network.normalizer
    normalizer.update(torch.randn(100, OBS) + 20.0)
    batch = _transitions(loss, 32, 1)
    packed = update.prepare(batch)
    assert torch.equal(loss.target_actor_network_params["normalizer", "mean"], normalizer.mean)
    stock = _stock(loss)
    torch.manual_seed(0)
    stock.step(batch)
    torch.manual_seed(0)
    update.step(packed)
    assert_equal_parameters(loss, stock.loss)


def test_the_users_actor_sees_every_step_and_parameters_keep_their_identity():
    actor, critic = make_td3_actor(OBS, ACT, hidden=(8,)), make_q_value(OBS, ACT, hidden=(8,))
    loss = TD3Loss(actor, critic, bounds=(-1.0, 1.0))
    loss.make_value_estimator(gamma=0.9)
    identities = [id(parameter) for parameter in actor.parameters()]
    update, batch = _update(loss), _transitions(loss, 16, 0)
    before = actor(batch.select("observation"))["action"]
    update.step(update.prepare(batch))
    assert [id(parameter) for parameter in actor.parameters()] == identities
    assert not torch.equal(actor(batch.select("observation"))["action"], before)
    [flat] = update.optimizers["actor"].param_groups[0]["params"]
    assert torch.equal(torch.cat([p.detach().flatten() for p in actor.parameters()]), flat)


def test_after_a_checkpoint_the_next_steps_are_the_same():
    loss = _loss(normalized=True, layer_norm=True)
    update = _update(loss)
    packed = update.prepare(_transitions(loss, 16, 0))
    for i in range(3):
        update.step(packed, update_policy=bool(i % 2))
    file = io.BytesIO()
    optimizers = {key: adam.state_dict() for key, adam in update.optimizers.items()}
    torch.save({"loss": loss.state_dict(), "optimizers": optimizers}, file)
    restored = _loss(normalized=True, layer_norm=True)
    resumed = _update(restored, lr_actor=7e-3)
    resumed.step(packed)  # something to forget
    file.seek(0)
    checkpoint = torch.load(file)
    restored.load_state_dict(checkpoint["loss"])
    for key, adam in resumed.optimizers.items():
        adam.load_state_dict(checkpoint["optimizers"][key])
    for i in range(3):
        generators = [torch.Generator().manual_seed(i) for _ in range(2)]
        left = update.step(packed, generator=generators[0])
        assert torch.equal(left, resumed.step(packed, generator=generators[1]))
    assert_equal_parameters(loss, restored, rtol=0.0, atol=0.0)


def test_a_step_never_looks_at_a_value(monkeypatch):
    loss = _loss(layer_norm=True)
    update = _update(loss)
    packed = update.prepare(_transitions(loss, 21, 0))

    def refuse(*_, **__):
        raise AssertionError("a step waited for the device")

    for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for i, minibatch in enumerate(update.minibatches(packed, 2)):
        update.step(minibatch, update_policy=bool(i))


class _Actor(SquashedPoint):
    pass


def _replaced(**parts) -> TD3Loss:
    """A supported loss but for one part."""
    actor = parts.pop("actor", make_td3_actor(OBS, ACT, hidden=(8,)))
    actor.net = parts.pop("actor_net", actor.net)
    return TD3Loss(actor, make_q_value(OBS, ACT, hidden=(8,)), bounds=(-1.0, 1.0), **parts)


def _subclass() -> SquashedPoint:
    bounds = torch.full((ACT,), -1.0), torch.ones(ACT)
    return _Actor("observation", nn.Identity(), make_td3_actor(OBS, ACT).net, *bounds)


UNSUPPORTED = {
    "tanh actor": lambda: _replaced(actor_net=nn.Sequential(nn.Linear(OBS, ACT), nn.Tanh())),
    "two linear layers": lambda: _replaced(
        actor_net=nn.Sequential(nn.Linear(OBS, 8), nn.Linear(8, ACT))
    ),
    "other normalisation": lambda: _replaced(
        actor_net=nn.Sequential(
            nn.Linear(OBS, 8), nn.LayerNorm(8, bias=False), nn.ReLU(), nn.Linear(8, ACT)
        )
    ),
    "other actor": lambda: _replaced(actor=_subclass()),
    "ten critics": lambda: _replaced(num_qvalue_nets=10),
    "no target actor": lambda: _replaced(delay_actor=False),
    "no target critics": lambda: _replaced(delay_qvalue=False),
    "sum": lambda: _replaced(reduction="sum"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_other_losses_and_networks_are_refused(case):
    loss = UNSUPPORTED[case]()
    assert not FusedTD3Update.supports(loss)
    with pytest.raises(ConfigError, match="by the loss and an optimiser"):
        _update(loss)


def test_a_supported_loss_is_that_of_our_networks():
    assert FusedTD3Update.supports(_replaced())


@pytest.mark.gpu
def test_a_step_on_a_gpu_does_not_wait_for_it():
    torch.set_default_dtype(torch.float32)
    loss = _loss(layer_norm=True, normalized=True).to("cuda")
    loss.actor_network.normalizer.to("cuda")
    update = _update(loss)
    packed = update.prepare(_transitions(loss, 32, 0).to("cuda"))
    update.step(packed)  # lets the libraries set themselves up
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        observed = [update.step(packed, update_policy=bool(i % 2)) for i in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.stack(observed).isfinite().all()
