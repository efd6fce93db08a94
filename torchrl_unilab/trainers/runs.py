"""Whole runs: train in a run directory, evaluate what lies there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torchrl.checkpoint import Checkpoint, CheckpointError
from torchrl.envs import EnvBase
from torchrl.record.loggers.csv import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from torchrl.trainers import Trainer

from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.collectors.base import CreateEnv, WorkerCollector
from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import PerEnvNoise
from torchrl_unilab.runtime import available_cores, plan_threads
from torchrl_unilab.trainers.appo import APPOTrainer
from torchrl_unilab.trainers.configs import APPOConfig
from torchrl_unilab.trainers.evaluation import evaluate
from torchrl_unilab.trainers.hooks import CollectorReport, LearningCurve, StopWhen
from torchrl_unilab.trainers.learners import build_learner
from torchrl_unilab.trainers.loggers import FanOutLogger
from torchrl_unilab.trainers.off_policy import OffPolicyTrainer
from torchrl_unilab.trainers.off_policy_configs import OffPolicyConfig
from torchrl_unilab.trainers.plots import plot_returns
from torchrl_unilab.weight_update import UniLabShmScheme

__all__ = ["evaluate_run", "train_appo", "train_off_policy"]

CHECKPOINT = "checkpoint"
SUMMARY = "summary.json"
CONFIG = "config.json"
_SAVED = ("policy", "loss_module", "optimizer", "trainer_state")


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
        announce: Takes a line for the person who runs this.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        ConfigError: The run directory is not empty, or frames or episodes are not positive.
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
    announce: Announce = lambda line: None,
) -> dict[str, Any]:
    """Train by SAC or TD3, as `config` says, and leave in `run_dir` what `train_appo` does.

    Arguments, result and errors are those of `train_appo`.
    """
    config = config or OffPolicyConfig.for_task(env)
    return _run(_OFF_POLICY, env, config.algorithm, config, **_arguments(locals()))


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in ("env", "config")}


@dataclass(frozen=True)
class _Algorithm:
    """What differs between the algorithms' runs: who collects, who trains, on what threads."""

    collector: Callable[..., Any]
    trainer: Callable[..., Any]
    learner_threads: Callable[[Any, int], int]
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
    announce: Announce,
) -> dict[str, Any]:
    if frames < 1:
        raise ConfigError(f"frames: {frames} (expected at least 1). Use for example 2000000.")
    if eval_episodes < 1:
        raise ConfigError(f"eval_episodes: {eval_episodes} (expected at least 1). Use 16.")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed: {seed} (expected 0 to {2**32 - 1}). Use for example 0.")
    cores = available_cores()
    learner_threads = algorithm.learner_threads(config, cores)
    plan = plan_threads(cores, config.num_collectors, config.physics_threads, learner_threads)
    if create_env is None:
        make_task(env)  # an unknown task is refused before anything is made
        create_env = _mujoco_env(env, config.num_envs, plan.physics_threads)
    path = _checked_run_dir(run_dir)
    announce(str(plan))
    torch.set_num_threads(plan.learner_threads)
    torch.manual_seed(seed)
    proxy = create_env()
    learner = build_learner(proxy, config)
    proxy.close()
    scheme = UniLabShmScheme()
    collector = algorithm.collector(create_env, learner.actor, scheme, config, seed)
    with contextlib.ExitStack() as closing:
        closing.callback(collector.shutdown)
        # Whatever could be refused has been: from here on files are written.
        path.mkdir(parents=True, exist_ok=True)
        settings = {"env": env, "algo": algo, "seed": seed, **dataclasses.asdict(config)}
        (path / CONFIG).write_text(json.dumps(settings, indent=2))
        board = TensorboardLogger("tensorboard", log_dir=str(path))
        closing.callback(board.experiment.close)  # ends its thread
        trainer = algorithm.trainer(
            collector=collector,
            loss_module=learner.loss,
            total_frames=frames,
            config=config,
            normalizers=learner.normalizers,
            scheme=scheme,
            logger=FanOutLogger([CSVLogger("logs", log_dir=str(path)), board]),
            progress_bar=progress_bar,
            seed=seed,
            checkpoint=Checkpoint(save_components=_SAVED),
            save_trainer_file=path / CHECKPOINT,
            save_trainer_interval=max(frames // 4, 1),
            log_interval=min(10 * collector.frames_per_batch, frames // 20),
        )
        closing.callback(algorithm.close, trainer)
        StopWhen(trainer.returns, stop_at=stop_at, max_seconds=max_seconds).register(trainer)
        cpu = _CollectorTime(collector)
        trainer.register_op("setup", cpu.start)
        trainer.register_op("post_steps", cpu.sample)
        interrupted = _train(trainer)
    eval_env = (
        MujocoBatchEnv(env, num_envs=eval_episodes, num_threads=plan.cores)
        if isinstance(create_env, partial) and create_env.func is MujocoBatchEnv
        else create_env()
    )
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
        kind = _CONFIGS[settings["algo"]]
        fields = {field.name for field in dataclasses.fields(kind)}
        config = kind(**{k: v for k, v in settings.items() if k in fields})
        task = make_task(settings["env"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot {purpose} {run_dir}: {CONFIG} says {error!r} (expected the settings of a "
            "run on a task of MujocoBatchEnv). Restore it, or train again."
        ) from error
    env = MujocoBatchEnv(task, **env_options)
    try:
        actor = build_learner(env, config).actor
        Checkpoint(policy=actor).load(path / CHECKPOINT)
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


def _ring_collector(
    create_env: CreateEnv,
    actor: TensorDictModuleBase,
    scheme: UniLabShmScheme,
    config: APPOConfig,
    seed: int,
) -> APPOCollector:
    return APPOCollector(
        create_env,
        actor,
        num_collectors=config.num_collectors,
        frames_per_batch=config.frames_per_rollout,
        total_frames=-1,  # the trainer counts
        weight_sync_schemes={"policy": scheme},
        slots=config.slots,
        overflow=config.overflow,
        max_policy_lag=config.max_policy_lag,
        lockstep=config.lockstep,
        use_buffers=False,
        num_threads=1,
        seed=seed,
    )


def _replay_collector(
    create_env: CreateEnv,
    actor: TensorDictModuleBase,
    scheme: UniLabShmScheme,
    config: OffPolicyConfig,
    seed: int,
) -> ReplayCollector:
    frames = config.learning_starts * config.total_envs
    return ReplayCollector(
        create_env,
        actor,
        capacity=config.capacity,
        num_collectors=config.num_collectors,
        frames_per_batch=config.frames_per_tick,
        total_frames=-1,  # the trainer counts
        init_random_frames=frames if config.init_random else 0,
        explore=_Explore(config) if config.algorithm == "td3" else None,
        weight_sync_schemes={"policy": scheme},
        lockstep=config.sync_collection,
        num_threads=1,
        seed=seed,
        n_step=config.n_step,
        gamma=config.gamma,
        next_observation=config.next_observation,
    )


@dataclass(frozen=True)
class _Explore:
    """Makes of TD3's actor what explores."""

    config: OffPolicyConfig

    def __call__(self, actor: TensorDictModuleBase) -> TensorDictModuleBase:
        noise = PerEnvNoise(
            actor.center - actor.reach,
            actor.center + actor.reach,
            std_min=self.config.noise_std_min,
            std_max=self.config.noise_std_max,
            init_key=None,
        )
        return TensorDictSequential(actor, noise)


_APPO = _Algorithm(
    _ring_collector, APPOTrainer, lambda config, cores: 1, close=lambda trainer: None
)
_OFF_POLICY = _Algorithm(
    _replay_collector,
    OffPolicyTrainer,
    lambda config, cores: config.learner_threads or cores,
    close=OffPolicyTrainer.close,
)


def _train(trainer: Trainer) -> bool:
    """Train to the end, or until Ctrl-C; leave a checkpoint; return if it was Ctrl-C."""
    try:
        trainer.train()
    except KeyboardInterrupt:
        trainer.save_trainer(force_save=True)
        return True
    except Exception:
        trainer.save_trainer(force_save=True)  # a lost worker must not cost the training
        raise
    return False


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
        self._processes = [psutil.Process(pid) for pid in collector.pids]
        self._started = 0.0
        self._before: list[float] = []
        self.busy: list[float] = []

    def start(self) -> None:
        self._started = time.perf_counter()
        self._before = [_cpu_seconds(process) for process in self._processes]

    def sample(self) -> None:
        elapsed = time.perf_counter() - self._started
        now = [_cpu_seconds(process) for process in self._processes]
        self.busy = [(b - a) / elapsed for a, b in zip(self._before, now, strict=True)]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
