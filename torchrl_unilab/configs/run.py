"""Settings of a run beside those of its algorithm: what to train on, how long, what to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchrl_unilab.configs.settings import (
    REQUIRED,
    Settings,
    flag,
    integer,
    names,
    number,
    setting,
    text,
)
from torchrl_unilab.errors import ConfigError

__all__ = ["LoggerName", "RunConfig"]

LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True)
class RunConfig(Settings):
    """Settings of one run of any algorithm; each field's help text describes it.

    Raises:
        ConfigError: A setting cannot work.

    Examples:
        >>> from torchrl_unilab.configs import RunConfig
        >>> RunConfig("Hopper-v5", frames=1000).interval
        250
    """

    env: str = setting(REQUIRED, "task, for example HalfCheetah-v5", text())
    frames: int = setting(REQUIRED, "frames to collect", integer())
    seed: int = setting(0, "seed of networks, environments and sampling", integer(0, 2**32 - 1))
    stop_at: float | None = setting(
        None, "mean return of the last episodes at which training stops early", number().or_none()
    )
    max_seconds: float | None = setting(
        None,
        "seconds of training, those before a resume included, after which it stops early",
        number(above=0).or_none(),
    )
    progress_bar: bool = setting(
        True,
        "show frames per second, return and policy lag: as a bar in terminals and notebooks, "
        "elsewhere as a line every ten seconds",
        flag(),
    )
    logger: str = setting(
        "csv,tensorboard", "TorchRL's loggers that follow the run", names(LoggerName)
    )
    eval_episodes: int = setting(16, "episodes of the final evaluation", integer())
    eval_interval: int | None = setting(
        None,
        "frames between evaluations while it trains, in a process of their own; None: only at the "
        "end",
        integer().or_none(),
    )
    video_interval: int | None = setting(
        None,
        "frames between evaluations that are filmed, into videos/; None: no videos. Needs "
        "eval_interval, a task of MujocoBatchEnv and the package PyAV",
        integer().or_none(),
    )
    trace: bool = setting(
        False, "write trace.json, for ui.perfetto.dev: what each process did when", flag()
    )
    checkpoint_interval: int | None = setting(
        None, "frames between checkpoints; None: a quarter of all", integer().or_none()
    )
    keep_checkpoints: int = setting(2, "checkpoints that are kept, the newest", integer())

    def __post_init__(self) -> None:
        """Check each setting, then those that depend on each other."""
        super().__post_init__()
        if self.video_interval is not None and self.eval_interval is None:
            raise ConfigError(
                f"video_interval: {self.video_interval} without eval_interval (expected both: "
                "evaluations are filmed). Give it."
            )

    @property
    def interval(self) -> int:
        """Frames between checkpoints."""
        return self.checkpoint_interval or max(1, self.frames // 4)
