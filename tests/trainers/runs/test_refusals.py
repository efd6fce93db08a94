"""What a run, its evaluation and its command line refuse before anything is written."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from typing import Any

import pytest

from tests.support.checkpoints import tree
from tests.support.processes import live_children
from tests.support.quick import APPO, four_pendulums, pendulum, quick_run
from torchrl_unilab.cli import main
from torchrl_unilab.configs import RunConfig
from torchrl_unilab.configs.file import CONFIG_FILE, as_yaml
from torchrl_unilab.envs import make_task
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import (
    APPOConfig,
    OffPolicyConfig,
    evaluate_run,
    load_policy,
    play_run,
    resume_run,
    train_appo,
    train_off_policy,
)
from torchrl_unilab.trainers.runs import loggers
from torchrl_unilab.trainers.runs.directory import run_dir_held
from torchrl_unilab.trainers.runs.train import Run


@pytest.mark.parametrize(
    ("run_dir", "said"),
    [
        ("", r"run directory '': .* \(expected a path"),
        ("~nobody-of-this-name/run", r"run directory '~nobody-of-this-name/run': .* \(expected a"),
        (None, r"a NoneType \(expected a path\)"),
        (b"run", r"a bytes \(expected a path\)"),
        (5, r"a int \(expected a path\)"),
    ],
)
def test_a_run_directory_that_is_no_path_is_refused(run_dir, said):
    for use in (quick_run, evaluate_run, resume_run):
        with pytest.raises(ConfigError, match=said):
            use(run_dir)


def test_a_run_directory_that_cannot_be_made_or_written_in_this_locale_is_refused():
    with pytest.raises(ConfigError, match=r"run directory /proc/none: cannot be made"):
        quick_run("/proc/none")
    with pytest.raises(ConfigError, match=r"run directory 'r\\udcfcn': no text in the locale's"):
        quick_run("r\udcfcn")


@pytest.mark.parametrize(
    ("again", "message"),
    [(False, "it is not empty"), (True, r"frames-0+128 by now \(expected none\)")],
)
def test_a_run_writes_nothing_beside_what_another_one_has_left_meanwhile(
    tmp_path, monkeypatch, again, message
):
    plan = RunConfig("InvertedPendulum-v5", 128, progress_bar=False, eval_episodes=1)
    start = partial(Run, plan, APPOConfig(**APPO), tmp_path, again=again)
    connect, runs = Run.connect, [start(), start()]

    def slow(run: Run, closing: contextlib.ExitStack) -> None:
        connect(run, closing)
        if runs:
            runs.pop()()
            kept.update(tree(tmp_path))

    kept: dict[Any, Any] = {}
    monkeypatch.setattr(Run, "connect", slow)
    if again:
        (tmp_path / CONFIG_FILE).write_text(as_yaml(runs[0].settings))
    with pytest.raises(ConfigError, match=message):
        runs.pop()()
    assert kept == tree(tmp_path) != {}


def test_an_environment_that_a_function_does_not_return_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"create_env returned: NoneType \(expected EnvBase"):
        quick_run(tmp_path / "run", env="Mine", create_env=lambda: None)
    assert not (tmp_path / "run").exists()


def test_a_task_is_imported_from_elsewhere_than_the_run_directory(tmp_path, monkeypatch):
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "from functools import partial\nfrom torchrl_unilab.envs import make_task\n"
    code += 'Task = partial(make_task, "InvertedPendulum-v5")\n'
    (elsewhere / "mine_of_a_test.py").write_text(code)
    monkeypatch.syspath_prepend(elsewhere)
    quick_run(run_dir, env="mine_of_a_test:Task", frames=64)
    assert evaluate_run(run_dir, episodes=1)["env"] == "mine_of_a_test:Task"
    monkeypatch.delitem(sys.modules, "mine_of_a_test")
    (run_dir / "mine_of_a_test.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(run_dir)
    for use in (evaluate_run, load_policy, partial(resume_run, frames=1000)):
        with pytest.raises(ConfigError, match=r"task 'mine_of_a_test:Task' is code in the run dir"):
            use(run_dir)


def test_nor_is_a_run_evaluated_on_it(off_policy_runs):
    with pytest.raises(ConfigError, match=r"create_env returned: int \(expected EnvBase"):
        evaluate_run(off_policy_runs["sac"].run_dir, create_env=lambda: 7)


@pytest.mark.parametrize(
    ("use", "asked", "message"),
    [
        (evaluate_run, {"episodes": "3"}, r"episodes: '3' \(expected an integer of at least 1\)"),
        (evaluate_run, {"episodes": True}, r"episodes: True \(expected an integer"),
        (evaluate_run, {"seed": 2.5}, r"seed: 2.5 \(expected an integer within"),
        (evaluate_run, {"create_env": 5}, r"create_env: int \(expected a function"),
        (load_policy, {"create_env": 5}, r"create_env: int \(expected a function"),
        (
            partial(quick_run, frames=64),
            {"create_env": 5},
            r"create_env: int \(expected a function",
        ),
        (partial(play_run, video="run.mp4"), {"episodes": 1.5}, r"episodes: 1.5 \(expected an int"),
        (partial(play_run, video="run.mp4"), {"seed": "x"}, r"seed: 'x' \(expected an integer"),
    ],
)
def test_what_is_asked_of_a_policy_is_refused_by_its_type(
    appo_run, tmp_path, monkeypatch, use, asked, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        use(run_dir=appo_run.run_dir, **asked)
    assert not list(tmp_path.iterdir())


def test_a_task_in_place_of_its_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"env: Hopper \(expected str\).*create_env"):
        train_appo(make_task("Hopper-v5"), frames=64, run_dir=tmp_path / "run")


def test_videos_that_cannot_be_made_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"video_interval: 9 without eval_interval"):
        quick_run(tmp_path / "run", video_interval=9)
    options = {"video_interval": 9, "eval_interval": 9, "create_env": pendulum}
    with pytest.raises(ConfigError, match=r"video_interval: with an environment of one's own"):
        quick_run(tmp_path / "run", env="Pendulum-v1", **options)
    assert not (tmp_path / "run").exists()


def test_loggers_that_are_not_installed_are_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "_is_installed", lambda name: name != "wandb")
    with pytest.raises(ConfigError, match="logger: no package wandb"):
        quick_run(tmp_path / "run", logger="csv,wandb")
    assert not (tmp_path / "run").exists()


def test_a_batch_that_num_envs_does_not_fill_is_refused_by_its_name(tmp_path):
    config = OffPolicyConfig(num_envs=3)
    with pytest.raises(ConfigError, match=r"num_envs: 3, where create_env makes 4 .*num_envs to 4"):
        train_off_policy(
            "p", frames=5000, run_dir=tmp_path / "run", config=config, create_env=four_pendulums
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("train", [train_appo, train_off_policy])
def test_the_error_for_a_setting_in_place_of_an_option_says_where_it_goes(train, tmp_path):
    kind = "APPOConfig" if train is train_appo else "OffPolicyConfig"
    expected = rf"'gamma' .* config={kind}.for_task\('Hopper-v5', gamma=0.5\)"
    with pytest.raises(TypeError, match=expected):
        train("Hopper-v5", frames=9, run_dir=tmp_path, gamma=0.5)
    with pytest.raises(TypeError, match=r"'stop_att' .* Did you mean stop_at\?"):
        train("Hopper-v5", frames=9, run_dir=tmp_path, stop_att=0.5)


def test_a_directory_is_one_runs_at_a_time(tmp_path):
    quick_run(tmp_path, frames=128)
    before = sorted(tmp_path.rglob("*"))
    with (
        run_dir_held(tmp_path),
        pytest.raises(ConfigError, match=r"another run writes to it \(expected none\)"),
    ):
        resume_run(tmp_path, frames=256, progress_bar=False)
    assert sorted(tmp_path.rglob("*")) == before
    assert not live_children()
    assert resume_run(tmp_path, frames=256, progress_bar=False)["frames"] == 256


@pytest.mark.parametrize(
    "arguments",
    [
        ["--env", "Nothing-v5", "--frames", "10"],
        ["--env", "Hopper-v5", "--frames", "10", "--lr", "inf"],
        ["--env", "Hopper-v5", "--frames", "10", "--seed", "4294967296"],
        ["--env", "Hopper-v5"],
        ["--env", "Hopper-v5", "--frames", "10", "--config", "nowhere.yaml"],
    ],
)
def test_bad_input_is_one_error_line_exit_code_2_and_nothing_written(arguments, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main(["train", "appo", *arguments, "--run-dir", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "ppo9"], "invalid choice: 'ppo9' (choose from"),
        (["eval"], "the following arguments are required: --run-dir"),
        (
            ["train", "appo", "--numenvs", "3"],
            "unknown argument --numenvs. Did you mean --num-envs?",
        ),
        (["train", "appo", "--epoch", "3"], "unknown argument --epoch. Did you mean --epochs?"),
        (["train", "appo", "--zz", "3"], "unknown argument --zz. See torchrl-unilab train appo"),
        (["train", "appo", "--hidden"], "--hidden: expected at least one argument. See"),
        (["train", "sac", "--lr", "3"], "--lr. Did you mean --lr-actor or --lr-critic"),
        (["train", "sac", "--frames", "1.5"], "--frames: invalid int value: '1.5'"),
        (["budget", "sac", "--env", "x", "--num-envs", "few"], "--num-envs: invalid int value"),
    ],
)
def test_a_wrong_argument_is_one_error_line_that_says_where_help_is(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("error: ")
    assert message in error
    assert f" See torchrl-unilab {arguments[0]}" in error
    assert error.endswith(" --help.\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize("config", [None, "{}", "[", '{"env": "Hopper-v5", "hidden": [3]}'])
def test_evaluating_no_run_or_a_damaged_one_is_one_error_line(config, tmp_path, capsys):
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
        (tmp_path / "checkpoint").mkdir()
    assert main(["eval", "--run-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot evaluate")
    assert ("Train first" in error) is (config is None)


@pytest.mark.parametrize(
    ("train", "config", "kind"),
    [
        (train_appo, OffPolicyConfig(), "OffPolicyConfig"),
        (train_off_policy, APPOConfig(), "APPOConfig"),
        (train_appo, {"epochs": 3}, "dict"),
    ],
)
def test_settings_of_another_kind_are_refused(train, config, kind, tmp_path):
    with pytest.raises(ConfigError, match=rf"config: {kind} \(expected \w+Config\)\. Take"):
        train("Hopper-v5", frames=1024, run_dir=tmp_path / "run", config=config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["algorithm", "algo"])
def test_the_error_for_an_algorithm_in_place_of_an_option_says_where_it_goes(name, tmp_path):
    expected = r"It is a setting: config=OffPolicyConfig.for_task\('Hopper-v5', algorithm='td3'\)"
    with pytest.raises(TypeError, match=expected):
        train_off_policy("Hopper-v5", frames=1024, run_dir=tmp_path, **{name: "td3"})


def test_a_run_directory_that_is_read_only_is_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # as root may write it
    with pytest.raises(ConfigError, match="it is read-only"), run_dir_held(tmp_path):
        pass
    assert not [*tmp_path.iterdir()]
