from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.record import VideoRecorder

from tests.support.collecting import linear_policy
from tests.support.videos import read_video
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import make_actor
from torchrl_unilab.trainers import video as module
from torchrl_unilab.trainers.video import (
    Mp4Logger,
    check_filming,
    check_video,
    film_episodes,
    write_video,
)


def _greys(count: int) -> Iterator[np.ndarray]:
    for i in range(count):
        yield np.full((48, 64, 3), 10 * i, dtype=np.uint8)


def test_a_video_has_every_frame_in_order_and_its_rate(tmp_path):
    path = tmp_path / "greys.mp4"
    (tmp_path / "greys.part").write_text("another's")
    assert write_video(path, _greys(20), Fraction(125, 3)) == 20
    frames, rate = read_video(path)
    assert frames.shape == (20, 48, 64, 3)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), 10 * np.arange(20), atol=4)
    assert rate == Fraction(125, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"greys.mp4", "greys.part"}


def test_a_video_that_is_not_finished_leaves_what_was_there(tmp_path):
    def broken() -> Iterator[np.ndarray]:
        for _ in range(100):  # more than the encoder keeps before it writes
            yield from _greys(1)
        raise RuntimeError("no more")

    path = tmp_path / "greys.mp4"
    path.write_text("before")
    with pytest.raises(RuntimeError, match="no more"):
        write_video(path, broken(), 30)
    assert [path.name for path in tmp_path.iterdir()] == ["greys.mp4"]
    assert path.read_text() == "before"


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("out.gif", (64, 48), "not a file name that ends in .mp4"),
        ("directory.mp4", (64, 48), "not a file name that ends in .mp4"),
        ("nowhere/out.mp4", (64, 48), "cannot be written in"),
        ("out.mp4", (63, 48), "63 x 48 pixels .expected even numbers"),
        ("out.mp4", (64, 0), "64 x 0 pixels"),
        ("out.mp4", (8194, 64), "8194 x 64 pixels"),
        ("out.mp4", (64.0, 48), "64.0 x 48 pixels"),
        ("out.mp4", (64, "x"), "64 x x pixels"),
        (None, (64, 48), "video None: not a file name"),
    ],
)
def test_what_cannot_be_a_video_is_refused(tmp_path, name, size, message):
    (tmp_path / "directory.mp4").mkdir()
    with pytest.raises(ConfigError, match=message):
        check_video(name and tmp_path / name, *size)


def test_the_smallest_and_the_largest_sides_are_taken(tmp_path):
    check_video(tmp_path / "out.mp4", 2, 8192)


def test_a_directory_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # as root may write it
    with pytest.raises(ConfigError, match=r"cannot be written in .* \(expected a directory that"):
        check_video(tmp_path / "out.mp4", 64, 48)


def test_filming_needs_pyav_and_a_backend_that_draws_the_one_asked_for_if_any(monkeypatch):
    monkeypatch.setattr(module, "find_backend", find := Mock())
    monkeypatch.setenv("MUJOCO_GL", " EGL")
    check_filming()
    find.assert_called_once_with("egl")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"Install it: pip install"):
        check_filming()


@pytest.mark.parametrize(("count", "fps"), [(0, 30), (2, 0)])
def test_a_video_of_nothing_or_without_a_rate_is_refused(tmp_path, count, fps):
    with pytest.raises(ConfigError, match="expected at least one, and a positive rate"):
        write_video(tmp_path / "out.mp4", _greys(count), fps)
    assert not list(tmp_path.iterdir())


def test_without_pyav_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"Install it: pip install 'torchrl-unilab\[render\]'"):
        check_video(tmp_path / "out.mp4", 64, 48)


def test_torchrl_records_an_environment_into_an_mp4_file(tmp_path):
    base = MujocoBatchEnv(
        "InvertedPendulum-v5", 4, seed=0, from_pixels=True, render_width=64, render_height=48
    )
    logger = Mp4Logger("run", str(tmp_path), video_fps=50)
    env = TransformedEnv(base, VideoRecorder(logger, tag="cart"))
    pixels = env.rollout(9, lambda td: td.set("action", torch.zeros(4, 1)))["next", "pixels"]
    env.transform.dump()
    env.close()
    frames, rate = read_video(tmp_path / "run" / "videos" / "cart_0.mp4")
    assert frames.shape == (10, 2 * 48, 2 * 64, 3)
    assert rate == 50
    difference = frames[-1, :48, :64].astype(int) - pixels[0, -1].numpy().astype(int)
    assert np.abs(difference).mean() < 8


def test_videos_of_one_name_are_numbered_and_options_of_another_writer_refused(tmp_path):
    logger = Mp4Logger("run", str(tmp_path))
    video = torch.zeros(1, 2, 3, 48, 64, dtype=torch.uint8)
    logger.log_video("a", video)
    logger.log_video("a", video)
    logger.log_video("b", video, step=7)
    written = sorted(path.name for path in (tmp_path / "run" / "videos").iterdir())
    assert written == ["a_0.mp4", "a_1.mp4", "b_7.mp4"]
    with pytest.raises(ConfigError, match=r"and options \['video_codec'\]"):
        logger.log_video("c", video, video_codec="vp9")


def test_a_policy_that_returns_a_tensordict_of_its_own_is_filmed(tmp_path):
    env = MujocoBatchEnv("InvertedPendulum-v5", 1, seed=0, max_episode_steps=3)
    film = film_episodes(env, linear_policy(4, inplace=False), tmp_path / "film.mp4")
    env.close()
    assert film.lengths == [3]


@pytest.mark.parametrize("shape", [(2, 3, 48, 64), (2, 2, 3, 48, 64), (1, 2, 1, 48, 64)], ids=str)
def test_all_but_one_video_of_three_colours_is_refused(tmp_path, shape):
    logger = Mp4Logger("run", str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(f"video c: shape {shape} and options []")):
        logger.log_video("c", torch.zeros(shape, dtype=torch.uint8))


def test_a_call_may_have_a_rate_of_its_own_but_not_0(tmp_path):
    logger = Mp4Logger("run", str(tmp_path), video_fps=50)
    video = torch.zeros(1, 2, 3, 48, 64, dtype=torch.uint8)
    logger.log_video("a", video, fps=12.5)
    assert read_video(tmp_path / "run" / "videos" / "a_0.mp4")[1] == Fraction(25, 2)
    with pytest.raises(ConfigError, match=r"some frames, 0 per second \(expected"):
        logger.log_video("a", video, fps=0)


@pytest.mark.parametrize("shown", [True, False])
def test_of_125_steps_a_second_each_third_is_filmed_and_said_where_that_is_asked_for(
    tmp_path, capsys, shown
):
    size = {"render_width": 64, "render_height": 48}
    env = MujocoBatchEnv("Hopper-v5", 1, seed=0, max_episode_steps=5, **size)
    film = film_episodes(env, make_actor(11, 3), tmp_path / "film.mp4", progress_bar=shown)
    env.close()
    assert (film.lengths, film.frames, film.fps) == ([5], 3, 125 / 3)  # steps 0 and 3, and the end
    said = capsys.readouterr().err
    assert ("filming: 5step" in said, bool(said)) == (shown, shown)
