from __future__ import annotations

import json
import math
from unittest.mock import Mock

import pytest
import torch

from tests.support.videos import read_video
from torchrl_unilab.cli import main
from torchrl_unilab.envs.rendering import BatchRenderer
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import evaluate, evaluate_run
from torchrl_unilab.trainers.runs import policy
from torchrl_unilab.trainers.runs.policy import play_run

SIZE = ["--width", "64", "--height", "48"]


@pytest.fixture
def run_dir(appo_run):
    return appo_run.run_dir


def test_play_films_the_episodes_that_eval_would_have(run_dir, tmp_path, capsys):
    path = tmp_path / "out.mp4"
    arguments = ["--run-dir", str(run_dir), "--video", str(path), "--seed", "3", *SIZE]
    assert main(["play", *arguments, "--episodes", "8"]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    result = json.loads(line)
    assert f"filming: {sum(result['lengths'])}step" in err
    # 25 steps a second are all filmed, and each episode's first state
    assert result["fps"] == 25.0
    assert result["frames"] == sum(result["lengths"]) + 8
    assert read_video(path)[0].shape == (result["frames"], 48, 64, 3)
    assert (result["env"], result["video"]) == ("InvertedPendulum-v5", str(path))
    # a reward of 1 for each step but the last, in which the pole falls
    assert result["returns"] == [length - 1 for length in result["lengths"]]
    assert result["mean"] == sum(result["returns"]) / 8
    assert result["min"] == min(result["returns"]) < max(result["returns"]) == result["max"]
    assert result["returns"][0] == evaluate_run(run_dir, episodes=1, seed=3)["mean"]


def test_more_episodes_than_are_played_side_by_side_take_turns(run_dir, monkeypatch):
    played = []

    def recorded(env, policy, **options):
        played.append((env.batch_size, evaluate(env, policy, **options)))
        return played[0][1]

    monkeypatch.setattr(policy, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(policy, "evaluate", recorded)
    result = evaluate_run(run_dir, episodes=5)
    ((batch_size, returns),) = played
    assert (batch_size, returns.shape) == ((2,), (5,))
    assert (result["episodes"], result["mean"]) == (5, returns.mean())


def test_a_task_of_many_steps_a_second_is_filmed_in_its_own_time(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_unilab.trainers.video._MOST_FPS", 10)
    result = play_run(run_dir, tmp_path / "out.mp4", width=64, height=48)
    # every third of 25 steps a second
    assert result["fps"] == pytest.approx(25 / 3)
    assert result["frames"] == math.ceil(result["lengths"][0] / 3) + 1
    assert len(read_video(tmp_path / "out.mp4")[0]) == result["frames"]


def test_actions_that_are_drawn_follow_the_seed(run_dir, tmp_path):
    def returns(seed: int, deterministic: bool) -> list[float]:
        result = play_run(
            run_dir,
            tmp_path / "out.mp4",
            episodes=12,  # hardly all as long when acted otherwise
            seed=seed,
            max_steps=40,
            deterministic=deterministic,
            width=16,
            height=16,
        )
        return result["lengths"]

    state = torch.get_rng_state()
    first = returns(0, False)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)  # as a caller draws meanwhile
    assert returns(0, False) == first
    assert returns(0, False) != returns(0, True)


def test_the_environment_that_was_filmed_is_closed(run_dir, tmp_path, monkeypatch):
    filmed = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(policy, "film_episodes", filmed)
    with pytest.raises(OSError, match="No space"):
        play_run(run_dir, tmp_path / "out.mp4")
    assert filmed.call_args.args[0].is_closed


def test_max_steps_ends_an_episode(run_dir, tmp_path):
    result = play_run(run_dir, tmp_path / "out.mp4", max_steps=2, width=64, height=48)
    assert result["lengths"] == [2]
    assert result["frames"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--camera", "front"], "camera 'front' (expected -1"),
        (["--camera", "2"], "camera 2 (expected -1"),
        (["--episodes", "0"], "episodes: 0 (expected an integer of at least 1)"),
        (["--max-steps", "0"], "max_episode_steps: 0"),
        (["--run-dir", "nowhere"], "cannot play nowhere: no config.yaml"),
        (["--video", "out.avi"], "not a file name that ends in .mp4"),
        (["--run-dir", "nowhere", "--video", "out.avi"], "not a file name"),  # looked at first
    ],
)
def test_bad_input_is_one_error_line_exit_code_2_and_no_file(
    run_dir, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    command = ["play", "--run-dir", str(run_dir), "--video", "out.mp4", *arguments]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_drawn_no_file_is_written(run_dir, tmp_path, monkeypatch):
    def blind(*_: object) -> None:
        raise ConfigError("rendering: no OpenGL backend can draw here")

    monkeypatch.setattr(BatchRenderer, "render", blind)
    with pytest.raises(ConfigError, match="can draw here"):
        play_run(run_dir, tmp_path / "out.mp4")
    assert not list(tmp_path.iterdir())
