"""Whole runs: train in a run directory, evaluate what lies there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.checkpoint import Checkpoint, CheckpointError
from torchrl.envs import EnvBase
from torchrl.record.loggers.csv import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from torchrl.trainers import Trainer

from torchrl_unilab.collectors.base import CreateEnv, WorkerCollector
from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.errors import ConfigError, UniLabError
from torchrl_unilab.runtime import available_cores
from torchrl_unilab.runtime import trace as tracing
from torchrl_unilab.trainers.appo import APPOTrainer
from torchrl_unilab.trainers.budgets import check_memory, run_threads
from torchrl_unilab.trainers.checkpoints import (
    RunCheckpoints,
    SavedRun,
    cut_logs,
    load_trainer,
    run_checkpoint,
    save_learner,
)
from torchrl_unilab.trainers.collecting import replay_collector, ring_collector
from torchrl_unilab.trainers.configs import APPOConfig
from torchrl_unilab.trainers.evaluation import evaluate
from torchrl_unilab.trainers.hooks import CollectorReport, LearningCurve, StopWhen
from torchrl_unilab.trainers.learners import build_learner
from torchrl_unilab.trainers.loggers import FanOutLogger
from torchrl_unilab.trainers.off_policy import OffPolicyTrainer
from torchrl_unilab.trainers.off_policy_configs import OffPolicyConfig
from torchrl_unilab.trainers.plots import plot_returns
from torchrl_unilab.weight_update import UniLabShmScheme

__all__ = ["evaluate_run", "resume_run", "train_appo", "train_off_policy"]

CHECKPOINT = "checkpoint"
SUMMARY = "summary.json"
TRACE = "trace.json"
CONFIG = "config.json"

Announce = Callable[[str], None]
_CONFIGS: Mapping[str, type[Any]] = {
    "appo": APPOConfig,
    "sac": OffPolicyConfig,
    "td3": OffPolicyConfig,
}


def train_appo(
    env: str,
    *,
    frames: int,
    seed: int = 0,
    run_dir: str | os.PathLike[str],
    config: APPOConfig | None = None,
    create_env: Callable[[], EnvBase] | None = None,
    stop_at: float | None = None,
    max_seconds: float | None = None,
    progress_bar: bool = True,
    eval_episodes: int = 16,
    trace: bool = False,
    checkpoint_interval: int | None = None,
    keep_checkpoints: int = 2,
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train by APPO and leave logs, checkpoint, picture and summary in `run_dir`.

    Args:
        env: Task of `MujocoBatchEnv`, or a name for `create_env`'s environments.
        frames: Frames to collect.
        seed: Seeds networks, environments and sampling.
        run_dir: Must not exist, or be empty.
        config: Settings; the task's own if not given.
        create_env: Makes one collector's environment, of any TorchRL kind; picklable.
            `MujocoBatchEnv` of the task if not given.
        stop_at: Stop early once the mean return of the last episodes is this high.
        max_seconds: Stop early after so many seconds of training.
        progress_bar: Show a bar with frames per second, return and policy lag.
        eval_episodes: Episodes of the final evaluation.
        trace: Write ``trace.json``: what learner and collectors did when
            (`torchrl_unilab.runtime.trace`). It is written however training ends.
        checkpoint_interval: Frames between checkpoints, from which `resume_run` goes on;
            None for a quarter of them. There is one at the end, however it comes.
        keep_checkpoints: How many of them are kept, the newest.
        announce: Takes a line for the person who runs this.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        ConfigError: The run directory is not empty, frames or episodes are not positive, or
            the run does not fit the memory that is free (says what would).
        ValueError: Unknown task (lists what exists).
    """
    config = config or APPOConfig.for_task(env)
    return _run(_APPO, env, "appo", config, **_arguments(locals()))


def train_off_policy(
    env: str,
    *,
    frames: int,
    seed: int = 0,
    run_dir: str | os.PathLike[str],
    config: OffPolicyConfig | None = None,
    create_env: CreateEnv | None = None,
    stop_at: float | None = None,
    max_seconds: float | None = None,
    progress_bar: bool = True,
    eval_episodes: int = 16,
    trace: bool = False,
    checkpoint_interval: int | None = None,
    keep_checkpoints: int = 2,
    announce: Announce = lambda line: None,
) -> dict[str, Any]:
    """Train by SAC or TD3, as `config` says, and leave in `run_dir` what `train_appo` does.

    Arguments, result and errors are those of `train_appo`.
    """
    config = config or OffPolicyConfig.for_task(env)
    return _run(_OFF_POLICY, env, config.algorithm, config, **_arguments(locals()))


def resume_run(
    run_dir: str | os.PathLike[str],
    *,
    settings: Mapping[str, Any] | None = None,
    frames: int | None = None,
    create_env: CreateEnv | None = None,
    stop_at: float | None = None,
    max_seconds: float | None = None,
    progress_bar: bool = True,
    eval_episodes: int = 16,
    trace: bool = False,
    checkpoint_interval: int | None = None,
    keep_checkpoints: int | None = None,
    announce: Announce = lambda line: None,
) -> dict[str, Any]:
    """Go on with a run from its newest checkpoint, in its directory.

    Counters, curve, clock and logs go on; what was logged after the checkpoint is logged
    anew. A run in lock-step goes on bit for bit as if it had never ended: APPO with
    ``lockstep``, SAC and TD3 with ``sync_collection``, on `MujocoBatchEnv`. Other runs go on
    from the same networks, optimisers and replay, in the same episodes where the environment
    is a `MujocoBatchEnv`.

    Versions of published weights are counted anew. Rows of a replay that were the last of
    their environments are not linked to what follows: with ``n_step`` above 1, or
    ``next_observation="derived"``, such a row's rewards end there, and a run in lock-step
    differs from an unbroken one in that.

    Args:
        run_dir: The run.
        settings: What the run is known to be, such as ``{"env": "Hopper-v5"}``; it is
            refused if it is not.
        frames: Frames to collect, those that have been among them; by default as many as
            the run was to collect.
        create_env: As it was given to the run.
        stop_at: As for `train_appo`, and likewise the other arguments.
        max_seconds: Counts the seconds before the checkpoint, too.
        progress_bar: As for `train_appo`.
        eval_episodes: As for `train_appo`.
        trace: As for `train_appo`; replaces a trace that is there.
        checkpoint_interval: Frames between checkpoints; as it was if not given.
        keep_checkpoints: How many are kept; as many as it was if not given.
        announce: As for `train_appo`.

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
    if frames <= saved.frames:
        raise ConfigError(
            f"cannot resume {run_dir}: {saved.frames} of {frames} frames have been collected "
            "(expected fewer). Ask for more frames."
        )
    announce(f"resuming at {saved.frames} of {frames} frames, from {saved.path}")
    algo = saved.run["algo"]
    return _run(
        _APPO if algo == "appo" else _OFF_POLICY,
        saved.run["env"],
        algo,
        _config_of(saved.run),
        frames=frames,
        seed=saved.run["seed"],
        run_dir=run_dir,
        create_env=create_env,
        stop_at=stop_at,
        max_seconds=max_seconds,
        progress_bar=progress_bar,
        eval_episodes=eval_episodes,
        trace=trace,
        checkpoint_interval=saved.interval if checkpoint_interval is None else checkpoint_interval,
        keep_checkpoints=saved.keep if keep_checkpoints is None else keep_checkpoints,
        announce=announce,
        saved=saved,
    )


def _config_of(settings: Mapping[str, Any]) -> Any:
    """Return the settings that ``config.json`` or a checkpoint has."""
    kind = _CONFIGS[settings["algo"]]
    fields = {field.name for field in dataclasses.fields(kind)}
    kept = {key: value for key, value in settings.items() if key in fields}
    return kind(**{**kept, "hidden": tuple(kept["hidden"])})


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in ("env", "config")}


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
    seed: int,
    run_dir: str | os.PathLike[str],
    create_env: CreateEnv | None,
    stop_at: float | None,
    max_seconds: float | None,
    progress_bar: bool,
    eval_episodes: int,
    trace: bool,
    checkpoint_interval: int | None,
    keep_checkpoints: int,
    announce: Announce,
    saved: SavedRun | None = None,
) -> dict[str, Any]:
    if frames < 1:
        raise ConfigError(f"frames: {frames} (expected at least 1). Use for example 2000000.")
    if eval_episodes < 1:
        raise ConfigError(f"eval_episodes: {eval_episodes} (expected at least 1). Use 16.")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed: {seed} (expected 0 to {2**32 - 1}). Use for example 0.")
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
    checkpoints = RunCheckpoints(path / CHECKPOINT, keep_checkpoints, checkpoint_interval)
    resumed = [*saved.resumed, saved.frames] if saved else []
    metadata = checkpoints.metadata(settings, total_frames=frames, resumed=resumed)
    announce(str(plan))
    torch.set_num_threads(plan.learner_threads)
    torch.manual_seed(seed)
    with contextlib.closing(create_proxy()) as proxy:
        learner = build_learner(proxy, config)
        check_memory(config, proxy, learner)
    scheme = UniLabShmScheme()
    begun = threading.Event()
    with contextlib.ExitStack() as closing:
        if trace:
            tracing.start(path / TRACE)  # before there are workers, which are told of it
            closing.callback(lambda: tracing.stop(keep=begun.is_set()))
        collector = algorithm.collector(create_env, learner.actor, scheme, config, seed)
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
            seed=seed,
            checkpoint=checkpoint,
            checkpoint_rotation=checkpoints,
            checkpoint_metadata=lambda _: metadata,
            save_trainer_interval=checkpoint_interval - 1,
            log_interval=min(10 * collector.frames_per_batch, frames // 20),
        )
        closing.callback(algorithm.close, trainer)
        StopWhen(trainer.returns, stop_at=stop_at, max_seconds=max_seconds).register(trainer)
        cpu = _CollectorTime(collector)
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


@dataclass(frozen=True)
class Run:
    """A run's policy, with an environment of its task.

    Attributes:
        settings: What ``config.json`` says.
        env: New, of the run's task; whoever loads the run closes it.
        actor: The policy of the run's checkpoint.
    """

    settings: Mapping[str, Any]
    env: MujocoBatchEnv
    actor: TensorDictModuleBase


def load_run(run_dir: str | os.PathLike[str], purpose: str, **env_options: Any) -> Run:
    """Load the checkpoint of a run.

    Args:
        run_dir: A run.
        purpose: What for, a verb; for messages.
        **env_options: Of `MujocoBatchEnv`.

    Raises:
        ConfigError: There is no run with a checkpoint in `run_dir`.
        ValueError: The environment refuses the options.
    """
    path = Path(run_dir)
    if not (path / CONFIG).is_file() or not (path / CHECKPOINT).exists():
        raise ConfigError(
            f"cannot {purpose} {run_dir}: no {CONFIG} and {CHECKPOINT} there (expected a "
            "run directory). Train first."
        )
    try:
        settings = json.loads((path / CONFIG).read_text())
        config = _config_of(settings)
        task = make_task(settings["env"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot {purpose} {run_dir}: {CONFIG} says {error!r} (expected the settings of a "
            "run on a task of MujocoBatchEnv). Restore it, or train again."
        ) from error
    env = MujocoBatchEnv(task, **env_options)
    try:
        actor = build_learner(env, config).actor
        saved = RunCheckpoints(path / CHECKPOINT).newest(("policy",))
        Checkpoint(policy=actor).load(saved.path)
    except (CheckpointError, RuntimeError, OSError, ValueError, KeyError) as error:
        env.close()
        raise ConfigError(
            f"cannot {purpose} {run_dir}: the checkpoint does not load, {error} (expected one "
            f"that fits {CONFIG}). Restore both, or train again."
        ) from error
    return Run(settings, env, actor)


def evaluate_run(
    run_dir: str | os.PathLike[str], *, episodes: int = 16, seed: int = 0
) -> dict[str, Any]:
    """Evaluate the checkpoint of a run on its task.

    Returns:
        ``env``, ``episodes``, and mean, minimum and maximum of the returns.

    Raises:
        ConfigError: There is no run with a checkpoint in `run_dir`.
    """
    run = load_run(run_dir, "evaluate", num_envs=episodes, num_threads=available_cores())
    run.env.set_seed(seed)
    with contextlib.closing(run.env):
        returns = evaluate(run.env, run.actor)
    return {
        "env": run.settings["env"],
        "episodes": episodes,
        "mean": returns.mean().item(),
        "min": returns.min().item(),
        "max": returns.max().item(),
    }


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
    closing.callback(board.experiment.close)  # ends its thread
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


class _CollectorTime:
    """Processor time of the collectors' processes per second since training began.

    Attributes:
        busy: One share per collector; above 1 if several threads step physics.
    """

    def __init__(self, collector: WorkerCollector) -> None:
        self._processes: list[psutil.Process | None] = [None] * len(collector.pids)
        for i, pid in enumerate(collector.pids):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes[i] = psutil.Process(pid)
        self._started = 0.0
        self._before: list[float] = []
        self._last = [0.0] * len(self._processes)
        self.busy: list[float] = []

    def start(self) -> None:
        self._started = time.perf_counter()
        self._before = self._now()

    def sample(self) -> None:
        elapsed = time.perf_counter() - self._started
        now = self._now()
        self.busy = [(b - a) / elapsed for a, b in zip(self._before, now, strict=True)]

    def _now(self) -> list[float]:
        """Seconds of each; of one that has ended, which others will tell, those seen last."""
        self._last = [
            _cpu_seconds(process, last)
            for process, last in zip(self._processes, self._last, strict=True)
        ]
        return self._last


def _cpu_seconds(process: psutil.Process | None, otherwise: float) -> float:
    if process is None:
        return otherwise
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return otherwise
    return float(times.user + times.system)
