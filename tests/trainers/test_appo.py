from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from unittest.mock import Mock, PropertyMock

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import ClipPPOLoss

from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.modules import (
    ObservationNormalizer,
    make_actor,
    make_critic,
    make_sac_actor,
)
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers import (
    APPOConfig,
    APPOTrainer,
    OffPolicyConfig,
    OffPolicyTrainer,
    appo,
    base,
)
from torchrl_unilab.trainers.loss_updates import APPOStepper
from torchrl_unilab.trainers.reports import CollectorReport, EpisodeReturns
from torchrl_unilab.weight_update import UniLabShmScheme

QUICK = {
    "num_envs": 4,
    "num_steps": 16,
    "epochs": 2,
    "minibatches": 2,
    "hidden": (8,),
    "lr": 1e-3,
    "log_std": -1.0,
    "anneal": 0.0,
}
FRAMES = 64

create_pendulum = partial(MujocoBatchEnv, "InvertedPendulum-v5", num_envs=4, num_threads=1)


def _loss(config: APPOConfig, normalizer: ObservationNormalizer) -> APPOLoss:
    torch.manual_seed(0)
    return APPOLoss(
        make_actor(4, 1, normalizer=normalizer, hidden=config.hidden),
        make_critic(4, normalizer=normalizer, hidden=config.hidden),
        gamma=config.gamma,
        value_clip=None,
        target_update_freq=config.epochs * config.minibatches,
    )


def _trainer(
    rollouts: int = 5,
    *,
    inline: bool = True,
    **settings: object,
) -> APPOTrainer:
    """A trainer of a pendulum, everything seeded."""
    config = APPOConfig(**{**QUICK, **settings})
    normalizer = ObservationNormalizer(4)
    loss = _loss(config, normalizer)
    scheme = UniLabShmScheme()
    return APPOTrainer(
        collector=APPOCollector(
            create_pendulum,
            loss.actor_network,
            frames_per_batch=FRAMES,
            weight_sync_schemes={"policy": scheme},
            inline=inline,
            lockstep=True,
            seed=3,
        ),
        loss_module=loss,
        total_frames=rollouts * FRAMES,
        config=config,
        normalizers={"observation": normalizer},
        scheme=scheme,
        progress_bar=False,
        seed=1,
    )


def _parameters(trainer: APPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.loss_module.named_parameters()}


def _trained(**settings: object) -> dict[str, torch.Tensor]:
    trainer = _trainer(**settings)
    before = _parameters(trainer)
    trainer.train()
    after = _parameters(trainer)
    assert not any(torch.equal(before[name], value) for name, value in after.items())
    return after


def _assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("fused", [True, False])
def test_the_target_begins_where_a_network_is_that_was_loaded(fused):
    before = _trainer(fused=fused)
    loss = before.loss_module
    with torch.no_grad():
        for parameter in loss.actor_network.parameters():
            parameter.add_(0.3)

    APPOTrainer(
        collector=before.collector,
        loss_module=loss,
        total_frames=FRAMES,
        config=before.config,
        progress_bar=False,
    )

    before.collector.shutdown()
    target = loss.target_actor_network.state_dict()
    _assert_equal(loss.actor_network.state_dict(), target)


@pytest.mark.parametrize("fused", [True, False])
def test_one_step_per_rollout_leaves_the_learning_rate_alone(fused):
    trainer = _trainer(8, epochs=1, minibatches=1, fused=fused)

    trainer.train()

    assert trainer.optimization_stepper.lr.item() == pytest.approx(1e-3)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stage", ["setup", "post_optim"])
def test_a_learning_rate_that_is_set_to_a_number_holds_from_then_on(fused, stage):
    trainer = _trainer(2, epochs=1, minibatches=2, fused=fused)

    def set_rate() -> None:
        trainer.optimizer.param_groups[0]["lr"] = 1e-4

    trainer.register_op(stage, set_rate)
    trainer.train()
    rate = trainer.optimization_stepper.lr
    assert rate is trainer.optimizer.param_groups[0]["lr"]
    assert 0.8e-4 < rate.item() < 1.22e-4  # two steps may have steered it


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("anneal", "shares"), [(1.0, [1 - i / 8 for i in range(8)]), (0.25, [1.0] * 7 + [0.5])]
)
@pytest.mark.parametrize("steps", [2, 1])
def test_an_annealed_rate_starts_at_its_setting_and_ends_near_zero(fused, anneal, shares, steps):
    trainer = _trainer(8, anneal=anneal, fused=fused, epochs=steps, minibatches=steps)
    rates = []
    trainer.register_op(
        "post_steps", lambda *_: rates.append(trainer.optimization_stepper.lr.item())
    )

    trainer.train()

    assert all(rate <= 1.0001e-3 * share for rate, share in zip(rates, shares, strict=True))
    assert rates[0] > 5e-4


@pytest.mark.parametrize("fused", [True, False])
def test_the_bound_of_the_deviation_falls_to_its_last_value(fused):
    trainer = _trainer(4, final_log_std=-3.0, fused=fused)
    highest = []
    trainer.register_op(
        "post_steps",
        lambda *_: highest.append(trainer.loss_module.actor_network[0].log_std.max().item()),
    )

    trainer.train()

    assert highest == pytest.approx([-1.5, -2.0, -2.5, -3.0])


@pytest.mark.parametrize("settings", [{}, {"target_update_freq": 3}, {"pool": 2, "fused": False}])
def test_the_fall_of_the_bound_is_no_divergence_that_slows_the_learning(settings):
    trainer = _trainer(6, final_log_std=-13.0, **settings)  # by 2 each rollout
    loss = trainer.loss_module
    apart = []

    def compare(*_: object) -> None:
        target, current = loss.target_actor_network[0].log_std, loss.actor_network[0].log_std
        apart.append((target - current).abs().max().item())

    trainer.register_op("post_steps", compare)

    trainer.train()

    assert max(apart) < 0.1


@pytest.mark.parametrize("fused", [True, False])
def test_values_are_estimated_with_a_discount_that_rises(fused, monkeypatch):
    trainer = _trainer(4, gamma=0.9, final_gamma=0.99, fused=fused)
    discounts, estimate = [], APPOLoss.estimate

    def recorded(loss: APPOLoss, rollouts: TensorDictBase) -> TensorDictBase:
        discounts.append(loss.gamma)
        return estimate(loss, rollouts)

    monkeypatch.setattr(APPOLoss, "estimate", recorded)

    trainer.train()

    assert discounts == pytest.approx([1 - 0.1 ** (1 + i / 4) for i in range(4)])


def test_without_a_last_discount_that_of_the_loss_stays():
    trainer = _trainer(2, gamma=0.9)
    trainer.loss_module.gamma = 0.8  # one's own
    trainer.train()
    assert trainer.loss_module.gamma == 0.8


def test_without_a_last_value_the_deviation_has_no_bound():
    trainer = _trainer(4)
    trainer.train()
    assert trainer.loss_module.actor_network[0].log_std.min() > -1.5


def test_a_last_deviation_is_refused_for_an_actor_of_another_kind():
    config = APPOConfig(**QUICK, final_log_std=-3.0)
    loss = APPOLoss(make_sac_actor(4, 1), make_critic(4))
    with pytest.raises(ConfigError, match=r"final_log_std: -3\.0 with SquashedGaussianActor"):
        APPOTrainer(collector=None, loss_module=loss, total_frames=FRAMES, config=config)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (ClipPPOLoss(make_actor(4, 1), make_critic(4)), "ClipPPOLoss"),
        (torch.nn.Identity(), "Identity"),
    ],
)
def test_the_loss_of_another_algorithm_is_refused_by_name(loss, name):
    with pytest.raises(ConfigError, match=rf"loss_module: {name} \(expected APPOLoss, which"):
        APPOTrainer(collector=None, loss_module=loss, total_frames=1, config=APPOConfig(**QUICK))


def _batches(count: int) -> list[TensorDictBase]:
    """Rollouts of the pendulum under the trainers' first policy."""
    loss = _loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    collector = APPOCollector(
        create_pendulum,
        loss.actor_network,
        frames_per_batch=FRAMES,
        total_frames=count * FRAMES,
        inline=True,
        seed=3,
    )
    batches = list(collector)
    collector.shutdown()
    return batches


@pytest.fixture(scope="module")
def serial() -> dict[str, torch.Tensor]:
    """Parameters after five rollouts collected in this process."""
    return _trained()


def test_training_is_repeatable_bit_for_bit(serial):
    _assert_equal(serial, _trained())


def test_serial_and_asynchronous_runs_agree_when_the_lag_is_zero(serial):
    _assert_equal(serial, _trained(inline=False))


def test_fused_and_unfused_steps_learn_the_same(serial):
    unfused = _trained(fused=False)
    for name, value in serial.items():
        torch.testing.assert_close(unfused[name], value, rtol=2e-3, atol=2e-4, msg=name)
    assert any(not torch.equal(value, unfused[name]) for name, value in serial.items())


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_each_rollout_enters_the_normaliser_once_however_often_it_is_used(pool):
    trainer = _trainer(4, pool=pool, lr=1e-4)
    trainer.loss_module.target_update_freq = 1000
    batches = _batches(4)
    for batch in batches:
        trainer.optim_steps(batch)
    assert (len(trainer.pool), trainer.pool.data.batch_size) == (pool, (16, 4 * pool))
    observations = torch.cat([batch["observation"] for batch in batches]).reshape(-1, 4).double()
    normalizer = trainer.normalizers["observation"]
    assert normalizer.count.item() == 4 * FRAMES
    torch.testing.assert_close(normalizer.mean, observations.mean(0))
    torch.testing.assert_close(normalizer.variance, observations.var(0, correction=0))
    target = trainer.loss_module.target_actor_network[0].normalizer
    assert torch.equal(target.mean, normalizer.mean)  # though no update of the target was due
    newest = trainer.pool.data["observation"].reshape(-1, 4).sum().item()
    expected = sum(batch["observation"].sum().item() for batch in batches[-pool:])
    assert newest == pytest.approx(expected, rel=1e-4)
    trainer.collector.shutdown()


def test_rewards_are_scaled_for_learning_alone():
    trainer = _trainer(reward_scale=0.25)
    [batch] = _batches(1)
    rewards = batch["next", "reward"].clone()
    trainer.optim_steps(batch)
    assert torch.equal(batch["next", "reward"], rewards)
    assert torch.equal(trainer.pool.data["next", "reward"], 0.25 * rewards.transpose(0, 1))
    trainer.collector.shutdown()


def test_a_batch_of_any_number_of_dimensions_is_taken_in():
    trainer = _trainer()
    [batch] = _batches(1)
    trainer.optim_steps(batch.reshape(2, 2, 16))
    trainer.optim_steps(batch)
    assert trainer.pool.data.batch_size == (16, 4)
    trainer.collector.shutdown()


def _calls(trainer: APPOTrainer, *names: str) -> dict[str, list]:
    """Register hooks at `names`; what they are called with is collected."""
    calls: dict[str, list] = {name: [] for name in names}

    def hook(name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            calls[name].append(args[0] if args else None)
            return {"seen": 1.0} if name.endswith("log") else (args[0] if args else None)

        return call

    for name in names:
        trainer.register_op(name, hook(name))
    return calls


WHOLE = ("pre_optim_steps", "pre_epoch_log", "post_optim", "post_epoch_log", "post_epoch")
ONCE = "post_optim_complete_log"
WITHIN = ("pre_epoch", "process_optim_batch", "post_optim_log")


def test_hooks_are_called_at_their_places_by_both_kinds_of_steps():
    seeing = _trainer()
    calls = _calls(seeing, *WHOLE, *WITHIN, ONCE)
    fused = _trainer()
    fused_calls = _calls(fused, *WHOLE)
    [batch] = _batches(1)
    for trainer in (seeing, fused):
        torch.manual_seed(5)
        trainer.optim_steps(batch)
        trainer.collector.shutdown()
    expected = {"pre_optim_steps": 1, "post_optim": 4} | dict.fromkeys(WHOLE[1:2] + WHOLE[3:], 2)
    assert {name: len(fused_calls[name]) for name in WHOLE} == expected
    assert {name: len(calls[name]) for name in WHOLE} == expected
    assert calls[ONCE] == [4]  # steps so far
    assert [td.numel() for td in calls["pre_epoch"]] == [64, 64]
    assert [td.numel() for td in calls["process_optim_batch"]] == [32] * 4
    assert [td.numel() for td in calls["post_optim_log"]] == [32] * 4
    for name, value in _parameters(seeing).items():  # of one and the same optimiser's steps
        torch.testing.assert_close(_parameters(fused)[name], value, rtol=2e-3, atol=2e-4)


def test_a_stage_that_an_update_does_not_have_is_refused():
    trainer = _trainer()
    with trainer.collector, pytest.raises(ConfigError, match=r"^hook stage 'optimizer': APPOTr"):
        trainer.register_op("optimizer", lambda losses: losses)


def test_a_hook_may_change_a_minibatch_and_the_optimiser_stays_the_same_one():
    trainer = _trainer()
    first, second = _batches(2)
    trainer.optim_steps(first)
    [state] = trainer.optimizer.state.values()
    before, steps = state["exp_avg"].clone(), state["step"].item()
    trainer.register_op(
        "process_optim_batch", lambda td: td.clone().set("advantage", 0 * td["advantage"])
    )
    actor = [p.clone() for p in trainer.loss_module.actor_network.parameters()]
    trainer.optim_steps(second)
    [state] = trainer.optimizer.state.values()
    assert state["step"].item() == steps + 4
    assert not torch.equal(state["exp_avg"], before)
    moved = max(
        (p - q).abs().max().item()
        for p, q in zip(actor, trainer.loss_module.actor_network.parameters(), strict=True)
    )
    assert moved > 0.0  # by what the optimiser still remembers
    trainer.collector.shutdown()


@pytest.mark.parametrize("dropped", [None, "loss_module", "optimizer"])
def test_gradients_that_a_user_dropped_keep_no_step_from_the_networks(dropped):
    trainer = _trainer()
    trainer.register_op("process_optim_batch", lambda td: td)
    if dropped is not None:
        getattr(trainer, dropped).zero_grad()
    before = _parameters(trainer)
    trainer.train()
    after = _parameters(trainer)
    assert not any(torch.equal(before[name], value) for name, value in after.items())
    _assert_equal(after, _hooked())


@cache
def _hooked() -> dict[str, torch.Tensor]:
    trainer = _trainer()
    trainer.register_op("process_optim_batch", lambda td: td)
    trainer.train()
    return _parameters(trainer)


@pytest.mark.parametrize("seeing", [False, True])
def test_of_two_trainers_of_one_loss_the_first_is_refused(seeing):
    trainer = _trainer()
    if seeing:
        trainer.register_op("process_optim_batch", lambda td: td)
    other = APPOTrainer(
        collector=trainer.collector,
        loss_module=trainer.loss_module,
        total_frames=FRAMES,
        config=APPOConfig(**QUICK),
        progress_bar=False,
    )
    [batch] = _batches(1)
    with trainer.collector, pytest.raises(ConfigError, match="its memory has moved"):
        trainer.optim_steps(batch)
    other.optim_steps(batch)


@pytest.mark.parametrize("same", [True, False])
def test_a_collector_that_acts_by_another_policy_is_told_in_the_log(same, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(base.torchrl_logger, "warning", lambda text, *of: told.append(text % of))
    loss = _loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    actor = loss.actor_network if same else make_actor(4, 1)
    with APPOCollector(create_pendulum, actor, frames_per_batch=FRAMES, inline=True) as collector:
        APPOTrainer(
            collector=collector,
            loss_module=loss,
            total_frames=FRAMES,
            config=APPOConfig(**QUICK),
            progress_bar=False,
        )
    assert told == [] if same else "APPOTrainer: the collector's policy has no parameter" in told[0]


@pytest.mark.parametrize("fused", [True, False])
def test_more_minibatches_than_samples_are_refused(fused):
    trainer = _trainer(fused=fused)
    [batch] = _batches(1)
    with trainer.collector, pytest.raises(ConfigError, match="minibatches: 2 of 1 samples"):
        trainer.optim_steps(batch[:1, :1])


def _without_log_prob(td: TensorDictBase) -> TensorDictBase:
    return td.exclude("action_log_prob")


def _by_component(td: TensorDictBase) -> TensorDictBase:
    return td.clone().set("action_log_prob", td["action_log_prob"].unsqueeze(-1))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_without_log_prob, LayoutKeyError, r"no \['action_log_prob'\] .*Collect with its actor"),
        (_by_component, LayoutShapeError, r"'action_log_prob' has shape \(4, 16, 1\) \(expected"),
    ],
)
def test_rollouts_of_a_policy_that_the_loss_cannot_learn_from_are_refused(spoil, error, message):
    trainer = _trainer()
    [batch] = _batches(1)
    with trainer.collector, pytest.raises(error, match=message):
        trainer.optim_steps(spoil(batch))


@pytest.mark.parametrize(
    ("key", "size", "error", "message"),
    [
        ("obs", 4, LayoutKeyError, r"normalizers: no \['obs'\] in what is collected"),
        ("observation", 2, LayoutShapeError, r"observation to normalise: .* \(expected \[..., 2"),
    ],
)
def test_a_normaliser_of_what_is_not_observed_is_refused(key, size, error, message):
    trainer = _trainer()
    trainer.normalizers[key] = ObservationNormalizer(size)
    [batch] = _batches(1)
    with trainer.collector, pytest.raises(error, match=message):
        trainer.optim_steps(batch)


def test_parts_of_another_algorithm_are_refused_by_name():
    loss = _loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    given = {"loss_module": loss, "total_frames": FRAMES}
    with pytest.raises(ConfigError, match=r"config: OffPolicyConfig \(expected APPOConfig"):
        APPOTrainer(collector=Mock(), config=OffPolicyConfig(), **given)
    with pytest.raises(ConfigError, match=r"config: APPOConfig \(expected OffPolicyConfig"):
        OffPolicyTrainer(collector=Mock(), config=APPOConfig(), **given)
    with pytest.raises(ConfigError, match="collector: ReplayCollector, which fills a replay"):
        APPOTrainer(collector=Mock(ReplayCollector), config=APPOConfig(), **given)


@pytest.mark.parametrize("fused", [True, False])
def test_one_look_at_the_device_per_rollout_is_all(fused, monkeypatch):
    trainer = _trainer(fused=fused)
    first, second = _batches(2)
    trainer.optim_steps(first)
    looks = []
    for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def look(self, *args, name=name, original=original, **kwargs):
            looks.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, look)
    trainer.optim_steps(second)
    monkeypatch.undo()
    assert looks == ["tolist"]
    trainer.collector.shutdown()


def test_the_collectors_word_and_the_policy_lag_are_logged():
    trainer = _trainer()
    trainer.train()
    assert isinstance(trainer.returns, CollectorReport)
    assert trainer.returns.last["dropped"] == trainer.returns.last["stale"] == 0
    assert trainer.returns.last["termination_rate"] == 1.0
    assert [frames for _, frames, _ in trainer.returns.curve][-1] == 5 * FRAMES
    assert trainer.lag.histogram == {0: 5}
    for name in ("lr", "kl", "rho_p99", "explained_variance", "fps", "return", "policy_lag_0"):
        assert name in trainer._log_dict, name
    assert 0.0 < trainer.busy_time.busy < 1.0


def test_of_more_samples_than_torch_takes_a_quantile_of_some_are_taken(monkeypatch):
    monkeypatch.setattr(appo, "_MOST_SORTED", FRAMES // 3)
    quantile, counts = torch.Tensor.quantile, []

    def recorded(samples: torch.Tensor, *arguments: float) -> torch.Tensor:
        counts.append(len(samples))
        return quantile(samples, *arguments)

    monkeypatch.setattr(torch.Tensor, "quantile", recorded)
    trainer = _trainer(2)

    trainer.train()

    assert counts == [FRAMES // 4] * 2


@pytest.mark.parametrize(("behind", "stale"), [(0, 0), (2, 0), (3, 4)])
def test_rollouts_that_aged_beyond_the_bound_are_not_learnt_from(behind, stale):
    trainer = _trainer(4, max_policy_lag=2)
    published = trainer.lag.scheme
    before = published.version
    trainer.lag.scheme = Mock(applied_versions={})
    type(trainer.lag.scheme).version = PropertyMock(side_effect=lambda: published.version + behind)
    trainer.train()
    assert trainer.stale == stale
    assert published.version - before == 4 - stale  # what was learnt, and nothing else
    assert (trainer._optim_count == 0) == (stale > 0)
    assert trainer.collected_frames == 4 * FRAMES


def test_a_bound_of_the_lag_needs_the_scheme_that_counts_it():
    config = APPOConfig(max_policy_lag=2)
    loss = _loss(config, ObservationNormalizer(4))
    with pytest.raises(ConfigError, match=r"max_policy_lag: 2 without a scheme"):
        APPOTrainer(collector=Mock(), loss_module=loss, total_frames=1, config=config)


def test_torchrls_own_collector_will_do():
    loss = _loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    collector = Collector(
        create_pendulum(),
        loss.actor_network,
        frames_per_batch=FRAMES,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    trainer = APPOTrainer(
        collector=collector,
        loss_module=loss,
        total_frames=5 * FRAMES,
        config=APPOConfig(**QUICK),
        normalizers={"observation": loss.actor_network[0].normalizer},
        progress_bar=False,
    )
    before = _parameters(trainer)
    trainer.train()
    assert isinstance(trainer.returns, EpisodeReturns)
    assert trainer.returns.finished
    assert trainer.lag is None
    assert not any(torch.equal(before[name], p) for name, p in _parameters(trainer).items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_loss_takes_the_same_step():
    moved = []
    for compiled in (False, True):
        torch.manual_seed(0)
        config = APPOConfig(fused=False, compile=compiled)
        loss = APPOLoss(make_actor(3, 1, hidden=(8,)), make_critic(3, hidden=(8,)))
        noise = TensorDict(observation=torch.randn(4, 8, 3), batch_size=[4, 8])
        with set_exploration_type(ExplorationType.RANDOM):
            rollout = loss.actor_network(noise).detach()
        rollout["next"] = TensorDict(
            observation=torch.randn(4, 8, 3),
            reward=torch.randn(4, 8, 1),
            done=torch.zeros(4, 8, 1, dtype=torch.bool),
            terminated=torch.zeros(4, 8, 1, dtype=torch.bool),
            batch_size=[4, 8],
        )
        APPOStepper(loss, config).step(None, loss.estimate(rollout).reshape(-1))
        moved.append([p.detach().clone() for p in loss.actor_network.parameters()])
    for eager, other in zip(*moved, strict=True):
        torch.testing.assert_close(eager, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_the_target_policy_moves_after_a_rollouts_last_step_whatever_was_counted_before(
    fused, monkeypatch
):
    trainer = _trainer(3, fused=fused, epochs=2, minibatches=48)  # which do not divide a rollout
    loss, moved, update = trainer.loss_module, [], trainer.loss_module.update_target
    loss.target_update_freq = None
    loss.steps = 5  # as where a run that was interrupted in mid-update goes on
    monkeypatch.setattr(loss, "update_target", lambda: (moved.append(loss.steps), update()))

    trainer.train()

    assert moved == [5 + 96, 5 + 2 * 96, 5 + 3 * 96]
    assert trainer._optim_count == 3 * 96
