"""Which settings a resumed run takes over from its `config.yaml`, and what it shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.checkpoints import tree
from tests.support.quick import FRAMES, QUIET
from torchrl_unilab.cli import main
from torchrl_unilab.configs import RunConfig
from torchrl_unilab.configs.file import as_yaml, read_config
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import resume_run
from torchrl_unilab.trainers.runs import resume, train
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints


def say(run_dir: Path, **settings: object) -> None:
    """Change settings in a run's file."""
    file = run_dir / "config.yaml"
    file.write_text(as_yaml(read_config(file) | settings))


@pytest.fixture
def plan(run_dir, monkeypatch) -> RunConfig:
    """The plan of a resumed run whose file has each setting other than by default."""
    said = {"progress_bar": False, "trace": True, "eval_episodes": 3, "keep_checkpoints": 5}
    say(run_dir, checkpoint_interval=None, **said)
    made = Mock()
    monkeypatch.setattr(resume, "Run", made)
    resume_run(run_dir, frames=4 * FRAMES, eval_max_steps=7)
    return made.call_args.args[0]


def test_a_resumed_run_shows_its_progress_and_is_not_traced_by_default(plan):
    assert (plan.progress_bar, plan.trace) == (True, False)


def test_a_resumed_run_evaluates_and_keeps_as_its_file_says_unless_flags_differ(plan):
    assert (plan.eval_episodes, plan.keep_checkpoints, plan.eval_max_steps) == (3, 5, 7)


def test_a_longer_run_is_saved_each_quarter_of_its_own_frames_unless_that_was_set(plan):
    assert plan.interval == FRAMES


def test_a_run_that_was_killed_after_it_came_to_its_limit_is_ended_and_then_continued(run_dir):
    say(run_dir, stop_at=1.0)
    (run_dir / "summary.json").unlink()
    for frames in (FRAMES, 2 * FRAMES):
        assert resume_run(run_dir, frames=2 * FRAMES, **QUIET)["frames"] == frames


def test_the_first_line_of_progress_of_a_resumed_run_counts_from_its_checkpoint(
    run_dir, monkeypatch
):
    begun = []
    log = Mock(side_effect=lambda trainer, _: begun.append(trainer.collected_frames))
    monkeypatch.setattr(train, "log_progress", log)
    resume_run(run_dir, frames=FRAMES + 32, eval_episodes=1)
    assert begun == [FRAMES]


@pytest.mark.parametrize(
    ("ranks", "here", "way"),
    [(1, 2, "without torchrun"), (2, 1, "by torchrun, in 2 processes in all")],
)
def test_a_run_of_another_number_of_ranks_is_refused_with_the_way_to_start_as_many(
    run_dir, monkeypatch, ranks, here, way
):
    saved = RunCheckpoints(run_dir / "checkpoint").newest()
    saved = dataclasses.replace(saved, run={**saved.run, "ranks": ranks})
    monkeypatch.setattr(RunCheckpoints, "newest", lambda _: saved)
    monkeypatch.setattr(resume.Ranks, "of_torchrun", lambda: Mock(size=here))
    refused = rf"{here} ranks for a run of {ranks} \(expected as many\)\. Start it {way}\."
    with pytest.raises(ConfigError, match=refused):
        resume_run(run_dir, frames=2 * FRAMES)


@pytest.mark.parametrize("limit", ["stop_at", "max_seconds"])
def test_a_limit_that_a_person_has_changed_to_no_number_is_refused_unless_there_is_another(
    run_dir, monkeypatch, limit
):
    say(run_dir, **{limit: "high"})
    monkeypatch.setattr(resume, "Run", made := Mock())
    with pytest.raises(ConfigError, match=rf"{limit}: 'high' \(expected None or a finite number"):
        resume_run(run_dir, frames=2 * FRAMES)
    resume_run(run_dir, frames=2 * FRAMES, **{limit: 1e9})
    assert made.call_count == 1


# By the command line


def test_the_command_line_resumes_the_run_it_is_given_and_refuses_another(
    run_dir, tmp_path, capsys
):
    resume = ["--resume", "--run-dir", str(run_dir), "--no-progress", "--eval-episodes", "1"]
    before = tree(run_dir)
    assert main(["train", "td3", *resume]) == 2
    assert main(["train", "sac", *resume, "--gamma", "0.5"]) == 2
    assert main(["train", "sac", *resume, "--seed", "5"]) == 2
    assert main(["train", "sac", "--resume", "--run-dir", str(tmp_path / "none")]) == 2
    assert main(["train", "sac", "--run-dir", str(tmp_path / "none")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 5
    assert all(line.startswith("error: ") for line in errors)
    assert tree(run_dir) == before
    assert not (tmp_path / "none").exists()
    more = ["--env", "InvertedPendulum-v5", "--frames", str(FRAMES + 64)]
    assert main(["train", "sac", *resume, *more, "--checkpoint-interval", "32"]) == 0
    assert f"{FRAMES + 64} frames" in capsys.readouterr().out
    assert RunCheckpoints(run_dir / "checkpoint").newest().interval == 32


def test_a_run_without_a_checkpoint_is_not_replaced_by_another_one(tmp_path, capsys):
    begun = tmp_path / "run" / "config.yaml"
    begun.parent.mkdir()
    begun.write_text("algo: appo\nenv: Hopper-v5\nseed: 3\n")
    command = ["train", "appo", "--env", "HalfCheetah-v5", "--frames", "300000", "--resume"]
    assert main([*command, "--run-dir", str(begun.parent)]) == 2
    said = capsys.readouterr().err
    assert "it is of a run with {'env': 'Hopper-v5', 'algo': 'appo', 'seed': 3} (expected" in said
    assert [*begun.parent.iterdir()] == [begun]
    assert begun.read_text().startswith("algo: appo\nenv: Hopper-v5")


def test_a_file_of_settings_counts_for_a_resumed_run_as_flags_do(run_dir, tmp_path, capsys):
    resume = ["train", "sac", "--resume", "--run-dir", str(run_dir), "--no-progress"]
    file, said = tmp_path / "other.yaml", read_config(run_dir / "config.yaml")
    file.write_text(as_yaml({**said, "gamma": 0.5}))
    assert main([*resume, "--config", str(file)]) == 2
    assert "{'gamma': 0.99}" in capsys.readouterr().err
    file.write_text(as_yaml({**said, "frames": FRAMES + 32}))
    assert main([*resume, "--config", str(file)]) == 0
    assert read_config(run_dir / "config.yaml")["frames"] == FRAMES + 32


def test_a_run_to_resume_is_not_trained_in_place_of_printing_it(run_dir, capsys):
    resume = ["train", "sac", "--resume", "--run-dir", str(run_dir), "--frames", str(2 * FRAMES)]
    before = tree(run_dir)
    assert main([*resume, "--print-config"]) == 2
    assert f"It is in {run_dir}/config.yaml" in capsys.readouterr().err
    assert tree(run_dir) == before
