"""Whole runs: `Run` trains in a directory and leaves logs, checkpoints, picture and summary.

A run is four steps. `prepare` and `connect` refuse what cannot work before a file is written;
`train` leaves a checkpoint however it ends; `summarise` evaluates. `train_appo`,
`train_off_policy` and `resume_run` start one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchrl_unilab.collectors.arguments import CreateEnv, check_factory
from torchrl_unilab.collectors.worker import closing_env, on_host
from torchrl_unilab.configs import APPOConfig, Config, OffPolicyConfig, RunConfig
from torchrl_unilab.configs.algorithms import OWN_ENVIRONMENT, run_settings, without_own_settings
from torchrl_unilab.configs.file import CONFIG_FILE, StrPath, as_yaml
from torchrl_unilab.envs import MujocoBatchEnv, make_task
from torchrl_unilab.errors import DivergedError, UniLabError
from torchrl_unilab.runtime import trace as tracing
from torchrl_unilab.runtime.ranks import Ranks, shapes_of
from torchrl_unilab.trainers.evaluation import MOST_AT_ONCE, BackgroundEvaluation, Videos, evaluate
from torchrl_unilab.trainers.hooks import CollectorTime
from torchrl_unilab.trainers.progress import can_draw, log_progress, stop_reason, stop_when
from torchrl_unilab.trainers.runs.best_policy import BestPolicy
from torchrl_unilab.trainers.runs.budget import check_frames, run_threads
from torchrl_unilab.trainers.runs.builders import ALGORITHMS, build_learner, child_seeds, run_budget
from torchrl_unilab.trainers.runs.checkpoint import (
    RunCheckpoints,
    SavedRun,
    load_trainer,
    run_checkpoint,
    save_learner,
)
from torchrl_unilab.trainers.runs.directory import (
    BEST,
    CHECKPOINT,
    TRACE,
    VIDEOS,
    check_run_dir,
    check_same_run,
    run_dir_held,
    run_path,
    write_whole,
)
from torchrl_unilab.trainers.runs.environment import fit_environments
from torchrl_unilab.trainers.runs.loggers import RunLogger, check_loggers, run_logger
from torchrl_unilab.trainers.runs.policy import check_newest
from torchrl_unilab.trainers.runs.summary import package_versions, write_summary
from torchrl_unilab.trainers.video import check_filming
from torchrl_unilab.weight_update import UniLabShmScheme


def train_appo(
    env: str,
    *,
    frames: int,
    run_dir: StrPath,
    seed: int = 0,
    config: APPOConfig | None = None,
    create_env: CreateEnv | None = None,
    announce: Callable[[str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train by APPO and leave logs, checkpoint, picture and summary in `run_dir`.

    Args:
        env: Task of `MujocoBatchEnv`, or a name for ``create_env``'s environments.
        frames: How many to collect.
        run_dir: Must not exist, or be empty.
        seed: Seeds networks, environments and sampling.
        config: Settings; the task's own if not given.
        create_env: Makes one collector's environment, of any TorchRL kind; picklable.
            `MujocoBatchEnv` of the task if not given. If it makes a number of environments other
            than ``num_envs``, each takes more or fewer steps, for the same number of frames.
            Actions are drawn from a Gaussian without bounds; an environment that does not clip them
            needs a `ClipTransform`.
        announce: Called with lines of text for the user; nothing is said if None.
        **options: Other fields of `RunConfig`, such as ``stop_at`` or ``eval_interval``.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        ConfigError: The run directory is not empty, a setting cannot work, memory is too small, or
            the task is unknown.
        DivergedError: A loss, a gradient, a parameter or an observation is no longer finite; the
            checkpoints are from before that.

    Examples:
        >>> from torchrl_unilab.trainers import train_appo
        >>> run = train_appo("InvertedPendulum-v5", frames=1024, run_dir="run", progress_bar=False)
        >>> run["frames"], run["final_return"] > 1
        (1024, True)
    """
    run, config = RunConfig.given(APPOConfig, config, env, frames, seed, **options)
    return Run(run, config, run_dir, create_env=create_env, announce=announce)()


def train_off_policy(
    env: str,
    *,
    frames: int,
    run_dir: StrPath,
    seed: int = 0,
    config: OffPolicyConfig | None = None,
    create_env: CreateEnv | None = None,
    announce: Callable[[str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train by SAC or TD3, as `config` says, and leave in `run_dir` what `train_appo` does.

    Arguments, result and errors are those of `train_appo`.

    Examples:
        >>> from torchrl_unilab.trainers import OffPolicyConfig, train_off_policy
        >>> config = OffPolicyConfig.for_task("InvertedPendulum-v5", "td3", learner_threads=1)
        >>> run = train_off_policy(
        ...     "InvertedPendulum-v5", frames=600, run_dir="run", config=config, progress_bar=False
        ... )
        >>> run["frames"], run["optim_steps"] > 0
        (600, True)
    """
    run, config = RunConfig.given(OffPolicyConfig, config, env, frames, seed, **options)
    return Run(run, config, run_dir, create_env=create_env, announce=announce)()


class Run:
    """One training run in a directory. Call it once; it returns the summary.

    Args:
        options: What to train on, how long, what to keep.
        config: The algorithm's settings.
        run_dir: New or empty, or that of `saved`.
        create_env: Makes one collector's environment; `MujocoBatchEnv` if not given.
        announce: Called with lines of text for the user; nothing is said if None.
        saved: The checkpoint to resume from, if any.
        again: Whether `run_dir` may be that of a run that ended before its first checkpoint.

    Raises:
        ConfigError: The run cannot work, whatever its environment, or the task is unknown.
    """

    def __init__(
        self,
        options: RunConfig,
        config: Config,
        run_dir: StrPath,
        *,
        create_env: CreateEnv | None = None,
        announce: Callable[[str], None] | None = None,
        saved: SavedRun | None = None,
        again: bool = False,
    ) -> None:
        self.ranks = ranks = Ranks.of_torchrun(device=config.device, timeout=options.rank_timeout)
        self.is_rank_zero = ranks.rank == 0
        check_frames(options.frames, config, ranks.size)
        self.options, self.config, self.saved = options, config, saved
        own = {OWN_ENVIRONMENT: True} if create_env else {}
        self.settings = run_settings(options, config) | own
        self.algorithm, self.loggers = ALGORITHMS[config.algorithm], options.logger.split(",")
        check_loggers(self.loggers)
        if options.video_interval is not None:
            check_filming(own_environment=create_env is not None)
        self.threads = run_threads(config)
        self.announce = announce if announce and self.is_rank_zero else lambda line: None
        if create_env is not None:
            check_factory(create_env)
        else:
            make_task(options.env)  # an unknown task is refused before anything is made
        self._own_create_env = create_env
        self.path, self._again, self._writing = run_path(run_dir), again, False
        self.resumed = [*saved.resumed, saved.frames] if saved else []
        # A resumed run has new seeds: workers without a saved state do not repeat old episodes.
        root = (options.seed, saved.frames) if saved else options.seed
        self._network_seed = child_seeds(options.seed, 1)[0]
        self._acting_seed = child_seeds(root, 2 + ranks.rank)[-1]
        self._holding = contextlib.ExitStack()  # the directory's lock and the logs, until the end
        self.evaluation: BackgroundEvaluation | None = None

    def __call__(self) -> dict[str, Any]:
        """Run the four steps; return the summary."""
        with self.ranks, self._holding, torch.random.fork_rng(devices=[]):
            self._holding.callback(torch.set_num_threads, torch.get_num_threads())
            with contextlib.ExitStack() as closing:
                self.prepare()
                self.connect(closing)
                interrupted = self.train()
            return self.summarise(interrupted)

    def prepare(self) -> None:
        """Build the networks and refuse a run that does not fit the memory that is free."""
        if self.is_rank_zero and not self.saved:
            if self._again:
                check_same_run(self.path, self.settings)
            else:
                check_run_dir(self.path)
        self.announce(str(self.threads))
        if not self.saved and (line := without_own_settings(self.options.env, self.config)):
            self.announce(line)
        torch.set_num_threads(self.threads.learner_threads)
        torch.manual_seed(self._network_seed)
        with closing_env(self._create_env()()) as proxy:
            if self._own_create_env and (line := fit_environments(proxy, self.config)):
                self.announce(line)
            self.learner = build_learner(proxy, self.config)
            evaluates = self.options.eval_interval is not None
            run_budget(proxy, self.learner, self.config, evaluates=evaluates).check()
        # The newest checkpoint first: it differs if the run directory is not shared.
        seen = {"checkpoint in the run's directory, at frames": self.resumed[-1:]}
        shapes = shapes_of(self.learner.loss)
        self.ranks.check_same(seen | self.settings | package_versions() | shapes)
        for module in (self.learner.loss, *self.learner.normalizers.values()):
            self.ranks.broadcast_([*module.parameters(), *module.buffers()])

    def connect(self, closing: contextlib.ExitStack) -> None:
        """Start the workers, build the trainer, and put both where a checkpoint says.

        Args:
            closing: Ends what is started.
        """
        options, saved = self.options, self.saved
        # What a checkpoint has is published once it is loaded, under the version that it had.
        first = max(0, saved.version - 1) if saved else 0
        scheme = UniLabShmScheme(pull=self.config.pull, first_version=first)
        closing.callback(scheme.shutdown)
        if options.trace and self.is_rank_zero:
            tracing.start(self.path / TRACE)  # the workers, started below, trace too
            closing.callback(lambda: tracing.stop(keep=self._writing))
        threads, config = self.threads.physics_threads, self.config
        create_env = self._create_env(config.num_envs, threads, stagger=config.stagger)
        collector = self.algorithm.collector(
            create_env, self.learner.actor, scheme, config, self._acting_seed
        )
        closing.callback(collector.shutdown)
        self.trainer = trainer = self._make_trainer(collector, scheme)
        if self.algorithm.replay:
            closing.callback(trainer.close)
        if options.eval_interval is not None and self.is_rank_zero:
            self.evaluation = self._start_evaluation(options.eval_interval, scheme)
            closing.callback(self.evaluation.close)
            self.evaluation.register(trainer)
        if self.is_rank_zero:
            stop_when(trainer, options.stop_at, options.max_seconds)
        self.cpu = CollectorTime(collector)
        self.cpu.register(trainer)
        if saved:
            moved = any(saved.run[n] != self.settings[n] for n in ("device", "collector_device"))
            load_trainer(trainer, saved, moved=moved)
            trainer.returns.measure(None)  # for the summary, where nothing is left to collect
        if trainer.progress_bar:  # TorchRL makes the bar when training starts, and leaves it open
            trainer.register_op("setup", lambda: closing.callback(trainer._pbar.close))
        elif options.progress_bar:
            log_progress(trainer, self.announce)

    def _make_trainer(self, collector: Any, scheme: UniLabShmScheme) -> Any:
        options, kept = self.options, self.options.keep_checkpoints
        checkpoints = RunCheckpoints(self.path / CHECKPOINT, kept, options.interval)
        replay = {"replay": collector.storage} if self.algorithm.replay else {}
        names = ("env", "algo", "seed", OWN_ENVIRONMENT)
        run = {name: value for name, value in self.settings.items() if name in names}
        run |= dataclasses.asdict(self.config) | {"ranks": self.ranks.size}
        metadata = partial(checkpoints.metadata, run, options.frames, self.resumed)
        self.best = BestPolicy(self.path / BEST, metadata())
        trainer = self.algorithm.trainer(
            collector=collector,
            loss_module=self.learner.loss,
            total_frames=options.frames,
            config=self.config,
            normalizers=self.learner.normalizers,
            scheme=scheme,
            ranks=self.ranks,
            progress_bar=options.progress_bar and self.is_rank_zero and can_draw(),
            seed=self._acting_seed,
            checkpoint=run_checkpoint(**replay),
            checkpoint_rotation=checkpoints,
            checkpoint_metadata=lambda _: metadata(version=scheme.version),
            save_trainer_interval=options.interval - 1,  # TorchRL waits for more than this
            log_interval=min(10 * collector.frames_per_batch, options.frames // 20),
        )
        trainer.checkpoint_seconds = None if options.checkpoint_interval else 600.0
        return trainer

    def _start_evaluation(self, interval: int, scheme: UniLabShmScheme) -> BackgroundEvaluation:
        options, filmed = self.options, self.options.video_interval
        return BackgroundEvaluation(
            self._create_env(min(options.eval_episodes, MOST_AT_ONCE)),
            self.learner.actor,
            scheme.create_transport(),
            interval=interval,
            episodes=options.eval_episodes,
            max_steps=options.eval_max_steps,
            seed=options.seed,
            videos=Videos(self._create_env(), self.path / VIDEOS, filmed) if filmed else None,
            keep=self.best.keep,
        )

    def train(self) -> bool:
        """Train to the end, or until Ctrl-C; leave a checkpoint; return whether it was Ctrl-C."""
        trainer = self.trainer
        if self.is_rank_zero:
            trainer.logger = self._start_writing()
        try:
            limits = self.options.stop_at, self.options.max_seconds
            reached = stop_reason(trainer.returns, *limits)
            if trainer.collected_frames < self.options.frames and not reached:  # or only summarise
                trainer.train()
            if reason := stop_reason(trainer.returns, *limits):
                self.announce(f"stopped at {trainer.collected_frames:,} frames: {reason}")
            if self.evaluation is not None:
                self.evaluation.finish()  # one that runs although another rank has stopped
        except KeyboardInterrupt as interrupt:
            try:
                self.ranks.leave(interrupt)  # first: the others wait
            finally:  # also if that is interrupted, or names a rank that is lost
                if self.is_rank_zero:
                    with contextlib.suppress(OSError):  # the reader may be gone
                        self.announce("interrupted: saving what was learnt; again to stop without")
                    save_learner(trainer)
            return True
        except Exception as error:
            try:
                self.ranks.leave(error)
            finally:
                with contextlib.suppress(OSError, UniLabError):  # the first error says more
                    if self.is_rank_zero and not isinstance(error, DivergedError):  # not to resume
                        save_learner(trainer, insist=self.ranks.size > 1)
            raise
        return False

    def _start_writing(self) -> RunLogger:
        """Make the run directory and the logs, after all that can be refused."""
        self._holding.enter_context(run_dir_held(self.path))
        if not self.saved and not self._again:
            check_run_dir(self.path)  # again: another run may have used it meanwhile
        check_newest(self.saved, self.path)
        self._writing = True
        write_whole(self.path / CONFIG_FILE, as_yaml(self.settings))
        frames = self.saved.frames if self.saved else 0
        resumed_at = frames if self.saved or self._again else None  # logs of later frames go
        logger = run_logger(self.path, self.loggers, self._holding, resumed_at)
        if self.saved is None:
            logger.log_hparams(self.settings | package_versions())
        return logger

    def summarise(self, interrupted: bool) -> dict[str, Any]:
        """Return the summary; rank 0 evaluates, writes it, and plots the learning curve."""
        options, trainer, returns = self.options, self.trainer, self.trainer.returns
        eval_return, learner_busy = None, trainer.busy_time.busy  # before it evaluates
        # If the run was interrupted, a second Ctrl-C only ends the evaluation.
        with contextlib.suppress(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
            if self.is_rank_zero:
                eval_return = self._evaluate()
                self.best.keep(self.learner.actor, trainer.collected_frames, eval_return)
        summary = {
            "env": options.env,
            "algo": self.config.algorithm,
            "seed": options.seed,
            "frames": trainer.collected_frames,
            "optim_steps": trainer._optim_count,
            "seconds": returns.seconds,
            "final_return": returns.mean if returns.curve else None,
            "eval_return": eval_return,
            "best": self.best.result() if self.is_rank_zero else None,
            "interrupted": interrupted,
            "resumed": self.resumed,
            "policy_lag": dict(sorted(trainer.lag.histogram.items())),
            "collector": returns.last,
            "busy": {"learner": learner_busy, "collectors": self.cpu.busy},
            "ranks": self.ranks.size,
            "threads": dataclasses.asdict(self.threads),
            "curve": returns.curve,
            "evaluations": self.evaluation.evaluations if self.evaluation else [],
            "versions": package_versions(),
        }
        if not self.is_rank_zero:
            return summary
        write_summary(self.path, summary)
        if returns.curve:
            trainer.logger.log_scalar("return", returns.mean, step=trainer.collected_frames)
        if eval_return is not None:
            trainer.logger.log_scalar("eval_return", eval_return, step=trainer.collected_frames)
        return summary

    def _evaluate(self) -> float:
        options, actor = self.options, on_host(self.learner.actor)
        envs = min(options.eval_episodes, MOST_AT_ONCE)
        with closing_env(self._create_env(envs, self.threads.cores)()) as env:
            limits = {"episodes": options.eval_episodes, "max_steps": options.eval_max_steps}
            return float(evaluate(env, actor, **limits, seed=options.seed).mean())

    def _create_env(self, envs: int = 1, threads: int = 1, *, stagger: bool = False) -> CreateEnv:
        """Return what makes an environment: the caller's, or a `MujocoBatchEnv` of this size."""
        make = partial(MujocoBatchEnv, self.options.env, num_envs=envs, num_threads=threads)
        return self._own_create_env or partial(make, stagger=stagger)
