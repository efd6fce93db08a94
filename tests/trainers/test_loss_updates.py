"""Updates, fused and by the loss's own backward pass, against one reference in float64."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.modules import GRUModule, LSTMModule, QValueActor
from torchrl.objectives import DDPGLoss, DQNLoss, SACLoss

from tests.support import reference
from tests.support.off_policy import make_transitions
from torchrl_unilab.errors import ConfigError, LayoutKeyError
from torchrl_unilab.modules import make_actor, make_critic, make_q_value
from torchrl_unilab.objectives import APPOLoss, FusedAPPOUpdate
from torchrl_unilab.objectives.fused.appo import STATISTICS
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig
from torchrl_unilab.trainers.loss_updates import APPOStepper, make_update
from torchrl_unilab.trainers.runs.builders import Learner, build_learner

pytestmark = pytest.mark.usefixtures("double_precision")

OBS, ACT, ROWS = 5, 2, 32
LOW, HIGH = torch.tensor([-0.4, -1.0]), torch.tensor([0.4, 5.0])
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "general"])
NORMALIZED = pytest.mark.parametrize("normalized", [True, False], ids=["normalised", "plain"])


def _env(low: torch.Tensor = LOW, high: torch.Tensor = HIGH) -> SimpleNamespace:
    """The specs of an environment with these bounds of actions."""
    low, high = low.double(), high.double()
    return SimpleNamespace(
        batch_size=torch.Size([]),
        observation_spec=Composite(observation=Unbounded(OBS)),
        action_spec=Bounded(low, high, shape=low.shape, dtype=low.dtype),
    )


def _move_networks(learner: Learner) -> None:
    """Make each parameter, and each target, another one."""
    with torch.no_grad():
        for name, tensor in learner.loss.state_dict().items():
            if isinstance(tensor, torch.Tensor) and ("net." in name or "log_" in name):
                tensor.add_(0.1 * torch.randn_like(tensor))


def _move_normalizers(learner: Learner) -> None:
    for normalizer in learner.normalizers.values():
        normalizer.update(4 * torch.randn(100, OBS) + 2)


def _normalized(batch: TensorDictBase, learner: Learner) -> TensorDictBase:
    batch = batch.clone()
    for normalizer in learner.normalizers.values():
        for key in ("observation", ("next", "observation")):
            batch[key] = reference.normalized(batch[key], normalizer.mean, normalizer.variance)
    return batch


def _off_policy(algorithm: str, fused: bool, normalized: bool, **settings):
    torch.manual_seed(0)
    config = OffPolicyConfig(
        algorithm, hidden=(16, 16), fused=fused, obs_normalization=normalized, **settings
    )
    learner = build_learner(_env(), config)
    update = make_update(learner.loss, config)
    _move_networks(learner)
    _move_normalizers(learner)
    batch = make_transitions(ROWS, OBS, ACT, seed=1)
    batch["action"] = LOW + (HIGH - LOW) * torch.rand(ROWS, ACT)
    return learner, update, batch


def _step(update, batch: TensorDictBase, seed: int) -> dict[str, torch.Tensor]:
    prepared = update.prepare(batch.clone())
    [minibatch] = update.minibatches(prepared, 1)
    torch.manual_seed(seed)
    observed = update.step(minibatch)
    return dict(zip(update.statistics, observed, strict=True))


def _assert_statistics(
    observed: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], fused: bool = True
) -> None:
    for name, number in expected.items():
        if fused or name not in ("q_value", "td_error"):  # which TorchRL's losses do not say
            torch.testing.assert_close(
                observed[name].double(), number.double(), rtol=1e-7, atol=1e-7, msg=name
            )


NOISE = {"target_noise": 0.4, "target_noise_clip": 0.5}


@NORMALIZED
@FUSED
@pytest.mark.parametrize(
    ("algorithm", "losses", "settings", "shape", "given"),
    [
        ("td3", reference.td3, NOISE, (ROWS, ACT), NOISE),
        ("sac", reference.sac, {"alpha": 0.3}, (2, ROWS, ACT), {}),
    ],
    ids=["td3", "sac"],
)
def test_sac_and_td3_have_the_losses_of_the_reference(
    fused, normalized, algorithm, losses, settings, shape, given
):
    learner, update, batch = _off_policy(algorithm, fused, normalized, **settings)
    state = {key: value.clone() for key, value in learner.loss.state_dict().items()}
    given = {"low": LOW.double(), "high": HIGH.double(), "gamma": 0.99, **given}
    torch.manual_seed(3)
    expected = losses(state, _normalized(batch, learner), torch.randn(shape), **given)
    _assert_statistics(_step(update, batch, seed=3), expected, fused)


@NORMALIZED
@FUSED
def test_appo_has_the_losses_of_the_reference(fused, normalized):
    torch.manual_seed(0)
    settings = {"gamma": 0.9, "lambda_": 0.8, "rho_bar": 1.3, "c_bar": 0.7}
    settings |= {"clip_epsilon": 0.1, "critic_coeff": 0.7}
    config = APPOConfig(hidden=(16, 16), value_clip=0.2, entropy_coeff=0.01, **settings)
    learner = build_learner(_env(), config)
    loss = learner.loss
    if not normalized:
        loss.actor_network[0].normalizer = torch.nn.Identity()
        loss.target_actor_network[0].normalizer = torch.nn.Identity()
        loss.critic_network.normalizer = torch.nn.Identity()
        learner.normalizers = {}
    _move_networks(learner)
    _move_normalizers(learner)
    batch = torch.stack([make_transitions(8, OBS, ACT, seed=i) for i in range(6)], dim=1)
    with torch.no_grad():
        log_b = loss.actor_network.get_dist(batch).log_prob(batch["action"])
    batch["action_log_prob"] = log_b + 0.3 * torch.randn(8, 6)
    state = {key: value for key, value in loss.state_dict().items() if "extra" not in key}
    state = {key: value.clone() for key, value in state.items()}
    expected = reference.appo(state, _normalized(batch, learner), **settings)
    pool = loss.estimate(batch).reshape(-1)

    if fused:
        update = FusedAPPOUpdate(loss, lr=1e-3, desired_kl=0.02, max_grad_norm=1.0)
        observed = dict(zip(STATISTICS, update.step(update.prepare(pool)), strict=True))
    else:
        observed = dict(APPOStepper(loss, config).step(None, pool).items())

    assert 0 < expected["clip_fraction"] < 1
    _assert_statistics(observed, expected)


@pytest.mark.parametrize(
    ("reach", "target"), [(1.0, -17.0), (0.4, -17.0 + 17 * math.log(0.4))], ids=["unit", "Humanoid"]
)
def test_sacs_target_entropy_is_minus_one_per_action_within_minus_one_and_one(reach, target):
    bounds = -reach * torch.ones(17), reach * torch.ones(17)

    loss = build_learner(_env(*bounds), OffPolicyConfig("sac", hidden=())).loss

    # The loss's density is per unit of action, and log(reach) lower than that within [-1, 1].
    assert loss.target_entropy.item() == pytest.approx(target)


def test_td3s_target_noise_is_in_halves_of_each_actions_range():
    config = OffPolicyConfig("td3", hidden=(), target_noise=0.2, target_noise_clip=0.5)

    loss = build_learner(_env(), config).loss

    torch.testing.assert_close(loss.policy_noise, torch.tensor([0.2 * 0.4, 0.2 * 3.0]))
    torch.testing.assert_close(loss.noise_clip, torch.tensor([0.5 * 0.4, 0.5 * 3.0]))


def test_td3s_target_noise_moves_with_the_loss_and_is_no_part_of_its_checkpoints():
    loss = build_learner(_env(), OffPolicyConfig("td3", hidden=())).loss

    assert not {"policy_noise", "noise_clip"} & set(loss.state_dict())
    assert loss.to(torch.float16).noise_clip.dtype == torch.float16


@pytest.mark.parametrize(
    ("chosen", "dtype", "has", "bfloat16"),
    [
        ("auto", torch.float32, "amx_bf16", True),
        ("auto", torch.float32, "avx512_bf16", True),
        ("auto", torch.float32, "avx2", False),
        ("auto", torch.float64, "amx_bf16", False),
        ("auto", torch.float32, None, False),
        ("bfloat16", torch.float32, "avx2", True),
        ("float32", torch.float32, "amx_bf16", False),
    ],
)
@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_products_are_in_bfloat16_where_chosen_or_where_the_processor_has_them(
    monkeypatch, algorithm, chosen, dtype, has, bfloat16
):
    if has is None:  # torch does not report what the processor has
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        known = {"amx_bf16": False, has: True}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    torch.set_default_dtype(dtype)
    seen = {}
    for setting in (chosen, "bfloat16", "float32"):
        _, update, batch = _off_policy(algorithm, True, False, matmul_dtype=setting)
        seen[setting] = _step(update, batch, seed=3)["loss_qvalue"].item()
    assert seen["bfloat16"] != seen["float32"]
    assert seen[chosen] == seen["bfloat16" if bfloat16 else "float32"]


def test_the_setting_of_correlated_noise_reaches_the_actor():
    config = APPOConfig(hidden=(8,), noise_correlation=0.8)
    assert build_learner(_env(), config).actor.noise_correlation == 0.8


def test_td3_without_the_fused_update_refuses_a_critic_that_its_loss_would_not_feed():
    config = OffPolicyConfig("td3", hidden=(), fused=False, critic_observation="all")
    env = _env()
    env.observation_spec["all"] = Unbounded(OBS)
    loss = build_learner(env, config).loss

    with pytest.raises(ConfigError, match=r"TD3Loss: its critic reads \['all'\].* Set fused=True"):
        make_update(loss, config)


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_recurrent_networks_are_refused_as_rows_are_in_no_order_of_time(kind):
    core = kind(input_size=OBS, hidden_size=ACT, in_key="observation", out_key="action")
    loss = DDPGLoss(core, make_q_value(OBS, ACT, hidden=()), delay_value=True)

    with pytest.raises(ConfigError, match=f"DDPGLoss: a {kind.__name__} in its networks"):
        make_update(loss, OffPolicyConfig())


def test_gradients_of_before_are_no_part_of_an_update():
    moved = []
    for left in (None, 100.0):
        learner, update, batch = _off_policy("td3", False, False)
        for parameter in learner.loss.parameters():
            if left is not None and parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, left)
        _step(update, batch, 1)
        moved.append({name: p.detach() for name, p in learner.loss.named_parameters()})
    torch.testing.assert_close(*moved)


def test_a_loss_without_target_networks_is_learnt_by():
    config = OffPolicyConfig("sac", hidden=(), batch_size=ROWS)
    networks = build_learner(_env(), config).loss
    loss = SACLoss(networks.actor_network, networks.qvalue_network, delay_qvalue=False)
    loss.make_value_estimator(gamma=0.99)
    before = [p.detach().clone() for p in loss.parameters()]

    update = make_update(loss, dataclasses.replace(config, fused=False))
    update.step(make_transitions(ROWS, OBS, ACT))

    changed = [not torch.equal(a, b) for a, b in zip(before, loss.parameters(), strict=True)]
    assert all(changed)


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
@pytest.mark.parametrize("fused", [True, False])
def test_targets_begin_where_networks_are_that_were_loaded(algorithm, fused):
    learner = build_learner(_env(), OffPolicyConfig(algorithm, hidden=(8,)))
    _move_networks(learner)

    make_update(learner.loss, OffPolicyConfig(algorithm, hidden=(8,), fused=fused))

    state = learner.loss.state_dict()
    targets = {name: value for name, value in state.items() if name.startswith("target_")}
    assert len(targets) >= 4
    for name, target in targets.items():
        assert torch.equal(target, state[name.removeprefix("target_")]), name


@FUSED
def test_targets_may_move_more_than_halfway_without_a_warning(fused):
    config = OffPolicyConfig("sac", hidden=(8,), fused=fused, tau=0.6)

    make_update(build_learner(_env(), config).loss, config)  # warnings are errors


@FUSED
@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_settings_say_how_far_networks_and_targets_move(algorithm, fused):
    rates = {"lr_actor": 1e-3, "lr_critic": 2e-3, "lr_alpha": 3e-3}
    learner, update, batch = _off_policy(algorithm, fused, False, tau=0.25, **rates)
    before = {name: p.detach().clone() for name, p in learner.loss.state_dict().items()}
    rate = dict(zip(("actor", "qvalue", "log"), rates.values(), strict=True))

    _step(update, batch, seed=1)

    after = learner.loss.state_dict()
    for name, parameter in learner.loss.named_parameters():
        moved = (parameter - before[name]).abs().max().item()  # Adam's first step is the rate
        assert moved == pytest.approx(rate[name.split("_")[0]], rel=1e-2), name
    for name in [name for name in after if name.startswith("target_") and "net." in name]:
        expected = before[name].lerp(after[name.removeprefix("target_")], 0.25)
        torch.testing.assert_close(after[name], expected, msg=name)


def test_truncated_rows_that_would_pass_for_terminated_are_refused():
    config = OffPolicyConfig("sac", hidden=(), fused=False)
    rows = make_transitions(ROWS, OBS, ACT)
    rows["next", "truncated"] = rows["next"].pop("terminated")

    with pytest.raises(ConfigError, match=r"'next.truncated' without 'next.terminated'"):
        make_update(build_learner(_env(), config).loss, config).prepare(rows)


def test_rows_without_what_came_next_are_refused_by_its_name():
    config = OffPolicyConfig("sac", hidden=(), fused=False)
    rows = make_transitions(ROWS, OBS, ACT).exclude("next")

    with pytest.raises(LayoutKeyError, match=r"^transitions: no 'next' among \['action', 'obs"):
        make_update(build_learner(_env(), config).loss, config).prepare(rows)


def test_rows_without_the_losss_reward_are_refused_by_its_key():
    loss, rows = _discrete()
    loss.set_keys(reward="score")

    with pytest.raises(LayoutKeyError, match=r"^transitions, 'next': no 'score' among .*set_keys"):
        make_update(loss, OffPolicyConfig("sac")).prepare(rows)


@pytest.mark.parametrize("fused", [True, False])
def test_more_minibatches_than_rows_are_refused(fused):
    config = OffPolicyConfig("sac", hidden=(), fused=fused)
    update = make_update(build_learner(_env(), config).loss, config)
    prepared = update.prepare(make_transitions(3, OBS, ACT))

    with pytest.raises(ConfigError, match=r"^minibatches: 4 \(expected an integer of 1 to 3\)"):
        [*update.minibatches(prepared, 4)]


def _discrete() -> tuple[DQNLoss, TensorDict]:
    """A loss that writes ``loss`` alone, and rows for it."""
    actor = QValueActor(nn.Linear(OBS, 2), in_keys=["observation"], action_space="one_hot")
    rows = make_transitions(ROWS, OBS, ACT)
    rows["action"] = nn.functional.one_hot(torch.arange(ROWS) % 2, 2)
    return DQNLoss(actor, action_space="one_hot", delay_value=True), rows


def test_a_loss_named_loss_alone_is_learnt_by():
    loss, rows = _discrete()
    before = [p.detach().clone() for p in loss.value_network_params.values(True, True)]
    update = make_update(loss, OffPolicyConfig("sac"))

    update.step(rows)

    after = loss.value_network_params.values(True, True)
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert update.statistics == ("loss",)


class _UnreducedLoss(DDPGLoss):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        losses = super().forward(tensordict)
        return losses.set("loss_regular", tensordict["action"].square().sum(-1))


class _PlainLoss(DDPGLoss):
    def forward(self, tensordict: TensorDictBase) -> torch.Tensor:
        return super().forward(tensordict)["loss_actor"]


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [
        (partial(DDPGLoss, reduction="none"), r"DDPGLoss gives .*'loss_actor': .*reduction='mean'"),
        (_UnreducedLoss, rf"gives .*'loss_regular': \({ROWS},\).*'mean'"),
        (_PlainLoss, r"_PlainLoss gives: Tensor \(expected TensorDict"),
    ],
    ids=["a number per row", "one loss per row beside numbers", "a plain tensor"],
)
def test_a_loss_that_gives_anything_but_numbers_is_refused_with_what_it_gives(loss_of, message):
    networks = build_learner(_env(), OffPolicyConfig("td3", hidden=())).loss
    loss = loss_of(networks.actor_network, networks.qvalue_network)
    loss.make_value_estimator(gamma=0.99)

    with pytest.raises(ConfigError, match=message):
        make_update(loss, OffPolicyConfig("td3")).step(make_transitions(ROWS, OBS, ACT))


def test_an_appo_loss_with_nothing_to_learn_is_refused():
    loss = APPOLoss(make_actor(4, 1), make_critic(4)).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"APPOLoss: no parameter requires a gradient"):
        APPOStepper(loss, APPOConfig())
