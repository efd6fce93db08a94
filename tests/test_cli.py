from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

import torchrl_unilab
from torchrl_unilab.cli import _resuming, _show, main
from torchrl_unilab.configs import benchmark_results
from torchrl_unilab.configs.benchmark_results import BenchmarkResult as Result
from torchrl_unilab.envs.registry import EXAMPLES, TASKS
from torchrl_unilab.errors import DivergedError, WorkerError
from torchrl_unilab.trainers import APPOTrainer
from torchrl_unilab.trainers.runs.train import Run

SMALL = "--num-envs 2 --num-steps 16 --minibatches 1 --epochs 1 --eval-episodes 1 --frames 64"


def _listed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The lines of the command ``tasks`` by their first word."""
    assert main(["tasks"]) == 0
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}


def test_every_task_is_listed(capsys):
    assert {*TASKS, *EXAMPLES} <= set(_listed(capsys))


def test_a_task_is_listed_with_the_algorithms_that_have_settings_for_it(capsys):
    assert _listed(capsys)["InvertedPendulum-v5"].split()[1:4] == ["appo", "sac", "td3"]


def test_a_task_is_listed_with_what_is_known_and_the_algorithm_to_choose(capsys, monkeypatch):
    entries = (
        Result("Ant-v5", "sac", 10, 9, 80, 3),
        Result("Ant-v5", "appo", 4304, 60, 900_000, 5),
    )
    monkeypatch.setattr(benchmark_results, "RESULTS", entries)
    assert _listed(capsys)["Ant-v5"].endswith(
        " appo    appo 4,304 after 60 s, 900,000 frames (5 seeds); sac 10 after 9 s, 80 frames "
        "(3 seeds)"
    )


def test_what_is_not_measured_is_said(capsys, monkeypatch):
    monkeypatch.setattr(benchmark_results, "RESULTS", ())
    assert _listed(capsys)["Ant-v5"].endswith(" -       not measured")


def _printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", "appo", "--print-config", *arguments]) == 0
    return capsys.readouterr().out


def test_the_printed_config_has_what_was_given_and_the_task_s_own(capsys):
    shown = _printed(capsys, "--env", "Swimmer-v5", "--frames", "9", "--hidden", "8", "4")
    values = yaml.safe_load(shown)
    assert (values["algo"], values["env"], values["frames"]) == ("appo", "Swimmer-v5", 9)
    assert (values["hidden"], values["gamma"]) == ([8, 4], 0.998)


def test_none_switches_off_what_a_task_has_set(capsys):
    given = ("--env", "Hopper-v5", "--frames", "9", "--final-log-std", "None")
    assert yaml.safe_load(_printed(capsys, *given))["final_log_std"] is None
    assert yaml.safe_load(_printed(capsys, *given[:4]))["final_log_std"] == -2.5
    with pytest.raises(SystemExit):
        main(["train", "appo", *given[:5], "low"])
    assert "--final-log-std: invalid float value: 'low'" in capsys.readouterr().err


@pytest.mark.parametrize(("algorithm", "other"), [("sac", "--noise-std-max"), ("td3", "--alpha")])
def test_settings_of_the_other_algorithm_are_no_arguments(algorithm, other, capsys):
    with pytest.raises(SystemExit):
        main(["train", algorithm, "--env", "Ant-v5", "--frames", "9", other, "0.5"])
    assert f"unknown argument {other}." in capsys.readouterr().err


def test_an_error_of_a_task_of_ones_own_shows_where_it_was_raised(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def Task():\n    raise ValueError('my bug')\n")
    monkeypatch.syspath_prepend(tmp_path)
    command = ["train", "appo", "--env", "mine:Task", "--frames", "9"]
    with pytest.raises(ValueError, match="my bug"):
        main([*command, "--run-dir", str(tmp_path / "run")])


def test_a_task_of_the_working_directory_is_found(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('found')\n")
    command = ["train", "appo", "--env", "mine:Task", "--frames", "9", "--run-dir", "run"]
    asked = f"from torchrl_unilab.cli import main; main({command})"
    isolated = [sys.executable, "-P", "-c", asked]
    done = subprocess.run(isolated, capture_output=True, text=True, cwd=tmp_path)
    assert "found" in done.stderr


def test_a_file_of_the_working_directory_hides_no_module_of_pythons(tmp_path):
    (tmp_path / "cmd.py").write_text("raise SystemExit('hidden')\n")  # which pdb imports
    command = ["train", "appo", "--env", "InvertedPendulum-v5", "--run-dir", "run", *SMALL.split()]
    script = Path(sys.executable).with_name("torchrl-unilab")
    done = subprocess.run([script, *command], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, "hidden" in done.stderr) == (0, False)


def test_a_config_file_repeats_a_run_and_flags_take_precedence(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    shown = _printed(capsys, "--env", "Swimmer-v5", "--frames", "9", "--gamma", "0.5")
    file.write_text(shown)
    assert _printed(capsys, "--config", str(file)) == shown
    again = yaml.safe_load(_printed(capsys, "--config", str(file), "--frames", "7"))
    assert again == {**yaml.safe_load(shown), "frames": 7}


def test_numbers_and_paths_of_a_film_are_read_as_those_of_a_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torchrl_unilab, "play_run", play := Mock(return_value={}))
    assert main(["play", "--run-dir", "run", "--video=~/film.mp4", "--episodes", "1e1"]) == 0
    given = play.call_args.kwargs
    assert (given["video"], given["episodes"]) == (str(tmp_path / "film.mp4"), 10)
    capsys.readouterr()
    shown = _printed(capsys, "--env", "Swimmer-v5", "--frames", "9", "--hidden", "1e1")
    assert yaml.safe_load(shown)["hidden"] == [10]


def test_a_run_without_a_directory_gets_one_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "appo", "--env", "InvertedPendulum-v5", "--no-progress", *SMALL.split()]
    assert main([*arguments, "--seed", "5", "--logger", "tensorboard"]) == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("InvertedPendulum-v5-appo-5-20")
    assert (run_dir / "summary.json").is_file()
    # No trace, which was not asked for.
    left = "best, checkpoint, config.yaml, returns.png, summary.json, tensorboard"
    assert f"wrote runs/{run_dir.name}: {left}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("local", "launch"), [("4", "--nproc-per-node 4"), ("2", "--nnodes 2 --nproc-per-node 2")]
)
def test_a_run_of_several_ranks_is_resumed_by_as_many_on_as_many_machines(
    local, launch, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    command = _resuming(Namespace(algorithm="appo", run_dir="run"))
    assert command == f"torchrun {launch} -m torchrl_unilab train appo --run-dir run --resume"


def test_resuming_takes_a_run_directory(capsys):
    assert main(["train", "appo", "--resume"]) == 2
    assert "--resume without --run-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "sac", "--env", "Ant-v5", "--help"],
        ["train", "sac", "--env", "Ant-v5", "--lrr", "1"],
        ["train", "sac", "--env", "Ant-v5", "--frames", "9", "--tau", "7"],
        ["train", "sac", "--env", "Amt-v5", "--frames", "9"],
        ["tasks"],
    ],
)
def test_help_and_refusals_do_not_wait_for_torch(arguments):
    asked = (
        "import sys\n"
        "from torchrl_unilab.cli import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "finally:\n"
        "    loaded = {'torch', 'torchrl', 'tensordict'} & sys.modules.keys()\n"
        "    assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert "AssertionError" not in done.stderr
    assert done.stdout or done.stderr.startswith("error: ")


def test_a_run_ends_with_what_came_of_it_one_figure_a_line(capsys):
    busy = {"learner": 0.5, "collectors": [0.25, 0.75]}
    _show(
        {"env": "Hopper-v5", "final_return": 1234.56, "eval_return": None, "frames": 5000}
        | {"seconds": 2.0, "busy": busy, "best": {"frames": 4096, "eval_return": 2345.67}}
    )
    title, *figures, note = capsys.readouterr().out.splitlines()
    assert title == "Hopper-v5"
    assert note.startswith("deterministic, best: without exploration; busy: ")
    assert figures == [
        "  training return: 1,234.6",
        "  deterministic: none",
        "  best: 2,345.7 at 4,096 frames",
        "  frames: 5,000",
        "  seconds: 2.0",
        "  frames/s: 2,500",
        "  busy: learner 50%, collectors 25%, 75%",
    ]


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (errno.ENOSPC, r"\[Errno \d+\] No space .*: 'a' \(expected room .* Make room, or "),
        (errno.EMFILE, r"\[Errno \d+\] Too many .*: 'a' \(expected more, .* Raise `ulimit -n`\.$"),
    ],
)
def test_an_error_of_the_system_says_what_to_do(code, end, monkeypatch, capsys):
    error = OSError(code, os.strerror(code), "a")
    monkeypatch.setattr("torchrl_unilab.cli._tasks", Mock(side_effect=error))
    assert main(["tasks"]) == 2
    assert re.match("error: " + end, capsys.readouterr().err)


AMID_IMPORTS = ImportError("initialization failed")
AMID_IMPORTS.__cause__ = ImportError("amid another import")
AMID_IMPORTS.__cause__.__cause__ = KeyboardInterrupt()


@pytest.mark.parametrize(
    ("where", "error"), [("_tasks", AMID_IMPORTS), ("_parser", KeyboardInterrupt)]
)
def test_an_interrupt_is_one_before_arguments_are_read_and_where_it_became_another_error(
    where, error, monkeypatch, capsys
):
    monkeypatch.setattr(f"torchrl_unilab.cli.{where}", Mock(side_effect=error))
    assert main(["tasks"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_error_after_an_interrupt_is_not_hidden_by_it(monkeypatch):
    error = RuntimeError("cannot save")
    error.__context__ = KeyboardInterrupt()
    monkeypatch.setattr("torchrl_unilab.cli._tasks", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="cannot save"):
        main(["tasks"])


def _run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import os, signal, sys\nfrom torchrl_unilab import cli\n{code}"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


HANGS_UP = """
cli._tasks = lambda _: os.kill(os.getpid(), signal.SIGHUP) or 0
sys.exit(cli.main(["tasks"]))
"""


STRIKES = """
import importlib.abc
class Strike(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy._core.multiarray":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Strike())
sys.exit(cli.main(COMMAND))
"""


@pytest.mark.parametrize(
    "command",
    [["train", "appo", "--env", "Hopper-v5", "--frames", "1024"], ["eval", "--run-dir", "run"]],
    ids=["train", "eval"],
)
def test_an_interrupt_while_numpy_is_imported_is_not_lost(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = _run(STRIKES.replace("COMMAND", repr(command)))
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert not os.listdir(tmp_path)


@pytest.mark.usefixtures("hangs_up")
def test_a_closed_terminal_interrupts_in_silence():
    done = _run(HANGS_UP)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_run_under_nohup_outlives_the_terminal():
    assert _run(f"signal.signal(signal.SIGHUP, signal.SIG_IGN){HANGS_UP}").returncode == 0


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "torchrl_unilab", "tasks"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_misspelt_task_is_refused_by_print_config_and_not_said_to_have_settings(capsys):
    command = ["train", "appo", "--env", "Hoper-v5"]
    assert main([*command, "--frames", "5", "--print-config"]) == 2
    assert "Did you mean Hopper-v5?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Hoper-v5 has no settings of its own: these are the general defaults." in text


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (WorkerError("lost"), 2),
        (DivergedError("nan"), 2),
        (OSError("no space"), 2),
        (KeyboardInterrupt, 130),
    ],
)
def test_a_run_that_fails_says_what_is_saved_and_how_to_resume(
    raised, code, tmp_path, monkeypatch, capsys
):
    def fail(run: Run) -> None:
        for name in ("2048-best", "2048", "1024"):  # of which the first is a copy, which is none
            (run.path / "checkpoint" / f"frames-00000000{name}").mkdir(parents=True)
        raise raised

    monkeypatch.setattr(Run, "__call__", fail)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["train", "appo", "--env", "Hopper-v5", "--frames", "4096"]
    assert main([*given, "--run-dir=~/run"]) == code
    said = f"2,048 frames are saved; to go on: torchrl-unilab train appo --run-dir {tmp_path}/run"
    assert f"{said} --resume" in capsys.readouterr().err


def test_a_complete_run_that_is_resumed_is_no_error(tmp_path, monkeypatch, capsys):
    run = ["train", "appo", "--env", "InvertedPendulum-v5", "--frames", "64", "--no-progress"]
    small = ["--num-envs", "8", "--num-steps", "8", "--minibatches", "2"]
    monkeypatch.setenv("HOME", str(tmp_path))
    command = [*run, *small, "--run-dir=~/run", "--resume"]
    assert main(command) == 0
    capsys.readouterr()
    assert main(command) == 0
    assert "run is complete: 64 of 64 frames have been collected" in capsys.readouterr().err


def test_the_version_is_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"torchrl-unilab {torchrl_unilab.__version__}\n"


def test_an_algorithm_that_is_missing_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--env", "Hopper-v5"])
    assert "invalid choice: 'Hopper-v5'" in (said := capsys.readouterr().err)
    assert "The algorithm comes before all flags." in said


def test_the_command_to_resume_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = ["train", "appo", "--env", "InvertedPendulum-v5", "--frames", "99999999"]
    monkeypatch.setattr(APPOTrainer, "_learn", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert main([*run, "--run-dir", "a run"]) == 130
    assert "train appo --run-dir 'a run' --resume" in capsys.readouterr().err


def test_a_rank_that_is_no_number_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "x")
    command = ["train", "appo", "--env", "Hopper-v5", "--frames", "5"]
    assert main([*command, "--run-dir", str(tmp_path / "run")]) == 2
    assert "RANK is 'x' (expected an integer" in capsys.readouterr().err
