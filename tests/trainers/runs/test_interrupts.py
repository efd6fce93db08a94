"""Ctrl-C and the end of a terminal, in a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
from tensordict import TensorDictBase

from tests.support.processes import DEADLINE, live_children, wait_for
from tests.support.quick import quick_run
from tests.support.traces import load_events, spans
from torchrl_unilab.cli import main
from torchrl_unilab.trainers import APPOTrainer, evaluate_run
from torchrl_unilab.trainers.runs.train import Run
from torchrl_unilab.weight_update import UniLabShmScheme


def test_ctrl_c_during_start_up_ends_with_one_line_and_no_child(tmp_path, monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> None:  # the workers have been started
        assert len(live_children()) == 1
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(UniLabShmScheme, "connect", interrupted)
    command = ["train", "appo", "--env", "Hopper-v5", "--frames", "9", "--trace"]
    assert main([*command, "--run-dir", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "run").exists()
    assert not live_children()


def test_ctrl_c_ends_with_a_checkpoint_a_trace_and_exit_code_130(tmp_path, monkeypatch, capsys):
    learn, updates = APPOTrainer._learn, iter([False, False, True])

    def interrupted(trainer: APPOTrainer, batch: TensorDictBase) -> dict[str, float]:
        if next(updates):
            os.kill(os.getpid(), signal.SIGINT)
        return learn(trainer, batch)

    monkeypatch.setattr(APPOTrainer, "_learn", interrupted)
    command = ["train", "appo", "--env", "InvertedPendulum-v5", "--frames", "100000000", "--trace"]
    assert main([*command, "--run-dir", str(tmp_path / "run"), "--num-envs", "8"]) == 130
    assert [e["name"] for e in spans(load_events(tmp_path / "run" / "trace.json"))].count(
        "update"
    ) == 3
    printed = capsys.readouterr()
    assert "interrupted: saving what was learnt" in printed.out
    left = "best, checkpoint, config.yaml, logs, summary.json, tensorboard, trace.json"
    assert f"wrote {tmp_path / 'run'}: {left}\n" in printed.out
    again = (
        rf"^interrupted after [\d,]+ frames; to go on: .* --run-dir {tmp_path / 'run'} --resume$"
    )
    assert re.search(again, printed.err, re.MULTILINE)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"] is True
    assert evaluate_run(tmp_path / "run", episodes=1)["episodes"] == 1
    assert not live_children()


def test_ctrl_c_in_the_final_evaluation_leaves_it_to_a_resumed_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Run, "_evaluate", lambda _: os.kill(os.getpid(), signal.SIGINT))
    command = ["train", "appo", "--env", "InvertedPendulum-v5", "--frames", "1024"]
    command += ["--run-dir", str(tmp_path), "--num-envs", "8", "--eval-episodes", "1"]
    assert main(command) == 130
    assert "frames are saved; to go on: " in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()
    monkeypatch.undo()
    assert main([*command, "--resume"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["eval_return"] > 0


def test_a_second_ctrl_c_ends_the_evaluation_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "_evaluate", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(APPOTrainer, "_learn", Mock(side_effect=KeyboardInterrupt))
    summary = quick_run(tmp_path)
    assert summary["interrupted"]
    assert json.loads((tmp_path / "summary.json").read_text())["eval_return"] is None


def test_after_a_second_ctrl_c_the_summary_names_the_best_policy_that_was_kept(
    tmp_path, monkeypatch
):
    def evaluate(run: Run) -> None:
        run.best.keep(run.learner.actor, 512, 7.0)  # as in an evaluation during training
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_evaluate", evaluate)
    monkeypatch.setattr(APPOTrainer, "_learn", Mock(side_effect=KeyboardInterrupt))
    assert quick_run(tmp_path)["best"] == {"frames": 512, "eval_return": 7.0}


@pytest.mark.usefixtures("hangs_up")
def test_the_end_of_a_terminal_leaves_a_checkpoint_of_what_was_learnt(tmp_path):
    options = "--env InvertedPendulum-v5 --frames 100000000 --num-envs 8 --checkpoint-interval 1024"
    command = [sys.executable, "-m", "torchrl_unilab", "train", "appo", *options.split()]
    checkpoints = tmp_path / "run" / "checkpoint"
    run = subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "run"), "--eval-episodes", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_for(lambda: any(checkpoints.glob("frames-*")) or run.poll() is not None)
        os.killpg(run.pid, signal.SIGHUP)  # to the workers, too, as from a terminal
        run.communicate(timeout=DEADLINE)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 130
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"] is True
    assert evaluate_run(tmp_path / "run", episodes=1)["episodes"] == 1


@pytest.mark.usefixtures("hangs_up")
def test_a_terminal_that_ends_interrupts_once_and_what_is_said_later_is_no_error():
    code = (
        "import os, signal, sys\n"
        "from torchrl_unilab import cli\n"
        "def saving(_):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "    except KeyboardInterrupt:\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print('saved', flush=True)\n"
        "    return 7\n"
        "cli._tasks = saving\n"
        "sys.exit(cli.main(['tasks']))\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer)
    os.close(writer)
    assert done.returncode == 7
