from __future__ import annotations

import io
import math
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import SACLoss, SoftUpdate

from tests.support.off_policy import StockStepper, assert_equal_parameters, make_transitions
from torchrl_unilab.errors import ConfigError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.modules.q_value import QValue, make_q_value
from torchrl_unilab.modules.squashed import SquashedGaussianActor, make_sac_actor
from torchrl_unilab.objectives.fused_sac import FusedSACUpdate

OBS, ACT, STATE = 5, 2, 7
LRS = {"actor_network_params": 1e-3, "qvalue_network_params": 2e-3, "log_alpha": 3e-3}


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
    gamma=0.9,
    bounds=(-1.0, 1.0),
    **kwargs,
) -> SACLoss:
    torch.manual_seed(0)
    normalizer = None
    if normalized:
        normalizer = ObservationNormalizer(OBS, clip=2.0)
        normalizer.update(torch.randn(50, OBS) * 3 + 1)
    low, high = bounds
    actor = make_sac_actor(
        OBS,
        ACT,
        low=low,
        high=high,
        normalizer=normalizer,
        hidden=hidden[0],
        layer_norm=layer_norm,
        log_std_bounds=(-3.0, 1.0),
    )
    critic = make_q_value(
        STATE if state else OBS,
        ACT,
        in_key="state" if state else "observation",
        normalizer=None if state or normalized == "actor" else normalizer,
        hidden=hidden[1],
        layer_norm=layer_norm,
    )
    loss = SACLoss(actor, critic, **kwargs)
    loss.make_value_estimator(gamma=gamma)
    with torch.no_grad():  # gains differ too, and targets from what they follow
        for parameter in loss.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return loss


def _update(loss: SACLoss, *, tau: float = 0.1, **kwargs) -> FusedSACUpdate:
    rates = dict(zip(("lr_actor", "lr_critic", "lr_alpha"), LRS.values(), strict=True))
    return FusedSACUpdate(loss, tau=tau, **{**rates, **kwargs})


def _stock(loss: SACLoss, tau: float = 0.1) -> StockStepper:
    other = deepcopy(loss)
    rates = {name: lr for name, lr in LRS.items() if name != "log_alpha" or not other.fixed_alpha}
    return StockStepper(other, rates, tau)


def _transitions(loss: SACLoss, size: int, seed: int) -> TensorDict:
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
    "distances": {"loss_function": "l1"},
    "fixed temperature": {"fixed_alpha": True, "alpha_init": 0.3},
    "bounded temperature": {"min_alpha": 0.1, "max_alpha": 0.5, "alpha_init": 0.7},
    "own target entropy": {"target_entropy": -0.3},
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
        for key in set(observed) & set(expected.keys()):
            torch.testing.assert_close(
                observed[key], expected[key].to(observed[key]), rtol=1e-9, atol=1e-10, msg=key
            )
        torch.testing.assert_close(update.td_error, batch["td_error"], rtol=1e-9, atol=1e-10)
        for name, parameter in stock.loss.named_parameters():
            torch.testing.assert_close(
                loss.get_parameter(name).grad, parameter.grad, rtol=1e-8, atol=1e-11, msg=name
            )
        assert_equal_parameters(loss, stock.loss)


def test_the_statistics_are_named_as_the_loss_names_them():
    losses = {"loss_qvalue", "loss_actor", "loss_alpha", "alpha", "entropy"}
    assert losses <= set(FusedSACUpdate.statistics)
    loss = _loss()
    update = _update(loss)
    observed = update.step(update.prepare(_transitions(loss, 8, 0)))
    assert observed.shape == (len(FusedSACUpdate.statistics),)
    assert not observed.is_inference()
    assert not observed.requires_grad


def test_several_steps_to_the_next_observation_and_priority_weights_count_as_in_the_loss():
    loss = _loss()
    stock, update = _stock(loss), _update(loss)
    batch = _transitions(loss, 32, seed=1)
    batch["steps_to_next_obs"] = torch.randint(1, 5, (32, 1))
    batch["priority_weight"] = torch.rand(32) + 0.1
    packed = update.prepare(batch)
    torch.manual_seed(1)
    expected = stock.step(batch)
    torch.manual_seed(1)
    observed = dict(zip(update.statistics, update.step(packed), strict=True))
    for key in ("loss_qvalue", "loss_actor", "loss_alpha"):
        torch.testing.assert_close(observed[key], expected[key], rtol=1e-9, atol=1e-12)
    assert_equal_parameters(loss, stock.loss)
    plain = _update(_loss()).prepare(batch.exclude("priority_weight", "steps_to_next_obs"))
    assert not torch.equal(plain, packed)


def test_two_critics_may_be_given_as_a_list():
    torch.manual_seed(0)
    critics = [make_q_value(OBS, ACT, hidden=(8,)) for _ in range(2)]
    loss = SACLoss(make_sac_actor(OBS, ACT, hidden=(8,)), critics)
    loss.make_value_estimator(gamma=0.9)
    stock, update = _stock(loss), _update(loss)
    batch = _transitions(loss, 32, 0)
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


def _linear() -> SACLoss:
    """One observation, one action within [-2, 2]; all networks linear and known."""
    actor = make_sac_actor(1, 1, low=-2.0, high=2.0, hidden=(), log_std_bounds=(-1.0, 1.0))
    loss = SACLoss(actor, make_q_value(1, 1, hidden=()), loss_function="l2", alpha_init=0.5)
    loss.make_value_estimator(gamma=0.9)
    values = {"actor_network_params": ([[0.2], [0.0]], [0.1, 0.0])}
    values["qvalue_network_params"] = ([[[1.0, 2.0]], [[1.0, 2.0]]], [[0.5], [0.3]])
    values["target_qvalue_network_params"] = ([[[1.0, 1.0]], [[1.0, 1.0]]], [[0.4], [0.6]])
    state = loss.state_dict()
    for prefix, (weight, bias) in values.items():
        inner = ".module.0.net.0" if prefix.startswith("actor") else ".net.0"
        state[f"{prefix}{inner}.weight"] = torch.tensor(weight)
        state[f"{prefix}{inner}.bias"] = torch.tensor(bias)
    loss.load_state_dict(state)
    return loss


def _transition(*, terminated: bool, done: bool) -> TensorDict:
    after = {"observation": [[2.0]], "reward": [[1.0]]}
    after = {key: torch.tensor(value) for key, value in after.items()}
    after |= {"terminated": torch.tensor([[terminated]]), "done": torch.tensor([[done]])}
    tensors = {"observation": torch.tensor([[1.0]]), "action": torch.tensor([[0.5]])}
    return TensorDict({**tensors, "next": after}, batch_size=[1])


def _drawn(loc: float, noise: float) -> tuple[float, float]:
    """Action and log probability of a standard normal's draw, squashed into [-2, 2]."""
    u = loc + noise
    normal = -0.5 * noise**2 - 0.5 * math.log(2 * math.pi)
    return 2.0 * math.tanh(u), normal - math.log(2.0 * (1.0 - math.tanh(u) ** 2))


@pytest.mark.parametrize(("terminated", "done"), [(False, False), (False, True), (True, True)])
def test_losses_of_linear_networks_are_those_computed_by_hand(terminated, done):
    update = _update(_linear())
    first, second = torch.randn(2, generator=torch.Generator().manual_seed(5)).tolist()
    packed = update.prepare(_transition(terminated=terminated, done=done))
    statistics = update.step(packed, generator=torch.Generator().manual_seed(5)).tolist()
    observed = dict(zip(update.statistics, statistics, strict=True))

    next_action, next_log_p = _drawn(0.2 * 2.0 + 0.1, first)
    soft_value = (2.0 + next_action + 0.4) - 0.5 * next_log_p
    target = 1.0 if terminated else 1.0 + 0.9 * soft_value  # cut off is not terminated
    errors = [1.0 + 2.0 * 0.5 + bias - target for bias in (0.5, 0.3)]
    action, log_p = _drawn(0.2 * 1.0 + 0.1, second)
    assert observed == pytest.approx(
        {
            "loss_qvalue": errors[0] ** 2 + errors[1] ** 2,
            "q_value": 2.4,
            "td_error": (abs(errors[0]) + abs(errors[1])) / 2,
            "alpha": 0.5,
            "loss_actor": 0.5 * log_p - (1.0 + 2.0 * action + 0.3),
            "entropy": -log_p,
            "loss_alpha": -math.log(0.5) * (log_p - 1.0),
        }
    )
    assert update.td_error.tolist() == pytest.approx([max(abs(error) for error in errors)])


def test_without_the_policys_turn_actor_and_temperature_stay_and_targets_move():
    loss = _loss(normalized=True)
    update = _update(loss)
    packed = update.prepare(_transitions(loss, 32, 0))
    observed = dict(zip(update.statistics, update.step(packed, update_policy=False), strict=True))
    assert [key for key, value in observed.items() if value.isnan()] == [
        "loss_actor",
        "entropy",
        "loss_alpha",
    ]
    first = update.step(packed)  # leaves gradients and momentum behind
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    again = update.step(packed, update_policy=False)
    moved = {k for k, v in loss.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {key for key in before if "qvalue_network_params" in key}
    assert torch.equal(first[4:], again[4:])  # the policy's, of when it last moved
    assert not torch.equal(first[:4], again[:4])


@pytest.mark.parametrize(("target", "sign"), [(-50.0, -1.0), (50.0, 1.0)])
def test_the_temperature_moves_as_the_entropy_lacks(target, sign):
    loss = _loss(target_entropy=target)
    update = _update(loss)
    before = loss.log_alpha.item()
    for minibatch in update.minibatches(update.prepare(_transitions(loss, 64, 0)), 4):
        update.step(minibatch)
    # Adam's first steps are of the learning rate's size.
    assert loss.log_alpha.item() - before == pytest.approx(sign * 4 * LRS["log_alpha"], rel=1e-3)


def test_saturated_actions_keep_finite_gradients_and_the_stock_losses():
    loss = _loss()
    with torch.no_grad():
        loss.actor_network_params["module", "0", "net", "4", "bias"][:ACT] = 30.0
    stock, update = _stock(loss), _update(loss)
    batch = _transitions(loss, 32, 0)
    packed = update.prepare(batch)
    torch.manual_seed(0)
    expected = stock.step(batch)
    torch.manual_seed(0)
    observed = dict(zip(update.statistics, update.step(packed), strict=True))
    assert observed["entropy"] < -50.0
    for key in ("loss_qvalue", "loss_actor"):
        torch.testing.assert_close(observed[key], expected[key], rtol=1e-9, atol=1e-9)
    assert_equal_parameters(loss, stock.loss)


def test_a_sample_is_cut_into_views_in_order():
    loss = _loss()
    update = _update(loss)
    packed = update.prepare(_transitions(loss, 10, 0))
    parts = update.minibatches(packed, 4)
    assert [len(part) for part in parts] == [3, 3, 2, 2]
    assert torch.equal(torch.cat(list(parts)), packed)
    assert {part.untyped_storage().data_ptr() for part in parts} == {
        packed.untyped_storage().data_ptr()
    }
    for count in (0, 11):
        with pytest.raises(ConfigError, match=f"{count} of 10 rows"):
            update.minibatches(packed, count)


def test_observations_are_normalised_by_the_statistics_of_the_moment():
    loss = _loss(normalized=True)
    update, batch = _update(loss), _transitions(loss, 8, 0)
    normalizer = loss.actor_network[0].normalizer
    before = update.prepare(batch)
    normalizer.update(torch.randn(100, OBS) + 20.0)
    after = update.prepare(batch)
    assert torch.equal(after[:, :OBS], normalizer(batch["observation"]))
    assert not torch.equal(after[:, :OBS], before[:, :OBS])
    assert torch.equal(after[:, OBS : OBS + ACT], batch["action"])
    # The stock loss goes by the same ones.
    stock = _stock(loss)
    batch = _transitions(loss, 32, 1)
    packed = update.prepare(batch)
    torch.manual_seed(0)
    stock.step(batch)
    torch.manual_seed(0)
    update.step(packed)
    assert_equal_parameters(loss, stock.loss)


def test_the_parameters_of_each_optimiser_are_views_of_one_tensor():
    loss = _loss(layer_norm=True)
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    identities = {name: id(parameter) for name, parameter in loss.named_parameters()}
    update = _update(loss)
    assert {name: id(parameter) for name, parameter in loss.named_parameters()} == identities
    for key, value in loss.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert list(update.optimizers) == ["actor", "critic", "alpha"]
    for name, (prefix, lr) in zip(update.optimizers, LRS.items(), strict=True):
        [group] = update.optimizers[name].param_groups
        [flat] = group["params"]
        assert group["lr"] == lr
        own = [p for key, p in loss.named_parameters() if key.startswith(prefix)]
        assert flat.numel() == sum(parameter.numel() for parameter in own)
        for parameter in own:
            assert parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            assert parameter.is_contiguous()


def test_the_users_actor_and_the_losss_own_forward_see_every_step():
    loss = _loss()
    actor, batch = loss.actor_network, _transitions(loss, 16, 0)
    SoftUpdate(loss, tau=0.1)
    loss(batch.clone())  # fills the caches of the loss
    update = _update(loss)
    before = actor.get_dist(batch.clone()).loc
    update.step(update.prepare(batch))
    assert not torch.equal(actor.get_dist(batch.clone()).loc, before)
    assert set(map(id, actor.parameters())) == {
        id(p) for name, p in loss.named_parameters() if name.startswith("actor")
    }
    torch.manual_seed(0)
    seen = loss(batch.clone())
    fresh = _loss()
    SoftUpdate(fresh, tau=0.1)
    fresh.load_state_dict(loss.state_dict())
    torch.manual_seed(0)
    expected = fresh(batch.clone())
    for key in ("loss_actor", "loss_qvalue"):
        assert torch.equal(seen[key], expected[key])


def test_targets_can_also_be_moved_by_torchrl_even_by_what_was_made_before():
    loss = _loss()
    targets = SoftUpdate(loss, tau=0.5)  # makes them equal to their networks
    update = _update(loss, tau=0.0)
    batch = _transitions(loss, 16, 0)
    before = loss.qvalue_network_params.data.clone()
    update.step(update.prepare(batch))
    assert (loss.target_qvalue_network_params.data == before).all()
    targets.step()
    halfway = before.lerp(loss.qvalue_network_params.data, 0.5)
    for key, target in loss.target_qvalue_network_params.items(True, True):
        torch.testing.assert_close(target, halfway[key])
    # And the update goes by them.
    fresh = _loss()
    fresh.load_state_dict(loss.state_dict())
    again = _update(fresh, tau=0.0)
    observed = [
        each.step(each.prepare(batch), generator=torch.Generator().manual_seed(0))
        for each in (update, again)
    ]
    assert torch.equal(*observed)


def test_after_a_checkpoint_the_next_steps_are_the_same():
    loss = _loss(normalized=True, layer_norm=True)
    update = _update(loss)
    packed = update.prepare(_transitions(loss, 16, 0))
    for _ in range(3):
        update.step(packed)
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


def test_the_optimisers_can_take_the_steps_themselves():
    loss, other = _loss(), _loss()
    update, theirs = _update(loss), _update(other)
    for adam in (theirs._actor_adam, theirs._critic_adam, theirs._alpha_adam):
        adam.step = adam.optimizer.step
    packed = update.prepare(_transitions(loss, 16, 0))
    for _ in range(3):
        for each in (update, theirs):
            each.step(packed, generator=torch.Generator().manual_seed(0))
    assert_equal_parameters(loss, other, rtol=0.0, atol=0.0)


def test_a_step_never_looks_at_a_value(monkeypatch):
    loss = _loss(layer_norm=True, min_alpha=0.5)
    update = _update(loss)
    packed = update.prepare(_transitions(loss, 21, 0))

    def refuse(*_, **__):
        raise AssertionError("a step waited for the device")

    for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for i, minibatch in enumerate(update.minibatches(packed, 2)):
        update.step(minibatch, update_policy=bool(i))


def _replaced(**parts) -> SACLoss:
    """A supported loss but for one part."""
    actor, critic = make_sac_actor(OBS, ACT, hidden=(8,)), make_q_value(OBS, ACT, hidden=(8,))
    actor[0].net = parts.pop("actor_net", actor[0].net)
    critic.net = parts.pop("critic_net", critic.net)
    critic = parts.pop("critic", critic)
    return SACLoss(actor, critic, **parts)


def _frozen() -> SACLoss:
    actor = make_sac_actor(OBS, ACT, hidden=(8,))
    actor[0].net[0].bias.requires_grad_(False)
    return SACLoss(actor, make_q_value(OBS, ACT, hidden=(8,)))


def _renamed() -> SACLoss:
    loss = _replaced()
    loss.set_keys(action="torque")
    return loss


def _other_estimator() -> SACLoss:
    loss = _replaced()
    loss.make_value_estimator("tdlambda", gamma=0.9, lmbda=0.9)
    return loss


class _Critic(QValue):
    pass


class _Loss(SACLoss):
    pass


def _tanh(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out))


UNSUPPORTED = {
    "tanh critic": lambda: _replaced(critic_net=_tanh(OBS + ACT, 1)),
    "tanh actor": lambda: _replaced(actor_net=_tanh(OBS, 2 * ACT)),
    "no bias": lambda: _replaced(actor_net=nn.Sequential(nn.Linear(OBS, 2 * ACT, bias=False))),
    "three critics": lambda: _replaced(num_qvalue_nets=3),
    "no targets": lambda: _replaced(delay_qvalue=False),
    "target actor": lambda: _replaced(delay_actor=True),
    "sum": lambda: _replaced(reduction="sum"),
    "skips": lambda: _replaced(skip_done_states=True),
    "other critic": lambda: _replaced(
        critic=_Critic("observation", nn.Identity(), make_q_value(OBS, ACT).net)
    ),
    "subclass": lambda: _Loss(make_sac_actor(OBS, ACT), make_q_value(OBS, ACT)),
    "frozen": _frozen,
    "mixed dtypes": lambda: _replaced(critic=make_q_value(OBS, ACT).float()),
    "renamed action": _renamed,
    "other estimator": _other_estimator,
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_other_losses_and_networks_are_refused(case):
    loss = UNSUPPORTED[case]()
    before = {name: p.data_ptr() for name, p in loss.named_parameters()}
    assert not FusedSACUpdate.supports(loss)
    with pytest.raises(ConfigError, match="by the loss and an optimiser"):
        _update(loss)
    assert {name: p.data_ptr() for name, p in loss.named_parameters()} == before


def test_a_supported_loss_is_that_of_our_networks():
    loss = _replaced()
    assert FusedSACUpdate.supports(loss)
    assert type(loss.actor_network) is SquashedGaussianActor


def test_settings_out_of_range_and_batches_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"tau: 1\.5"):
        _update(_loss(), tau=1.5)
    loss = _loss()
    loss.make_value_estimator(gamma=0.9, average_rewards=True)
    with pytest.raises(ConfigError, match="average_rewards"):
        _update(loss)
    update, batch = _update(_loss()), _transitions(_loss(), 8, 0)
    with pytest.raises(LayoutKeyError, match="'reward'"):
        update.prepare(batch.exclude(("next", "reward")))
    with pytest.raises(LayoutShapeError, match=r"\(2, 4\)"):
        update.prepare(batch.reshape(2, 4))
    batch["action"] = torch.zeros(8, ACT + 1)
    with pytest.raises(LayoutShapeError, match=r"'action' has shape \(8, 3\) \(expected \(8, 2\)"):
        update.prepare(batch)


@pytest.mark.gpu
def test_a_step_on_a_gpu_does_not_wait_for_it():
    torch.set_default_dtype(torch.float32)
    loss = _loss(layer_norm=True, min_alpha=0.01).to("cuda")
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
