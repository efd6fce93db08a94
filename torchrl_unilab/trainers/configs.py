"""Settings of APPO, and what differs per task, as data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_unilab.data.rollout_pool import MAX_ROLLOUTS
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.shm.ring import Overflow

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
        tau: Share of the current policy that a target update takes over.
        target_update_freq: Optimiser steps between target updates; None for one per rollout.

    Raises:
        ConfigError: A size is not positive.
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

    def __post_init__(self) -> None:
        """Refuse sizes that cannot work."""
        for name in (
            "num_envs",
            "num_steps",
            "num_collectors",
            "pool",
            "epochs",
            "minibatches",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{name}: {value!r} (expected an integer of at least 1). "
                    "Leave it out for the default."
                )
        if self.pool > MAX_ROLLOUTS:
            raise ConfigError(
                f"pool: {self.pool} (expected at most {MAX_ROLLOUTS}). Use 1 to learn from each "
                "rollout once."
            )
        for name in ("lr", "desired_kl", "max_grad_norm", "reward_scale", "value_clip"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(
                    f"{name}: {value!r} (expected a finite positive number). "
                    "Leave it out for the default."
                )
        for name in ("log_std", "entropy_coeff", "critic_coeff", "rho_bar", "c_bar"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise ConfigError(
                    f"{name}: {value!r} (expected a finite number). Leave it out for the default."
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
