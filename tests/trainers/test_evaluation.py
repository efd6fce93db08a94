from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import av
import psutil
import pytest
import torch

from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError, WorkerError
from torchrl_unilab.modules import make_actor
from torchrl_unilab.trainers import BackgroundEvaluation, evaluate
from torchrl_unilab.trainers.evaluation import Evaluation, Videos
from torchrl_unilab.weight_update import UniLabShmTransport

make_env = partial(MujocoBatchEnv, "InvertedPendulum-v5", 3, num_threads=1, max_episode_steps=50)


class _Trainer:
    """As much of a trainer as the evaluation sees."""

    def __init__(self) -> None:
        self.collected_frames = 0
        self.logged: list[tuple[str, float, int]] = []
        self.logger = SimpleNamespace(
            log_scalar=lambda name, value, step: self.logged.append((name, value, step))
        )
        self.hook: Any = None

    def register_op(self, stage: str, hook: Any) -> None:
        assert stage == "post_steps"
        self.hook = hook

    def collect(self, frames: int) -> None:
        self.collected_frames = frames
        self.hook()


@pytest.fixture(scope="module")
def policy() -> torch.nn.Module:
    return make_actor(4, 1)


@pytest.fixture(scope="module")
def transport(policy: torch.nn.Module) -> Iterator[UniLabShmTransport]:
    transport = UniLabShmTransport.from_state_dict(policy)
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def shared(policy: torch.nn.Module, transport: UniLabShmTransport) -> Iterator[Any]:
    """One process for all tests that leave it alive."""
    evaluation = BackgroundEvaluation(make_env, policy, transport, interval=100, seed=5)
    yield evaluation
    evaluation.close()


@pytest.fixture
def evaluation(shared: BackgroundEvaluation) -> tuple[BackgroundEvaluation, _Trainer]:
    trainer = _Trainer()
    shared.register(trainer)
    shared.evaluations.clear()
    shared._begun = 0
    return shared, trainer


def _expected(policy: torch.nn.Module) -> float:
    env = make_env()
    env.set_seed(5)
    mean = evaluate(env, policy).mean().item()
    env.close()
    return mean


def test_it_evaluates_the_published_policy_once_an_interval_is_over(evaluation, policy):
    background, trainer = evaluation
    trainer.collect(99)
    background.finish()
    assert background.evaluations == []
    trainer.collect(130)
    background.finish()
    (one,) = background.evaluations
    expected = _expected(policy)
    length = expected + 1  # the step at which it falls earns nothing
    assert one == Evaluation(130, 1, expected, length)
    assert trainer.logged == [("eval_return", expected, 130), ("eval_length", length, 130)]


def test_it_takes_the_newest_version_whole(evaluation, policy, transport):
    background, trainer = evaluation
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(-2.0)
    version = transport.write_weights(policy)
    trainer.collect(100)
    background.finish()
    (one,) = background.evaluations
    assert (one.version, one.mean_return) == (version, _expected(policy))


def test_what_becomes_due_during_an_evaluation_is_left_out(evaluation):
    background, trainer = evaluation
    trainer.collect(100)
    assert background._running
    background._process.poll = lambda index: False  # it takes long
    try:
        trainer.collect(250)
    finally:
        del background._process.poll
    background.finish()
    trainer.collect(290)
    background.finish()
    assert [one.frames for one in background.evaluations] == [100]
    trainer.collect(300)
    background.finish()
    assert [one.frames for one in background.evaluations] == [100, 300]


def test_a_process_that_dies_fails_the_next_batch(policy, transport):
    background = BackgroundEvaluation(make_env, policy, transport, interval=100)
    try:
        trainer = _Trainer()
        background.register(trainer)
        trainer.collect(100)
        process = psutil.Process(background.pids[0])
        process.kill()
        process.wait(10)
        with pytest.raises(WorkerError, match=r"evaluation 0, process \d+, was ended by SIGKILL"):
            trainer.collect(200)
    finally:
        background.close()
    assert background.pids == []


def test_an_interval_of_no_frames_is_refused_before_a_process_starts(policy, transport):
    with pytest.raises(ConfigError, match=r"interval: 0 frames \(expected at least 1\)"):
        BackgroundEvaluation(make_env, policy, transport, interval=0)


def test_an_evaluation_is_filmed_each_so_many_frames(policy, transport, tmp_path):
    stage = partial(MujocoBatchEnv, "InvertedPendulum-v5", 1, num_threads=1, max_episode_steps=3)
    videos = Videos(stage, tmp_path / "videos", interval=200)
    trainer = _Trainer()
    evaluation = BackgroundEvaluation(make_env, policy, transport, interval=100, videos=videos)
    try:
        evaluation.register(trainer)
        for frames in (100, 200, 300, 400):
            trainer.collect(frames)
            evaluation.finish()
    finally:
        evaluation.close()
    names = sorted(path.name for path in videos.directory.iterdir())
    assert names == ["frames-000000000200.mp4", "frames-000000000400.mp4"]
    with av.open(str(videos.directory / names[0])) as container:
        assert sum(1 for _ in container.decode(video=0)) == 4  # three steps, and the first state
