"""`resume_run`: continues a run from the newest checkpoint in its directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchrl_unilab.collectors.arguments import CreateEnv
from torchrl_unilab.configs import RunConfig
from torchrl_unilab.configs.algorithms import OWN_ENVIRONMENT, check_known
from torchrl_unilab.configs.file import CONFIG_FILE, StrPath, file_settings_of
from torchrl_unilab.errors import ConfigError, RunCompleteError
from torchrl_unilab.runtime.ranks import Ranks
from torchrl_unilab.trainers.progress import stop_reason
from torchrl_unilab.trainers.reports import LearningCurve
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints, SavedRun, run_checkpoint
from torchrl_unilab.trainers.runs.directory import CHECKPOINT, run_path
from torchrl_unilab.trainers.runs.policy import MACHINE_SETTINGS, check_run, saved_config, task_of
from torchrl_unilab.trainers.runs.summary import summarised_frames
from torchrl_unilab.trainers.runs.train import Run

_CHANGEABLE = RunConfig.kinds().keys() - {"env", "frames", "seed"}
"""Settings that a resumed run may change."""

_LIMITS = ("max_seconds", "stop_at")
"""Changeable settings that are kept by default, unless the run has reached them."""

_KEPT = _CHANGEABLE - {"progress_bar", "trace"}
"""Changeable settings that are kept by default. A new trace would replace the old one."""


def resume_run(
    run_dir: StrPath,
    *,
    settings: Mapping[str, Any] | None = None,
    frames: int | None = None,
    create_env: CreateEnv | None = None,
    announce: Callable[[str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Continue a run from its newest checkpoint, in its directory.

    Counters, curve, clock, versions of weights and logs continue; steps that were logged after the
    checkpoint are logged anew. A run in lock-step that learns on the CPU continues bit for bit as
    if it had never ended: APPO with ``lockstep``, SAC and TD3 with ``sync_collection``, on
    `MujocoBatchEnv`. Other runs continue from the same networks, optimisers and replay, in the same
    episodes if the environment is a `MujocoBatchEnv`. A checkpoint that Ctrl-C left has no
    episodes: they begin anew, and so does their count.

    Args:
        run_dir: The run.
        settings: Settings that the run must have, such as ``{"env": "Hopper-v5"}``; a run with
            other values is refused. ``device``, ``collector_device``, ``physics_threads`` and
            ``learner_threads`` may differ: the run continues with them, and its generators begin
            anew on another device.
        frames: Frames to collect, including those already collected; by default the number that the
            run was started with.
        create_env: The function that the run was given, if any.
        announce: Called with lines of text for the user; nothing is said if None.
        **options: As for `train_appo`. Loggers, evaluations, videos, ``rank_timeout``, and how
            checkpoints are kept default to those of the run, as do ``stop_at`` and ``max_seconds``
            unless they ended it; ``trace`` does not.

    Returns:
        The summary; ``resumed`` has the frames at which the run was resumed.

    Raises:
        CheckpointError: There is no whole checkpoint.
        ConfigError: The checkpoint belongs to a run other than the directory or `settings` say, or
            to an unknown task, or ``config.yaml`` has an unknown setting, or nothing is left to
            collect, or to reach. The directory is unchanged.

    Examples:
        >>> from torchrl_unilab.trainers import resume_run, train_appo
        >>> run = train_appo("InvertedPendulum-v5", frames=1024, run_dir="run", progress_bar=False)
        >>> resume_run("run", frames=2048, progress_bar=False)["frames"]
        2048
    """
    if of_the_run := options.keys() - _CHANGEABLE:
        raise ConfigError(
            f"cannot resume {run_dir}: {sorted(of_the_run)} (expected some of "
            f"{', '.join(sorted(_CHANGEABLE))}). Task, seed and settings of a run stay: train anew."
        )
    path = run_path(run_dir)
    saved = RunCheckpoints(path / CHECKPOINT).newest()
    file_settings = file_settings_of(path)
    check_run(saved, file_settings, f"cannot resume {run_dir}", settings)
    # What the checkpoint has may be a setting of an earlier version.
    unsaved = [name for name in file_settings if name not in saved.run]
    check_known(unsaved, saved.run["algo"], f"cannot resume {run_dir}: {CONFIG_FILE}: ")
    _check_ranks(saved, run_dir)
    kept = {"checkpoint_interval": saved.interval, "keep_checkpoints": saved.keep}
    kept |= {name: file_settings[name] for name in _KEPT & file_settings.keys()}
    planned = max(saved.total_frames, file_settings.get("frames", 0))
    frames = planned if frames is None else frames
    run = RunConfig(saved.run["env"], frames, saved.run["seed"], **(kept | options))
    # Without a summary, the run was killed between its last checkpoint and its summary.
    summarised = summarised_frames(path) >= saved.frames
    returns = LearningCurve()
    if (run.stop_at, run.max_seconds) != (None, None):
        part = {"trainer_module.learning_curve": returns}
        run_checkpoint(**part).load(saved.path, components=part)
    limits = [name for name in _LIMITS if summarised and name not in options]
    reached = [name for name in limits if stop_reason(returns, **{name: getattr(run, name)})]
    run = run.replace(**dict.fromkeys(reached))
    if run.frames <= saved.frames and (run.frames < planned or summarised):
        raise RunCompleteError(
            f"{run_dir} is complete: {saved.frames} of {run.frames} frames have been collected "
            "(expected fewer). To go on, ask for more: frames, or --frames."
        )
    if summarised and (end := stop_reason(returns, run.stop_at, run.max_seconds)):
        raise RunCompleteError(
            f"{run_dir} is complete: {end} (expected less). To go on, ask for more, or leave "
            "stop_at and max_seconds out."
        )
    if create_env is None:
        task_of(saved.run, path, f"cannot resume {run_dir}")
    elif not saved.run.get(OWN_ENVIRONMENT):
        raise ConfigError(
            f"cannot resume {run_dir}: create_env for a run without one (expected None: its "
            f"environment is MujocoBatchEnv of {saved.run['env']}). Leave it out, or train anew."
        )
    asked = {**file_settings, **(settings or {})}
    here = {name: asked[name] for name in MACHINE_SETTINGS if name in asked}
    config = saved_config({**saved.run, **here})
    resumed = Run(run, config, path, create_env=create_env, announce=announce, saved=saved)
    resumed.announce(f"resuming at {saved.frames} of {run.frames} frames, from {saved.path}")
    if reached:
        resumed.announce(f"not taken over, as they ended the run: {', '.join(reached)}")
    return resumed()


def _check_ranks(saved: SavedRun, run_dir: StrPath) -> None:
    """Refuse another number of ranks than the run had."""
    ranks, found = saved.run.get("ranks", 1), Ranks.of_torchrun().size
    if ranks != found:
        way = "without torchrun" if ranks == 1 else f"by torchrun, in {ranks} processes in all"
        raise ConfigError(
            f"cannot resume {run_dir}: {found} ranks for a run of {ranks} (expected as many). "
            f"Start it {way}."
        )
