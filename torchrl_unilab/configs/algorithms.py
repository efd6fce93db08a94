"""`SETTINGS`: the settings of each algorithm by name, and of a whole run as one mapping.

`torchrl_unilab.trainers.runs.builders` has the parts that are built from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchrl_unilab.configs.appo import APPO_TASKS, APPOConfig
from torchrl_unilab.configs.off_policy import OFF_POLICY_TASKS, Algorithm, OffPolicyConfig
from torchrl_unilab.configs.run import Config, RunConfig
from torchrl_unilab.configs.settings import Settings, nearest
from torchrl_unilab.errors import ConfigError

OWN_ENVIRONMENT = "own_environment"
"""Key in ``config.yaml`` and checkpoints, next to the settings, of runs with ``create_env``."""


@dataclass(frozen=True)
class AlgorithmSettings:
    """The settings of an algorithm.

    Attributes:
        title: What it is called in full.
        kind: Their class.
        for_task: Returns the settings of a task, with overrides by name.
        tasks: The tasks that have settings of their own.
    """

    title: str
    kind: type[Settings]
    for_task: Callable[..., Config]
    tasks: Collection[str]


def _off_policy(algorithm: Algorithm, title: str) -> AlgorithmSettings:
    for_task = partial(OffPolicyConfig.for_task, algorithm=algorithm)
    return AlgorithmSettings(title, OffPolicyConfig, for_task, OFF_POLICY_TASKS)


SETTINGS: Mapping[str, AlgorithmSettings] = {
    "appo": AlgorithmSettings("asynchronous PPO", APPOConfig, APPOConfig.for_task, APPO_TASKS),
    "sac": _off_policy("sac", "soft actor-critic"),
    "td3": _off_policy("td3", "twin delayed DDPG"),
}
"""The settings of all algorithms, by name."""


def without_own_settings(env: str, config: Config) -> str | None:
    """Describe the settings used for a task without its own; None if the task has its own."""
    if env in SETTINGS[config.algorithm].tasks:
        return None
    defaults = vars(SETTINGS[config.algorithm].for_task(""))
    other = {name: value for name, value in vars(config).items() if value != defaults[name]}
    given = ", ".join(f"{name} {value}" for name, value in other.items())
    return (
        f"{env} has no settings of its own for {config.algorithm}: the defaults are taken"
        f"{f', except {given}' if given else ''}"
    )


def run_settings(run: RunConfig, config: Config) -> dict[str, Any]:
    """Return everything needed to repeat a run, by name, as in ``config.yaml``.

    Examples:
        >>> config = APPOConfig.for_task("Hopper-v5")
        >>> settings = run_settings(RunConfig("Hopper-v5", 1000), config)
        >>> settings["algo"], settings["env"], settings["num_envs"]
        ('appo', 'Hopper-v5', 16)
    """
    values = {"algo": config.algorithm, **dataclasses.asdict(run), **dataclasses.asdict(config)}
    return {name: value for name, value in values.items() if name != "algorithm"}


def split_settings(
    values: Mapping[str, Any], algorithm: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the result of `run_settings` into the arguments of `RunConfig` and of the settings.

    Raises:
        ConfigError: The values are of another algorithm, or one is unknown; names the nearest.
    """
    if values.get("algo") != algorithm:
        raise ConfigError(
            f"algo: {values.get('algo')!r} (expected {algorithm!r}). Train with that algorithm, or "
            "use another file."
        )
    if OWN_ENVIRONMENT in values:
        raise ConfigError(
            f"{OWN_ENVIRONMENT}: the run was given create_env (expected a task by name). Repeat it "
            "in Python, or leave this line out for a task."
        )
    check_known(values, algorithm)
    run, config = _names(RunConfig), _names(SETTINGS[algorithm].kind)
    return (
        {name: value for name, value in values.items() if name in run},
        {name: value for name, value in values.items() if name in config},
    )


def check_known(names: Iterable[str], algorithm: str, where: str = "") -> None:
    """Refuse names of no setting of a run of an algorithm; a ConfigError names the nearest."""
    known = [*_names(RunConfig), *_names(SETTINGS[algorithm].kind)]
    for name in names:
        if name not in {"algo", *known}:
            raise ConfigError(
                f"{where}{name}: unknown (expected a setting of {algorithm})."
                f"{nearest(name, known)} Correct the name, or remove the setting."
            )


def _names(kind: type[Settings]) -> list[str]:
    return [name for name in kind.kinds() if name != "algorithm"]
