from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest
import torch
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, exploration_type

from tests.support.collecting import linear_policy
from tests.support.processes import DEADLINE, wait_for
from tests.support.videos import read_video
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError, PeerGoneError, UsageError, WorkerError
from torchrl_unilab.modules import make_actor
from torchrl_unilab.trainers import BackgroundEvaluation, evaluate
from torchrl_unilab.trainers import evaluation as module
from torchrl_unilab.trainers.evaluation import Evaluation, Videos
from torchrl_unilab.weight_update import UniLabShmTransport

make_env = partial(MujocoBatchEnv, "InvertedPendulum-v5", 3, num_threads=1, max_episode_steps=50)


def _trainer() -> Mock:
    """What is to collect 1000 frames."""
    return Mock(total_frames=1000, _stop_training=False)


def _collect(
    evaluation: BackgroundEvaluation, trainer: Mock, frames: int, *, finish: bool = False
) -> None:
    """A batch has come; hooks look, and what they begin may finish."""
    trainer.collected_frames = frames
    evaluation()
    if finish:
        evaluation.finish()


@contextlib.contextmanager
def _evaluating(*arguments: Any, **settings: Any) -> Iterator[BackgroundEvaluation]:
    """An evaluation in the background, with a trainer of its own."""
    with contextlib.closing(BackgroundEvaluation(*arguments, **settings)) as background:
        background.register(_trainer())
        yield background


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
def evaluation(shared: BackgroundEvaluation) -> tuple[BackgroundEvaluation, Mock]:
    trainer = _trainer()
    shared.register(trainer)
    trainer.register_op.assert_called_once_with("post_steps", shared)
    shared.evaluations.clear()
    shared._interval_start = 0
    return shared, trainer


def _expected(policy: torch.nn.Module) -> float:
    env = make_env()
    env.set_seed(5)
    mean = evaluate(env, policy).mean().item()
    env.close()
    return mean


def test_it_evaluates_the_published_policy_once_an_interval_is_over(evaluation, policy):
    background, trainer = evaluation
    _collect(background, trainer, 99, finish=True)
    assert background.evaluations == []
    _collect(background, trainer, 130, finish=True)
    (one,) = background.evaluations
    expected = _expected(policy)
    length = expected + 1  # the step at which it falls earns nothing
    assert one == Evaluation(130, 1, expected, length)
    assert trainer.logger.log_scalar.call_args_list == [
        call("eval_return", expected, step=130),
        call("eval_length", length, step=130),
    ]


def test_an_evaluation_that_is_registered_as_a_function_is_refused(shared, monkeypatch):
    monkeypatch.setattr(shared, "_trainer", None)
    with pytest.raises(UsageError, match=r"^BackgroundEvaluation: .*Call its register\(trainer\)"):
        shared()


def test_it_takes_the_newest_version_whole(evaluation, policy, transport):
    background, trainer = evaluation
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(-2.0)
    version = transport.write_weights(policy)
    _collect(background, trainer, 100, finish=True)
    (one,) = background.evaluations
    assert (one.version, one.mean_return) == (version, _expected(policy))


def test_what_becomes_due_during_an_evaluation_is_left_out(evaluation):
    background, trainer = evaluation
    _collect(background, trainer, 100)
    assert background._running
    background._process.poll = lambda index: False  # it takes long
    try:
        _collect(background, trainer, 250)
    finally:
        del background._process.poll
    background.finish()
    _collect(background, trainer, 290, finish=True)
    assert [one.frames for one in background.evaluations] == [100]
    _collect(background, trainer, 300, finish=True)
    assert [one.frames for one in background.evaluations] == [100, 300]


def test_a_restored_evaluation_continues_and_repeats_what_had_not_ended(evaluation):
    background, trainer = evaluation
    trainer.register_module.assert_called_once_with("evaluation", background)
    _collect(background, trainer, 150, finish=True)
    before = list(background.evaluations)
    _collect(background, trainer, 210)  # runs while the checkpoint is written
    state = background.state_dict()
    background.finish()
    background.load_state_dict(state)
    assert background.evaluations == before
    _collect(background, trainer, 230, finish=True)
    background.load_state_dict(background.state_dict())
    _collect(background, trainer, 299, finish=True)  # of the same interval
    assert [one.frames for one in background.evaluations] == [150, 230]


def test_what_an_interrupt_kept_from_being_asked_for_is_due_at_the_next_batch(
    evaluation, monkeypatch
):
    background, trainer = evaluation
    with monkeypatch.context() as interrupted:
        interrupted.setattr(background._process, "send", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _collect(background, trainer, 100)
    assert background.state_dict()["begun"] == 0
    _collect(background, trainer, 110, finish=True)
    assert [one.frames for one in background.evaluations] == [110]


@pytest.mark.parametrize(("frames", "stopped"), [(1000, False), (500, True)], ids=["all", "early"])
def test_the_last_batch_waits_for_the_evaluation(evaluation, frames, stopped):
    background, trainer = evaluation
    trainer._stop_training = stopped
    _collect(background, trainer, frames)
    assert [one.frames for one in background.evaluations] == [frames]


def _endless_env() -> MujocoBatchEnv:
    """An environment in which no evaluation comes to its first step."""
    env = make_env()

    def wait_for_ever(seed: int) -> None:
        while True:
            signal.pause()

    env.set_seed = wait_for_ever
    return env


def test_a_process_that_dies_fails_the_next_batch(policy, transport):
    with _evaluating(_endless_env, policy, transport, interval=100) as background:
        _collect(background, background._trainer, 100)
        (worker,) = background._process._workers
        worker.process.kill()
        worker.process.join()
        with pytest.raises(WorkerError, match=r"evaluation 0, process \d+, was ended by SIGKILL"):
            _collect(background, background._trainer, 200)
    assert background.pids == []


def _lonely_env() -> MujocoBatchEnv:
    """An environment that fails as a process of its own is gone."""
    env = make_env()

    def fail(seed: int) -> None:
        raise PeerGoneError("its simulator is gone")

    env.set_seed = fail
    return env


def test_an_environment_that_loses_a_peer_of_its_own_fails_with_its_words(policy, transport):
    with _evaluating(_lonely_env, policy, transport, interval=100) as background:
        _collect(background, background._trainer, 100)
        with pytest.raises(WorkerError, match=r"(?s)evaluation 0, .*failed:\n.*simulator is gone"):
            background.finish()


def test_an_interval_of_no_frames_is_refused_before_a_process_starts(policy, transport):
    with pytest.raises(ConfigError, match=r"interval: 0 \(expected an integer"):
        BackgroundEvaluation(make_env, policy, transport, interval=0)


def test_an_evaluation_is_filmed_each_so_many_frames(policy, transport, tmp_path):
    stage = partial(MujocoBatchEnv, "InvertedPendulum-v5", 1, num_threads=1, max_episode_steps=3)
    videos = Videos(stage, tmp_path / "videos", interval=200)
    with _evaluating(make_env, policy, transport, interval=100, videos=videos) as evaluation:
        for frames in (100, 200, 300, 400):
            _collect(evaluation, evaluation._trainer, frames, finish=True)
    names = sorted(path.name for path in videos.directory.iterdir())
    assert names == ["frames-000000000200.mp4", "frames-000000000400.mp4"]
    frames, _ = read_video(videos.directory / names[0])
    assert len(frames) == 4  # three steps, and the first state


def test_the_policy_of_each_evaluation_is_handed_to_its_keeper(policy, transport, tmp_path):
    def keep(kept: torch.nn.Module, frames: int, mean_return: float) -> None:
        torch.save((kept.state_dict(), frames, mean_return), tmp_path / f"{frames}.pt")

    with _evaluating(make_env, policy, transport, interval=100, keep=keep) as evaluation:
        for frames in (100, 230):
            _collect(evaluation, evaluation._trainer, frames, finish=True)
        returns = [(one.frames, one.mean_return) for one in evaluation.evaluations]
    kept = [torch.load(tmp_path / f"{frames}.pt") for frames in (100, 230)]
    assert [(frames, mean) for _, frames, mean in kept] == returns
    assert all(torch.equal(kept[0][0][key], value) for key, value in policy.state_dict().items())


def test_its_process_gives_way_to_learner_and_collectors(shared):
    (pid,) = shared.pids
    assert psutil.Process(pid).nice() == min(19, psutil.Process().nice() + 10)


@pytest.mark.parametrize(("ended", "again"), [(False, "v/frames-000000000230.mp4"), (True, None)])
def test_a_restored_evaluation_films_again_what_had_not_ended(
    evaluation, monkeypatch, ended, again
):
    background, _ = evaluation
    monkeypatch.setattr(background, "_videos", Videos(make_env, Path("v"), interval=200))
    monkeypatch.setattr(background, "_filmed", 0)
    monkeypatch.setattr(background, "_running", not ended)
    background._interval_start = 210
    assert background._video(210) is not None
    state = background.state_dict()
    background._filmed = 0
    background.load_state_dict(state)
    assert background._video(230) == (again and Path(again))


def test_it_is_filmed_without_exploration_and_as_its_seed_says(monkeypatch, tmp_path):
    filmed, env, path = [], Mock(EnvBase, is_closed=True), tmp_path / "videos" / "film.mp4"

    def film(env: EnvBase, policy: object, path: Path) -> None:
        filmed.append((exploration_type(), torch.initial_seed(), path))

    monkeypatch.setattr(module, "film_episodes", film)
    module._film(lambda: env, linear_policy(inplace=True), path, 5)
    assert filmed == [(ExplorationType.DETERMINISTIC, 5, path)]
    env.set_seed.assert_called_once_with(5)


def test_an_episode_that_nothing_ends_is_cut():
    endless = partial(MujocoBatchEnv, "HalfCheetah-v5", 2, num_threads=1, max_episode_steps=10**6)
    cheetah = make_actor(17, 6)
    with (
        contextlib.closing(UniLabShmTransport.from_state_dict(cheetah)) as published,
        _evaluating(endless, cheetah, published, interval=1, max_steps=7) as background,
    ):
        _collect(background, background._trainer, 1, finish=True)
    assert [one.mean_length for one in background.evaluations] == [7.0]


@pytest.mark.parametrize("filmed", [False, True])
def test_it_ends_with_the_learner_in_the_midst_of_an_episode(filmed, tmp_path):
    endless = partial(MujocoBatchEnv, "HalfCheetah-v5", 1, num_threads=1, max_episode_steps=10**8)
    cheetah, steps = make_actor(17, 6), 1 if filmed else 10**8
    stage = partial(endless, render_width=64, render_height=64)
    videos = Videos(stage, tmp_path, interval=1) if filmed else None
    settings = {"interval": 1, "max_steps": steps, "videos": videos}
    with (
        contextlib.closing(UniLabShmTransport.from_state_dict(cheetah)) as published,
        _evaluating(endless, cheetah, published, **settings) as background,
    ):
        _collect(background, background._trainer, 1)
        (worker,) = background._process._workers
        wait_for(lambda: not filmed or any(tmp_path.glob("*.part")))
        worker.channel.close()  # as when the learner is killed
        worker.process.join(DEADLINE)
        assert worker.process.exitcode == 0
