"""Settings of SAC and TD3, and what differs per task, as data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_unilab.data.packed_replay import NextObservation
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers.configs.settings import (
    Allowed,
    check_settings,
    choice,
    flag,
    integer,
    number,
    text,
    widths,
)

__all__ = [
    "OFF_POLICY_TASKS",
    "Algorithm",
    "OffPolicyConfig",
    "compute_train_start_threshold",
]

Algorithm = Literal["sac", "td3"]


def compute_train_start_threshold(batch_size: int, learning_starts: int, num_envs: int) -> int:
    """Return how many rows the replay must have before the first update.

    Args:
        batch_size: Rows of a minibatch.
        learning_starts: Steps of each environment; below 0 counts as 0.
        num_envs: Environments.

    Example:
        >>> compute_train_start_threshold(256, 100, 16)
        1600
    """
    return max(batch_size, max(learning_starts, 0) * num_envs)


@dataclass(frozen=True)
class OffPolicyConfig:
    """Settings of one SAC or TD3 run.

    A *tick* is ``env_steps_per_sync`` steps of all environments, followed by
    ``updates_per_step`` updates on as many minibatches.

    Attributes:
        algorithm: ``"sac"`` or ``"td3"``.
        num_envs: Environments per collector.
        num_collectors: Collector processes.
        physics_threads: Threads that step each collector's environment; None to share out
            the cores.
        learner_threads: Torch threads of the learner; None for all cores, which collecting
            at a few steps per update leaves nearly idle.
        replay_buffer_n: Rows of the replay per environment.
        batch_size: Rows of a minibatch.
        learning_starts: Steps of each environment before the first update, see
            `compute_train_start_threshold`; below 0 counts as 0.
        init_random: Whether those steps are taken at random, and not by the policy.
        updates_per_step: Updates per tick.
        policy_frequency: Critic updates per update of the policy.
        sync_collection: Collect only when the learner asks: repeatable bit for bit. Else
            the collectors take the next tick's steps while the learner updates.
        restart_workers: Lost collectors to replace before the loss of one ends the run.
        env_steps_per_sync: Steps of each environment in a tick.
        obs_normalization: Normalise observations by running statistics of all rows, each
            counted once.
        n_step: Rewards that are summed up before a value is looked up.
        next_observation: ``"stored"`` with each row, or ``"derived"`` from the row that
            follows, for about half the memory (`PackedReplayStorage`).
        observation: Key that the actor reads.
        critic_observation: Key that the critics read.
        hidden: Widths of the layers of actor and critics.
        layer_norm: Normalise the inputs of the hidden layers' relus.
        gamma: Discount.
        tau: Share of the networks that their targets take over in each update.
        lr_actor: Learning rate of the actor.
        lr_critic: Learning rate of the critics.
        lr_alpha: Learning rate of SAC's temperature.
        alpha: SAC's initial temperature. It is steered towards an entropy of -1 per dimension
            of actions scaled to [-1, 1]: -17 for Humanoid, whatever the bounds are.
        target_noise: TD3's noise on target actions, in halves of the action's range.
        target_noise_clip: Bound of that noise, in the same units.
        noise_std_min: Lowest standard deviation of TD3's exploration noise; each
            environment has its own.
        noise_std_max: Highest one.
        reward_scale: Factor on rewards for learning; reported returns are unscaled.
        fused: Take updates by `FusedSACUpdate` or `FusedTD3Update`.
        compile: Compile the loss (`torch.compile`) where `fused` does not apply; pays off in
            long runs only, as compiling takes half a minute and a C++ compiler. The noise in
            the loss is then drawn by the compiler's generator: other numbers, as good ones.

    Raises:
        ConfigError: A setting cannot work.
    """

    algorithm: Algorithm = "sac"
    num_envs: int = 16
    num_collectors: int = 1
    physics_threads: int | None = None
    learner_threads: int | None = None
    replay_buffer_n: int = 62_500
    batch_size: int = 256
    learning_starts: int = 250
    init_random: bool = True
    updates_per_step: int = 4
    policy_frequency: int = 1
    sync_collection: bool = False
    restart_workers: int = 0
    env_steps_per_sync: int = 1
    obs_normalization: bool = False
    n_step: int = 1
    next_observation: NextObservation = "stored"
    observation: str = "observation"
    critic_observation: str = "observation"
    hidden: tuple[int, ...] = (256, 256)
    layer_norm: bool = False
    gamma: float = 0.99
    tau: float = 0.005
    lr_actor: float = 3e-4
    lr_critic: float = 3e-4
    lr_alpha: float = 3e-4
    alpha: float = 1.0
    target_noise: float = 0.2
    target_noise_clip: float = 0.5
    noise_std_min: float = 0.05
    noise_std_max: float = 0.4
    reward_scale: float = 1.0
    fused: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_settings(vars(self), _ALLOWED)
        if self.noise_std_min > self.noise_std_max:
            raise ConfigError(
                f"noise_std_min: {self.noise_std_min} (expected at most noise_std_max, "
                f"{self.noise_std_max}). Leave both out for the defaults."
            )
        if self.train_start_threshold > self.capacity:
            raise ConfigError(
                f"replay_buffer_n: {self.replay_buffer_n} (expected at least "
                f"{math.ceil(self.train_start_threshold / self.total_envs)}, as the first update "
                f"needs {self.train_start_threshold} rows). Raise it, or lower learning_starts or "
                "batch_size."
            )

    @property
    def total_envs(self) -> int:
        """Environments of all collectors."""
        return self.num_envs * self.num_collectors

    @property
    def train_start_threshold(self) -> int:
        """Rows before the first update, see `compute_train_start_threshold`."""
        return compute_train_start_threshold(self.batch_size, self.learning_starts, self.total_envs)

    @property
    def init_random_frames(self) -> int:
        """Frames at first, of all collectors, with random actions."""
        return max(self.learning_starts, 0) * self.total_envs if self.init_random else 0

    @property
    def frames_per_tick(self) -> int:
        """Rows that a tick adds to the replay."""
        return self.total_envs * self.env_steps_per_sync

    @property
    def capacity(self) -> int:
        """Rows of the replay."""
        return self.replay_buffer_n * self.total_envs

    @classmethod
    def for_task(cls, task: str, algorithm: Algorithm = "sac", **overrides: Any) -> OffPolicyConfig:
        """Return the settings of a task, with `overrides` on top."""
        own = {**ALGORITHM_DEFAULTS.get(algorithm, {}), **OFF_POLICY_TASKS.get(task, {})}
        return dataclasses.replace(cls(algorithm=algorithm, **own), **overrides)


_ALLOWED: Mapping[str, Allowed] = {
    "algorithm": choice("sac", "td3"),
    "num_envs": integer(),
    "num_collectors": integer(),
    "physics_threads": integer().or_none(),
    "learner_threads": integer().or_none(),
    "replay_buffer_n": integer(),
    "batch_size": integer(),
    "learning_starts": integer(None),
    "init_random": flag(),
    "updates_per_step": integer(),
    "policy_frequency": integer(),
    "sync_collection": flag(),
    "restart_workers": integer(0),
    "env_steps_per_sync": integer(),
    "obs_normalization": flag(),
    "n_step": integer(),
    "next_observation": choice("stored", "derived"),
    "observation": text(),
    "critic_observation": text(),
    "hidden": widths(),
    "layer_norm": flag(),
    "gamma": number(0, 1),
    "tau": number(0, 1),
    "lr_actor": number(above=0),
    "lr_critic": number(above=0),
    "lr_alpha": number(above=0),
    "alpha": number(above=0),
    "target_noise": number(0),
    "target_noise_clip": number(0),
    "noise_std_min": number(0),
    "noise_std_max": number(0),
    "reward_scale": number(above=0),
    "fused": flag(),
    "compile": flag(),
}

ALGORITHM_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sac": {},
    "td3": {"policy_frequency": 2},
}
"""What differs from the defaults, per algorithm."""

_FAST: Mapping[str, Any] = {
    "alpha": 0.1,
    "lr_actor": 1e-3,
    "lr_critic": 1e-3,
    "lr_alpha": 1e-3,
    "obs_normalization": True,
}

OFF_POLICY_TASKS: Mapping[str, Mapping[str, Any]] = {
    "HalfCheetah-v5": {**_FAST, "tau": 0.01},
    "InvertedPendulum-v5": {
        **_FAST,
        "num_envs": 8,
        "learning_starts": 50,
        "hidden": (64, 64),
        "batch_size": 128,
        "gamma": 0.98,
        "tau": 0.02,
    },
}
"""What differs from the defaults, per task."""
