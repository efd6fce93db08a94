"""Settings of APPO, and what each task changes of them, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from torchrl_unilab.checks import as_integer
from torchrl_unilab.configs.settings import (
    AlgorithmConfig,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Widths,
    setting,
)
from torchrl_unilab.errors import ConfigError

MAX_POOL = 8
"""Rollouts that the pool holds at most."""
Pool = Annotated[int, Field(ge=1, le=MAX_POOL, description=f"an integer within [1, {MAX_POOL}]")]
Correlation = Annotated[
    float, Field(ge=0, le=0.999, description="a finite number within [0, 0.999]")
]
Pull = Literal["step", "rollout"]
"""What a run offers of `UniLabShmScheme`'s `pull`: without ``"manual"``, as no run calls it."""


@dataclass(frozen=True)
class APPOConfig(AlgorithmConfig):
    """Settings of one APPO run.

    ``torchrl-unilab train appo --help`` lists them with meaning, range and default; so does the
    help text in the metadata of each of ``dataclasses.fields(APPOConfig)``.

    Raises:
        ConfigError: A setting cannot work.

    Examples:
        >>> from torchrl_unilab.trainers import APPOConfig
        >>> APPOConfig.for_task("Hopper-v5", num_envs=32).epochs
        10
    """

    algorithm: ClassVar[str] = "appo"
    learner_threads: ClassVar[int] = 1  # small networks run fastest on one thread
    min_frames: ClassVar[int] = 1

    num_envs: Count = setting(64, "environments per collector")
    num_steps: Count = setting(16, "steps of each environment in a rollout")
    pool: Pool = setting(1, "rollouts that are reused together; the oldest is replaced")
    epochs: Count = setting(10, "passes over the pool per new rollout")
    minibatches: Count = setting(8, "minibatches per pass over the pool")
    lr: Positive = setting(
        3e-4,
        "initial and highest learning rate; adapted by the KL divergence, down to 1e-5, or to "
        "the annealed bound if that is lower",
    )
    anneal: Fraction = setting(
        1.0,
        "last share of the run, in which the highest learning rate falls linearly to 0; 0: "
        "constant rate",
    )
    desired_kl: Positive = setting(
        0.02, "KL divergence, target to current policy, that the learning rate is steered to"
    )
    max_grad_norm: Positive = setting(1.0, "upper bound of the gradient's norm")
    reward_scale: Positive = setting(
        0.1, "factor on rewards for learning; reported returns are unscaled"
    )
    hidden: Widths = setting((64, 64), "widths of the actor's and the critic's hidden layers")
    log_std: float = setting(0.0, "initial log standard deviation of the actions")
    final_log_std: float | None = setting(
        None,
        "upper bound of the log standard deviation at the end; the bound moves there linearly from "
        "log_std, while the rate falls, or over the whole run with anneal 0; None: no bound",
    )
    noise_correlation: Correlation = setting(
        0.0,
        "correlation of an environment's exploration noise with its previous step; 0: white noise",
    )
    final_gamma: Fraction | None = setting(
        None,
        "discount at the end; the horizon, 1 / (1 - gamma), changes geometrically from that of "
        "gamma to that of final_gamma; None: gamma is constant",
    )
    lambda_: Fraction = setting(0.95, "decay of V-trace's traces")
    rho_bar: Positive = setting(1.0, "V-trace's bound of the ratio in temporal differences")
    c_bar: NonNegative = setting(1.0, "V-trace's bound of the ratio in traces")
    clip_epsilon: NonNegative = setting(0.2, "bound of the surrogate's ratio")
    value_clip: Positive | None = setting(None, "bound of a value's change; None leaves it free")
    critic_coeff: NonNegative = setting(1.0, "weight of the value loss")
    entropy_coeff: float = setting(0.0, "weight of the entropy bonus")
    tau: Fraction = setting(
        1.0, "share of the current policy that is mixed into the target at an update; 1: copy"
    )
    target_update_freq: Count | None = setting(
        None, "optimiser steps between target updates; None: once per rollout"
    )
    fused: bool = setting(True, "update by `FusedAPPOUpdate` if it supports the networks")
    compile: bool = setting(
        False,
        "torch.compile the loss if `fused` does not apply; takes half a minute and a C++ "
        "compiler, so it pays off only in long runs; a Ctrl-C may be lost in it",
    )
    pull: Pull = setting(
        "step",
        "when collectors take over newly published weights: before each step, or only at the start "
        "of a rollout, so that one policy acts in all of it",
    )
    stagger: bool = setting(
        True, "draw the first episodes' time limits at random, so that not all end in one step"
    )
    slots: Count | None = setting(None, "slots of the rollout ring; None: one per collector")
    overflow: Literal["overwrite", "block"] = setting(
        "block",
        "what a collector does without a free slot: block waits for one, overwrite drops its "
        "oldest unread rollout; with lockstep always block",
    )
    max_policy_lag: Natural | None = setting(
        None, "published versions after which a rollout is dropped; None keeps all"
    )
    lockstep: bool = setting(False, "collect only when the learner asks: repeatable bit for bit")

    def __post_init__(self) -> None:
        """Check each setting, then those that depend on each other."""
        super().__post_init__()
        replaced = "a run with a replaced collector is not repeatable"
        self.check_exclusive("restart_workers", "lockstep", replaced)
        # The first pool has one rollout.
        remedy = "Lower it, or collect rollouts of more frames, num_envs x num_steps."
        as_integer("minibatches", self.minibatches, remedy, most=self.frames_per_rollout)
        if self.final_gamma is not None and 1.0 in (self.gamma, self.final_gamma):
            raise ConfigError(
                f"final_gamma: {self.final_gamma} with gamma {self.gamma} (expected both below 1: "
                "no horizon grows to or from an infinite one). Use 0.998, or leave it out."
            )
        if self.lockstep and self.slots is not None:
            remedy = "Leave it out, for one per collector."
            as_integer("slots in lock-step", self.slots, remedy, least=self.num_collectors)

    @property
    def frames_per_rollout(self) -> int:
        """Frames of one rollout of one collector."""
        return self.num_envs * self.num_steps

    def highest_lr(self, progress: float) -> float:
        """Return the highest learning rate after a share `progress` of the run."""
        return self.lr * self._remaining(progress) if self.anneal else self.lr

    def discount(self, progress: float) -> float:
        """Return the discount after a share `progress` of the run.

        A rising discount: François-Lavet et al. 2015, "How to Discount Deep Reinforcement
        Learning: Towards New Dynamic Strategies", https://arxiv.org/abs/1512.02011. There it
        rises by a rate of its own; here by the share of the run.
        """
        if self.final_gamma is None:
            return self.gamma
        done = min(1.0, max(0.0, progress))
        return 1.0 - math.pow(1 - self.gamma, 1 - done) * math.pow(1 - self.final_gamma, done)

    def highest_log_std(self, progress: float) -> float:
        """Return the bound of the log standard deviation after a share `progress` of the run.

        Infinity where `final_log_std` is None.
        """
        if self.final_log_std is None:
            return math.inf
        return self.final_log_std + (self.log_std - self.final_log_std) * self._remaining(progress)

    def _remaining(self, progress: float) -> float:
        """Return the share of rate and noise that is left to anneal: 1 at first, 0 at the end."""
        return min(1.0, max(0.0, 1 - progress) / (self.anneal or 1.0))

    @classmethod
    def for_task(cls, task: str, **overrides: Any) -> APPOConfig:
        """Return the settings of a task, with `overrides` on top."""
        return cls(**APPO_TASKS.get(task, {})).replace(**overrides)


_LARGE_STEPS = {"epochs": 5, "minibatches": 4, "lr": 1e-3, "log_std": -1.0, "anneal": 0.0}
"""Few large steps of a policy with little noise: fastest where no seed stands still at first."""

_LONG_WINDOWS = {"num_envs": 16, "num_steps": 128, "minibatches": 16}

# Noise makes them fall over, and is not needed at the end.
_NOISE_ENDS = {"anneal": 0.3, "final_log_std": -4.0}

APPO_TASKS: Mapping[str, Mapping[str, Any]] = {
    "HalfCheetah-v5": {**_LARGE_STEPS, **_NOISE_ENDS},
    "Hopper-v5": {
        **_LONG_WINDOWS,
        "lambda_": 0.98,
        "desired_kl": 0.01,  # a gait that was found is lost again by larger steps
        # At 0.99 a fast hop that falls after 400 steps is worth one that lasts; at 0.995 from
        # the first frame on a beginner stands still.
        "final_gamma": 0.998,
        "final_log_std": -2.5,  # noise makes it fall
    },
    # In windows of 16 steps one seed of eight stays at a gait that falls, or at a slow one.
    "Walker2d-v5": {**_LONG_WINDOWS, "anneal": 0.0, "reward_scale": 0.03},
    "Ant-v5": {"log_std": -0.5, **_NOISE_ENDS},
    # Actions reach from -0.4 to 0.4.
    "Humanoid-v5": {"log_std": -1.0, **_NOISE_ENDS},
    "HumanoidStandup-v5": {"log_std": -1.0},
    # Less noise is enough, and costs less of the return.
    "Reacher-v5": {"log_std": -1.0},
    "InvertedDoublePendulum-v5": {"log_std": -1.0},
    "Pusher-v5": {},
    # A stroke pays off after seconds, and no episode ends before its time limit: a window is a
    # whole episode, rewards count over it (lambda), and values reach little further (gamma).
    "Swimmer-v5": {
        "num_envs": 4,
        "num_steps": 1024,
        "minibatches": 16,
        "lr": 6e-4,
        "anneal": 0.0,
        "gamma": 0.998,
        "lambda_": 0.997,
        "reward_scale": 0.03,
        "noise_correlation": 0.8,  # white noise moves it on average nowhere
    },
    # The deviation becomes so small that a step of the full rate can undo what was learnt.
    "InvertedPendulum-v5": {**_LARGE_STEPS, "num_envs": 16, "num_steps": 32, "anneal": 1.0},
    "QuadrupedWalk": {
        **_LARGE_STEPS,
        "critic_observation": "critic_observation",
        "epochs": 8,
        "reward_scale": 0.3,
        "log_std": -1.5,
    },
}
"""What differs from the defaults, per task."""
