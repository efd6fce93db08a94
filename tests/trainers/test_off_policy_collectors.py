"""Which collectors a trainer of SAC and TD3 takes, and what it learns from others than its own."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDictBase
from torchrl import logger as torchrl_logger
from torchrl.collectors import Collector
from torchrl.envs import RenameTransform, TransformedEnv

from tests.support.off_policy_training import BOTH, QUICK, off_policy_trainer
from tests.support.quick import four_pendulums
from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.collectors.replay import transition_keys
from torchrl_unilab.collectors.worker import closing_env
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.errors import ConfigError, LayoutKeyError
from torchrl_unilab.trainers import OffPolicyConfig, OffPolicyTrainer
from torchrl_unilab.trainers.runs.builders import Learner, build_off_policy


def _learner_and_row(config: OffPolicyConfig) -> tuple[Learner, TensorDictBase]:
    """Networks for a pendulum, and a row of a replay for it."""
    with closing_env(four_pendulums()) as env:
        row = env.fake_tensordict()[0].select(*transition_keys(env))
        return build_off_policy(env, config), row


def _trainer(
    collector: object, learner: Learner, storage: PackedReplayStorage, **settings: object
) -> OffPolicyTrainer:
    """A trainer that keeps what another collector yields."""
    settings = {"total_frames": 80, "config": OffPolicyConfig(**QUICK), **settings}
    return OffPolicyTrainer(
        collector=collector,
        loss_module=learner.loss,
        normalizers=learner.normalizers,
        storage=storage,
        progress_bar=False,
        **settings,
    )


def test_another_collector_without_a_storage_is_refused():
    config = OffPolicyConfig(**QUICK)
    with pytest.raises(ConfigError, match=r"storage: none, with Mock \(expected one"):
        OffPolicyTrainer(collector=Mock(), loss_module=Mock(), total_frames=1, config=config)


@BOTH
def test_what_another_collector_yields_is_learnt_from_in_a_replay_of_the_trainers(algorithm):
    torch.manual_seed(0)
    config = OffPolicyConfig(algorithm, **QUICK | {"obs_normalization": True})
    learner, row = _learner_and_row(config)
    steps, batches = 4, 5
    with PackedReplayStorage(100, example=row) as storage:
        collector = APPOCollector(
            four_pendulums, learner.actor, frames_per_batch=4 * steps, inline=True, seed=0
        )
        trainer = _trainer(collector, learner, storage, config=config)
        trainer.train()
        assert trainer.collected_frames == storage.size == batches * 4 * steps
        assert trainer.updates == (batches - 1) * QUICK["updates_per_step"]  # 32 rows first
        assert learner.normalizers["observation"].count == storage.size
        # Rows of one environment follow each other.
        before = storage[:]["next", "observation"].view(-1, 4, 4)
        after = storage[:]["observation"].view(-1, 4, 4)
        done = storage[:]["next", "done"].view(-1, 4)
        assert before[:-1][~done[:-1]].equal(after[1:][~done[:-1]])
        trainer.close()


def test_returns_of_another_collector_are_of_the_reward_that_the_loss_reads():
    config = OffPolicyConfig(**QUICK)
    learner, row = _learner_and_row(config)
    learner.loss.set_keys(reward="gain")
    row["next", "gain"] = row["next"].pop("reward")
    env = TransformedEnv(four_pendulums(), RenameTransform(["reward"], ["gain"]))
    settings = {"total_frames": -1, "auto_register_policy_transforms": False}
    collector = Collector(env, learner.actor, frames_per_batch=40, **settings)
    with PackedReplayStorage(100, example=row) as storage:
        trainer = _trainer(collector, learner, storage)
        trainer.train()
        lengths = trainer.returns.lengths  # every step but the last is worth 1
        assert [*trainer.returns.finished] == [steps - 1 for steps in lengths] != []
        trainer.close()


def test_a_replay_besides_the_one_that_the_workers_fill_is_refused():
    learner, row = _learner_and_row(OffPolicyConfig(**QUICK))
    settings = {"capacity": 100, "frames_per_batch": 4, "inline": True}
    with (
        ReplayCollector(four_pendulums, learner.actor, **settings) as collector,
        PackedReplayStorage(100, example=row) as storage,
    ):
        with pytest.raises(ConfigError, match=r"storage: another than ReplayCollector's"):
            _trainer(collector, learner, storage)
        _trainer(collector, learner, collector.storage).close()


def test_random_frames_of_another_collector_are_in_the_replay():
    learner, row = _learner_and_row(OffPolicyConfig(**QUICK))
    with PackedReplayStorage(100, example=row) as storage:
        collector = Collector(
            four_pendulums,
            learner.actor,
            frames_per_batch=16,
            total_frames=80,
            init_random_frames=48,
            auto_register_policy_transforms=False,
        )
        trainer = _trainer(collector, learner, storage)
        trainer.train()
        trainer.close()
        assert trainer.collected_frames == storage.size == 80
        assert trainer.updates == 3 * QUICK["updates_per_step"]


@pytest.mark.parametrize(
    ("reward", "gamma", "message"),
    [
        ("bonus", 0.99, "a loss of the reward 'bonus'"),
        ("reward", 0.9, r"returns of gamma=0\.9 \(expected 0\.99, the loss's\)"),
    ],
)
def test_returns_of_several_steps_that_are_not_of_the_losses_reward_and_discount_are_refused(
    reward, gamma, message
):
    learner, row = _learner_and_row(OffPolicyConfig(**QUICK))
    learner.loss.set_keys(reward=reward)
    with (
        PackedReplayStorage(100, example=row, n_step=3, gamma=gamma) as storage,
        pytest.raises(ConfigError, match=f"replay of n_step=3: {message}"),
    ):
        _trainer(Mock(spec=APPOCollector), learner, storage)


def test_rollouts_without_a_key_of_the_replays_rows_are_refused():
    learner, row = _learner_and_row(OffPolicyConfig(**QUICK))
    row.set("index", torch.tensor(0))
    with PackedReplayStorage(100, example=row) as storage:
        settings = {"frames_per_batch": 16, "inline": True, "seed": 0}
        collector = APPOCollector(four_pendulums, learner.actor, **settings)
        trainer = _trainer(collector, learner, storage)
        with pytest.raises(LayoutKeyError, match=r"rollouts: no \['index'\] \(expected all"):
            trainer.train()
        trainer.close()
        trainer.collector.shutdown()


def test_a_replay_that_never_has_enough_for_the_first_update_is_refused():
    config = OffPolicyConfig(**QUICK)
    learner, _ = _learner_and_row(config)
    settings = {"capacity": 16, "frames_per_batch": 4, "inline": True}
    with (
        ReplayCollector(four_pendulums, learner.actor, **settings) as collector,
        pytest.raises(ConfigError, match=r"replay: 16 \(expected an integer of at least 32"),
    ):
        OffPolicyTrainer(
            collector=collector, loss_module=learner.loss, total_frames=100, config=config
        )


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
@pytest.mark.parametrize(("setting", "value"), [("gamma", 0.5), ("n_step", 3)])
def test_a_setting_that_differs_from_replay_and_loss_which_count_is_refused(
    algorithm, setting, value
):
    trainer = off_policy_trainer(algorithm=algorithm)
    with pytest.raises(ConfigError, match=f"{setting}: {value} in config .* replay and loss"):
        OffPolicyTrainer(
            collector=trainer.collector,
            loss_module=trainer.loss_module,
            total_frames=80,
            config=OffPolicyConfig(**QUICK, algorithm=algorithm, **{setting: value}),
        )
    trainer.close()
    trainer.collector.shutdown()


def test_a_collector_of_other_ticks_than_the_settings_is_warned_of(monkeypatch):
    monkeypatch.setattr(torchrl_logger, "warning", warned := Mock())
    trainer = off_policy_trainer()
    assert not warned.called
    other = OffPolicyTrainer(
        collector=trainer.collector,
        loss_module=trainer.loss_module,
        total_frames=80,
        config=OffPolicyConfig(**QUICK, env_steps_per_sync=2),
        progress_bar=False,
    )
    assert "ticks of 4 frames (expected 8, those of config" in warned.call_args.args[0]
    other.close()
    trainer.close()
    trainer.collector.shutdown()
