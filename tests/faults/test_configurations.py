"""Runs that cannot work are refused before a process is started or a file is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_points import ENV
from torchrl_unilab.runtime.workers import WorkerGroup
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, train_appo, train_off_policy

# What a setting alone may be is tested in tests/configs.
APPO: list[dict[str, Any]] = [
    {"num_envs": 0},
    {"slots": 10**9},
    {"minibatches": 33, "pool": 2},  # the first update is of one rollout
    {"minibatches": 2, "num_envs": 1, "num_steps": 1},
]
SAC: list[dict[str, Any]] = [
    {"algorithm": "ddpg"},
    {"replay_buffer_n": 10**12},
    {"batch_size": 2000},  # more than the replay holds
    {"learning_starts": 500},  # all frames
]
RUN: list[dict[str, Any]] = [{"env": "Nonsense-v5"}, {"env": None}, {"frames": 0}, {"seed": -1}]


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


@pytest.mark.parametrize("settings", APPO, ids=str)
def test_settings_of_appo_that_cannot_work_are_refused(settings, tmp_path):
    _refused(tmp_path, "appo", settings)


@pytest.mark.parametrize("settings", SAC, ids=str)
def test_settings_of_sac_that_cannot_work_are_refused(settings, tmp_path):
    _refused(tmp_path, "sac", settings)


@pytest.mark.parametrize("name", ["observation", "critic_observation"])
@pytest.mark.parametrize("kind", ["appo", "sac"])
def test_what_an_environment_observes_is_named_where_a_key_is_unknown(kind, name, tmp_path):
    known = re.escape(f"{name}: 'nothing' (expected 'observation'). Choose a vector")
    with pytest.raises(ValueError, match=known):
        _train(kind, {name: "nothing"}, env=ENV, frames=1024, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("run", RUN, ids=str)
def test_a_run_that_cannot_work_is_refused(run, tmp_path):
    _refused(tmp_path, "appo", {}, **run)


def test_a_directory_that_is_a_file_or_not_empty_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    _refused(tmp_path, "appo", {}, run_dir=tmp_path / "file")
    _refused(tmp_path, "sac", {}, run_dir=tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
