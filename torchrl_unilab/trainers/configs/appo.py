"""Settings of APPO, and what differs per task, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_unilab.data.rollout_pool import MAX_ROLLOUTS
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.shm.ring import Overflow
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

__all__ = ["APPO_TASKS", "APPOConfig"]


@dataclass(frozen=True)
class APPOConfig:
    """Settings of one APPO run.

    Attributes:
        num_envs: Environments per collector.
        num_steps: Steps of each environment in a rollout.
        num_collectors: Collector processes.
        physics_threads: Threads that step each collector's environment; None to share out
            the cores.
        pool: Rollouts that are reused together; the oldest is replaced.
        epochs: Passes over the pool per new rollout.
        minibatches: Parts of the pool per pass.
        lr: Initial learning rate; the KL divergence steers it from there.
        desired_kl: KL divergence, target to current policy, to steer towards.
        max_grad_norm: Bound of the gradient's norm.
        reward_scale: Factor on rewards for learning; reported returns are unscaled.
        observation: Key that the actor reads.
        critic_observation: Key that the critic reads; may hold what no actor can know.
        hidden: Widths of the layers of actor and critic.
        log_std: Initial logarithm of the action's standard deviation.
        gamma: Discount.
        lambda_: Decay of V-trace's traces.
        rho_bar: V-trace's bound of the ratio in temporal differences.
        c_bar: V-trace's bound of the ratio in traces.
        clip_epsilon: Bound of the surrogate's ratio.
        value_clip: Bound of a value's move; None leaves it free.
        critic_coeff: Weight of the value loss.
        entropy_coeff: Weight of the entropy bonus.
        fused: Take steps by `FusedAPPOUpdate` where the networks allow.
        compile: Compile the loss (`torch.compile`) where `fused` does not apply; pays off in
            long runs only, as compiling takes half a minute and a C++ compiler.
        slots: Slots of the rollout ring; None for one per collector.
        overflow: What a collector does when no slot is free: ``"block"`` or ``"overwrite"``.
        max_policy_lag: Rollouts that began more published versions ago are dropped.
        lockstep: Collect only when the learner asks: repeatable bit for bit.
        restart_workers: Lost collectors to replace before the loss of one ends the run.
        tau: Share of the current policy that a target update takes over.
        target_update_freq: Optimiser steps between target updates; None for one per rollout.

    Raises:
        ConfigError: A setting cannot work.
    """

    num_envs: int = 64
    num_steps: int = 16
    num_collectors: int = 1
    physics_threads: int | None = None
    pool: int = 1
    epochs: int = 5
    minibatches: int = 4
    lr: float = 1e-3
    desired_kl: float = 0.02
    max_grad_norm: float = 1.0
    reward_scale: float = 0.1
    observation: str = "observation"
    critic_observation: str = "observation"
    hidden: tuple[int, ...] = (64, 64)
    log_std: float = -1.0
    gamma: float = 0.99
    lambda_: float = 0.95
    rho_bar: float = 1.0
    c_bar: float = 1.0
    clip_epsilon: float = 0.2
    value_clip: float | None = None
    critic_coeff: float = 1.0
    entropy_coeff: float = 0.0
    tau: float = 1.0
    target_update_freq: int | None = None
    fused: bool = True
    compile: bool = False
    slots: int | None = None
    overflow: Overflow = "block"
    max_policy_lag: int | None = None
    lockstep: bool = False
    restart_workers: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_settings(vars(self), _ALLOWED)
        if self.minibatches > self.frames_per_rollout:  # the first pool has one rollout
            raise ConfigError(
                f"minibatches: {self.minibatches} (expected at most the {self.frames_per_rollout} "
                f"frames of a rollout, num_envs {self.num_envs} x num_steps {self.num_steps}). "
                "Lower it, or collect more at a time."
            )
        if self.lockstep and self.slots is not None and self.slots < self.num_collectors:
            raise ConfigError(
                f"slots: {self.slots} in lock-step (expected at least num_collectors, "
                f"{self.num_collectors}). Leave it out."
            )

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """The keys that the networks read, each once."""
        return tuple(dict.fromkeys((self.observation, self.critic_observation)))

    @property
    def frames_per_rollout(self) -> int:
        """Frames of one rollout of one collector."""
        return self.num_envs * self.num_steps

    @classmethod
    def for_task(cls, task: str, **overrides: Any) -> APPOConfig:
        """Return the settings of a task, with `overrides` on top."""
        return dataclasses.replace(cls(**APPO_TASKS.get(task, {})), **overrides)


_ALLOWED: Mapping[str, Allowed] = {
    "num_envs": integer(),
    "num_steps": integer(),
    "num_collectors": integer(),
    "physics_threads": integer().or_none(),
    "pool": integer(1, MAX_ROLLOUTS),
    "epochs": integer(),
    "minibatches": integer(),
    "lr": number(above=0),
    "desired_kl": number(above=0),
    "max_grad_norm": number(above=0),
    "reward_scale": number(above=0),
    "observation": text(),
    "critic_observation": text(),
    "hidden": widths(),
    "log_std": number(),
    "gamma": number(0, 1),
    "lambda_": number(0, 1),
    "rho_bar": number(above=0),
    "c_bar": number(0),
    "clip_epsilon": number(0),
    "value_clip": number(above=0).or_none(),
    "critic_coeff": number(0),
    "entropy_coeff": number(),
    "tau": number(0, 1),
    "target_update_freq": integer().or_none(),
    "fused": flag(),
    "compile": flag(),
    "slots": integer().or_none(),
    "overflow": choice("block", "overwrite"),
    "max_policy_lag": integer(0).or_none(),
    "lockstep": flag(),
    "restart_workers": integer(0),
}

APPO_TASKS: Mapping[str, Mapping[str, Any]] = {
    "HalfCheetah-v5": {},
    "Hopper-v5": {"num_steps": 32, "epochs": 8, "gamma": 0.995},
    "Walker2d-v5": {},
    "InvertedPendulum-v5": {"num_envs": 16, "num_steps": 32},
    "QuadrupedWalk": {
        "critic_observation": "critic_observation",
        "epochs": 8,
        "reward_scale": 0.3,
        "log_std": -1.5,
    },
}
"""What differs from the defaults, per task."""
