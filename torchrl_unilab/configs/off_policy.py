"""Settings of SAC and TD3, and what differs per task, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchrl_unilab.configs.settings import (
    AlgorithmConfig,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Threads,
    Widths,
    setting,
)
from torchrl_unilab.errors import ConfigError

Algorithm = Literal["sac", "td3"]
MatmulDtype = Literal["auto", "float32", "bfloat16"]


def compute_train_start_threshold(batch_size: int, learning_starts: int, num_envs: int) -> int:
    """Return how many rows the replay must have before the first update.

    Args:
        batch_size: Rows of a minibatch.
        learning_starts: Steps of each environment; below 0 counts as 0.
        num_envs: Environments.

    Examples:
        >>> from torchrl_unilab.trainers import compute_train_start_threshold
        >>> compute_train_start_threshold(256, 100, 16)
        1600
    """
    return max(batch_size, max(learning_starts, 0) * num_envs)


@dataclass(frozen=True)
class OffPolicyConfig(AlgorithmConfig):
    """Settings of one SAC or TD3 run.

    A *tick* is ``env_steps_per_sync`` steps of all environments, followed by ``updates_per_step``
    updates, each on one minibatch. ``torchrl-unilab train sac --help`` lists all settings with
    meaning, range and default; so does the help text in the metadata of each of
    ``dataclasses.fields(OffPolicyConfig)``.

    Raises:
        ConfigError: A setting cannot work.

    Examples:
        >>> from torchrl_unilab.trainers import OffPolicyConfig
        >>> OffPolicyConfig.for_task("HalfCheetah-v5", "td3", num_envs=8).policy_frequency
        2
    """

    stagger: ClassVar[bool] = False  # updates draw from the whole replay, not one window of time
    pull: ClassVar[Literal["rollout"]] = "rollout"  # a tick has one step, or a few

    algorithm: Algorithm = setting("sac", "the algorithm")
    learner_threads: Threads | None = setting(
        None,
        "threads of the learner; a fused update computes the policy's gradient on half of them, "
        "beside the critics'; None: 2, or 1 on a single core",
    )
    replay_buffer_n: Count = setting(62_500, "rows of the replay per environment")
    batch_size: Count = setting(256, "rows of a minibatch")
    learning_starts: int = setting(
        250, "steps of each environment before the first update; below 0 counts as 0"
    )
    init_random: bool = setting(
        True, "take random actions, not the policy's, up to learning_starts"
    )
    updates_per_step: Count = setting(
        4, "updates per tick, which is env_steps_per_sync steps of all environments"
    )
    policy_frequency: Count = setting(1, "critic updates per update of the policy")
    sync_collection: bool = setting(
        False,
        "collect only when the learner asks: repeatable bit for bit; otherwise collectors take the "
        "next tick's steps while the learner updates",
    )
    prefetch: bool = setting(
        False,
        "pack the next tick's sample in a thread during this tick's updates; it then has no rows "
        "of the next tick; for a learner that leaves a core idle",
    )
    env_steps_per_sync: Count = setting(1, "steps of each environment in a tick")
    obs_normalization: bool = setting(
        False, "normalise observations with running statistics; each row counts once"
    )
    n_step: Count = setting(
        1, "steps of the returns: number of rewards summed before a value is added"
    )
    hidden: Widths = setting((256, 256), "widths of the actor's and the critics' hidden layers")
    layer_norm: bool = setting(False, "normalise the inputs of the hidden layers' relus")
    tau: Fraction = setting(
        0.005, "share of the networks that is mixed into their targets per update"
    )
    lr_actor: Positive = setting(3e-4, "learning rate of the actor")
    lr_critic: Positive = setting(3e-4, "learning rate of the critics")
    lr_alpha: Positive = setting(3e-4, "learning rate of SAC's temperature", of="sac")
    anneal: Fraction = setting(
        0.0, "last share of the run, in which learning rates fall linearly to 0; 0: constant rates"
    )
    alpha: Positive = setting(
        1.0,
        "SAC's initial temperature; it is steered towards an entropy of -1 per dimension of "
        "actions scaled to [-1, 1]",
        of="sac",
    )
    target_noise: NonNegative = setting(
        0.2,
        "standard deviation of TD3's noise on target actions, in half-ranges of the action",
        of="td3",
    )
    target_noise_clip: NonNegative = setting(
        0.5, "bound of that noise, in half-ranges of the action", of="td3"
    )
    noise_std_min: NonNegative = setting(
        0.05, "lowest standard deviation of TD3's exploration noise, one per environment", of="td3"
    )
    noise_std_max: NonNegative = setting(
        0.4, "highest standard deviation of TD3's exploration noise", of="td3"
    )
    reward_scale: Positive = setting(
        1.0, "factor on rewards for learning; reported returns are unscaled"
    )
    fused: bool = setting(True, "update by `FusedSACUpdate` or `FusedTD3Update`")
    matmul_dtype: MatmulDtype = setting(
        "float32",
        "dtype of the hidden layers' matrix products, only in fused updates; auto: bfloat16 on a "
        "CPU that multiplies it in hardware (amx_bf16, avx512_bf16), else float32",
    )
    compile: bool = setting(
        False,
        "torch.compile the update, which then takes up to a seventh (bfloat16: a third) less time; "
        "needs a C++ compiler, and 15 s before the first update, or 3 s with the cache of an "
        "earlier run; if `fused` does not apply, the noise has other random numbers, and a Ctrl-C "
        "may be lost",
    )

    def __post_init__(self) -> None:
        """Check each setting, then those that depend on each other."""
        super().__post_init__()
        if self.noise_std_min > self.noise_std_max:
            raise ConfigError(
                f"noise_std_min: {self.noise_std_min} (expected at most noise_std_max, "
                f"{self.noise_std_max}). Leave both out for the defaults."
            )
        replaced = "a run with a replaced collector is not repeatable"
        self.check_exclusive("restart_workers", "sync_collection", replaced)
        found = "what a thread finds in the replay is not repeatable"
        self.check_exclusive("prefetch", "sync_collection", found)
        if self.min_frames > self.capacity:
            raise ConfigError(
                f"replay_buffer_n: {self.replay_buffer_n} (expected at least "
                f"{math.ceil(self.min_frames / self.total_envs)}, as the first update "
                f"needs {self.min_frames} rows). Raise it, or lower learning_starts or "
                "batch_size."
            )

    def lr_share(self, progress: float) -> float:
        """Return the share of the learning rates that is left after a share `progress` of the run.

        Examples:
            >>> from torchrl_unilab.trainers import OffPolicyConfig
            >>> config = OffPolicyConfig(anneal=0.5)
            >>> config.lr_share(0.25), config.lr_share(0.75), config.lr_share(1.0)
            (1.0, 0.5, 0.0)
        """
        return min(1.0, max(0.0, 1 - progress) / self.anneal) if self.anneal else 1.0

    @property
    def total_envs(self) -> int:
        """Environments of all collectors."""
        return self.num_envs * self.num_collectors

    @property
    def init_random_frames(self) -> int:
        """Frames with random actions at the start, of all collectors."""
        return max(self.learning_starts, 0) * self.total_envs if self.init_random else 0

    @property
    def min_frames(self) -> int:
        """Frames up to the first update, which needs that many rows in the replay."""
        return compute_train_start_threshold(self.batch_size, self.learning_starts, self.total_envs)

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
        own = {
            **ALGORITHM_DEFAULTS.get(algorithm, {}),
            **OFF_POLICY_TASKS.get(task, {}),
            **ALGORITHM_TASKS.get((algorithm, task), {}),
        }
        return cls(algorithm=algorithm, **own).replace(**overrides)


ALGORITHM_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"sac": {}, "td3": {"policy_frequency": 2}}
"""What differs from the defaults, per algorithm."""

_LOW_RATES = {"lr_actor": 3e-4, "lr_critic": 3e-4}
_HIGH_RATES = {"lr_actor": 1e-3, "lr_critic": 1e-3}
_FAST = {"alpha": 0.1, **_HIGH_RATES, "lr_alpha": 1e-3, "obs_normalization": True}

# Half an update per frame, of half the rows: critics lag behind a robot that falls.
_MANY_UPDATES = {
    **_FAST,
    "tau": 0.01,
    "updates_per_step": 8,
    "batch_size": 128,
    "policy_frequency": 2,
}

OFF_POLICY_TASKS: Mapping[str, Mapping[str, Any]] = {
    "HalfCheetah-v5": {**_FAST, "tau": 0.01},
    # Rewards of three steps: a fall is felt sooner. With layer norm it learnt a fifth as much.
    "Walker2d-v5": {**_MANY_UPDATES, "n_step": 3},
    # With running statistics of the observations it stood still at 280.
    "Hopper-v5": {**_MANY_UPDATES, "n_step": 3, "obs_normalization": False},
    # Layer norm trebled it; rewards of three steps halved that.
    "Ant-v5": {**_MANY_UPDATES, "layer_norm": True},
    "Humanoid-v5": {**_MANY_UPDATES, "layer_norm": True, "obs_normalization": False},
    # A stroke pays off after seconds. With gamma 0.998 and a quarter of the updates it stood still.
    "Swimmer-v5": {"gamma": 0.9999, "updates_per_step": 16, "learning_starts": 625},
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

_EVEN_NOISE = {"noise_std_min": 0.1, "noise_std_max": 0.1}

ALGORITHM_TASKS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    # With half an update of 128 rows per frame it had a third of the return after 150,000 frames.
    ("sac", "Humanoid-v5"): {
        "updates_per_step": 16,
        "batch_size": 256,
        **_LOW_RATES,
        "lr_alpha": 3e-4,
    },
    # With half an update of 128 rows per frame it had two fifths of the return after 300,000.
    ("td3", "Ant-v5"): {"updates_per_step": 16, "batch_size": 256, **_LOW_RATES, **_EVEN_NOISE},
    # With 16 environments, whatever the steps and the updates, it stood still at 300 to 400.
    ("td3", "Hopper-v5"): {
        "num_envs": 4,
        "replay_buffer_n": 250_000,
        "updates_per_step": 4,
        "n_step": 1,
        **_LOW_RATES,
        "batch_size": 256,
        "tau": 0.005,
        **_EVEN_NOISE,
    },
    # With 0.9999 values are never learnt in full: a seed swam at 329, and forgot it.
    ("td3", "Swimmer-v5"): {"gamma": 0.998, **_HIGH_RATES, **_EVEN_NOISE},
}
"""What differs for one algorithm on a task, on top of both."""
