"""Evaluation without exploration: `evaluate`, and `BackgroundEvaluation` during training.

The process that evaluates is one more reader of the published weights. It takes a whole version,
with which it plays all its episodes, and the learner never waits for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.trainers import Trainer

from torchrl_unilab.checks import as_integer
from torchrl_unilab.collectors.arguments import CreateEnv, check_done_keys
from torchrl_unilab.collectors.worker import Policy, act, base_env, closing_env, on_host, rewards_of
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import UsageError
from torchrl_unilab.owner import Owner
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.workers import WorkerGroup
from torchrl_unilab.trainers.video import film_episodes
from torchrl_unilab.weight_update import UniLabShmTransport

MOST_AT_ONCE = 1024
"""Episodes that are played side by side where each has a simulation; more take turns."""

_NICENESS = 10  # learner and collectors come first


def evaluate(
    env: EnvBase,
    policy: TensorDictModuleBase,
    *,
    episodes: int | None = None,
    max_steps: int = 100_000,
    seed: int | None = None,
) -> torch.Tensor:
    """Run whole episodes, acting deterministically.

    Args:
        env: Batch size [N] or [].
        policy: Writes the action; in ``eval`` mode meanwhile.
        episodes: Number of episodes, one of each environment at a time; N by default (1 for batch
            size []).
        max_steps: Steps after which an unfinished episode is cut.
        seed: Seed of the environments and of everything else drawn on the CPU, such as noise of
            transforms; torch's generator is left as it was. None seeds nothing.

    Returns:
        The returns, float64, [episodes], summed over agents and reward keys.

    Raises:
        ConfigError: `episodes` or `max_steps` is below 1, or episodes end for some agents alone.

    Examples:
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.modules import make_actor
        >>> from torchrl_unilab.trainers import evaluate
        >>> env = MujocoBatchEnv("InvertedPendulum-v5", num_envs=3, num_threads=1, seed=0)
        >>> evaluate(env, make_actor(4, 1)).shape
        torch.Size([3])
        >>> env.close()
    """
    with _eval_mode(policy):
        return _play_episodes(env, policy, episodes, max_steps, seed)[0]


@contextlib.contextmanager
def _eval_mode(policy: Policy) -> Iterator[None]:
    """Have dropout and batch statistics off, as TorchRL's evaluations do; then as before."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _play_episodes(
    env: EnvBase, policy: Policy, episodes: int | None, max_steps: int, seed: int | None
) -> torch.Tensor:
    """Return returns and lengths of episodes, float64 [2, episodes]."""
    envs = env.batch_size.numel()
    count = envs if episodes is None else as_integer("episodes", episodes, "Use 1 or more.")
    max_steps = as_integer("max_steps", max_steps, "Use 1 or more.")
    check_done_keys(env)
    base = base_env(env)
    with contextlib.ExitStack() as seeded:
        if seed is not None:
            seeded.enter_context(torch.random.fork_rng(devices=[]))
            env.set_seed(seed)
            torch.manual_seed(seed)
        if isinstance(base, MujocoBatchEnv) and base.stagger:
            env.reset()  # only the first episodes are staggered
        rounds = [_play_round(env, policy, max_steps) for _ in range(-(-count // envs))]
    return torch.cat(rounds, 1)[:, :count]


@torch.no_grad()
def _play_round(env: EnvBase, policy: Policy, max_steps: int) -> torch.Tensor:
    """Return returns and lengths of each environment's next episode, float64 [2, N]."""
    returns = torch.zeros(env.batch_size.numel(), dtype=torch.float64, device=env.device)
    lengths = torch.zeros_like(returns)
    running = torch.ones_like(returns, dtype=torch.bool)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        current = env.reset()
        for _ in range(max_steps):
            stepped, current = env.step_and_maybe_reset(act(policy, current))
            after = stepped["next"]
            returns += rewards_of(after, env.reward_keys, returns.shape).where(running, 0.0)
            lengths += running
            running &= ~after["done"].reshape(-1)
            if not running.any():
                break
    return torch.stack([returns, lengths]).cpu()


class Evaluation(NamedTuple):
    """A policy's episodes without exploration, while it was trained.

    Attributes:
        frames: Collected when it was asked for.
        version: Of the weights that acted in all episodes.
        mean_return: Of the episodes.
        mean_length: Of the episodes, in steps.
    """

    frames: int
    version: int
    mean_return: float
    mean_length: float


class Videos(NamedTuple):
    """Which evaluations are filmed, and where to.

    Attributes:
        create_env: Makes a `MujocoBatchEnv` with one simulation. Picklable.
        directory: Gets ``frames-NUMBER.mp4``.
        interval: Frames from one filmed evaluation to the next.
    """

    create_env: CreateEnv
    directory: Path
    interval: int


class BackgroundEvaluation(Owner):
    """Evaluates the published policy in a separate process, each time after `interval` frames.

    One evaluation runs at a time: those that become due meanwhile are skipped. Its figures are
    logged as ``eval_return`` and ``eval_length`` at the frames at which it was requested.

    Args:
        create_env: Makes the environment. Picklable.
        policy: The published policy.
        transport: Where its weights are published.
        interval: Frames from one evaluation to the next.
        episodes: How many; one of each environment if None.
        max_steps: Steps after which an unfinished episode is cut.
        seed: Seeds the environment before each evaluation.
        videos: Which evaluations are filmed, in an additional episode; none if None.
        keep: Called in that process with the policy, frames and mean return of each evaluation, for
            example to save the best policy. Picklable.

    Raises:
        ConfigError: `interval` is not positive.
        WorkerError: The process failed at its start; a later failure is raised at the next batch.

    Attributes:
        evaluations: The finished evaluations.

    Examples:
        >>> from functools import partial
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.modules import make_actor
        >>> from torchrl_unilab.trainers import BackgroundEvaluation
        >>> from torchrl_unilab.weight_update import UniLabShmTransport
        >>> policy = make_actor(4, 1)
        >>> evaluation = BackgroundEvaluation(
        ...     partial(MujocoBatchEnv, "InvertedPendulum-v5", 2, num_threads=1),
        ...     policy,
        ...     UniLabShmTransport.from_state_dict(policy),
        ...     interval=1000,
        ... )  # then evaluation.register(trainer)
        >>> evaluation.close()
    """

    def __init__(
        self,
        create_env: CreateEnv,
        policy: TensorDictModuleBase,
        transport: UniLabShmTransport,
        *,
        interval: int,
        episodes: int | None = None,
        max_steps: int = 100_000,
        seed: int = 0,
        videos: Videos | None = None,
        keep: Callable[[TensorDictModuleBase, int, float], object] | None = None,
    ) -> None:
        self.interval = as_integer("evaluation interval", interval, "Use 1 or more.")
        self.evaluations: list[Evaluation] = []
        self._trainer: Trainer | None = None
        self._running = False
        self._interval_start = 0  # frames at which an evaluation was last due, run or skipped
        self._videos = videos
        self._filmed = 0  # frames of the newest video
        stage = videos.create_env if videos else None
        acting = create_env, stage, on_host(policy), episodes, max_steps, seed, keep
        payload = cloudpickle.dumps(acting)
        self._process = WorkerGroup(_run, [(payload, transport)], name="evaluation")

    def register(self, trainer: Trainer) -> None:
        """Register after each batch. Checkpoints hold the evaluations that ended before them."""
        self._trainer = trainer
        trainer.register_op("post_steps", self)
        trainer.register_module("evaluation", self)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been evaluated and filmed; a running evaluation is requested again."""
        ended = self.evaluations[-1].frames if self.evaluations else 0
        start = ended if self._running else self._interval_start
        evaluations = [list(one) for one in self.evaluations]
        return {"evaluations": evaluations, "begun": start, "filmed": min(self._filmed, start)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after what has been evaluated."""
        self.evaluations[:] = [Evaluation(*one) for one in state_dict["evaluations"]]
        self._interval_start, self._filmed = state_dict["begun"], state_dict["filmed"]

    @property
    def pids(self) -> list[int]:
        """Id of the process."""
        return self._process.pids

    def __call__(self) -> None:
        """Log an evaluation that has ended; ask for the next if it is due.

        After the last batch it is waited for: the last checkpoint has it.

        Raises:
            UsageError: `register` was not called.
            WorkerError: The process failed.
        """
        trainer = self._trainer
        if trainer is None:
            raise UsageError(
                "BackgroundEvaluation: called without a trainer (expected one by `register`). Call "
                "its register(trainer) in place of register_op."
            )
        if self._running and self._process.poll(0):
            self.finish()
        frames = trainer.collected_frames
        if frames // self.interval > self._interval_start // self.interval:
            if not self._running:
                self._process.send(0, frames, self._video(frames))
                self._running = True
            self._interval_start = frames  # last: what Ctrl-C kept from being asked for is due
        if frames >= trainer.total_frames or trainer._stop_training:
            self.finish()

    def _video(self, frames: int) -> Path | None:
        """Return the file that the evaluation is filmed to; None if it is not filmed."""
        videos = self._videos
        if videos is None or frames // videos.interval <= self._filmed // videos.interval:
            return None
        self._filmed = frames
        return videos.directory / f"frames-{frames:012d}.mp4"

    def finish(self) -> None:
        """Wait for an evaluation that runs, and log it.

        Raises:
            WorkerError: The process failed.
        """
        if not self._running:
            return
        evaluation = Evaluation(*self._process.receive(0))
        self._running = False
        self.evaluations.append(evaluation)
        if self._trainer is not None and (logger := self._trainer.logger) is not None:
            logger.log_scalar("eval_return", evaluation.mean_return, step=evaluation.frames)
            logger.log_scalar("eval_length", evaluation.mean_length, step=evaluation.frames)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.stop()


def _run(link: Link, payload: bytes, transport: UniLabShmTransport) -> None:
    """Evaluate on request, until the learner ends."""
    os.nice(_NICENESS)
    create_env, create_stage, policy, episodes, max_steps, seed, keep = cloudpickle.loads(payload)
    policy.eval()

    def act_while_needed(current: TensorDictBase) -> TensorDictBase:
        link.request(block=False)  # raises if the learner has ended; no request comes meanwhile
        return act(policy, current)

    with closing_env(create_env()) as env:
        link.ready()
        while True:
            request = link.request(block=True)
            assert request is not None, "it was waited for"
            frames, video = request
            version = transport.read_weights_into(policy)
            returns, lengths = _play_episodes(env, act_while_needed, episodes, max_steps, seed)
            mean_return = returns.mean().item()
            if keep is not None:
                keep(policy, frames, mean_return)
            if video is not None:
                _film(create_stage, act_while_needed, video, seed)
            link.answer((frames, version, mean_return, lengths.mean().item()))


def _film(create_env: CreateEnv, policy: Policy, path: Path, seed: int) -> None:
    path.parent.mkdir(exist_ok=True)
    with closing_env(create_env()) as env, set_exploration_type(ExplorationType.DETERMINISTIC):
        env.set_seed(seed)
        torch.manual_seed(seed)
        film_episodes(env, policy, path)
