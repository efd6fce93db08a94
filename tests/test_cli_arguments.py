"""What the command line takes, does where streams or ranks differ, and passes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

import torchrl_unilab
from torchrl_unilab import cli
from torchrl_unilab.cli import main
from torchrl_unilab.errors import ConfigError, DivergedError, WorkerError
from torchrl_unilab.trainers.runs.train import Run

RUN = ["train", "appo", "--env", "Hopper-v5", "--frames", "4096"]


def test_flags_take_precedence_over_settings_of_a_file_in_the_home_directory(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("algo: appo\nenv: Hopper-v5\nframes: 9\ngamma: 0.5\n")
    assert main(["train", "appo", "--config=~/mine.yaml", "--print-config", "--gamma", "0.7"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["gamma"] == 0.7


def test_a_run_without_a_directory_gets_one_that_every_file_system_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Mock(return_value=Mock(side_effect=ConfigError("enough")))
    monkeypatch.setattr("torchrl_unilab.trainers.runs.train.Run", made)
    task = "torchrl_unilab.envs.gymnasium.arms:Pusher"
    assert main(["train", "appo", "--env", task, "--frames", "4096"]) == 2
    assert Path(made.call_args.args[2]).name.startswith(f"{task.replace(':', '-')}-appo-0-20")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_says_what_is_saved(rank, tmp_path, monkeypatch, capsys):
    def fail(run: Run) -> None:
        (tmp_path / "checkpoint" / "frames-000000002048").mkdir(parents=True)
        raise OSError("no space")

    monkeypatch.setattr(Run, "__call__", fail)
    monkeypatch.setattr(cli, "launcher_env", lambda name, default: rank if name == "RANK" else 1)
    assert main([*RUN, "--run-dir", str(tmp_path)]) == 2
    assert ("are saved; to go on" in capsys.readouterr().err) is not bool(rank)


@pytest.mark.parametrize("interrupted", [False, True])
def test_each_rank_ends_with_the_exit_code_of_the_run(interrupted, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Run, "__call__", lambda _: {"interrupted": interrupted})
    monkeypatch.setattr(cli, "launcher_env", lambda name, default: 1)
    assert main([*RUN, "--run-dir", str(tmp_path)]) == (130 if interrupted else 0)
    assert capsys.readouterr().out == ""


def test_flags_are_written_out(capsys):
    with pytest.raises(SystemExit):
        main([*RUN, "--epoch", "3"])
    said = "unknown argument --epoch. Did you mean --epochs? See torchrl-unilab train appo --help."
    assert capsys.readouterr().err == f"error: {said}\n"


def test_a_task_that_is_left_out_after_its_flag_is_asked_for(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "appo", "--env"])
    assert ended.value.code == 2
    assert "argument --env: expected one argument" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["-1e3", "-.5", "-1_000"])
def test_a_negative_number_is_a_value_however_it_is_written(number, capsys):
    assert main([*RUN, "--print-config", "--stop-at", number]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["stop_at"] == float(number)


def test_a_task_is_listed_without_the_algorithms_that_have_no_settings_for_it(capsys):
    assert main(["tasks"]) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("Pusher-v5 "))
    assert line.split()[1:4] == ["appo", "appo", "appo"]  # its own, to choose, and known


def test_without_standard_output_a_command_succeeds():
    command = f"exec {sys.executable} -m torchrl_unilab tasks >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


FILM = {"run_dir": "run", "video": "a.mp4", "episodes": 1, "max_steps": None, "seed": 0}
FILM |= {"best": False, "width": 640, "height": 480, "camera": None, "deterministic": True}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", {}),
        ("--no-deterministic", {"deterministic": False}),
        ("--best", {"best": True}),
        ("--camera -1", {"camera": -1}),
        ("--camera 2", {"camera": 2}),
        ("--camera track", {"camera": "track"}),
    ],
)
def test_a_film_is_made_as_the_help_says_unless_it_is_told(flags, told, monkeypatch):
    monkeypatch.setattr(torchrl_unilab, "play_run", play := Mock(return_value={}))
    assert main(["play", "--run-dir", "run", "--video", "a.mp4", *flags.split()]) == 0
    assert play.call_args.kwargs == FILM | told


def test_a_run_is_evaluated_on_as_many_episodes_as_the_help_says(monkeypatch):
    monkeypatch.setattr(torchrl_unilab, "evaluate_run", evaluate := Mock(return_value={}))
    assert main(["eval", "--run-dir", "run"]) == 0
    expected = {"run_dir": "run", "best": False, "episodes": 16, "seed": 0}
    assert evaluate.call_args.kwargs == expected
    assert main(["eval", "--run-dir", "run", "--best"]) == 0
    assert evaluate.call_args.kwargs == expected | {"best": True}


def test_the_end_of_a_job_interrupts_as_ctrl_c_does_and_ends_what_was_started(monkeypatch, capsys):
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # which would end the tests
    child = Mock()
    monkeypatch.setattr(cli.multiprocessing, "active_children", lambda: [child])
    monkeypatch.setattr(cli, "_tasks", lambda _: os.kill(os.getpid(), signal.SIGTERM) or 0)
    try:
        assert main(["tasks"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "interrupted\n"
    child.terminate.assert_called_once_with()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WorkerError("lost:\n  in step"), "lost:\n  in step"),
        (ConfigError("memory:\n  ring"), "memory:\n  ring"),
        (DivergedError("nan\n  in step"), "nan in step"),
        (OSError("full\n disk"), "full disk"),
    ],
)
def test_a_workers_traceback_and_a_table_keep_their_lines_and_other_errors_are_one(
    error, said, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "_tasks", Mock(side_effect=error))
    assert main(["tasks"]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    ("backend", "imported", "refused"),
    [("egl", False, True), ("egl", True, False), (None, False, False)],
)
def test_an_error_is_laid_to_the_backend_of_mujoco_only_where_it_kept_it_from_its_import(
    backend, imported, refused, monkeypatch, capsys
):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if backend:
        monkeypatch.setenv("MUJOCO_GL", backend)
    monkeypatch.delitem(sys.modules, "mujoco", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "mujoco", Mock())
    monkeypatch.setattr(cli, "_tasks", Mock(side_effect=AttributeError("no display")))
    if refused:
        assert main(["tasks"]) == 2
        assert "with MUJOCO_GL=egl, no display (expected" in capsys.readouterr().err
    else:
        with pytest.raises(AttributeError, match="no display"):
            main(["tasks"])


@pytest.mark.parametrize(
    ("error", "saved"),
    [(OSError("full"), None), (ConfigError("taken"), 2048), (OSError("full"), 0)],
)
def test_how_to_continue_is_not_said_where_nothing_is_saved_or_the_run_was_refused(
    error, saved, tmp_path, monkeypatch, capsys
):
    if saved is not None:
        (tmp_path / "checkpoint" / f"frames-{saved:012d}").mkdir(parents=True)
    monkeypatch.setattr(Run, "__call__", Mock(side_effect=error))
    assert main([*RUN, "--run-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize("described", [["--config", "mine.yaml"], RUN[2:]])
def test_a_run_to_resume_is_started_as_long_as_it_has_no_checkpoint(
    described, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("algo: appo\nenv: Hopper-v5\nframes: 4096\n")
    start = Mock(return_value=Mock(side_effect=ConfigError("enough")))
    monkeypatch.setattr("torchrl_unilab.trainers.runs.train.Run", start)
    resume = Mock(side_effect=ConfigError("enough"))
    monkeypatch.setattr("torchrl_unilab.trainers.runs.resume.resume_run", resume)
    command = ["train", "appo", *described, "--run-dir", "run"]
    for make, arguments, again in (
        (lambda: None, ["--resume"], False),
        (lambda: Path("run").mkdir(), ["--resume"], False),
        (lambda: Path("run/config.yaml").touch(), ["--resume"], True),
        (lambda: None, [], False),
    ):
        make()
        assert main([*command, *arguments]) == 2
        assert start.call_args.kwargs["again"] is again
    assert not resume.called
    Path("run/checkpoint/frames-000000002048").mkdir(parents=True)
    assert main([*command, "--resume", "--seed", "3", "--gamma", "0.5"]) == 2
    known = {"algo": "appo", "env": "Hopper-v5", "seed": 3, "gamma": 0.5}
    assert resume.call_args.args == ("run",)
    assert resume.call_args.kwargs == {"settings": known, "announce": print, "frames": 4096}


def test_a_run_of_no_time_and_without_collectors_has_no_rate(capsys):
    summary = {
        "env": "Hopper-v5",
        "final_return": None,
        "eval_return": 1.0,
        "frames": 0,
        "best": None,
    }
    cli._show(summary | {"seconds": 0.0, "busy": {"learner": 0.0, "collectors": []}})
    shown = capsys.readouterr().out.splitlines()
    assert {"  frames/s: none", "  busy: learner 0%, collectors none"} <= {*shown}


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ([], "COMMAND"),
        (["train"], "ALGORITHM"),
        (["budget", "sac"], "--env"),
        (["play", "--video", "a.mp4"], "--run-dir"),
        (["play", "--run-dir", "run"], "--video"),
    ],
)
def test_what_a_command_cannot_do_without_is_asked_for(arguments, missing, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr().err
    assert said.startswith(f"error: the following arguments are required: {missing}. See ")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("own_environment: true", "the run was given create_env"),
        ("1: 3", "1: unknown"),
        ("env: Hopper-v5", "--env Hopper-v5, --frames None (expected both)"),
    ],
)
def test_a_config_that_cannot_be_repeated_is_refused_with_the_reason(lines, said, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(f"algo: appo\n{lines}\n")
    assert main(["train", "appo", "--config", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_in_a_directory_that_is_gone_a_command_ends_with_one_line_that_says_so(
    deleted_directory, capsys
):
    assert main(["tasks"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: working directory: deleted (expected")
