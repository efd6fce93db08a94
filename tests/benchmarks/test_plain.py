from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.bench_race import TARGETS
from tests.benchmarks.plain import PlainEnv, train
from tests.support.bounds import DEADLINE
from torchrl_unilab.configs.appo import APPOConfig


@pytest.mark.parametrize("task", TARGETS)
def test_the_plain_loop_runs_on_each_task_of_the_race(task):
    config = APPOConfig.for_task(task, num_envs=4, num_steps=8, minibatches=1, epochs=1)
    threads = {"physics_threads": 1, "seconds": 0.2}
    train(task, config=config, seed=0, threshold=float("inf"), **threads)


def test_first_episodes_that_were_cut_do_not_count():
    config = APPOConfig.for_task("HalfCheetah-v5", num_envs=64, minibatches=1, epochs=1)
    end = {"threshold": -float("inf"), "seconds": 2 * DEADLINE, "physics_threads": 1}
    ((_, frames, _),) = train("HalfCheetah-v5", config=config, seed=0, **end)
    assert frames > 64_000  # a whole episode after the shortest of the first ones


def test_its_first_episodes_end_apart_as_ours_do():
    env = PlainEnv("HalfCheetah-v5", 64, 1, seed=0, stagger=True)
    assert len(np.unique(env.elapsed)) > 32
    assert not PlainEnv("HalfCheetah-v5", 4, 1, seed=0).elapsed.any()
