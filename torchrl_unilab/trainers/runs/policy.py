"""Loads the policy of a run from its directory, evaluates and films it.

`loaded_run` refuses a directory without a whole checkpoint before an environment is made. The
commands `eval` and `play` start here; `resume_run` shares `saved_config`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.checkpoint import Checkpoint
from torchrl.checkpoint import CheckpointError as TorchRLCheckpointError
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_unilab.collectors.arguments import CreateEnv, check_factory
from torchrl_unilab.collectors.worker import closing_env
from torchrl_unilab.configs import SETTINGS, RunConfig
from torchrl_unilab.configs.algorithms import OWN_ENVIRONMENT
from torchrl_unilab.configs.file import CONFIG_FILE, StrPath, file_settings_of
from torchrl_unilab.envs import MujocoBatchEnv, MujocoTask, make_task
from torchrl_unilab.errors import CheckpointError, ConfigError
from torchrl_unilab.limits import available_cores
from torchrl_unilab.trainers.evaluation import MOST_AT_ONCE, evaluate
from torchrl_unilab.trainers.runs.builders import build_learner
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints, SavedRun
from torchrl_unilab.trainers.runs.directory import BEST, CHECKPOINT, run_path
from torchrl_unilab.trainers.video import check_video, film_episodes

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


@contextlib.contextmanager
def loaded_run(
    run_dir: StrPath,
    purpose: str,
    create_env: CreateEnv | None = None,
    *,
    best: bool = False,
    **env_options: Any,
) -> Iterator[tuple[Mapping[str, Any], Any, TensorDictModuleBase]]:
    """Load the policy of a run; close the environment, and restore torch's generator, after it.

    Args:
        run_dir: A run.
        purpose: A verb for messages: "evaluate".
        create_env: Makes the environment; `MujocoBatchEnv` of the run's task if not given.
        best: Load the policy of the best evaluation, not the newest one.
        **env_options: Of `MujocoBatchEnv`, if it makes it.

    Yields:
        The settings of its checkpoint, and those that only ``config.yaml`` has; a new environment
        of its task; and the policy of the checkpoint.

    Raises:
        ConfigError: `run_dir` is not that of a run, or the environment refuses the options.
        CheckpointError: There is no checkpoint, or it is damaged, or does not fit the environment;
            names an older one that is whole, if there is one.
    """
    path, refusal = run_path(run_dir), f"cannot {purpose} {run_dir}"
    if not (path / CONFIG_FILE).is_file() and not (path / CHECKPOINT).exists():
        raise ConfigError(
            f"{refusal}: no {CONFIG_FILE} and {CHECKPOINT} there (expected a run directory). Train "
            "first."
        )
    checkpoints = RunCheckpoints(path / (BEST if best else CHECKPOINT))
    try:
        file_settings = file_settings_of(path)
        saved = checkpoints.newest(("policy",))
    except (CheckpointError, ConfigError) as error:
        way = ""
        if best and isinstance(error, CheckpointError):
            way = " Or leave best out, for the newest checkpoint."
        raise type(error)(f"{refusal}: {error}{way}") from error
    check_run(saved, file_settings, refusal)
    if create_env is None:
        create_env = partial(MujocoBatchEnv, task_of(saved.run, path, refusal), **env_options)
    check_factory(create_env)
    with torch.random.fork_rng(devices=[]), closing_env(create_env()) as env:
        try:
            here = saved_config(saved.run).replace(device="cpu", collector_device="cpu")
            actor = build_learner(env, here).actor
            if not saved.path.exists():  # newer ones came while the environment was made
                saved = checkpoints.newest(("policy",))
            Checkpoint(policy=actor).load(saved.path, map_location="cpu")
        except (TorchRLCheckpointError, RuntimeError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{refusal}: {saved.path.name} does not load, {error} (expected one that fits the "
                "environment). Restore the task, or give the create_env that it was trained with."
            ) from error
        yield {**file_settings, **saved.run}, env, actor


def check_episodes(episodes: int, seed: int) -> tuple[int, int]:
    """Return a number of episodes, and a seed, that a run takes; refuse others."""
    kinds = RunConfig.kinds()
    return kinds["eval_episodes"].check("episodes", episodes), kinds["seed"].check("seed", seed)


def load_policy(
    run_dir: StrPath, *, best: bool = False, create_env: CreateEnv | None = None
) -> TensorDictModuleBase:
    """Load the policy of a run's checkpoint, to act with it anywhere.

    Args:
        run_dir: The run.
        best: Load the policy of the best evaluation, not the newest one.
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
    size = {"num_envs": 1, "num_threads": 1}
    with loaded_run(run_dir, "load", create_env, best=best, **size) as (_, _, actor):
        return actor


def evaluate_run(
    run_dir: StrPath,
    *,
    best: bool = False,
    episodes: int = 16,
    seed: int = 0,
    create_env: CreateEnv | None = None,
) -> dict[str, Any]:
    """Evaluate the checkpoint of a run on its task.

    Args:
        run_dir: The run.
        best: Evaluate the policy of the best evaluation, not the newest one.
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
    size = {"num_envs": min(episodes, MOST_AT_ONCE), "num_threads": available_cores()}
    with loaded_run(run_dir, "evaluate", create_env, best=best, **size) as (settings, env, actor):
        max_steps = settings.get("eval_max_steps", RunConfig.eval_max_steps)
        steps = RunConfig.kinds()["eval_max_steps"]  # a person may have changed it
        steps.check("eval_max_steps", max_steps)
        returns = evaluate(env, actor, episodes=episodes, max_steps=max_steps, seed=seed)
    return _results(settings, returns.tolist())


def play_run(
    run_dir: StrPath,
    video: StrPath,
    *,
    best: bool = False,
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
        best: Film the policy of the best evaluation, not the newest one.
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
    options: dict[str, Any] = {
        "num_envs": 1,
        "num_threads": 1,
        "seed": seed,
        "max_episode_steps": max_steps,
        "render_width": width,
        "render_height": height,
        "render_camera": camera,
    }
    kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    with (
        loaded_run(run_dir, "play", best=best, **options) as (settings, env, actor),
        set_exploration_type(kind),
    ):
        torch.manual_seed(seed)
        film = film_episodes(env, actor, video, episodes, progress_bar=progress_bar)
    return _results(settings, film.returns) | film._asdict() | {"video": str(video)}


def _results(settings: Mapping[str, Any], returns: Sequence[float]) -> dict[str, Any]:
    """Return what a run's episodes came to."""
    return {
        "env": settings["env"],
        "episodes": len(returns),
        "mean": sum(returns) / len(returns),
        "min": min(returns),
        "max": max(returns),
    }
