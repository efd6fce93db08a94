from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Distribution, Normal, kl_divergence
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal, TruncatedNormal
from torchrl.objectives import ValueEstimators

from torchrl_unilab.errors import ConfigError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic, make_td3_actor
from torchrl_unilab.objectives import APPOLoss, appo
from torchrl_unilab.objectives.appo import kl_adapted_lr

OBS, ACT = 3, 2


def _loss(**kwargs) -> APPOLoss:
    torch.manual_seed(0)
    normalizer = ObservationNormalizer(OBS)
    networks = {"normalizer": normalizer, "hidden": (8,)}
    return APPOLoss(make_actor(OBS, ACT, **networks), make_critic(OBS, **networks), **kwargs)


def _rollout(loss: APPOLoss, batch: int = 4, time: int = 6) -> TensorDict:
    observation = torch.randn(batch, time, OBS)
    with torch.no_grad():
        acted = loss.actor_network(TensorDict(observation=observation, batch_size=[batch, time]))
    done = torch.rand(batch, time, 1) < 0.2
    acted["next"] = TensorDict(
        observation=torch.randn(batch, time, OBS),
        reward=torch.randn(batch, time, 1),
        done=done,
        terminated=done & (torch.rand(batch, time, 1) < 0.5),
        batch_size=[batch, time],
    )
    return acted


def _actor(layer: nn.Module, distribution: type[Distribution]) -> ProbabilisticActor:
    layers = nn.Sequential(layer, NormalParamExtractor())
    params = TensorDictModule(layers, ["observation"], ["loc", "scale"])
    return ProbabilisticActor(
        params, ["loc", "scale"], distribution_class=distribution, return_log_prob=True
    )


def test_rewards_of_another_dtype_are_learnt_in_that_of_the_values():
    loss = _loss()
    rollout = _rollout(loss)
    expected = loss.estimate(rollout)
    rollout["next", "reward"] = rollout["next", "reward"].double()
    found = loss.estimate(rollout)
    for key in ("value_target", "advantage"):
        assert torch.equal(found[key], expected[key])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"value_clip": None},
        {"value_clip": 0.0, "critic_coeff": 0.7, "entropy_coeff": 0.01},
        {"value_clip": 0.3, "clip_epsilon": 0.1, "rho_bar": 0.7},
    ],
    ids=str,
)
def test_all_losses_follow_a_reference_in_float64(settings):
    loss = _loss(**settings)
    epsilon, value_clip = settings.get("clip_epsilon", 0.2), settings.get("value_clip", 0.2)
    rollout = _rollout(loss).apply(lambda t: t.double() if t.is_floating_point() else t)
    rows = loss.double().estimate(rollout).reshape(-1).select(*loss.in_keys)
    n = rows.numel()
    noise = torch.randn(6, n, ACT, dtype=torch.float64)
    rows["action_log_prob"] += 0.3 * noise[0, :, 0]
    rows["target_log_prob"] += 0.3 * noise[1, :, 0]
    rows["state_value"] += noise[2, :, 0]
    rows["target", "loc"] = rows["target", "loc"] + 0.2 * noise[3]
    rows["target", "scale"] = rows["target", "scale"] * (0.3 * noise[4]).exp()
    losses = loss(rows)

    with torch.no_grad():
        params = loss.actor_network.get_dist_params(rows.select("observation"))
        value = loss.critic_network(rows.select("observation"))["state_value"].squeeze(-1)
    now, before = (Normal(p["loc"], p["scale"]) for p in (params, rows["target"]))
    log_b, log_t = rows["action_log_prob"], rows["target_log_prob"]
    log_p = now.log_prob(rows["action"]).sum(-1)
    ratio = (log_b - log_t).exp().clamp(max=1.0) * (log_p - log_b).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    advantage, target, old = rows["advantage"], rows["value_target"], rows["state_value"]
    near = value if value_clip is None else old + (value - old).clamp(-value_clip, value_clip)
    of_values = torch.maximum((value - target) ** 2, (near - target) ** 2).mean()
    entropy = now.entropy().sum(-1).mean()
    expected = {
        "loss_objective": -torch.minimum(ratio * advantage, clipped * advantage).mean(),
        "loss_critic": 0.5 * settings.get("critic_coeff", 1.0) * of_values,
        "loss_entropy": -settings.get("entropy_coeff", 0.0) * entropy,
        "entropy": entropy,
        "kl": kl_divergence(before, now).sum(-1).mean(),
        "clip_fraction": (ratio != clipped).double().mean(),
        "rho_clip_fraction": ((log_t - log_b).exp() > settings.get("rho_bar", 1.0)).double().mean(),
    }
    assert 0 < expected["clip_fraction"] < 1
    assert 0 < expected["rho_clip_fraction"] < 1
    for key, number in expected.items():
        assert losses[key].item() == pytest.approx(number.item(), rel=1e-6), key


@pytest.mark.parametrize("columns", [1, ACT])
def test_log_probabilities_by_component_are_refused(columns):
    loss = _loss()
    rollout = _rollout(loss, 6, 6)  # which a number per component could be taken for
    log_prob = rollout["action_log_prob"]
    with pytest.raises(LayoutShapeError, match=r"^APPOLoss: 'action_log_prob' has shape \(6, 6, "):
        loss.estimate(rollout.set("action_log_prob", log_prob[..., None].expand(6, 6, columns)))


def test_rollouts_end_to_end_are_not_taken_for_one():
    loss = _loss()
    rollout = _rollout(loss)
    ids = torch.arange(len(rollout)).flip(0)[:, None].expand(rollout.shape)
    loss.estimate(rollout.set(("collector", "traj_ids"), ids))
    with pytest.raises(LayoutShapeError, match=r"where a trajectory that is not done is followed"):
        loss.estimate(rollout.reshape(-1))
    rollout["next", "done"][:, -1] = True
    loss.estimate(rollout.reshape(-1))


def test_advantages_are_normalised_over_the_pool_and_estimates_carry_no_gradient():
    loss = _loss()
    estimated = loss.estimate(_rollout(loss))
    assert estimated["advantage"].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert estimated["advantage"].std().item() == pytest.approx(1.0, abs=1e-5)
    assert not any(value.requires_grad for value in estimated.values(True, True))


def test_the_advantage_of_a_sample_alone_is_nothing():
    loss = _loss()
    assert loss.estimate(_rollout(loss)[:1, :1])["advantage"].tolist() == [[0.0]]


def test_only_actor_and_critic_learn():
    loss = _loss()
    losses = loss(loss.estimate(_rollout(loss)).reshape(-1))
    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    learned = {name for name, p in loss.named_parameters() if p.grad is not None}
    assert learned == {n for n, p in loss.named_parameters() if p.requires_grad}
    assert {n.split(".")[0] for n in learned} == {"actor_network", "critic_network"}


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_the_target_follows_every_nth_step_by_tau(tau):
    loss = _loss(tau=tau, target_update_freq=3)
    target = loss.target_actor_network[0].log_std
    target.fill_(0.0)
    loss.actor_network[0].log_std.data.fill_(1.0)
    seen = []
    for _ in range(3):
        loss.step_target()
        seen.append(target[0].item())
    assert seen == [0.0, 0.0, tau]


@pytest.mark.parametrize(
    "use", [APPOLoss.update_target, lambda loss: loss.estimate(_rollout(loss))], ids=["move", "ask"]
)
def test_the_target_normalises_by_the_same_statistics(use):
    loss = _loss()
    loss.actor_network[0].normalizer.update(torch.randn(50, OBS) * 3 + 1)
    use(loss)
    target = loss.target_actor_network[0].normalizer
    assert torch.equal(target.mean, loss.actor_network[0].normalizer.mean)
    assert target is not loss.actor_network[0].normalizer


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.0121, 1e-3 / 1.1), (0.0119, 1e-3), (0.0084, 1e-3), (0.0083, 1.1e-3)]
)
def test_the_learning_rate_steps_by_a_tenth_outside_the_band(kl, expected):
    lr = kl_adapted_lr(torch.tensor(1e-3), torch.tensor(kl), desired_kl=0.01, max_lr=1e-2)
    assert lr.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kl", [0.0, -1e-9])
def test_a_policy_that_has_not_moved_leaves_the_learning_rate_alone(kl):
    lr = torch.tensor(1e-3)
    assert torch.equal(kl_adapted_lr(lr, torch.tensor(kl), desired_kl=0.01, max_lr=1e-2), lr)


@pytest.mark.parametrize(
    ("settings", "blind"),
    [
        ({"target_update_freq": 1}, [True, False]),
        ({"target_update_freq": 2}, [True, False]),
        ({"target_update_freq": 1, "tau": 0.5}, [False, False]),  # the target lags behind
        ({"target_update_freq": 3}, [False, False]),
    ],
    ids=str,
)
def test_the_target_is_current_until_the_first_step_on_a_pool_that_was_estimated_with_it(
    settings, blind
):
    loss = _loss(**settings)
    for _ in range(2):
        loss.step_target()
    loss.estimate(_rollout(loss))
    seen = []
    for _ in range(2):
        seen.append(loss.target_is_current)
        loss.step_target()
    assert seen == blind


@pytest.mark.parametrize(("lr", "kl"), [(1e-3, 1e-9), (1e-5, 9.0), (1e-6, 1e-9)])
def test_the_learning_rate_stays_within_its_bounds(lr, kl):
    adapted = kl_adapted_lr(torch.tensor(lr), torch.tensor(kl), 0.01, max_lr=min(lr, 1e-3))
    assert adapted.item() == pytest.approx(lr)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 1.1),
        ("tau", -0.1),
        ("lambda_", 2.0),
        ("target_update_freq", 0),
        ("clip_epsilon", -0.1),
        ("value_clip", -1.0),
        ("critic_coeff", -1.0),
        ("rho_bar", -1.0),
        ("c_bar", -2.0),
        ("entropy_coeff", float("nan")),
        ("entropy_coeff", float("inf")),
    ],
)
def test_coefficients_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        _loss(**{name: value})


def test_an_actor_of_several_actions_is_refused():
    net = TensorDictModule(nn.Linear(OBS, 1), ["observation"], [("params", "move", "loc")])
    actor = ProbabilisticActor(
        net,
        in_keys=["params"],
        out_keys=["move"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"move": Normal}},
    )
    with pytest.raises(ConfigError, match=r"CompositeDistribution .*Join the actions"):
        APPOLoss(actor, make_critic(OBS))


@pytest.mark.parametrize(
    "actor",
    [TensorDictSequential(make_actor(OBS, ACT)), make_td3_actor(OBS, ACT)],
    ids=["a sequence that ends with an actor", "a deterministic actor"],
)
def test_an_actor_whose_distribution_cannot_be_rebuilt_is_refused(actor):
    with pytest.raises(ConfigError, match="Wrap the whole network"):
        APPOLoss(actor, make_critic(OBS))


def test_an_actor_without_shapes_is_refused():
    with pytest.raises(ConfigError, match=r"weight' is lazy .*Run one forward pass first"):
        APPOLoss(_actor(nn.LazyLinear(2 * ACT), IndependentNormal), make_critic(OBS))


def test_another_value_estimator_than_v_trace_is_refused():
    with pytest.raises(ConfigError, match=r"^APPOLoss: make_value_estimator was called .*gamma"):
        _loss().make_value_estimator(ValueEstimators.GAE, gamma=0.9)


def test_it_reads_and_writes_the_keys_it_declares():
    loss = _loss()
    minibatch = loss.estimate(_rollout(loss)).reshape(-1).select(*loss.in_keys)
    assert set(loss(minibatch).keys()) == set(loss.out_keys)
    assert "APPOLoss" in repr(loss)


def test_tensors_by_name_give_the_losses_of_a_tensordict_in_order():
    loss = _loss()
    minibatch = loss.estimate(_rollout(loss)).reshape(-1)
    expected = loss(minibatch)
    given = {key: minibatch[key] for key in loss.in_keys}
    assert [*loss(**given)] == [expected[key] for key in loss.out_keys]


def test_a_state_dict_carries_the_count_of_steps():
    loss, other = _loss(target_update_freq=5), _loss()
    for _ in range(5):
        loss.step_target()
    other.load_state_dict(loss.state_dict())
    other.estimate(_rollout(other))
    assert (other.steps, other.target_is_current) == (5, True)


def test_time_is_the_last_dimension_whatever_comes_before():
    loss = _loss()
    rollout = _rollout(loss, batch=6)
    expected = loss.estimate(rollout)
    nested = loss.estimate(rollout.reshape(2, 3, 6))
    alone = loss.estimate(rollout[2])
    for key in ("value_target", "advantage", "target_log_prob"):
        torch.testing.assert_close(nested[key].reshape(6, 6), expected[key])
    torch.testing.assert_close(alone["value_target"], expected["value_target"][2])


@pytest.mark.parametrize("distribution", [IndependentNormal, TanhNormal, TruncatedNormal])
def test_a_distribution_without_a_closed_entropy_or_divergence_is_learnt_by_samples(distribution):
    torch.manual_seed(0)
    layer = nn.Linear(OBS, 2 * ACT)
    loss = APPOLoss(_actor(layer, distribution), make_critic(OBS), entropy_coeff=0.1)
    batch = loss.estimate(_rollout(loss, 64, 32)).reshape(-1)
    assert loss(batch)["kl"].item() == pytest.approx(0.0, abs=1e-6)  # the policies are the same
    layer.bias.data.add_(0.5)
    losses = loss(batch)
    sum(losses[key] for key in ("loss_objective", "loss_critic", "loss_entropy")).backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in loss.actor_network.parameters()
    )
    assert losses["kl"] > 0.01


class _Twofold(TensorDictModuleBase):
    """A critic that writes another number before the state value."""

    in_keys, out_keys = ["observation"], ["doubt", "state_value"]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(OBS, 2)

    def forward(self, tensordict: TensorDict) -> TensorDict:
        doubt, value = self.layer(tensordict["observation"]).split(1, -1)
        return tensordict.update({"doubt": doubt, "state_value": value})


@pytest.mark.parametrize("last", ["state_value", "doubt"])
def test_the_value_is_what_the_critic_writes_by_that_name(last):
    critic = _Twofold()
    critic.out_keys = sorted(critic.out_keys, key=last.__eq__)
    loss = APPOLoss(make_actor(OBS, ACT), critic)
    rollout = _rollout(loss)
    values = critic(rollout.select("observation"))["state_value"].squeeze(-1)
    torch.testing.assert_close(loss.estimate(rollout)["state_value"], values)


def test_what_a_batch_lacks_is_said_with_what_to_do():
    loss = _loss()
    for key in loss.in_keys:
        with pytest.raises(LayoutKeyError, match=rf"^APPOLoss: no '{key}' .*Call `estimate`"):
            loss(loss.estimate(_rollout(loss)).reshape(-1).exclude(key))
    with pytest.raises(LayoutKeyError, match=r"no 'action_log_prob' .*Collect with a policy"):
        loss.estimate(_rollout(loss).exclude("action_log_prob"))


@pytest.mark.parametrize("key", ["observation", ("next", "observation")])
def test_an_observation_that_rollouts_lack_is_named(key):
    loss = _loss()
    with pytest.raises(LayoutKeyError, match=r"^APPOLoss: no .*observation.* among \['action', "):
        loss.estimate(_rollout(loss).exclude(key))


@pytest.mark.parametrize("moves", [None, APPOLoss.step_target, APPOLoss.update_target])
def test_a_loop_that_never_moves_the_target_is_warned_once(moves, monkeypatch):
    monkeypatch.setattr(appo.torchrl_logger, "warning", warned := Mock())
    loss = _loss()
    for _ in range(3):
        pool = loss.estimate(_rollout(loss)).reshape(-1)
        with torch.no_grad():
            loss(pool)
        assert not warned.called  # nothing has been learnt
    for _ in range(3):
        loss(loss.estimate(_rollout(loss)).reshape(-1))
        if moves is not None:
            moves(loss)
    assert warned.call_count == (moves is None)


def test_the_target_follows_parameters_that_were_replaced():
    loss = _loss()
    loss.load_state_dict(_loss().state_dict(), assign=True)
    with torch.no_grad():
        for parameter in loss.actor_network.parameters():
            parameter.add_(1.0)
    loss.update_target()
    current = dict(loss.actor_network.named_parameters())
    for name, parameter in loss.target_actor_network.named_parameters():
        torch.testing.assert_close(parameter, current[name].detach())
