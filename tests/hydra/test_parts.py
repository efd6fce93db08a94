"""What a trainer of Hydra's gets: seeds, threads, environments, collectors; and how it ends."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from torchrl.trainers import TrainerHookBase

from tests.support.processes import live_children
from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.configs import RunConfig
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError, DivergedError
from torchrl_unilab.hydra import train as command
from torchrl_unilab.hydra.factories import (
    _sized,
    make_appo_collector,
    make_appo_trainer,
    make_off_policy_trainer,
    make_replay_collector,
)
from torchrl_unilab.modules import make_actor
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, OffPolicyTrainer
from torchrl_unilab.trainers.runs.train import Run
from torchrl_unilab.weight_update import UniLabShmScheme

TASK = "InvertedPendulum-v5"
APPO = APPOConfig(num_envs=2, num_steps=8, minibatches=2, hidden=(8,))
OFF_POLICY = {"num_envs": 2, "batch_size": 8, "learning_starts": 4, "replay_buffer_n": 64}
TRAINERS = pytest.mark.parametrize(
    ("make", "collector", "config"),
    [
        (make_appo_trainer, make_appo_collector, APPO),
        (make_off_policy_trainer, make_replay_collector, OffPolicyConfig("sac", **OFF_POLICY)),
    ],
)
COLLECTORS = pytest.mark.parametrize(
    ("make", "kind", "own"),
    [
        (make_appo_collector, APPOCollector, {}),
        (make_replay_collector, ReplayCollector, {"capacity": 64}),
    ],
)


@TRAINERS
def test_a_seed_makes_the_networks_and_the_data_of_a_run_with_that_seed(
    make, collector, config, tmp_path
):
    trainer = make(
        config=config,
        create_env_fn=partial(MujocoBatchEnv, TASK),
        collector=partial(collector, inline=True),
        total_frames=64,
        seed=3,
        progress_bar=False,
    )
    trainer.collector.shutdown()
    if isinstance(trainer, OffPolicyTrainer):
        trainer.close()
    run = Run(RunConfig(TASK, 64, seed=3), config, tmp_path / "run")
    run.prepare()
    theirs = run.learner.loss.state_dict()
    for name, ours in trainer.loss_module.state_dict().items():
        assert not isinstance(ours, torch.Tensor) or torch.equal(ours, theirs[name]), name
    assert trainer.collector._first_seed == trainer.seed == run._acting_seed


def test_a_trainer_of_hydras_learns_in_as_many_threads_as_a_run():
    torch.set_num_threads(3)
    make_env = partial(MujocoBatchEnv, TASK)
    inline = partial(make_appo_collector, inline=True)
    trainer = make_appo_trainer(
        config=APPO, create_env_fn=make_env, collector=inline, total_frames=64, progress_bar=False
    )
    trainer.collector.shutdown()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("given", "threads"), [({}, 2), ({"num_envs": 2, "num_threads": 3}, 3), ({"num_envs": None}, 2)]
)
def test_an_environment_is_as_large_as_the_settings_say_and_has_its_nodes_threads(given, threads):
    config = APPOConfig(num_envs=2, physics_threads=2)
    made = _sized(partial(MujocoBatchEnv, TASK, **given), config).keywords
    expected = {"num_envs": 2, "num_threads": threads, "stagger": config.stagger}
    assert made == expected


def test_a_collectors_node_has_no_policy_of_its_own_beside_the_trainers():
    collector = partial(make_appo_collector, policy=make_actor(4, 1))
    with pytest.raises(ConfigError, match=r"^trainer=appo: policy \(expected null"):
        make_appo_trainer(config=APPO, total_frames=64, collector=collector)


def test_a_hook_that_is_refused_leaves_no_worker():
    hook = Mock(TrainerHookBase, **{"register.side_effect": ConfigError("no such stage")})
    make_env = partial(MujocoBatchEnv, TASK)
    with pytest.raises(ConfigError, match="no such stage") as refused:
        make_appo_trainer(
            config=APPO, create_env_fn=make_env, total_frames=64, hooks=[hook], progress_bar=False
        )
    assert not live_children(), refused.traceback  # which keeps what was made alive


@COLLECTORS
def test_a_collector_of_its_own_has_those_arguments_of_its_node_that_are_not_none(make, kind, own):
    make_env = partial(MujocoBatchEnv, TASK, 2, num_threads=1)
    schemes = DictConfig({"policy": UniLabShmScheme()}, flags={"allow_objects": True})
    own = {"frames_per_batch": 8, "num_workers": 2, "weight_sync_schemes": schemes, **own}
    with make(create_env_fn=make_env, policy=make_actor(4, 1), lockstep=None, **own) as collector:
        assert type(collector) is kind
        assert len(collector.pids) == 2
        assert collector.scheme is schemes["policy"]
        next(iter(collector))


# The command


def test_the_server_of_its_workers_is_forked_first(monkeypatch):
    calls = Mock()
    monkeypatch.setattr("torchrl_unilab.fork_server.start_fork_server", calls.fork)
    monkeypatch.setattr(command, "main", calls.train)
    runpy.run_module("torchrl_unilab.hydra", run_name="__main__")
    assert [call[0] for call in calls.method_calls] == ["fork", "train"]


def _run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **instantiate: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["hydra", "--config-name", "appo"])
    monkeypatch.setattr(command, "instantiate", Mock(**instantiate))
    monkeypatch.setattr(command.signal, "signal", Mock())
    command.main()


def test_an_interrupt_ends_the_collector_of_another_trainer_which_saves_nothing(
    monkeypatch, tmp_path
):
    trainer = Mock(**{"train.side_effect": KeyboardInterrupt})
    with pytest.raises(SystemExit, match="130"):
        _run(monkeypatch, tmp_path, return_value=trainer)
    trainer.collector.shutdown.assert_called_once_with()
    assert not trainer.save_trainer.called


@pytest.mark.parametrize("kind", [InstantiationException, ValueError])
def test_an_error_of_a_part_that_is_none_of_ours_shows_where_it_was_raised(
    kind, monkeypatch, tmp_path
):
    error = kind("in a part")
    error.__cause__ = ZeroDivisionError("its own")
    with pytest.raises(kind, match="in a part"):
        _run(monkeypatch, tmp_path, side_effect=error)


def test_an_error_of_ours_in_training_is_one_line_and_what_the_trainer_has_is_closed(
    monkeypatch, tmp_path
):
    trainer = Mock(OffPolicyTrainer, **{"train.side_effect": DivergedError("loss is nan")})
    with pytest.raises(SystemExit, match=r"^error: loss is nan$"):
        _run(monkeypatch, tmp_path, return_value=trainer)
    trainer.close.assert_called_once_with()
    trainer.collector.shutdown.assert_called_once_with()


def test_a_trainer_ends_with_its_frames_in_the_log_of_the_directory_that_it_trained_in(
    monkeypatch, tmp_path
):
    entered: list[Path] = []
    trainer = Mock(collected_frames=12, train=lambda: entered.append(Path.cwd()))
    _run(monkeypatch, tmp_path, return_value=trainer)
    (directory,) = entered
    assert tmp_path in directory.parents
    (log,) = directory.glob("*.log")
    assert "12 frames collected" in log.read_text()
