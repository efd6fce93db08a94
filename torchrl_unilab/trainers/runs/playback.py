"""Films a trained policy: `play_run`, the command `play`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_unilab.collectors.worker import closing_env
from torchrl_unilab.configs.file import StrPath
from torchrl_unilab.trainers.runs.policy import check_episodes, load_run
from torchrl_unilab.trainers.video import check_video, film_episodes


def play_run(
    run_dir: StrPath,
    video: StrPath,
    *,
    episodes: int = 1,
    max_steps: int | None = None,
    seed: int = 0,
    width: int = 640,
    height: int = 480,
    camera: str | int | None = None,
    deterministic: bool = True,
    progress_bar: bool = True,
) -> dict[str, Any]:
    """Film the checkpoint of a run on its task, one episode after the other.

    The video runs at the speed of the simulated time. If the task takes more than 60 steps a
    second, only every second step is filmed, or every third, and so on; the first and last state of
    each episode are always filmed.

    Args:
        run_dir: A run.
        video: The file to write, ending in ``.mp4``; replaced if it exists.
        episodes: How many.
        max_steps: Steps after which an episode ends; the task's limit if None.
        seed: Seed of the episodes, and of actions that are drawn.
        width: In pixels, even.
        height: In pixels, even.
        camera: A camera of the model, by name or number; None for one that follows the robot,
            see `torchrl_unilab.envs.rendering.BatchRenderer`.
        deterministic: Act without exploration.
        progress_bar: Show one on standard error.

    Returns:
        ``env``, ``episodes``, their ``returns`` and ``lengths`` (steps), the mean,
        minimum and maximum of the returns, ``frames``, ``fps`` and ``video``.

    Raises:
        ConfigError: A setting is wrong, there is no run with a checkpoint in `run_dir`,
            PyAV is missing or OpenGL cannot draw here. No file is written then.

    Examples:
        >>> from torchrl_unilab.trainers import play_run, train_appo
        >>> run = train_appo("InvertedPendulum-v5", frames=1024, run_dir="run", progress_bar=False)
        >>> play_run("run", "run/first.mp4", max_steps=5)["episodes"]
        1
    """
    episodes, seed = check_episodes(episodes, seed)
    check_video(video, width, height)
    run = load_run(
        run_dir,
        "play",
        num_envs=1,
        num_threads=1,
        seed=seed,
        max_episode_steps=max_steps,
        render_width=width,
        render_height=height,
        render_camera=camera,
    )
    kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    with closing_env(run.env), torch.random.fork_rng(devices=[]), set_exploration_type(kind):
        torch.manual_seed(seed)
        film = film_episodes(run.env, run.actor, video, episodes, progress_bar=progress_bar)
    return {
        "env": run.settings["env"],
        "episodes": episodes,
        "mean": float(np.mean(film.returns)),
        "min": min(film.returns),
        "max": max(film.returns),
        **film._asdict(),
        "video": str(video),
    }
