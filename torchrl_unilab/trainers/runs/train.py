"""Whole runs: train in a run directory, or go on with what lies there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.record.loggers.csv import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from torchrl.trainers import Trainer

from torchrl_unilab.collectors.base import CreateEnv
from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.errors import ConfigError, UniLabError
from torchrl_unilab.runtime import trace as tracing
from torchrl_unilab.trainers.appo import APPOTrainer
from torchrl_unilab.trainers.runs.budget import check_memory, run_threads
from torchrl_unilab.trainers.checkpoints import (
    RunCheckpoints,
    SavedRun,
    cut_logs,
    load_trainer,
    run_checkpoint,
    save_learner,
)
from torchrl_unilab.trainers.runs.builders import replay_collector, ring_collector
from torchrl_unilab.trainers.configs.appo import APPOConfig
from torchrl_unilab.trainers.configs.off_policy import OffPolicyConfig
from torchrl_unilab.trainers.configs.run import RunOptions, check_frames, check_run
from torchrl_unilab.trainers.evaluation import evaluate
from torchrl_unilab.trainers.hooks import CollectorReport, LearningCurve, StopWhen
from torchrl_unilab.trainers.learners import build_learner
from torchrl_unilab.trainers.loggers import FanOutLogger
from torchrl_unilab.trainers.off_policy import OffPolicyTrainer
from torchrl_unilab.trainers.runs.summary import plot_returns
from torchrl_unilab.trainers.processor_time import CollectorTime
from torchrl_unilab.trainers.saved_runs import CHECKPOINT, CONFIG, config_of, evaluate_run
from torchrl_unilab.weight_update import UniLabShmScheme

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["evaluate_run", "resume_run", "train_appo", "train_off_policy"]

SUMMARY = "summary.json"
TRACE = "trace.json"


def train_appo(
    env: str,
    *,
    frames: int,
    run_dir: str | os.PathLike[str],
    seed: int = 0,
    config: APPOConfig | None = None,
    **options: Unpack[RunOptions],
) -> dict[str, Any]:
    """Train by APPO and leave logs, checkpoint, picture and summary in `run_dir`.

    Args:
        env: Task of `MujocoBatchEnv`, or a name for ``create_env``'s environments.
        frames: Frames to collect.
        run_dir: Must not exist, or be empty.
        seed: Seeds networks, environments and sampling.
        config: Settings; the task's own if not given.
        **options: Those of `RunOptions`: ``create_env``, ``stop_at``, ``max_seconds``,
            ``progress_bar``, ``eval_episodes``, ``trace``, ``checkpoint_interval``,
            ``keep_checkpoints``, ``announce``.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        ConfigError: The run directory is not empty, something asked for cannot work, or the
            run does not fit the memory that is free (says what would).
        ValueError: Unknown task (lists what exists).
    """
    config = config or APPOConfig.for_task(env)
    return _run(_APPO, env, "appo", config, frames=frames, run_dir=run_dir, seed=seed, **options)


def train_off_policy(
    env: str,
    *,
    frames: int,
    run_dir: str | os.PathLike[str],
    seed: int = 0,
    config: OffPolicyConfig | None = None,
    **options: Unpack[RunOptions],
) -> dict[str, Any]:
    """Train by SAC or TD3, as `config` says, and leave in `run_dir` what `train_appo` does.

    Arguments, result and errors are those of `train_appo`.
    """
    config = config or OffPolicyConfig.for_task(env)
    return _run(
        _OFF_POLICY,
        env,
        config.algorithm,
        config,
        frames=frames,
        run_dir=run_dir,
        seed=seed,
        **options,
    )


def resume_run(
    run_dir: str | os.PathLike[str],
    *,
    settings: Mapping[str, Any] | None = None,
    frames: int | None = None,
    **options: Unpack[RunOptions],
) -> dict[str, Any]:
    """Go on with a run from its newest checkpoint, in its directory.

    Counters, curve, clock, versions of weights and logs go on; what was logged after the
    checkpoint is logged anew. A run in lock-step goes on bit for bit as if it had never ended:
    APPO with ``lockstep``, SAC and TD3 with ``sync_collection``, on `MujocoBatchEnv`. Other runs
    go on from the same networks, optimisers and replay, in the same episodes where the
    environment is a `MujocoBatchEnv`.

    Args:
        run_dir: The run.
        settings: What the run is known to be, such as ``{"env": "Hopper-v5"}``; it is
            refused if it is not.
        frames: Frames to collect, those that have been among them; by default as many as
            the run was to collect.
        **options: As for `train_appo`; ``create_env`` as it was given to the run.

    Returns:
        The summary; ``resumed`` has the frames at which the run was resumed.

    Raises:
        ConfigError: There is no whole checkpoint, or it is of another run than the directory
            or `settings` say, or nothing is left to collect. The directory is as it was.
        ValueError: Unknown task (lists what exists).
    """
    path = Path(run_dir)
    saved = RunCheckpoints(path / CHECKPOINT).newest()
    known = dict(settings or {})
    if (path / CONFIG).is_file():
        try:
            known = {**json.loads((path / CONFIG).read_text()), **known}
        except ValueError as error:
            raise ConfigError(
                f"cannot resume {run_dir}: {CONFIG} cannot be read, {error} (expected the "
                "settings of the run). Remove it: the checkpoint has them."
            ) from error
    other = {key: saved.run.get(key) for key in known if saved.run.get(key) != known[key]}
    if other:
        raise ConfigError(
            f"cannot resume {run_dir}: {saved.path.name} is of a run with {other} (expected "
            f"{ {key: known[key] for key in other} }). Leave the settings out, or train anew "
            "in another directory."
        )
    frames = saved.total_frames if frames is None else frames
    check_frames(frames)
    if frames <= saved.frames:
        raise ConfigError(
            f"cannot resume {run_dir}: {saved.frames} of {frames} frames have been collected "
            "(expected fewer). Ask for more frames."
        )
    options.get("announce", _say_nothing)(
        f"resuming at {saved.frames} of {frames} frames, from {saved.path}"
    )
    algo = saved.run["algo"]
    if options.get("checkpoint_interval") is None:
        options["checkpoint_interval"] = saved.interval
    if options.get("keep_checkpoints") is None:
        options["keep_checkpoints"] = saved.keep
    return _run(
        _APPO if algo == "appo" else _OFF_POLICY,
        saved.run["env"],
        algo,
        config_of(saved.run),
        frames=frames,
        run_dir=run_dir,
        seed=saved.run["seed"],
        saved=saved,
        **options,
    )


def _say_nothing(line: str) -> None:
    """Announce a line to nobody."""


@dataclass(frozen=True)
class _Algorithm:
    """What differs between the algorithms' runs: who collects, who trains."""

    collector: Callable[..., Any]
    trainer: Callable[..., Any]
    close: Callable[[Any], None]


def _run(
    algorithm: _Algorithm,
    env: str,
    algo: str,
    config: Any,
    *,
    frames: int,
    run_dir: str | os.PathLike[str],
    seed: int,
    saved: SavedRun | None = None,
    create_env: CreateEnv | None = None,
    stop_at: float | None = None,
    max_seconds: float | None = None,
    progress_bar: bool = True,
    eval_episodes: int = 16,
    trace: bool = False,
    checkpoint_interval: int | None = None,
    keep_checkpoints: int | None = None,
    announce: Callable[[str], None] = _say_nothing,
) -> dict[str, Any]:
    """Train as `config` says; see `RunOptions`."""
    asked = {
        "env": env,
        "frames": frames,
        "seed": seed,
        "stop_at": stop_at,
        "max_seconds": max_seconds,
        "progress_bar": progress_bar,
        "eval_episodes": eval_episodes,
        "trace": trace,
    }
    check_run(config, asked)
    plan = run_threads(config)
    create_proxy = create_env
    if create_env is None or create_proxy is None:
        make_task(env)  # an unknown task is refused before anything is made
        create_env = _mujoco_env(env, config.num_envs, plan.physics_threads)
        create_proxy = _mujoco_env(env, 1, 1)
    path = Path(run_dir) if saved else _checked_run_dir(run_dir)
    settings = {"env": env, "algo": algo, "seed": seed, **dataclasses.asdict(config)}
    settings = json.loads(json.dumps(settings))  # as a file has them
    if checkpoint_interval is None:
        checkpoint_interval = max(1, frames // 4)
    keep = 2 if keep_checkpoints is None else keep_checkpoints
    checkpoints = RunCheckpoints(path / CHECKPOINT, keep, checkpoint_interval)
    resumed = [*saved.resumed, saved.frames] if saved else []
    metadata = partial(checkpoints.metadata, settings, total_frames=frames, resumed=resumed)
    announce(str(plan))
    torch.set_num_threads(plan.learner_threads)
    network_seed, acting_seed = _children(seed, 2)
    torch.manual_seed(network_seed)
    with contextlib.closing(create_proxy()) as proxy:
        learner = build_learner(proxy, config)
        check_memory(config, proxy, learner)
    # What a checkpoint has is published once it is loaded, under the version that it had.
    scheme = UniLabShmScheme(first_version=max(0, saved.version - 1) if saved else 0)
    begun = threading.Event()
    with contextlib.ExitStack() as closing:
        if trace:
            tracing.start(path / TRACE)  # before there are workers, which are told of it
            closing.callback(lambda: tracing.stop(keep=begun.is_set()))
        collector = algorithm.collector(create_env, learner.actor, scheme, config, acting_seed)
        closing.callback(collector.shutdown)
        parts = {} if algo == "appo" else {"replay": collector.storage}
        checkpoint = run_checkpoint(**parts)
        trainer = algorithm.trainer(
            collector=collector,
            loss_module=learner.loss,
            total_frames=frames,
            config=config,
            normalizers=learner.normalizers,
            scheme=scheme,
            progress_bar=progress_bar,
            seed=acting_seed,
            checkpoint=checkpoint,
            checkpoint_rotation=checkpoints,
            checkpoint_metadata=lambda _: metadata(version=scheme.version),
            save_trainer_interval=checkpoint_interval - 1,
            log_interval=min(10 * collector.frames_per_batch, frames // 20),
        )
        closing.callback(algorithm.close, trainer)
        StopWhen(trainer.returns, stop_at=stop_at, max_seconds=max_seconds).register(trainer)
        cpu = CollectorTime(collector)
        trainer.register_op("setup", cpu.start)
        trainer.register_op("post_steps", cpu.sample)
        if saved:
            load_trainer(trainer, saved)
        # Whatever could be refused has been: from here on files are written.
        begun.set()
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG).write_text(json.dumps(settings, indent=2))
        trainer.logger = _logger(path, closing, saved)
        interrupted = _train(trainer)
    eval_env = _evaluation_env(create_env, eval_episodes, plan.cores)
    eval_return = None
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C leaves a summary all the same
        eval_return = _mean_return(eval_env, learner.actor, seed)
    summary = {
        "env": env,
        "algo": algo,
        "seed": seed,
        "frames": trainer.collected_frames,
        "optim_steps": trainer._optim_count,
        "seconds": trainer.returns.seconds,
        "final_return": trainer.returns.mean if trainer.returns.curve else None,
        "eval_return": eval_return,
        "interrupted": interrupted,
        "resumed": resumed,
        "policy_lag": dict(sorted(trainer.lag.histogram.items())) if trainer.lag else {},
        "collector": _last_report(trainer.returns),
        "busy": {"learner": trainer.busy_time.busy, "collectors": cpu.busy},
        "threads": dataclasses.asdict(plan),
        "curve": trainer.returns.curve,
        "versions": _versions(),
    }
    plot_returns(path / "returns.png", f"{env}, {algo.upper()}, seed {seed}", trainer.returns.curve)
    (path / SUMMARY).write_text(json.dumps(summary, allow_nan=False))
    return summary


def _children(seed: int, count: int) -> list[int]:
    """Seeds that follow from one, and have nothing in common with those of the next one."""
    children = np.random.SeedSequence(seed).spawn(count)
    return [int(child.generate_state(1)[0]) >> 1 for child in children]  # NumPy counts on from it


def _evaluation_env(create_env: CreateEnv, episodes: int, threads: int) -> EnvBase:
    """The environment that is trained on; of ours, as many simulations as episodes."""
    if not (isinstance(create_env, partial) and create_env.func is MujocoBatchEnv):
        return create_env()
    settings = {**create_env.keywords, "num_envs": episodes, "num_threads": threads}
    return MujocoBatchEnv(*create_env.args[:1], **settings)


def _mujoco_env(task: str, num_envs: int, num_threads: int) -> Callable[[], EnvBase]:
    return partial(MujocoBatchEnv, task, num_envs=num_envs, num_threads=num_threads)


def _checked_run_dir(run_dir: str | os.PathLike[str]) -> Path:
    path = Path(run_dir)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"run directory {run_dir}: it is not empty (expected a new or empty directory). "
            "Choose another."
        )
    parent = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(
            f"run directory {run_dir}: cannot be made in {parent} (expected a directory that "
            "may be written to). Choose another."
        )
    return path


_APPO = _Algorithm(ring_collector, APPOTrainer, close=lambda trainer: None)
_OFF_POLICY = _Algorithm(replay_collector, OffPolicyTrainer, close=OffPolicyTrainer.close)


def _train(trainer: Trainer) -> bool:
    """Train to the end, or until Ctrl-C; leave a checkpoint; return if it was Ctrl-C."""
    try:
        trainer.train()
    except KeyboardInterrupt:
        save_learner(trainer)
        return True
    except Exception:
        with contextlib.suppress(OSError, UniLabError):  # the first error tells more
            save_learner(trainer)  # a lost worker must not cost the training
        raise
    return False


def _logger(path: Path, closing: contextlib.ExitStack, saved: SavedRun | None) -> FanOutLogger:
    """Return what logs in a run directory, with nothing in it from after the checkpoint."""
    if saved:
        cut_logs(path / "logs", saved.frames)
    board = TensorboardLogger("tensorboard", log_dir=str(path))
    if saved:
        board.experiment.purge_step = saved.frames + 1  # for the file that is opened next
        board.experiment.close()

    def close(kind: type[BaseException] | None, *_: object) -> None:
        try:
            board.experiment.close()  # ends its thread
        except OSError:
            if kind is None:  # else the first error tells more
                raise

    closing.push(close)
    return FanOutLogger([CSVLogger("logs", log_dir=str(path)), board])


def _last_report(report: LearningCurve) -> dict[str, Any]:
    """What the collectors told last; endless rates, of phases that took no time, left out."""
    last = report.last if isinstance(report, CollectorReport) else {}
    return {key: value for key, value in last.items() if math.isfinite(value)}


def _mean_return(env: EnvBase, actor: TensorDictModuleBase, seed: int) -> float:
    env.set_seed(seed)
    with contextlib.closing(env):
        return float(evaluate(env, actor).mean())


def _versions() -> dict[str, str]:
    names = ("torchrl-unilab", "torchrl", "tensordict", "torch", "mujoco", "gymnasium")
    return {name: importlib.metadata.version(name) for name in names}
