"""Videos as H.264 in mp4 files, written by PyAV.

`play_run` and `BackgroundEvaluation` film episodes, TorchRL's `VideoRecorder` takes `Mp4Logger`.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.record.loggers.csv import CSVLogger
from tqdm import tqdm

from torchrl_unilab.collectors.worker import Policy, act
from torchrl_unilab.configs.file import StrPath
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.envs.rendering import find_backend
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers.progress import on_terminal

_MOST_FPS = 60
_MOST_PIXELS = 8192  # along one side


class Mp4Logger(CSVLogger):
    """TorchRL's `CSVLogger`, with videos as H.264 in ``videos/NAME_STEP.mp4``.

    For TorchRL's `VideoRecorder`. ``CSVLogger(video_format="mp4")`` does the same through
    torchcodec, which needs FFmpeg's libraries on the system and a build for exactly this PyTorch;
    `Mp4Logger` needs PyAV, which brings its own libraries.

    Args:
        exp_name: Name of the experiment.
        log_dir: Where its directory is created.
        video_fps: Frames per second, unless a call gives them.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl.record import VideoRecorder
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.trainers.video import Mp4Logger
        >>> directory = tempfile.mkdtemp()
        >>> recorder = VideoRecorder(Mp4Logger("hopper", directory), tag="rollout", fps=40)
        >>> env = TransformedEnv(MujocoBatchEnv("Hopper-v5", 4, from_pixels=True), recorder)
        >>> _ = env.rollout(10, break_when_any_done=False)
        >>> recorder.dump()
        >>> Path(directory, "hopper", "videos", "rollout_0.mp4").is_file()
        True
        >>> env.close()
    """

    def __init__(self, exp_name: str, log_dir: str | None = None, *, video_fps: int = 30) -> None:
        super().__init__(exp_name, log_dir, video_format="mp4", video_fps=video_fps)

    def log_video(
        self,
        name: str,
        video: torch.Tensor,
        step: int | None = None,
        *,
        fps: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a video.

        Args:
            name: Its name.
            video: [1, time, 3, height, width] uint8.
            step: Ends the file's name; if not given, the number of videos of this name.
            fps: Frames per second; ``video_fps`` if not given.
            **kwargs: Refused; TorchRL's are torchcodec's.

        Raises:
            ConfigError: PyAV is missing, or what was given cannot be a video.
        """
        if kwargs or video.ndim != 5 or video.shape[0] != 1 or video.shape[2] != 3:
            raise ConfigError(
                f"video {name}: shape {tuple(video.shape)} and options {sorted(kwargs)} "
                "(expected [1, time, 3, height, width] and none but fps). Pass a video of this "
                "shape, and no option but fps."
            )
        if step is None:
            step = self.experiment.videos_counter[name]
            self.experiment.videos_counter[name] += 1
        path = Path(self.experiment.log_dir, "videos", f"{name}_{step}.mp4")
        path.parent.mkdir(parents=True, exist_ok=True)
        frames = video[0].permute(0, 2, 3, 1).to("cpu", torch.uint8).numpy()
        rate = Fraction(self.video_fps if fps is None else fps).limit_denominator(1000)
        write_video(path, frames, rate)


def check_video(path: StrPath, width: int, height: int) -> None:
    """Check, before anything is made, that a video of this size can be written there.

    Raises:
        ConfigError: PyAV is missing, the name does not end in ``.mp4``, there is no such
            directory, or a side is odd or not positive.
    """
    _av()
    named = isinstance(path, (str, os.PathLike))
    if not named or Path(path).suffix != ".mp4" or Path(path).is_dir():
        raise ConfigError(
            f"video {path}: not a file name that ends in .mp4 (expected one). Use for example "
            "play.mp4."
        )
    directory = Path(path).parent
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise ConfigError(
            f"video {path}: cannot be written in {directory} (expected a directory that may "
            "be written to). Make it, or choose another."
        )
    even = range(2, _MOST_PIXELS + 1, 2)
    if not all(isinstance(side, int) and side in even for side in (width, height)):
        raise ConfigError(
            f"video {path}: {width} x {height} pixels (expected even numbers up to {_MOST_PIXELS}, "
            "which H.264 needs). Use for example 640 x 480."
        )


def check_filming(*, own_environment: bool = False) -> None:
    """Check, before anything starts, that a run can film its evaluations.

    Raises:
        ConfigError: The run's environment is no `MujocoBatchEnv`, PyAV is missing, or OpenGL cannot
            draw here.
    """
    if own_environment:
        raise ConfigError(
            "video_interval: with an environment of one's own (expected a task of "
            "MujocoBatchEnv, which draws). Leave it out."
        )
    _av()
    find_backend(os.environ.get("MUJOCO_GL", "").lower().strip())


def write_video(path: StrPath, frames: Iterable[NDArray[np.uint8]], fps: Fraction | int) -> int:
    """Write H.264 in an mp4 file, frame by frame, as they come.

    The file appears, or is replaced, when it is complete.

    Args:
        path: A name that ends in ``.mp4``.
        frames: At least one, [height, width, 3] uint8 each, of one even size.
        fps: Frames per second.

    Returns:
        The number of frames.

    Raises:
        ConfigError: As `check_video`, or there is no frame or fps is not positive.
    """
    frames = iter(frames)
    first = next(frames, None)
    if first is None or fps <= 0:
        raise ConfigError(
            f"video {path}: {'no' if first is None else 'some'} frames, {fps} per second "
            "(expected at least one, and a positive rate). Pass both, such as fps=30."
        )
    height, width, _ = first.shape
    check_video(path, width, height)
    av = _av()
    unfinished = Path(path).with_name(f".{Path(path).name}.part")
    try:
        with av.open(str(unfinished), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=fps)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            count = 0
            for frame in itertools.chain([first], frames):
                picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
                container.mux(stream.encode(picture))
                count += 1
            container.mux(stream.encode(None))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


class Film(NamedTuple):
    """What was filmed: each episode's return and length, and the video's frames and their rate."""

    returns: list[float]
    lengths: list[int]
    frames: int
    fps: float


@torch.no_grad()
def film_episodes(
    env: MujocoBatchEnv,
    actor: Policy,
    path: StrPath,
    episodes: int = 1,
    *,
    progress_bar: bool = False,
) -> Film:
    """Film episodes of an environment with one simulation, at the speed of the simulated time.

    Where the task takes more than 60 steps a second, every second step is filmed, or third, and so
    on; each episode's first and last state always are.

    Raises:
        ConfigError: As `write_video`, or OpenGL cannot draw here.
    """
    every = math.ceil(1 / (_MOST_FPS * env.dt))
    fps = Fraction(1 / (env.dt * every)).limit_denominator(1000)
    returns: list[float] = []
    lengths: list[int] = []

    def pictures() -> Iterator[NDArray[np.uint8]]:
        for _ in range(episodes):
            current, done = env.reset(), False
            returns.append(0.0)
            lengths.append(0)
            while not done:
                if lengths[-1] % every == 0:
                    yield env.render()[0]
                stepped = env.step(act(actor, current))
                after = stepped["next"]
                returns[-1] += after["reward"].item()
                lengths[-1] += 1
                done = after["done"].item()
                bar.update()
                current = env.step_mdp(stepped)
            yield env.render()[0]

    seconds = 0.1 if on_terminal() else 10.0
    with tqdm(desc="filming", unit="step", mininterval=seconds, disable=not progress_bar) as bar:
        frames = write_video(path, pictures(), fps)
    return Film(returns, lengths, frames, float(fps))


def _av() -> Any:
    """Return PyAV, which is installed only for those who want videos.

    Raises:
        ConfigError: PyAV is not installed.
    """
    try:
        return importlib.import_module("av")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"video: {error} (expected PyAV, which writes it). "
            "Install it: pip install 'torchrl-unilab[render]'."
        ) from error
