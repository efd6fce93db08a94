from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.trainers import ClearCudaCache, UpdateWeights, UTDRHook

from tests.support.off_policy_training import off_policy_trainer
from tests.support.training import QUICK, appo_loss, appo_trainer, trainer_of
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.errors import CheckpointError, ConfigError, SegmentClosedError, UsageError
from torchrl_unilab.modules import ObservationNormalizer
from torchrl_unilab.trainers import APPOConfig, base
from torchrl_unilab.trainers.base import NORM

OF_ONE_UPDATE = pytest.mark.parametrize(
    ("make", "batches"), [(partial(appo_trainer, 1), 1), (partial(off_policy_trainer, 8), 8)]
)
"""Trainers that learn from the last of their batches alone."""


@OF_ONE_UPDATE
def test_what_a_hook_after_an_update_returns_is_logged_if_it_is_anything(make, batches):
    trainer = make()
    hooks = (lambda steps, losses, name: {name: steps}), (lambda steps, losses: None)
    trainer.register_op("post_optim_complete_log", hooks[0], name="steps of a hook")
    trainer.register_op("post_optim_complete_log", hooks[1])
    trainer.train()
    assert [*trainer._log_dict["steps of a hook"]] == [trainer._optim_count]


@OF_ONE_UPDATE
@pytest.mark.parametrize("auto", [True, False])
def test_losses_and_steps_are_logged_without_hooks_unless_that_is_off(make, batches, auto):
    trainer = make()
    trainer.auto_log_optim_steps = auto
    trainer.train()
    logged = {*trainer._log_dict}
    assert ("optim_steps" in logged) is any(key.startswith("loss_") for key in logged) is auto
    assert NORM not in logged


@OF_ONE_UPDATE
def test_hooks_may_publish_to_another_collector_and_within_an_update(make, batches):
    trainer, other = make(), Mock()
    before = trainer.collector.scheme.version
    UpdateWeights(other).register(trainer, "update_other")
    UpdateWeights(trainer.collector, interval_unit="optim_steps", trainer=trainer).register(trainer)
    trainer.train()
    assert other.update_policy_weights_.call_count == batches
    assert trainer.collector.scheme.version == before + batches + trainer._optim_count


@OF_ONE_UPDATE
@pytest.mark.parametrize("returned", [None, "no batch"])
def test_a_hook_before_an_epoch_may_return_no_batch(make, batches, returned):
    trainer = make()
    trainer.register_op("pre_epoch", lambda batch: returned)
    trainer.train()
    assert trainer._optim_count


@OF_ONE_UPDATE
def test_a_hook_that_raises_stop_iteration_fails_the_training(make, batches):
    trainer = make()
    trainer.register_op("process_optim_batch", Mock(side_effect=StopIteration))
    with trainer.collector, pytest.raises(UsageError, match=r"raised StopIteration .*request_stop"):
        trainer.train()


@OF_ONE_UPDATE
@pytest.mark.parametrize("frames", [None, -1, 0, "1024", float("nan")])
def test_frames_to_collect_that_are_no_number_above_zero_are_refused(make, batches, frames):
    made = make()
    arguments = {"collector": made.collector, "loss_module": made.loss_module}
    with made.collector, pytest.raises(ConfigError, match=rf"^total_frames: {frames!r} \(expected"):
        type(made)(**arguments, total_frames=frames, config=made.config, progress_bar=False)


@OF_ONE_UPDATE
def test_the_end_is_saved_though_no_checkpoint_is_due(make, batches, tmp_path):
    trainer = make()
    trainer.checkpoint, trainer.save_trainer_file = Checkpoint(), tmp_path / "end"
    trainer.train()
    assert trainer.collected_frames < trainer.save_trainer_interval
    assert Checkpoint.manifest(tmp_path / "end")


@OF_ONE_UPDATE
def test_a_save_after_the_end_is_refused_and_leaves_the_one_of_the_end(make, batches, tmp_path):
    trainer = make()
    trainer.checkpoint, trainer.save_trainer_file = Checkpoint(), tmp_path / "end"
    trainer.train()
    with pytest.raises(SegmentClosedError, match=r"^save_trainer: .*saves the end"):
        trainer.save_trainer(force_save=True)
    assert Checkpoint.manifest(tmp_path / "end")


@OF_ONE_UPDATE
@pytest.mark.parametrize("missing", ["collector", "loss_module", "state", "of a hook"])
def test_a_state_without_a_part_is_refused_before_anything_is_loaded(make, batches, missing):
    trainer = make()
    ClearCudaCache(2).register(trainer, "of a hook")
    state = trainer.state_dict()
    del state[missing]
    trainer.loss_module.load_state_dict = loaded = Mock()
    with trainer.collector, pytest.raises(CheckpointError, match=rf"no \['{missing}'\] \(expect"):
        trainer.load_state_dict(state)
    assert not loaded.called


def test_a_state_of_another_trainer_is_refused_by_the_parts_that_it_lacks():
    one, other = appo_trainer(), off_policy_trainer()
    with one.collector, other.collector:
        of_one, of_other = one.state_dict(), other.state_dict()
        with pytest.raises(
            CheckpointError, match=r"^state of APPOTrainer: no \['optimization_stepp"
        ):
            one.load_state_dict(of_other)
        with pytest.raises(
            CheckpointError, match=r"^state of OffPolicyTrainer: no \['learner', 'p"
        ):
            other.load_state_dict(of_one)
    other.close()


@pytest.mark.parametrize(("seconds", "times"), [(None, 0), (100.0, 5), (600.0, 1)])
@OF_ONE_UPDATE
def test_checkpoints_come_by_the_clock_however_few_frames_came(
    make, batches, seconds, times, monkeypatch, tmp_path
):
    trainer, clock = make(), iter(range(60, 660, 60))
    trainer.checkpoint, trainer.save_trainer_file = Checkpoint(), tmp_path / "end"
    trainer.checkpoint_seconds, trainer._saved_at = seconds, 0.0
    monkeypatch.setattr(base, "time", Mock(monotonic=lambda: next(clock)))
    monkeypatch.setattr(trainer, "_save_trainer", saved := Mock())
    for _ in range(10):  # in ten minutes
        trainer.save_trainer()
    assert saved.call_count == times


def test_a_policy_without_parameters_is_not_taken_for_another_than_the_losses(monkeypatch):
    monkeypatch.setattr(base.torchrl_logger, "warning", warned := Mock())
    loss = appo_loss(APPOConfig(**QUICK), ObservationNormalizer(4))
    trainer_of(Mock(APPOCollector, policy=nn.Identity()), loss)
    assert not warned.called


def test_updates_per_row_of_a_replay_are_not_asked_of_a_collector_without_one():
    trainer = appo_trainer()
    with (
        trainer.collector,
        pytest.raises(ConfigError, match=r"^hook UTDRHook: APPOCollector counts no rows"),
    ):
        UTDRHook(trainer).register(trainer)
