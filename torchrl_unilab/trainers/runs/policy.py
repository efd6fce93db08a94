"""Loads the policy of a run from its directory, and evaluates it.

`load_run` refuses a directory without a whole checkpoint before an environment is made. The
commands `eval` and `play` start here; `resume_run` shares `saved_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.checkpoint import Checkpoint
from torchrl.checkpoint import CheckpointError as TorchRLCheckpointError

from torchrl_unilab.collectors.arguments import CreateEnv, check_factory
from torchrl_unilab.collectors.worker import check_env, close_env, closing_env
from torchrl_unilab.configs import SETTINGS, RunConfig
from torchrl_unilab.configs.algorithms import OWN_ENVIRONMENT
from torchrl_unilab.configs.file import CONFIG_FILE, StrPath, file_settings_of
from torchrl_unilab.envs import MujocoBatchEnv, MujocoTask, make_task
from torchrl_unilab.errors import CheckpointError, ConfigError
from torchrl_unilab.limits import available_cores
from torchrl_unilab.trainers.evaluation import MOST_AT_ONCE, evaluate
from torchrl_unilab.trainers.runs.builders import build_learner
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints, SavedRun
from torchrl_unilab.trainers.runs.directory import CHECKPOINT, run_path

MACHINE_SETTINGS = ("device", "collector_device", "physics_threads", "learner_threads")
"""Settings of the machine, not of the result: a resumed run may change them."""


def saved_config(settings: Mapping[str, Any]) -> Any:
    """Return the settings that a checkpoint has."""
    algorithm = SETTINGS[settings["algo"]]
    kept = {key: value for key, value in settings.items() if key in algorithm.kind.kinds()}
    return algorithm.for_task(settings["env"], **kept)


def task_of(settings: Mapping[str, Any], path: Path, refusal: str) -> MujocoTask:
    """Return the task of a run.

    A task of the user's own is imported, as it was to train on it. But whatever is in a run
    directory is data: a module there is refused before it is looked at.

    Args:
        settings: What the checkpoint has.
        path: The run directory.
        refusal: How errors begin.

    Raises:
        ConfigError: There is no such task, or the run had another environment.
    """
    if settings.get(OWN_ENVIRONMENT):
        raise ConfigError(
            f"{refusal}: its environment was made by create_env (expected a task of "
            "MujocoBatchEnv). Pass create_env, in Python."
        )
    module, own, _ = settings["env"].partition(":")
    if own and _is_inside(module.split(".")[0], path):
        raise ConfigError(
            f"{refusal}: its task {settings['env']!r} is code in the run directory (expected a "
            "module elsewhere, as code there is never run). Move it, if you trust it."
        )
    try:
        return make_task(settings["env"])
    except ValueError as error:
        raise ConfigError(
            f"{refusal}: {error} Where the run was given create_env, give it here, too."
        ) from error


def _is_inside(module: str, directory: Path) -> bool:
    """Return whether a module would be imported from a directory."""
    if (spec := PathFinder.find_spec(module)) is None:
        return False
    found = filter(None, (spec.origin, *(spec.submodule_search_locations or ())))
    return any(Path(path).resolve().is_relative_to(directory.resolve()) for path in found)


def check_run(
    saved: SavedRun,
    file_settings: Mapping[str, Any],
    refusal: str,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Refuse a checkpoint of another run than its directory's; a ConfigError says what differs.

    On another machine it is the same run.

    Args:
        saved: The checkpoint.
        file_settings: What ``config.yaml`` says.
        refusal: How the error begins.
        settings: Further settings that the run is expected to have, if any.
    """
    known = {key: value for key, value in file_settings.items() if key in saved.run}
    try:
        known = json.loads(json.dumps(known | dict(settings or {})))  # lists for tuples
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{refusal}: settings cannot be compared, {error} (expected a mapping, as "
            f"{CONFIG_FILE} holds). Pass plain values by name, or leave settings out."
        ) from error
    may_differ = saved.run.keys() & MACHINE_SETTINGS
    differ = [key for key in known if saved.run.get(key) != known[key]]
    other = {key: saved.run.get(key) for key in differ if key not in may_differ}
    if "algo" in other:
        raise ConfigError(
            f"{refusal}: it is a run of {other['algo']} (expected {known['algo']}). Restore "
            f"{CONFIG_FILE}, or resume it as what it is: train {other['algo']}."
        )
    if other:
        raise ConfigError(
            f"{refusal}: {saved.path.name} is of a run with {other} (expected "
            f"{ {key: known[key] for key in other} }). Restore {CONFIG_FILE}, leave the settings "
            "out, or train anew in another directory."
        )


def check_newest(saved: SavedRun | None, run_dir: Path) -> None:
    """Refuse to resume from a checkpoint, or none, that is not the newest of its directory."""
    found = next((path.name for path in RunCheckpoints(run_dir / CHECKPOINT).paths()), "none")
    expected = saved.path.name if saved else "none"
    if found != expected:
        raise ConfigError(
            f"cannot resume {run_dir}: its newest checkpoint is {found} by now (expected "
            f"{expected}). Resume again."
        )


@dataclass(frozen=True)
class TrainedPolicy:
    """A run's policy, with an environment of its task.

    Attributes:
        settings: Those of its checkpoint, and those that only ``config.yaml`` has.
        env: New; the caller closes it.
        actor: The policy of the run's checkpoint.
    """

    settings: Mapping[str, Any]
    env: Any
    actor: TensorDictModuleBase


def load_run(
    run_dir: StrPath, purpose: str, create_env: CreateEnv | None = None, **env_options: Any
) -> TrainedPolicy:
    """Load the checkpoint of a run.

    Args:
        run_dir: A run.
        purpose: A verb for messages: "evaluate".
        create_env: Makes the environment; `MujocoBatchEnv` of the run's task if not given.
        **env_options: Of `MujocoBatchEnv`, if it makes it.

    Raises:
        ConfigError: `run_dir` is not that of a run, or the environment refuses the options.
        CheckpointError: There is no checkpoint, or it is damaged, or does not fit the environment;
            names an older one that is whole, if there is one.
    """
    path = run_path(run_dir)
    if not (path / CONFIG_FILE).is_file() and not (path / CHECKPOINT).exists():
        raise ConfigError(
            f"cannot {purpose} {run_dir}: no {CONFIG_FILE} and {CHECKPOINT} there (expected a "
            "run directory). Train first."
        )
    refusal = f"cannot {purpose} {run_dir}"
    try:
        file_settings = file_settings_of(path)
        saved = RunCheckpoints(path / CHECKPOINT).newest(("policy",))
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{refusal}: {error}") from error
    check_run(saved, file_settings, refusal)
    if create_env is None:
        create_env = partial(MujocoBatchEnv, task_of(saved.run, path, refusal), **env_options)
    check_factory(create_env)
    with torch.random.fork_rng(devices=[]):  # whatever is drawn, the caller's goes on as it was
        env = create_env()
        check_env(env)
        try:
            here = saved_config(saved.run).replace(device="cpu", collector_device="cpu")
            actor = build_learner(env, here).actor
            Checkpoint(policy=actor).load(saved.path, map_location="cpu")
        except (TorchRLCheckpointError, RuntimeError, OSError, ValueError, KeyError) as error:
            close_env(env)
            raise CheckpointError(
                f"{refusal}: {saved.path.name} does not load, {error} (expected one that fits the "
                "environment). Restore the task, or give the create_env that it was trained with."
            ) from error
    return TrainedPolicy({**file_settings, **saved.run}, env, actor)


def check_episodes(episodes: int, seed: int) -> tuple[int, int]:
    """Return a number of episodes, and a seed, that a run takes; refuse others."""
    kinds = RunConfig.kinds()
    return kinds["eval_episodes"].check("episodes", episodes), kinds["seed"].check("seed", seed)


def load_policy(run_dir: StrPath, *, create_env: CreateEnv | None = None) -> TensorDictModuleBase:
    """Load the policy of a run's checkpoint, to act with it anywhere.

    Args:
        run_dir: The run.
        create_env: The function that the run was given, if any.

    Returns:
        A module on the CPU that reads the run's observation, float32 [..., size], and writes
        ``action``, float32 [..., size]. It acts without noise; policies of APPO and SAC explore
        under ``torchrl.envs.set_exploration_type(ExplorationType.RANDOM)``.

    Raises:
        ConfigError: `run_dir` is not that of a run with a checkpoint.
        CheckpointError: The checkpoint is damaged, or does not fit the environment.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.trainers import load_policy, train_appo
        >>> run = train_appo("InvertedPendulum-v5", frames=1024, run_dir="run", progress_bar=False)
        >>> policy = load_policy("run")
        >>> policy(TensorDict(observation=torch.zeros(4)))["action"].shape
        torch.Size([1])
    """
    run = load_run(run_dir, "load", create_env, num_envs=1, num_threads=1)
    close_env(run.env)
    return run.actor


def evaluate_run(
    run_dir: StrPath, *, episodes: int = 16, seed: int = 0, create_env: CreateEnv | None = None
) -> dict[str, Any]:
    """Evaluate the checkpoint of a run on its task.

    Args:
        run_dir: The run.
        episodes: How many.
        seed: Of the episodes.
        create_env: The function that the run was given, if any.

    Returns:
        ``env``, ``episodes``, and mean, minimum and maximum of the returns. Episodes are cut at the
        run's own limit (``eval_max_steps``).

    Raises:
        ConfigError: `run_dir` is not that of a run with a checkpoint.
        CheckpointError: The checkpoint is damaged, or does not fit the environment.

    Examples:
        >>> from torchrl_unilab.trainers import evaluate_run, train_appo
        >>> run = train_appo("InvertedPendulum-v5", frames=1024, run_dir="run", progress_bar=False)
        >>> evaluate_run("run", episodes=3)["episodes"]
        3
    """
    episodes, seed = check_episodes(episodes, seed)
    envs = min(episodes, MOST_AT_ONCE)
    run = load_run(run_dir, "evaluate", create_env, num_envs=envs, num_threads=available_cores())
    with closing_env(run.env):
        max_steps = run.settings.get("eval_max_steps", RunConfig.eval_max_steps)
        steps = RunConfig.kinds()["eval_max_steps"]  # a person may have changed it
        steps.check("eval_max_steps", max_steps)
        returns = evaluate(run.env, run.actor, episodes=episodes, max_steps=max_steps, seed=seed)
    return {
        "env": run.settings["env"],
        "episodes": episodes,
        "mean": returns.mean().item(),
        "min": returns.min().item(),
        "max": returns.max().item(),
    }
