"""Runs that cannot work are refused before a process is started or a file is written."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import ENV
from torchrl_unilab.runtime.workers import WorkerGroup
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, train_appo, train_off_policy

NAN, INF = math.nan, math.inf
APPO: dict[str, list[Any]] = {
    "num_envs": [0, 2.5, "4", None, True],
    "num_steps": [0, 8.0],
    "num_collectors": [0],
    "pool": [0, 10**9],
    "epochs": [0, NAN],
    "minibatches": [0, 33],
    "lr": [0.0, NAN, "fast", True],
    "desired_kl": [-0.1],
    "max_grad_norm": [INF],
    "reward_scale": [0.0],
    "value_clip": [-1.0],
    "log_std": [NAN],
    "entropy_coeff": [INF],
    "critic_coeff": [NAN, -1.0],
    "rho_bar": [NAN, -1.0],
    "c_bar": [INF, -0.5],
    "gamma": [1.5, NAN],
    "lambda_": [2.0],
    "clip_epsilon": [-0.1, None],
    "tau": [2.0],
    "target_update_freq": [0, 1.5],
    "physics_threads": [0, 1.5],
    "slots": [0, 10**9, 2.5],
    "overflow": ["drop"],
    "max_policy_lag": [-1, 0.5],
    "observation": ["nothing", "", ("observation",)],
    "critic_observation": ["nothing", None],
    "hidden": [(0,), ("wide",), (8, True), 8],
    "fused": ["yes"],
    "compile": [1],
    "lockstep": [None],
}
SAC: dict[str, list[Any]] = {
    "algorithm": ["ddpg"],
    "num_envs": [0, True],
    "num_collectors": [-1],
    "physics_threads": [0],
    "replay_buffer_n": [0, 10**12],
    "batch_size": [0, 1.5, 4001, 2000],
    "updates_per_step": [0],
    "policy_frequency": [0],
    "env_steps_per_sync": [0],
    "n_step": [0],
    "gamma": [-0.1, True],
    "tau": [1.1],
    "lr_actor": [0.0],
    "lr_critic": [NAN],
    "alpha": [0.0, "auto"],
    "target_noise": [-1.0],
    "reward_scale": [INF],
    "hidden": [(-1,), "wide"],
    "observation": ["nothing"],
    "critic_observation": ["nothing"],
    "learner_threads": [0, 1.0],
    "learning_starts": [10**6, 1001, 2.5, NAN, 500],  # 1001: the replay; 500: all frames
    "noise_std_max": [NAN],
    "target_noise_clip": [-0.5],
    "init_random": [None],
    "obs_normalization": ["running"],
    "sync_collection": [1],
}
RUN: dict[str, list[Any]] = {
    "env": ["Nonsense-v5", None, ""],
    "frames": [0, -5, 64.5, "64", True, NAN],
    "seed": [-1, 2**32, None, 1.5],
    "eval_episodes": [0, 1.5],
    "keep_checkpoints": [0, 1.5],
    "checkpoint_interval": [0, 32.5],
    "stop_at": [NAN, "high"],
    "max_seconds": [0.0, -1.0, NAN],
    "progress_bar": [None],
    "trace": ["trace.json"],
}


def _each(bad: dict[str, list[Any]], *together: dict[str, Any]) -> list[Any]:
    """One case for each value of each setting, and for those that do not go together."""
    cases = [{name: value} for name, values in bad.items() for value in values]
    return [pytest.param(case, id=str(case)) for case in (*cases, *together)]


@pytest.fixture(autouse=True)
def _no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(WorkerGroup, "__init__", started)


def _train(kind: str, settings: dict[str, Any], **run: Any) -> None:
    small: dict[str, Any] = {"num_envs": 4, "hidden": (8,), "physics_threads": 1}
    if kind == "appo":
        train_appo(config=APPOConfig(**{**small, "num_steps": 8, **settings}), **run)
    else:
        config = OffPolicyConfig(**{**small, "replay_buffer_n": 1000, **settings})
        train_off_policy(config=config, **run)


def _refused(tmp_path: Path, kind: str, settings: dict[str, Any], **run: Any) -> None:
    arguments = {"frames": 1024, "progress_bar": False, "eval_episodes": 1, **run}
    env = arguments.pop("env", ENV)
    run_dir = arguments.pop("run_dir", tmp_path / "run")
    with pytest.raises(ValueError, match=r"\(expected .*\. [A-Z]"):
        _train(kind, settings, env=env, run_dir=run_dir, **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    _each(
        APPO,
        {"slots": 1, "num_collectors": 2, "lockstep": True},
        {"minibatches": 33, "pool": 2},  # the first update is of one rollout
        {"minibatches": 2, "num_envs": 1, "num_steps": 1},
    ),
)
def test_settings_of_appo_that_cannot_work_are_refused(settings, tmp_path):
    _refused(tmp_path, "appo", settings)


@pytest.mark.parametrize(
    "settings",
    _each(
        SAC,
        {"noise_std_min": 0.5, "noise_std_max": 0.1},
    ),
)
def test_settings_of_sac_that_cannot_work_are_refused(settings, tmp_path):
    _refused(tmp_path, "sac", settings)


@pytest.mark.parametrize("name", ["observation", "critic_observation"])
@pytest.mark.parametrize("kind", ["appo", "sac"])
def test_what_an_environment_observes_is_named_where_a_key_is_unknown(kind, name, tmp_path):
    known = re.escape(f"{name}: 'nothing' (expected ") + ".*one of " + re.escape("['observation']")
    with pytest.raises(ValueError, match=known):
        _train(kind, {name: "nothing"}, env=ENV, frames=1024, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("run", _each(RUN))
def test_a_run_that_cannot_work_is_refused(run, tmp_path):
    _refused(tmp_path, "appo", {}, **run)


def test_a_directory_that_is_a_file_or_not_empty_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    _refused(tmp_path, "appo", {}, run_dir=tmp_path / "file")
    _refused(tmp_path, "sac", {}, run_dir=tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
