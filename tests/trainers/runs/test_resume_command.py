"""Runs resumed by the command line."""

from __future__ import annotations

from tests.support.checkpoints import tree
from tests.support.quick import FRAMES
from torchrl_unilab.cli import main
from torchrl_unilab.configs.file import as_yaml, read_config
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints


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
