"""What a run does after an error or an interrupt, and what it asks, compares and says before."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.support.quick import APPO, quick_run
from torchrl_unilab.configs import RunConfig
from torchrl_unilab.configs.file import CONFIG_FILE, as_yaml
from torchrl_unilab.errors import PeerGoneError
from torchrl_unilab.trainers import APPOConfig, APPOTrainer
from torchrl_unilab.trainers.runs import train as module
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints
from torchrl_unilab.trainers.runs.train import Run


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (OSError(28, "No space left on device"), "the first"),
        (KeyboardInterrupt("enough"), "enough"),
    ],
)
def test_the_first_error_is_raised_though_its_checkpoint_fails_unless_ctrl_c_ends_that(
    tmp_path, monkeypatch, failure, raised
):
    monkeypatch.setattr(APPOTrainer, "_learn", Mock(side_effect=RuntimeError("the first")))
    monkeypatch.setattr(RunCheckpoints, "save", save := Mock(side_effect=failure))
    with pytest.raises((RuntimeError, KeyboardInterrupt), match=raised):
        quick_run(tmp_path)
    assert save.call_count == 1


@pytest.mark.parametrize(
    ("ended_by", "raised"),
    [
        (RuntimeError("the first"), KeyboardInterrupt("by the launcher")),
        (KeyboardInterrupt(), PeerGoneError("another rank has crashed")),
    ],
)
def test_what_was_learnt_is_saved_though_leaving_the_other_ranks_raises(
    tmp_path, monkeypatch, ended_by, raised
):
    monkeypatch.setattr(APPOTrainer, "_learn", Mock(side_effect=ended_by))
    monkeypatch.setattr(module.Ranks, "leave", Mock(side_effect=[raised, None]))
    with pytest.raises(type(raised), match=str(raised)):
        quick_run(tmp_path)
    assert RunCheckpoints(tmp_path / "checkpoint").newest().frames == 128


def test_an_interrupted_run_is_saved_though_its_output_has_no_reader(tmp_path, monkeypatch):
    def gone(line: str) -> None:
        if "interrupted" in line:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(APPOTrainer, "_learn", Mock(side_effect=KeyboardInterrupt))
    assert quick_run(tmp_path, announce=gone)["interrupted"]
    assert RunCheckpoints(tmp_path / "checkpoint").newest().frames == 128


def test_a_run_that_starts_again_without_a_checkpoint_has_no_logs_of_before(tmp_path):
    plan = RunConfig("InvertedPendulum-v5", 128, progress_bar=False, eval_episodes=1)
    run = Run(plan, APPOConfig(**APPO), tmp_path, again=True)
    (tmp_path / CONFIG_FILE).write_text(as_yaml(run.settings))
    log = tmp_path / "logs" / "scalars" / "return.csv"
    log.parent.mkdir(parents=True)
    log.write_text("64,123.0\n")
    run()
    assert "123.0" not in log.read_text()


def test_evaluations_beside_the_training_are_as_long_and_seeded_as_was_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BackgroundEvaluation", made := Mock())
    asked = {"eval_interval": 9, "eval_episodes": 3, "eval_max_steps": 7, "video_interval": 18}
    monkeypatch.setattr(module, "check_filming", Mock())
    run = Run(RunConfig("Hopper-v5", 1 << 20, seed=5, **asked), APPOConfig(), tmp_path / "run")
    run.learner, run.best = Mock(), Mock()
    run._start_evaluation(9, Mock())
    (create_env, *_), asked = made.call_args
    expected = {"interval": 9, "episodes": 3, "max_steps": 7, "seed": 5, "keep": run.best.keep}
    assert expected.items() <= asked.items()
    assert create_env.keywords == {"num_envs": 3, "num_threads": 1, "stagger": False}
    assert asked["videos"][1:] == (tmp_path / "run" / "videos", 18)
    assert asked["videos"].create_env.keywords == {**create_env.keywords, "num_envs": 1}


def test_a_run_of_several_ranks_needs_the_frames_of_a_first_update_for_each(tmp_path, monkeypatch):
    config = APPOConfig()
    monkeypatch.setattr(module.Ranks, "of_torchrun", lambda **_: Mock(rank=0, size=2))
    plan = RunConfig("Hopper-v5", 2 * config.min_frames - 1)
    with pytest.raises(ValueError, match=rf"an integer of at least {2 * config.min_frames}\)"):
        Run(plan, config, tmp_path / "run")


@pytest.mark.parametrize("resumed", [False, True])
def test_what_ranks_compare_has_settings_and_versions_and_the_first_run_alone_tells_of_defaults(
    tmp_path, resumed
):
    told: list[str] = []
    task = "torchrl_unilab.envs.gymnasium.arms:Pusher"  # as a user names a task
    saved = SimpleNamespace(resumed=[], frames=5) if resumed else None
    plan = RunConfig(task, 100_000)
    run = Run(plan, APPOConfig(), tmp_path / "run", announce=told.append, saved=saved)
    run.ranks = Mock()
    run.prepare()
    compared = run.ranks.check_same.call_args.args[0]
    assert {"env", "gamma", "torch", "torchrl"} <= compared.keys()
    assert any("no settings of its own" in line for line in told) is not resumed


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_says_something(tmp_path, monkeypatch, rank):
    monkeypatch.setattr(module.Ranks, "of_torchrun", lambda **_: Mock(rank=rank, size=2))
    told: list[str] = []
    plan = RunConfig("Hopper-v5", 100_000)
    Run(plan, APPOConfig(), tmp_path / "run", announce=told.append).announce("a line")
    assert told == ([] if rank else ["a line"])


def test_an_evaluation_that_runs_when_another_rank_stops_the_training_is_waited_for(
    tmp_path, monkeypatch
):
    run = Run(RunConfig("Hopper-v5", 1 << 20), APPOConfig(), tmp_path / "run")
    monkeypatch.setattr(run, "_start_writing", Mock())
    run.trainer, run.evaluation = Mock(collected_frames=1 << 20), Mock()
    assert run.train() is False
    run.evaluation.finish.assert_called_once_with()


@pytest.mark.parametrize("resumed", [False, True])
def test_the_first_run_alone_logs_its_settings(tmp_path, monkeypatch, resumed):
    monkeypatch.setattr(module, "run_logger", Mock())
    monkeypatch.setattr(module, "check_newest", Mock())
    saved = SimpleNamespace(resumed=[], frames=5) if resumed else None
    run = Run(RunConfig("Hopper-v5", 1 << 20), APPOConfig(), tmp_path / "run", saved=saved)
    with run._holding:
        logger = run._start_writing()
    assert logger.log_hparams.called is not resumed


@pytest.mark.parametrize("stagger", [True, False])
def test_a_collectors_environments_are_made_as_the_settings_say(tmp_path, stagger):
    config = APPOConfig(num_envs=3, physics_threads=2, stagger=stagger)
    run = Run(RunConfig("Hopper-v5", 1 << 20), config, tmp_path / "run")
    run.learner, run.algorithm = Mock(), Mock(**{"collector.side_effect": ZeroDivisionError})
    with pytest.raises(ZeroDivisionError), contextlib.ExitStack() as closing:
        run.connect(closing)
    create_env = run.algorithm.collector.call_args.args[0]
    assert create_env.keywords == {"num_envs": 3, "num_threads": 2, "stagger": stagger}


@pytest.mark.parametrize(("interval", "after", "seconds"), [(700, 699, None), (None, 2499, 600.0)])
def test_a_trainer_is_made_as_the_plan_says(tmp_path, interval, after, seconds):
    plan = RunConfig("Hopper-v5", 10_000, checkpoint_interval=interval, progress_bar=False)
    run = Run(plan, APPOConfig(), tmp_path / "run")
    run.learner, made = Mock(), Mock()
    run.algorithm = dataclasses.replace(run.algorithm, trainer=made)
    trainer = run._make_trainer(Mock(frames_per_batch=8), Mock())
    assert trainer.checkpoint_seconds == seconds
    # TorchRL saves and logs after more than the interval.
    expected = {"total_frames": 10_000, "save_trainer_interval": after, "log_interval": 80}
    expected |= {"seed": run._acting_seed, "progress_bar": False}
    assert expected.items() <= made.call_args.kwargs.items()


@pytest.mark.parametrize("ranks", [1, 2])
def test_saving_after_an_error_outlives_the_interrupt_of_a_launcher_of_several_ranks(
    tmp_path, monkeypatch, ranks
):
    monkeypatch.setattr(module, "save_learner", save := Mock())
    run = Run(RunConfig("Hopper-v5", 1 << 20), APPOConfig(), tmp_path / "run")
    monkeypatch.setattr(run, "_start_writing", Mock())
    run.ranks, run.trainer = Mock(size=ranks), Mock(collected_frames=0)
    run.trainer.train.side_effect = OSError("lost")
    with pytest.raises(OSError, match="lost"):
        run.train()
    save.assert_called_once_with(run.trainer, insist=ranks > 1)
