from __future__ import annotations

from unittest.mock import Mock, PropertyMock

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import RenameTransform, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import ClipPPOLoss

from tests.support.quick import four_pendulums
from tests.support.training import (
    FRAMES,
    QUICK,
    appo_loss,
    appo_trainer,
    assert_equal,
    parameters_of,
    pendulum_rollouts,
    trainer_of,
)
from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.errors import CheckpointError, ConfigError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers import APPOConfig, APPOTrainer, OffPolicyConfig, OffPolicyTrainer, base
from torchrl_unilab.trainers.loss_updates import APPOStepper
from torchrl_unilab.trainers.reports import CollectorReport, EpisodeReturns


def _trained(**settings: object) -> dict[str, torch.Tensor]:
    trainer = appo_trainer(**settings)
    before = parameters_of(trainer)
    trainer.train()
    after = parameters_of(trainer)
    assert not any(torch.equal(before[name], value) for name, value in after.items())
    return after


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("fused", [True, False])
def test_a_target_that_no_step_has_moved_begins_where_a_network_is_that_was_loaded(fused, steps):
    before = appo_trainer(fused=fused)
    loss = before.loss_module
    loss.steps = steps
    with torch.no_grad():
        for parameter in loss.actor_network.parameters():
            parameter.add_(0.3)

    trainer_of(before.collector, loss, config=before.config)

    before.collector.shutdown()
    networks = loss.actor_network, loss.target_actor_network
    for own, target in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(own, target) is (steps == 0)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (ClipPPOLoss(make_actor(4, 1), make_critic(4)), "ClipPPOLoss"),
        (torch.nn.Identity(), "Identity"),
    ],
)
def test_the_loss_of_another_algorithm_is_refused_by_name(loss, name):
    with pytest.raises(ConfigError, match=rf"loss_module: {name} \(expected APPOLoss\)"):
        APPOTrainer(collector=None, loss_module=loss, total_frames=1, config=APPOConfig(**QUICK))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gamma": 0.5}, r"gamma: 0\.5 in config \(expected 0\.99, that of the loss"),
        ({"lambda_": 0.5, "gamma": 0.99}, "lambda_: 0.5"),
        ({"clip_epsilon": 0.05}, "clip_epsilon"),
        ({"value_clip": 0.3}, r"value_clip: 0\.3 in config \(expected None"),
        ({"entropy_coeff": 0.3}, "entropy_coeff"),
        ({"critic_coeff": 7.0}, "critic_coeff"),
        ({"rho_bar": 2.0}, "rho_bar"),
        ({"c_bar": 2.0}, "c_bar"),
        ({"tau": 0.1}, "tau"),
        ({"target_update_freq": 9}, "target_update_freq"),
    ],
)
def test_a_setting_that_differs_from_the_loss_which_counts_is_refused(settings, named):
    loss = appo_loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    with pytest.raises(ConfigError, match=named):
        trainer_of(None, loss, config=APPOConfig(**QUICK, **settings))


@pytest.mark.parametrize(("fused", "threads"), [(True, 1), (False, 2)])
def test_a_fused_update_has_one_thread_others_as_many_as_torch(fused, threads):
    torch.set_num_threads(2)
    trainer, seen = appo_trainer(1, fused=fused), []
    trainer.register_op("post_optim", lambda: seen.append(torch.get_num_threads()))
    trainer.train()
    assert {*seen} == {threads}
    assert torch.get_num_threads() == 2


@pytest.fixture(scope="module")
def serial() -> dict[str, torch.Tensor]:
    """Parameters after five rollouts collected in this process."""
    return _trained()


def test_training_is_repeatable_bit_for_bit(serial):
    assert_equal(serial, _trained())


def test_serial_and_asynchronous_runs_agree_when_the_lag_is_zero(serial):
    assert_equal(serial, _trained(inline=False))


def test_fused_and_unfused_steps_learn_the_same(serial):
    unfused = _trained(fused=False)
    for name, value in serial.items():
        torch.testing.assert_close(unfused[name], value, rtol=2e-3, atol=2e-4, msg=name)
    assert any(not torch.equal(value, unfused[name]) for name, value in serial.items())


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_each_rollout_enters_the_normaliser_once_however_often_it_is_used(pool):
    trainer = appo_trainer(4, pool=pool, lr=1e-4)
    trainer.loss_module.target_update_freq = 1000
    batches = pendulum_rollouts(4)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_rewards_also_integers_are_scaled_for_learning_alone(dtype):
    trainer = appo_trainer(reward_scale=0.25)
    [batch] = pendulum_rollouts(1)
    rewards = batch["next", "reward"].round().to(dtype)
    trainer.optim_steps(batch.set(("next", "reward"), rewards.clone()))
    assert torch.equal(batch["next", "reward"], rewards)
    assert torch.equal(trainer.pool.data["next", "reward"], 0.25 * rewards.transpose(0, 1))
    trainer.collector.shutdown()


def test_a_batch_of_any_number_of_dimensions_is_taken_in():
    trainer = appo_trainer()
    [batch] = pendulum_rollouts(1)
    trainer.optim_steps(batch.reshape(2, 2, 16))
    trainer.optim_steps(batch)
    assert trainer.pool.data.batch_size == (16, 4)
    trainer.collector.shutdown()


@pytest.mark.parametrize("same", [True, False])
def test_a_collector_that_acts_by_another_policy_is_logged(same, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(base.torchrl_logger, "warning", lambda text, *of: told.append(text % of))
    loss = appo_loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    actor = loss.actor_network if same else make_actor(4, 1)
    with APPOCollector(four_pendulums, actor, frames_per_batch=FRAMES, inline=True) as collector:
        trainer_of(collector, loss)
    assert told == [] if same else "APPOTrainer: the collector's policy has no parameter" in told[0]


@pytest.mark.parametrize("fused", [True, False])
def test_more_minibatches_than_samples_are_refused(fused):
    trainer = appo_trainer(fused=fused)
    [batch] = pendulum_rollouts(1)
    with (
        trainer.collector,
        pytest.raises(ConfigError, match=r"minibatches: 2 \(expected an integer of 1 to 1\)"),
    ):
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
    trainer = appo_trainer()
    [batch] = pendulum_rollouts(1)
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
    trainer = appo_trainer()
    trainer.normalizers[key] = ObservationNormalizer(size)
    [batch] = pendulum_rollouts(1)
    with trainer.collector, pytest.raises(error, match=message):
        trainer.optim_steps(batch)


def test_parts_of_another_algorithm_are_refused_by_name():
    loss = appo_loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    given = {"loss_module": loss, "total_frames": FRAMES}
    with pytest.raises(ConfigError, match=r"config: OffPolicyConfig \(expected APPOConfig"):
        APPOTrainer(collector=Mock(), config=OffPolicyConfig(), **given)
    with pytest.raises(ConfigError, match=r"config: APPOConfig \(expected OffPolicyConfig"):
        OffPolicyTrainer(collector=Mock(), config=APPOConfig(), **given)
    with pytest.raises(ConfigError, match="collector: ReplayCollector, which fills a replay"):
        APPOTrainer(collector=Mock(ReplayCollector), config=APPOConfig(), **given)


@pytest.mark.parametrize("fused", [True, False])
def test_one_look_at_the_device_per_rollout_is_all(fused, monkeypatch):
    trainer = appo_trainer(fused=fused)
    first, second = pendulum_rollouts(2)
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
    trainer = appo_trainer()
    trainer.train()
    assert isinstance(trainer.returns, CollectorReport)
    assert trainer.returns.last["dropped"] == trainer.returns.last["stale"] == 0
    assert trainer.returns.last["termination_rate"] == 1.0
    assert [frames for _, frames, _ in trainer.returns.curve][-1] == 5 * FRAMES
    assert trainer.lag.histogram == {0: 5}
    for name in ("lr", "kl", "rho_p99", "explained_variance", "fps", "return", "policy_lag_0"):
        assert name in trainer._log_dict, name
    assert 0.0 < trainer.busy_time.busy < 1.0


@pytest.mark.parametrize(("behind", "stale"), [(0, 0), (2, 0), (3, 4)])
def test_rollouts_that_aged_beyond_the_bound_are_not_learnt_from(behind, stale):
    trainer = appo_trainer(4, max_policy_lag=2)
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
    loss = appo_loss(config, ObservationNormalizer(4))
    with pytest.raises(ConfigError, match=r"max_policy_lag: 2 without a scheme"):
        APPOTrainer(collector=Mock(), loss_module=loss, total_frames=1, config=config)


def test_torchrls_own_collector_will_do():
    loss = appo_loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    collector = Collector(
        four_pendulums(),
        loss.actor_network,
        frames_per_batch=FRAMES,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    normalizers = {"observation": loss.actor_network[0].normalizer}
    trainer = trainer_of(collector, loss, total_frames=5 * FRAMES, normalizers=normalizers)
    before = parameters_of(trainer)
    trainer.train()
    assert isinstance(trainer.returns, EpisodeReturns)
    assert trainer.returns.finished
    assert trainer.lag is None
    assert not any(torch.equal(before[name], p) for name, p in parameters_of(trainer).items())


def test_returns_of_torchrls_own_collector_are_of_the_reward_that_the_loss_reads():
    loss = appo_loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    loss.set_keys(reward="gain")
    env = TransformedEnv(four_pendulums(), RenameTransform(["reward"], ["gain"]))
    settings = {"total_frames": -1, "auto_register_policy_transforms": False}
    collector = Collector(env, loss.actor_network, frames_per_batch=FRAMES, **settings)
    trainer = trainer_of(collector, loss, total_frames=5 * FRAMES)
    trainer.train()
    lengths = trainer.returns.lengths  # every step but the last is worth 1
    assert [*trainer.returns.finished] == [steps - 1 for steps in lengths] != []


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
    trainer = appo_trainer(
        3, fused=fused, epochs=2, minibatches=48
    )  # which do not divide a rollout
    loss, moved, update = trainer.loss_module, [], trainer.loss_module.update_target
    loss.target_update_freq = None
    loss.steps = 5  # as where a run that was interrupted in mid-update goes on
    monkeypatch.setattr(loss, "update_target", lambda: (moved.append(loss.steps), update()))

    trainer.train()

    assert moved == [5 + 96, 5 + 2 * 96, 5 + 3 * 96]
    assert trainer._optim_count == 3 * 96


@pytest.mark.parametrize("fused", [True, False])
def test_a_state_of_another_kind_of_update_is_refused_before_anything_is_loaded(fused):
    saved, other = appo_trainer(fused=fused), appo_trainer(fused=not fused)
    before = parameters_of(other)
    state = saved.state_dict()
    with saved.collector, other.collector, pytest.raises(CheckpointError, match="fused in config"):
        other.load_state_dict(state)
    assert_equal(parameters_of(other), before)
