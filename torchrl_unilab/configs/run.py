"""Settings of a run besides those of its algorithm: what to train on, how long, what to keep."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field

from torchrl_unilab.checks import as_instance
from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.configs.off_policy import OffPolicyConfig
from torchrl_unilab.configs.settings import (
    REQUIRED,
    Count,
    LoggerNames,
    Positive,
    Settings,
    Text,
    nearest,
    setting,
)
from torchrl_unilab.errors import ConfigError

Config: TypeAlias = APPOConfig | OffPolicyConfig
"""The settings of any algorithm."""
ConfigT = TypeVar("ConfigT", APPOConfig, OffPolicyConfig)

Seed = Annotated[int, Field(ge=0, le=2**32 - 1, description=f"an integer within [0, {2**32 - 1}]")]


@dataclass(frozen=True)
class RunConfig(Settings):
    """Settings of one run of any algorithm.

    ``torchrl-unilab train appo --help`` lists them with meaning, range and default; so does the
    help text in the metadata of each of ``dataclasses.fields(RunConfig)``.

    Raises:
        ConfigError: A setting cannot work.

    Examples:
        >>> from torchrl_unilab.configs import RunConfig
        >>> RunConfig("Hopper-v5", frames=1000).interval
        250
    """

    env: Text = setting(REQUIRED, "task, for example HalfCheetah-v5")
    frames: Count = setting(REQUIRED, "frames to collect, of all ranks together")
    seed: Seed = setting(0, "seed of networks, environments and sampling")
    stop_at: float | None = setting(
        None, "mean return of the last episodes at which training stops early"
    )
    max_seconds: Positive | None = setting(
        None, "seconds of training, including those before a resume, after which it stops early"
    )
    progress_bar: bool = setting(
        True,
        "show frames per second, return and policy lag: as a bar in terminals and notebooks, "
        "elsewhere as a line every ten seconds",
    )
    logger: LoggerNames = setting("csv,tensorboard", "TorchRL's loggers to use")
    eval_episodes: Count = setting(16, "episodes of each evaluation")
    eval_max_steps: Count = setting(
        10_000, "steps after which an evaluation cuts an episode that has not ended"
    )
    eval_interval: Count | None = setting(
        None,
        "frames between evaluations during training, in a separate process; None: only at the end",
    )
    video_interval: Count | None = setting(
        None,
        "frames between evaluations that are filmed, into videos/; None: no videos. Needs "
        "eval_interval, a task of MujocoBatchEnv and the package PyAV",
    )
    trace: bool = setting(
        False, "write trace.json, a timeline of all processes, for ui.perfetto.dev"
    )
    checkpoint_interval: Count | None = setting(
        None, "frames between checkpoints; None: a quarter of `frames`, and one every ten minutes"
    )
    keep_checkpoints: Count = setting(
        2, "newest checkpoints to keep; with 2, one can be loaded while the run goes on"
    )
    rank_timeout: Positive = setting(
        300.0,
        "under torchrun, seconds that the ranks wait for each other at a step before the run ends; "
        "must be longer than it takes to write a checkpoint",
    )

    def __post_init__(self) -> None:
        """Check each setting, then those that depend on each other."""
        super().__post_init__()
        if self.video_interval is not None and self.eval_interval is None:
            raise ConfigError(
                f"video_interval: {self.video_interval} without eval_interval (expected both: "
                "evaluations are filmed). Set eval_interval, for example to the same number."
            )

    @classmethod
    def given(
        cls,
        kind: type[ConfigT],
        config: ConfigT | None,
        env: str,
        frames: int,
        seed: int,
        /,
        **options: Any,
    ) -> tuple[RunConfig, ConfigT]:
        """Return the settings that a function was given for a run, and the algorithm's.

        Args:
            kind: Of the algorithm's settings.
            config: These; the task's own if not given.
            env: The task.
            frames: How many to collect.
            seed: Of all randomness.
            **options: Further settings of the run.

        Raises:
            ConfigError: `config` is of another kind, or `env` no name.
            TypeError: There is no such option; says where a setting of the algorithm goes.
        """
        as_instance(
            "env", env, str, "Name a task, 'module:Class' for your own, or give create_env."
        )
        if config is not None:
            remedy = f"Take {kind.__name__}.for_task({env!r}), or the other algorithm's function."
            as_instance("config", config, kind, remedy)
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in options.items():
            if name in names:
                continue
            if name in {"algo", *(field.name for field in dataclasses.fields(kind))}:
                name = "algorithm" if name == "algo" else name
                say = f"It is a setting: config={kind.__name__}.for_task({env!r}, "
                say += f"{name}={value!r})."
            else:
                say = (nearest(name, names) or " Leave it out.").lstrip()
            raise TypeError(
                f"unexpected argument {name!r} (expected some of {', '.join(names)}). {say}"
            )
        return cls(env, frames, seed, **options), config or kind.for_task(env)

    @property
    def interval(self) -> int:
        """Frames between checkpoints."""
        return self.checkpoint_interval or max(1, self.frames // 4)
