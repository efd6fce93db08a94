"""Runs on environments other than the tasks that have a name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torchrl.envs import CatFrames, TransformedEnv

from tests.support.collecting import flat_state_env
from tests.support.quick import APPO, four_pendulums, pendulum, quick_run
from torchrl_unilab.configs import RunConfig
from torchrl_unilab.configs.file import CONFIG_FILE, read_config
from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import (
    APPOConfig,
    OffPolicyConfig,
    evaluate_run,
    resume_run,
    train_appo,
)
from torchrl_unilab.trainers.runs.train import Run


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (APPOConfig(num_envs=8, num_steps=6), "each takes 12 steps in place of 6 (num_steps)"),
        (OffPolicyConfig(num_envs=8), "each takes 2 steps in place of 1 (env_steps_per_sync)"),
        (APPOConfig(num_envs=4), None),
    ],
)
def test_a_batch_of_another_size_than_num_envs_is_announced(tmp_path, config, line):
    announced: list[str] = []
    options = {"create_env": four_pendulums, "announce": announced.append}
    Run(RunConfig("p", 100_000), config, tmp_path / "run", **options).prepare()
    found = [one.split(": ")[1] for one in announced if "create_env" in one]
    assert found == ([f"{line}, for as many frames"] if line else [])


def test_a_partial_of_our_environment_is_evaluated_as_it_is(tmp_path, monkeypatch):
    played = Mock(return_value=torch.zeros(1))
    monkeypatch.setattr("torchrl_unilab.trainers.runs.train.evaluate", played)
    four = partial(MujocoBatchEnv, "InvertedPendulum-v5", 4, num_threads=1)
    quick_run(tmp_path, env="p", create_env=four, frames=64, eval_episodes=3)
    assert played.call_args.args[0].batch_size == (4,)


def test_a_run_on_another_environment_is_evaluated_and_resumed_with_what_makes_it(tmp_path):
    # A known name, which would be another task than was trained on.
    run = {"env": "InvertedPendulum-v5", "create_env": pendulum, "frames": 64}
    trained = quick_run(tmp_path, **run)
    state = torch.get_rng_state()
    found = evaluate_run(tmp_path, episodes=2, create_env=pendulum)
    assert torch.equal(torch.get_rng_state(), state)
    assert found["episodes"] == 2
    assert found["min"] < found["mean"] < found["max"] < 0
    for use in (evaluate_run, partial(resume_run, frames=1000)):
        with pytest.raises(ConfigError, match=r"was made by create_env \(expected a task of Muj"):
            use(tmp_path)
    cut = evaluate_run(tmp_path, episodes=2, create_env=pendulum)  # where the run cuts its own
    config = tmp_path / CONFIG_FILE
    config.write_text(config.read_text().replace("eval_max_steps: 10000", "eval_max_steps: 1"))
    assert cut["min"] < evaluate_run(tmp_path, episodes=2, create_env=pendulum)["min"]
    config.write_text(config.read_text().replace("eval_max_steps: 1", "eval_max_steps: 10000"))
    more = {"frames": trained["frames"] + 1, "progress_bar": False, "eval_episodes": 2}
    resumed = resume_run(tmp_path, create_env=pendulum, **more)
    assert resumed["frames"] > resumed["resumed"][0] == trained["frames"]


def test_a_task_of_ones_own_is_trained_and_evaluated_on(tmp_path):
    task = replace(make_task("InvertedPendulum-v5"), name="Mine", max_episode_steps=7)
    create_env = partial(MujocoBatchEnv, task, APPO["num_envs"], num_threads=1)
    summary = quick_run(tmp_path, env="Mine", create_env=create_env, frames=512)
    assert 0 < summary["eval_return"] <= 7


def test_several_collectors_feed_one_learner_whose_critic_sees_more(tmp_path):
    config = APPOConfig(**APPO, num_collectors=2, pool=2, critic_observation="state")
    summary = quick_run(
        tmp_path, env="Counting", create_env=flat_state_env, config=config, frames=2048
    )
    assert len(summary["busy"]["collectors"]) == 2
    assert summary["collector"]["timeout_rate"] == 1.0
    assert {"dropped", "stale", "ring_occupancy", "fps_physics"} <= set(summary["collector"])
    assert sum(summary["policy_lag"].values()) == 16
    saved = read_config(tmp_path / "config.yaml")
    assert saved["critic_observation"] == "state"


def test_a_run_without_a_finished_episode_says_so(tmp_path):
    task = replace(make_task("HalfCheetah-v5"), max_episode_steps=100)  # many rollouts
    create_env = partial(MujocoBatchEnv, task, APPO["num_envs"], num_threads=1)
    summary = quick_run(tmp_path, create_env=create_env, frames=128)
    assert summary["final_return"] is None
    assert json.loads((tmp_path / "summary.json").read_text())["final_return"] is None


def _stacking_env() -> TransformedEnv:
    """An environment whose transform has no buffer until it is stepped."""
    env = MujocoBatchEnv("InvertedPendulum-v5", 2, num_threads=1)
    return TransformedEnv(env, CatFrames(3, dim=-1, in_keys=["observation"]))


def test_a_run_with_frames_that_are_stacked_is_resumed(tmp_path):
    config = APPOConfig(num_envs=2, num_steps=16, minibatches=1, hidden=(8,))
    options = {"run_dir": tmp_path / "run", "create_env": _stacking_env, "progress_bar": False}
    train_appo("stacked", frames=64, config=config, **options)
    del options["run_dir"]
    assert resume_run(tmp_path / "run", frames=128, **options)["frames"] == 128
