"""What a run is asked for beside its settings, and what of it cannot work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from torchrl_unilab.collectors.base import CreateEnv
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers.configs.appo import APPOConfig
from torchrl_unilab.trainers.configs.off_policy import OffPolicyConfig
from torchrl_unilab.trainers.configs.settings import (
    Allowed,
    check_settings,
    flag,
    integer,
    number,
    text,
)

__all__ = ["RunOptions", "check_frames", "check_run"]


class RunOptions(TypedDict, total=False):
    """What a run is asked for beside its task, frames, seed and settings: keywords of all runs.

    Attributes:
        create_env: Makes one collector's environment, of any TorchRL kind; picklable.
            `MujocoBatchEnv` of the task if not given.
        stop_at: Stop early once the mean return of the last episodes is this high.
        max_seconds: Stop early after so many seconds of training, those before a checkpoint
            that is resumed from among them.
        progress_bar: Show a bar with frames per second, return and policy lag; by default.
        eval_episodes: Episodes of the final evaluation, 16 if not given.
        trace: Write ``trace.json``: what learner and collectors did when
            (`torchrl_unilab.runtime.trace`), in place of one that is there. It is written
            however training ends.
        checkpoint_interval: Frames between checkpoints, from which `resume_run` goes on;
            None for a quarter of them, or as it was in a run that is resumed. There is one at
            the end, however it comes.
        keep_checkpoints: How many of them are kept, the newest; None for 2, or as it was.
        announce: Takes a line for the person who runs this.
    """

    create_env: CreateEnv | None
    stop_at: float | None
    max_seconds: float | None
    progress_bar: bool
    eval_episodes: int
    trace: bool
    checkpoint_interval: int | None
    keep_checkpoints: int | None
    announce: Callable[[str], None]


_ALLOWED: Mapping[str, Allowed] = {
    "env": text(),
    "frames": integer(),
    "seed": integer(0, 2**32 - 1),
    "stop_at": number().or_none(),
    "max_seconds": number(above=0).or_none(),
    "progress_bar": flag(),
    "eval_episodes": integer(),
    "trace": flag(),
}


def check_frames(frames: Any) -> None:
    """Refuse what is no number of frames.

    Raises:
        ConfigError: It is not.
    """
    check_settings({"frames": frames}, {"frames": _ALLOWED["frames"]}, "Use for example 2000000.")


def check_run(config: APPOConfig | OffPolicyConfig, asked: Mapping[str, Any]) -> None:
    """Refuse a run that cannot work, whatever its environment.

    Args:
        config: Its settings, each of which may be as it is.
        asked: What `train_appo` is asked for beside them, by name.

    Raises:
        ConfigError: Something is not as it may be, or nothing would ever be learnt.
    """
    check_frames(asked["frames"])
    check_settings(asked, _ALLOWED)
    if isinstance(config, OffPolicyConfig) and config.train_start_threshold > asked["frames"]:
        raise ConfigError(
            f"frames: {asked['frames']} (expected at least {config.train_start_threshold}, which "
            "the first update needs). Ask for more, or lower learning_starts or batch_size."
        )
