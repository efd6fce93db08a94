from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDictBase

from tests.support.processes import live_children
from tests.support.quick import APPO, OFF_POLICY, four_pendulums, quick_run
from torchrl_unilab.configs import RunConfig
from torchrl_unilab.configs.file import read_config
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import DivergedError
from torchrl_unilab.modules import make_actor
from torchrl_unilab.trainers import (
    APPOConfig,
    APPOTrainer,
    OffPolicyConfig,
    evaluate_run,
    load_policy,
    resume_run,
    train_off_policy,
)
from torchrl_unilab.trainers.progress import log_progress
from torchrl_unilab.trainers.runs import train
from torchrl_unilab.trainers.runs.builders import child_seeds
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints
from torchrl_unilab.trainers.runs.train import Run

SUMMARY_KEYS = {
    "env",
    "algo",
    "seed",
    "frames",
    "optim_steps",
    "seconds",
    "final_return",
    "eval_return",
    "interrupted",
    "resumed",
    "policy_lag",
    "collector",
    "busy",
    "ranks",
    "threads",
    "curve",
    "versions",
    "best",
    "evaluations",
}


# A run in lock-step


@pytest.fixture(scope="module")
def lockstep(tmp_path_factory):
    """The summary of a run that was to stop early."""
    config = APPOConfig.for_task("InvertedPendulum-v5", lockstep=True, physics_threads=1)
    run_dir = tmp_path_factory.mktemp("lockstep")
    return quick_run(run_dir, frames=300_000, config=config, stop_at=800.0)


@pytest.mark.learning
def test_appo_learns_to_balance_a_pendulum(lockstep):
    assert lockstep["curve"][0][2] < 20.0
    assert lockstep["final_return"] >= 800.0


def test_a_run_stops_at_the_return_that_was_asked_for(lockstep):
    assert lockstep["frames"] < 100_000


def test_a_run_in_lockstep_has_no_lag(lockstep):
    assert list(lockstep["policy_lag"]) == [0]


# In the middle of a rollout


@pytest.mark.parametrize(("changed", "mixes"), [({}, True), ({"pull": "rollout"}, False)])
def test_workers_take_new_weights_in_mid_rollout_unless_pull_is_rollout(
    changed, mixes, tmp_path, monkeypatch
):
    learn, versions = APPOTrainer._learn, []

    def watch(trainer: APPOTrainer, batch: TensorDictBase) -> dict[str, float]:
        versions.append(batch["next", "policy_version"].unique())
        return learn(trainer, batch)

    monkeypatch.setattr(APPOTrainer, "_learn", watch)
    config = APPOConfig(**APPO | {"num_steps": 64} | changed)
    quick_run(tmp_path / "run", frames=16 * config.frames_per_rollout, config=config)
    assert any(len(version) > 1 for version in versions) is mixes


# What a run says


OWN_TASK = "torchrl_unilab.envs.gymnasium.arms:Pusher"  # as a user names a task


@pytest.mark.parametrize(
    ("task", "config", "lines"),
    [
        ("InvertedPendulum-v5", APPOConfig(), []),
        (
            OWN_TASK,
            OffPolicyConfig.for_task(OWN_TASK, "td3"),
            [f"{OWN_TASK} has no settings of its own for td3: the defaults are taken"],
        ),
        (
            OWN_TASK,
            APPOConfig.for_task(OWN_TASK, epochs=7, lr=0.5),
            [
                f"{OWN_TASK} has no settings of its own for appo: the defaults are taken, except "
                "epochs 7, lr 0.5"
            ],
        ),
    ],
    ids=["own", "defaults", "given"],
)
def test_a_task_without_settings_of_its_own_is_announced(tmp_path, task, config, lines):
    announced: list[str] = []
    Run(RunConfig(task, 100_000), config, tmp_path / "run", announce=announced.append).prepare()
    assert announced[1:] == lines


# One short run that has ended


def _logged(run, key: str) -> list[tuple[int, float]]:
    lines = (run.run_dir / "logs" / "scalars" / f"{key}.csv").read_text().splitlines()
    return [(int(step), float(value)) for step, value in (line.split(",") for line in lines)]


def test_the_summary_of_a_run_is_written(appo_run):
    written = json.loads((appo_run.run_dir / "summary.json").read_text())
    assert written == json.loads(json.dumps(appo_run.summary))
    assert (written["frames"], written["seed"]) == (1024, 3)
    assert {"torchrl", "torch", "mujoco"} <= written["versions"].keys()
    assert set(written) == SUMMARY_KEYS


def test_a_run_is_evaluated_while_it_trains(appo_run):
    evaluations = appo_run.summary["evaluations"]
    assert 400 <= evaluations[0].frames < 800
    assert evaluations[0].mean_return >= 1
    assert _logged(appo_run, "eval_return")[:-1] == [
        (one.frames, pytest.approx(one.mean_return)) for one in evaluations
    ]


def test_the_logs_end_with_what_the_summary_says(appo_run):
    summary = appo_run.summary
    for key, name in (("return", "final_return"), ("eval_return", "eval_return")):
        assert _logged(appo_run, key)[-1] == (1024, pytest.approx(summary[name]))


def test_each_batchs_return_is_logged_once_also_the_last(appo_run):
    steps = [step for step, _ in _logged(appo_run, "return")]
    assert steps == [frames for _, frames, _ in appo_run.summary["curve"]]


def test_the_curve_has_seconds_frames_and_return(appo_run):
    assert appo_run.summary["curve"]
    for seconds, frames, mean in appo_run.summary["curve"]:
        assert 0 < seconds <= appo_run.summary["seconds"]
        assert 0 < frames <= 1024
        assert mean > 0


def test_the_settings_of_a_run_are_written(appo_run):
    written = read_config(appo_run.run_dir / "config.yaml")
    assert (written["env"], written["algo"], written["seed"]) == ("InvertedPendulum-v5", "appo", 3)
    assert APPO.items() <= written.items()


def test_a_run_leaves_a_picture_and_two_kinds_of_logs(appo_run):
    assert (appo_run.run_dir / "returns.png").stat().st_size > 1000
    assert list((appo_run.run_dir / "logs").rglob("*.csv"))
    assert list((appo_run.run_dir / "tensorboard").rglob("events.*"))
    (settings,) = (appo_run.run_dir / "logs" / "texts").glob("hparams*")
    assert "\nenv: InvertedPendulum-v5\n" in settings.read_text()


def test_a_run_saves_every_quarter_and_keeps_two(appo_run):
    names = [f"frames-{frames:012d}" for frames in (768, 1024)]
    assert sorted(os.listdir(appo_run.run_dir / "checkpoint")) == names


def test_the_checkpoint_of_a_run_evaluates_as_the_run_did(appo_run):
    result = evaluate_run(appo_run.run_dir, episodes=2, seed=3)
    assert result["mean"] == pytest.approx(appo_run.summary["eval_return"])


def test_the_progress_bar_ends_its_line_before_the_summary_is_printed(appo_run):
    assert "frames" not in appo_run.terminal
    assert "1024/1024" in appo_run.terminal
    assert appo_run.terminal.endswith("\n")


def test_elsewhere_than_in_a_terminal_there_are_lines_and_no_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(log_progress, "__defaults__", (0.0,))
    told: list[str] = []
    quick_run(tmp_path, frames=128, progress_bar=True, announce=told.append)
    assert any(re.match(r"\d+ of 128 frames, [\d,]+ frames/s, ", line) for line in told)
    assert capsys.readouterr().err == ""


def test_the_final_evaluation_is_no_work_of_the_learner(tmp_path, monkeypatch):
    at_its_end = []

    def evaluate(run: Run) -> float:
        at_its_end.append(busy := run.trainer.busy_time.busy)
        while run.trainer.busy_time.busy == busy:  # time passes
            pass
        return 0.0

    monkeypatch.setattr(Run, "_evaluate", evaluate)
    summary = quick_run(tmp_path / "run", frames=1024)
    assert summary["busy"]["learner"] <= at_its_end[0] < 1.0


def test_a_run_that_has_ended_leaves_no_child(appo_run):
    assert not live_children()


def test_runs_one_after_the_other_in_a_process_leave_no_open_file_and_no_thread(tmp_path):
    def run(name: str) -> None:
        train_off_policy(
            "InvertedPendulum-v5",
            frames=64,
            run_dir=tmp_path / name,
            config=OffPolicyConfig(**(OFF_POLICY | {"learner_threads": 2})),
            progress_bar=False,
            eval_episodes=2,
        )

    run("first")  # which imports, and opens fonts
    gc.collect()
    gc.disable()  # by chance it would close what a run has left
    try:
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        run("second")
        run("third")
        assert len(os.listdir("/proc/self/fd")) <= files
        assert threading.active_count() <= threads
    finally:
        gc.enable()


def test_episodes_of_the_final_evaluation_are_cut_where_it_is_said(tmp_path):
    assert quick_run(tmp_path / "run", frames=64, eval_max_steps=2)["eval_return"] == 2.0


# Before and after


def test_a_run_directory_in_the_home_directory_is_found_whatever_directory_is_entered(
    tmp_path, monkeypatch
):
    def wandering() -> MujocoBatchEnv:
        os.chdir(tmp_path)
        return four_pendulums()

    (tmp_path / "home").mkdir()
    (tmp_path / "begin").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "begin")
    quick_run("~/run", env="p", create_env=four_pendulums, frames=64)
    quick_run("run", env="p", create_env=wandering, frames=64)
    os.chdir(tmp_path / "begin")
    for run in ("~/run", "run"):
        assert resume_run(run, create_env=four_pendulums, frames=256, progress_bar=False)
    for run in (tmp_path / "home" / "run", tmp_path / "begin" / "run"):
        assert list((run / "checkpoint").glob("frames-*")), run
    assert {path.name for path in tmp_path.iterdir()} == {"home", "begin"}


@pytest.mark.parametrize("learnt", [True, False], ids=["weights", "losses alone"])
def test_what_is_no_longer_finite_ends_a_run_and_leaves_the_checkpoints_of_before(
    tmp_path, monkeypatch, learnt
):
    learn, frames = APPOTrainer._learn, iter(range(100))

    def spoil(trainer: APPOTrainer, batch: TensorDictBase) -> dict[str, float]:
        if next(frames) == 2:
            batch["next", "reward"].fill_(math.nan)
            if not learnt:
                return {"loss_critic": math.nan}
        return learn(trainer, batch)

    monkeypatch.setattr(APPOTrainer, "_learn", spoil)
    with pytest.raises(DivergedError, match=r"loss_\w+ is nan .* is from before"):
        quick_run(tmp_path, checkpoint_interval=64)
    saved = RunCheckpoints(tmp_path / "checkpoint").newest()
    assert saved.frames == 2 * APPOConfig(**APPO).frames_per_rollout
    assert all(p.isfinite().all() for p in load_policy(tmp_path).parameters())
    assert not live_children()


def test_runs_of_neighbouring_seeds_share_no_environment():
    acting = sorted(child_seeds(seed, 2)[1] for seed in range(100))
    assert min(b - a for a, b in itertools.pairwise(acting)) > 10_000  # which counts on from it
    assert child_seeds(7, 2) == child_seeds(7, 2)
    children = {child for seed in range(100) for child in child_seeds(seed, 2)}
    assert len(children) == 200
    assert max(children) < 1 << 31  # NumPy takes seeds of 32 bits


@pytest.mark.parametrize(("episodes", "envs"), [(3, 3), (2000, 1024)])
def test_a_run_is_evaluated_on_whole_episodes(tmp_path, monkeypatch, episodes, envs):
    played = []

    def recorded(env, policy, **options):
        played.append((env.batch_size.numel(), env.stagger, options["episodes"]))
        return torch.zeros(1)

    monkeypatch.setattr(train, "evaluate", recorded)
    plan = RunConfig("InvertedPendulum-v5", 1024, eval_episodes=episodes)
    run = Run(plan, APPOConfig(), tmp_path / "run")
    run.learner = Mock(actor=make_actor(4, 1))
    run._evaluate()
    assert played == [(envs, False, episodes)]


def test_a_run_leaves_the_callers_generator_and_threads_as_they_were(tmp_path):
    torch.set_num_threads(2)
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    quick_run(tmp_path / "run", frames=128)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == 2


def test_observations_that_are_not_finite_end_a_run_before_they_are_counted(tmp_path, monkeypatch):
    added = PackedReplayStorage.read_since

    def spoil(storage: PackedReplayStorage, cursor: Any) -> tuple[TensorDictBase, Any]:
        rows, after = added(storage, cursor)
        if storage.size >= 24:
            rows["observation"][0] = math.nan
        return rows, after

    monkeypatch.setattr(PackedReplayStorage, "read_since", spoil)
    config = OffPolicyConfig(**OFF_POLICY)
    options = {"config": config, "progress_bar": False, "checkpoint_interval": 4}
    with pytest.raises(DivergedError, match=r"frames: not all of 'observation' are finite"):
        train_off_policy("InvertedPendulum-v5", frames=160, run_dir=tmp_path / "run", **options)
    assert all(buffer.isfinite().all() for buffer in load_policy(tmp_path / "run").buffers())
