from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import contents, differences, tree
from tests.support.processes import live_children
from tests.support.quick import FRAMES, INTERVAL, OFF_POLICY, QUIET
from torchrl_unilab.configs.file import as_yaml, read_config
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.errors import ConfigError, RunCompleteError, WorkerError
from torchrl_unilab.trainers import (
    APPOConfig,
    OffPolicyConfig,
    PublishWeights,
    evaluate_run,
    resume_run,
    train_appo,
    train_off_policy,
)
from torchrl_unilab.trainers.runs.checkpoint import DIGESTS, RunCheckpoints, _digests

KILLED = 160  # frames, after the first checkpoint
# What makes each hard: a round of rollouts cut in two and older ones used again, and noise that
# follows the step before; what the physics derives, in ticks of two steps; noise that each
# environment keeps, and two collectors that fill one replay with rows whose successors come only
# after the checkpoint.
RUNS: Mapping[str, tuple[str, APPOConfig | OffPolicyConfig]] = {
    "appo": (
        "Hopper-v5",
        APPOConfig(
            num_envs=4,
            num_steps=8,
            num_collectors=2,
            pool=2,
            hidden=(8,),
            noise_correlation=0.8,
            physics_threads=1,
            lockstep=True,
        ),
    ),
    "sac": (
        "Reacher-v5",
        OffPolicyConfig("sac", **OFF_POLICY, env_steps_per_sync=2, sync_collection=True),
    ),
    "td3": (
        "InvertedPendulum-v5",
        OffPolicyConfig(
            "td3",
            **OFF_POLICY,
            num_collectors=2,
            n_step=3,
            updates_per_step=3,
            policy_frequency=5,
            sync_collection=True,
        ),
    ),
}


def train(run_dir: Path, algorithm: str, **settings: Any) -> dict[str, Any]:
    """Train as `RUNS` says, in one thread each."""
    env, config = RUNS[algorithm]
    run = train_appo if algorithm == "appo" else train_off_policy
    settings = {"frames": FRAMES, "checkpoint_interval": INTERVAL, "seed": 3, **settings}
    return run(env, run_dir=run_dir, **{"config": config, **QUIET, **settings})


def at_the_kill(act: Callable[[PublishWeights], object]) -> Callable[[PublishWeights], None]:
    """What publishes, and then acts once so many frames have come, after a checkpoint."""
    publish, acted = PublishWeights.__call__, []

    def publish_and_act(hook: PublishWeights) -> None:
        publish(hook)
        if hook.trainer.collected_frames >= KILLED and not acted:
            acted.append(act(hook))

    return publish_and_act


def timeless(name: str) -> bool:
    """Whether what a checkpoint holds under a name is the same in each run.

    The generators of Python are nobody's.
    """
    return "seconds" not in name and not name.startswith(
        ("trainer_module.learning_curve.curve", "rng.python")
    )


def points(summary: Mapping[str, Any]) -> list[list[float]]:
    """The learning curve, without the seconds."""
    return [list(point[1:]) for point in summary["curve"]]


@pytest.mark.parametrize("algorithm", RUNS)
def test_a_run_resumed_from_what_was_on_the_disk_equals_the_unbroken_one_bit_for_bit(
    algorithm, tmp_path, monkeypatch
):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    with monkeypatch.context() as patch:
        copy = at_the_kill(lambda _: shutil.copytree(unbroken, broken))
        patch.setattr(PublishWeights, "__call__", copy)
        train(unbroken, algorithm)
    assert RunCheckpoints(broken / "checkpoint").newest().frames == INTERVAL

    resume_run(broken, **QUIET)

    whole, resumed = (json.loads((run / "summary.json").read_text()) for run in (unbroken, broken))
    assert (whole["resumed"], resumed["resumed"]) == ([], [INTERVAL])
    for key in ("frames", "optim_steps", "final_return", "eval_return", "policy_lag"):
        assert resumed[key] == whole[key], key
    assert points(resumed) == points(whole)
    assert whole["frames"] == FRAMES
    name = f"frames-{FRAMES:012d}"
    one, other = (contents(run / "checkpoint" / name) for run in (unbroken, broken))
    assert [name for name in differences(one, other) if timeless(name)] == []
    assert sum("loss_module" in name for name in one) > 8
    update = () if algorithm == "appo" else ("loss_actor", "loss_qvalue", "td_error")
    for key in ("optim_steps", "policy_version", "policy_lag", "policy_lag_max", *update):
        logged = [run / "logs" / "scalars" / f"{key}.csv" for run in (unbroken, broken)]
        assert logged[0].read_text() == logged[1].read_text(), key
        assert len(logged[0].read_text().splitlines()) > 3


# Runs that do not wait for one another


def test_a_run_ahead_of_the_learner_continues_with_counters_curve_replay_and_logs(run_dir):
    before = json.loads((run_dir / "summary.json").read_text())
    # What was said of the run's progress is no part of its checkpoint.
    after = resume_run(run_dir, frames=2 * FRAMES, eval_episodes=1, progress_bar=True)
    assert after["frames"] == 2 * FRAMES
    assert after["resumed"] == [FRAMES]
    updates = FRAMES // 4 * 4  # at once, as the replay is there
    assert after["optim_steps"] == before["optim_steps"] + updates
    assert points(after)[: len(before["curve"])] == points(before)
    seconds = [point[0] for point in after["curve"]]
    assert seconds == sorted(seconds)
    assert after["seconds"] > before["seconds"]
    steps = (run_dir / "logs" / "scalars" / "optim_steps.csv").read_text().splitlines()
    numbers = [int(line.split(",")[0]) for line in steps]
    assert numbers == sorted(set(numbers))
    assert numbers[0] < FRAMES < numbers[-1]
    versions = (run_dir / "logs" / "scalars" / "policy_version.csv").read_text().splitlines()
    for line in versions:  # a tick of 4 frames has what was published after the one before
        step, version = line.split(",")
        assert float(version) == int(step) / 4 - 1
    assert len(list((run_dir / "tensorboard").glob("events.*"))) == 3  # 1, then purged, then on
    newest = RunCheckpoints(run_dir / "checkpoint").newest()
    assert newest.version == 2 * FRAMES // 4
    assert (newest.frames, newest.interval, newest.keep) == (2 * FRAMES, INTERVAL, 2)
    assert evaluate_run(run_dir, episodes=1)["mean"] == pytest.approx(after["eval_return"])


def test_evaluations_begin_with_a_resume_that_asks_for_them_and_continue_with_the_next(run_dir):
    """The first checkpoint knows of none."""
    quiet = {"progress_bar": False, "eval_episodes": 1}
    once = resume_run(run_dir, frames=2 * FRAMES, eval_interval=INTERVAL, **quiet)["evaluations"]
    twice = resume_run(run_dir, frames=3 * FRAMES, **quiet)["evaluations"]
    assert twice[: len(once)] == once
    assert once[0].frames > FRAMES
    assert twice[-1].frames > 2 * FRAMES
    logged = (run_dir / "logs" / "scalars" / "eval_return.csv").read_text().splitlines()
    evaluated = {one.frames for one in twice} | {FRAMES, 2 * FRAMES, 3 * FRAMES}  # at each end, too
    assert [int(line.split(",")[0]) for line in logged] == sorted(evaluated)


def test_a_run_that_lost_a_worker_is_resumed_with_new_episodes(tmp_path, monkeypatch):
    kill = at_the_kill(lambda hook: os.kill(hook.collector.pids[0], signal.SIGKILL))
    keeps_all = dataclasses.replace(RUNS["sac"][1], replay_buffer_n=FRAMES // 4)
    with monkeypatch.context() as patch:
        patch.setattr(PublishWeights, "__call__", kill)
        with pytest.raises(WorkerError, match="was ended by SIGKILL"):
            train(tmp_path / "run", "sac", config=keeps_all)
    saved = RunCheckpoints(tmp_path / "run" / "checkpoint").newest()
    assert saved.frames == KILLED
    summary = resume_run(tmp_path / "run", **QUIET)
    assert summary["frames"] == FRAMES
    assert summary["resumed"] == [KILLED]
    assert summary["optim_steps"] == 4 * (FRAMES // 8 - 3)  # from 32 rows on, none left out
    assert not live_children()
    with PackedReplayStorage(FRAMES) as replay:
        (rows,) = RunCheckpoints(tmp_path / "run" / "checkpoint").newest().path.rglob("rows.bin")
        replay.loads(rows.parent)
        first, again = replay[:4]["observation"], replay[KILLED : KILLED + 4]["observation"]
    assert not torch.isclose(first, again).all(1).any()


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_a_limit_ends_says_so(killed, tmp_path):
    lines: list[str] = []
    train(tmp_path / "run", "appo", max_seconds=1e-6, announce=lines.append)
    if killed:  # before its summary
        lines.clear()
        (tmp_path / "run" / "summary.json").unlink()
        resume_run(tmp_path / "run", announce=lines.append, **QUIET)
    assert [line.endswith("seconds are over") for line in lines if "stopped" in line] == [True]


@pytest.mark.parametrize("again", [{}, {"max_seconds": 1e6}])
def test_what_ended_a_run_is_not_taken_over_and_said(again, tmp_path):
    train(tmp_path / "run", "appo", max_seconds=1e-6)
    lines: list[str] = []
    resume_run(tmp_path / "run", frames=FRAMES + 32, announce=lines.append, **QUIET, **again)
    said = "not taken over, as they ended the run: max_seconds"
    assert (said in lines) is not bool(again)
    assert read_config(tmp_path / "run" / "config.yaml")["max_seconds"] == again.get("max_seconds")


def test_a_trace_stays_unless_another_one_is_asked_for(tmp_path):
    train(tmp_path / "run", "appo", trace=True)
    trace = tmp_path / "run" / "trace.json"
    before = trace.read_bytes()
    resume_run(tmp_path / "run", frames=FRAMES + 32, **QUIET)
    assert trace.read_bytes() == before
    resume_run(tmp_path / "run", frames=FRAMES + 64, trace=True, **QUIET)
    assert trace.read_bytes() != before


def test_limits_that_a_run_has_not_reached_stay(tmp_path):
    limits = {"max_seconds": 1e6, "stop_at": 1e6}
    train(tmp_path / "run", "appo", **limits)
    lines: list[str] = []
    resume_run(tmp_path / "run", frames=FRAMES + 32, announce=lines.append, **QUIET)
    assert not [line for line in lines if "not taken over" in line]
    assert lines[0].startswith(f"resuming at {FRAMES} of {FRAMES + 32} frames, from ")
    after = read_config(tmp_path / "run" / "config.yaml")
    assert {name: after[name] for name in limits} == limits


def test_a_resumed_run_keeps_the_frames_it_was_last_given(run_dir):
    file = run_dir / "config.yaml"  # as a resumed run leaves it that is killed at once
    file.write_text(file.read_text().replace(f"frames: {FRAMES}\n", f"frames: {FRAMES + 32}\n"))
    assert resume_run(run_dir, **QUIET)["frames"] == FRAMES + 32


def test_a_resumed_run_logs_evaluates_and_waits_for_ranks_as_before(run_dir):
    file = run_dir / "config.yaml"
    edited = {"logger": "csv", "rank_timeout": 3600.0, "keep_checkpoints": 1}
    said = {**read_config(file), **edited, "checkpoint_interval": 2 * FRAMES}
    file.write_text(as_yaml(said))
    resume_run(run_dir, frames=2 * FRAMES, progress_bar=False)
    after = read_config(file)
    for name in (*edited, "eval_episodes", "checkpoint_interval"):
        assert after[name] == said[name]
    assert len(list((run_dir / "checkpoint").glob("frames-*"))) == 1
    assert len(list((run_dir / "tensorboard").glob("events.*"))) == 1


@pytest.fixture(params=["appo", "sac"])
def of_a_gpu(request, appo_run, off_policy_runs, tmp_path) -> Path:
    """A run whose learner and collectors were on a GPU, as its files say."""
    runs = {"appo": appo_run, **off_policy_runs}
    run_dir = shutil.copytree(runs[request.param].run_dir, tmp_path / "run")
    saved = RunCheckpoints(run_dir / "checkpoint").newest().path
    generator = '[{"kind":"value","value":"torch_cpu"},'
    gpus = '[{"kind":"value","value":"torch_cuda"},{"kind":"list","items":[]}],'
    for file in saved.rglob("state.json"):
        state = file.read_text().replace('"device":"cpu"', '"device":"cuda:0"')
        file.write_text(state.replace(generator, gpus + generator))
    record = saved / "manifest.json"
    record.write_text(record.read_text().replace('device": "cpu"', 'device": "cuda"'))
    sealed = saved / DIGESTS
    sealed.unlink()
    sealed.write_text(json.dumps(_digests(saved)))
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("device: cpu", "device: cuda"))
    assert read_config(config)["collector_device"] == "cuda"
    return run_dir


def test_a_run_on_a_gpu_is_evaluated_where_there_is_none(of_a_gpu):
    told = json.loads((of_a_gpu / "summary.json").read_text())["eval_return"]
    said = read_config(of_a_gpu / "config.yaml")
    episodes, seed = said["eval_episodes"], said["seed"]
    assert evaluate_run(of_a_gpu, episodes=episodes, seed=seed)["mean"] == told


def test_a_run_on_a_gpu_resumes_on_a_cpu_if_asked_to(of_a_gpu):
    before, frames = tree(of_a_gpu), RunCheckpoints(of_a_gpu / "checkpoint").newest().frames
    more = {"frames": frames + 128, **QUIET}
    with pytest.raises(
        ConfigError, match=r"device: 'cuda' \(expected one that torch .* finds here"
    ):
        resume_run(of_a_gpu, **more)
    assert tree(of_a_gpu) == before
    here = {"device": "cpu", "collector_device": "cpu", "physics_threads": 2}
    assert resume_run(of_a_gpu, settings=here, **more)["resumed"] == [frames]
    said = read_config(of_a_gpu / "config.yaml")
    assert {name: said[name] for name in here} == here
    more["frames"] += 128
    assert resume_run(of_a_gpu, **more)["resumed"] == [frames, frames + 128]


def test_none_switches_off_what_a_run_did_before(run_dir):
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace("eval_interval: null\n", "eval_interval: 64\n"))
    assert read_config(file)["eval_interval"] == 64
    resume_run(run_dir, frames=FRAMES + 32, eval_interval=None, **QUIET)
    assert read_config(file)["eval_interval"] is None


def test_a_damaged_summary_does_not_keep_a_run_from_being_resumed(run_dir):
    (run_dir / "summary.json").write_text("{")
    assert resume_run(run_dir, frames=FRAMES + 32, **QUIET)["frames"] == FRAMES + 32


def test_a_damaged_config_is_named_once(run_dir):
    (run_dir / "config.yaml").write_text("")
    with pytest.raises(
        ConfigError, match=r"config.yaml: cannot be read, it holds NoneType"
    ) as caught:
        evaluate_run(run_dir, episodes=1)
    assert str(caught.value).count("expected") == 1


def test_a_run_that_was_killed_after_its_last_checkpoint_is_ended_by_resuming_it(run_dir):
    summary = run_dir / "summary.json"
    expected = json.loads(summary.read_text())
    summary.unlink()
    found = resume_run(run_dir, **QUIET)
    assert summary.exists()
    assert found["frames"] == expected["frames"]
    assert found["busy"] == {"learner": 0.0, "collectors": [0.0]}
    assert found["collector"].keys() == expected["collector"].keys()
    assert found["collector"]["replay_size"] == expected["collector"]["replay_size"]
    with pytest.raises(ConfigError, match="have been collected"):
        resume_run(run_dir, **QUIET)


@pytest.mark.parametrize("limit", [{"stop_at": 1.0}, {"max_seconds": 1e-3}])
def test_a_run_that_came_to_its_limit_is_complete_until_more_is_asked_for(run_dir, limit):
    assert json.loads((run_dir / "summary.json").read_text())["final_return"] > 1.0
    more = {"frames": FRAMES + 32, **limit}
    before = tree(run_dir)
    with pytest.raises(ConfigError, match=r"run is complete: .* (reached|are over) \(expected"):
        resume_run(run_dir, **QUIET, **more)
    assert tree(run_dir) == before
    summary = run_dir / "summary.json"
    summary.unlink()  # as where it was killed between the last checkpoint and its summary
    assert resume_run(run_dir, **QUIET, **more)["frames"] == FRAMES
    assert summary.exists()
    higher = {**more, **dict.fromkeys(limit, 1e6)}
    assert resume_run(run_dir, **QUIET, **higher)["frames"] == FRAMES + 32


def test_a_run_whose_last_rollout_brought_more_frames_than_asked_for_is_complete(tmp_path):
    assert train(tmp_path, "appo", frames=100)["frames"] == 128
    with pytest.raises(ConfigError, match="128 of 100 frames have been collected"):
        resume_run(tmp_path, **QUIET)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ConfigError, match="128 of 99 frames have been collected"):
        resume_run(tmp_path, frames=99, **QUIET)
    assert resume_run(tmp_path, **QUIET)["frames"] == 128
    assert (tmp_path / "summary.json").exists()


def test_a_line_of_a_log_that_is_none_is_left_out_by_a_resumed_run(run_dir):
    log = next(run_dir.joinpath("logs").rglob("*.csv"))
    with log.open("ab") as file:
        file.write(b"\0" * 8 + b"\n\xff\n")
    resume_run(run_dir, frames=FRAMES + 32, **QUIET)
    assert not {0, 0xFF} & {*log.read_bytes()}


def test_a_run_whose_end_was_interrupted_is_ended_by_a_resumed_one_that_logs_nothing_twice(run_dir):
    file = run_dir / "summary.json"
    summary = json.loads(file.read_text())
    file.write_text(json.dumps(summary | {"interrupted": True}))
    logs = {log: log.read_text() for log in run_dir.joinpath("logs").rglob("*.csv")}
    assert not resume_run(run_dir, **QUIET)["interrupted"]
    assert {log: log.read_text() for log in run_dir.joinpath("logs").rglob("*.csv")} == logs
    with pytest.raises(RunCompleteError):
        resume_run(run_dir, **QUIET)
