"""Reference of every metric that a run logs: name, meaning, unit, who computes it.

A run logs no other names, except those that a caller adds with hooks or environment metrics.
`torchrl_unilab.trainers` computes nothing from this table; readers of logs and the tests use it.
"""

from __future__ import annotations

from typing import NamedTuple


class LoggedMetric(NamedTuple):
    """One name in the logs of a run.

    Attributes:
        meaning: What the value says, and over what it is averaged.
        unit: Unit, or the range of a share.
        source: Class of the package that computes it.
    """

    meaning: str
    unit: str
    source: str


_LAG_SHARE = "share of the batches so far whose policy lag was {}"

LOGGED_METRICS: dict[str, LoggedMetric] = {
    # Episodes and speed
    "return": LoggedMetric(
        "mean undiscounted return of the last 64 episodes, of each worker an equal share",
        "reward",
        "CollectorReport",
    ),
    "episode_length": LoggedMetric("mean length of these episodes", "steps", "CollectorReport"),
    "timeout_rate": LoggedMetric(
        "share of these episodes that a time limit ended", "0 to 1", "CollectorReport"
    ),
    "termination_rate": LoggedMetric(
        "share of these episodes that a terminal state ended", "0 to 1", "CollectorReport"
    ),
    "reward_TERM": LoggedMetric(
        "mean over environments of a part of each worker's newest reward, one per name that the "
        "task gives its parts",
        "reward",
        "CollectorReport",
    ),
    "fps": LoggedMetric("frames since training started", "frames/s", "CollectorReport"),
    "fps_physics": LoggedMetric(
        "frames per second that the workers spend in the environment", "frames/s", "CollectorReport"
    ),
    "fps_policy": LoggedMetric(
        "frames per second that the workers spend in the policy", "frames/s", "CollectorReport"
    ),
    "fps_write": LoggedMetric(
        "frames per second that the workers spend writing to shared memory",
        "frames/s",
        "CollectorReport",
    ),
    "fps_wait": LoggedMetric(
        "frames per second that the workers spend waiting for a free slot or a request",
        "frames/s",
        "CollectorReport",
    ),
    "learner_busy": LoggedMetric(
        "share of the time so far in which the learner did not wait for data",
        "0 to 1",
        "BusyTime",
    ),
    "optim_steps": LoggedMetric("optimiser steps so far", "steps", "APPOTrainer"),
    # Policy lag
    "policy_version": LoggedMetric("newest published version", "versions", "LogPolicyLag"),
    "policy_lag": LoggedMetric(
        "published versions that the batch is behind, mean over its frames (APPO), or that the "
        "worker furthest behind is (SAC, TD3)",
        "versions",
        "LogPolicyLag",
    ),
    "policy_lag_max": LoggedMetric("largest policy lag so far", "versions", "LogPolicyLag"),
    "policy_lag_0": LoggedMetric(_LAG_SHARE.format("0"), "0 to 1", "LogPolicyLag"),
    "policy_lag_1": LoggedMetric(_LAG_SHARE.format("1"), "0 to 1", "LogPolicyLag"),
    "policy_lag_2_3": LoggedMetric(_LAG_SHARE.format("2 or 3"), "0 to 1", "LogPolicyLag"),
    "policy_lag_4_7": LoggedMetric(_LAG_SHARE.format("4 to 7"), "0 to 1", "LogPolicyLag"),
    "policy_lag_8_15": LoggedMetric(_LAG_SHARE.format("8 to 15"), "0 to 1", "LogPolicyLag"),
    "policy_lag_16_up": LoggedMetric(_LAG_SHARE.format("16 or more"), "0 to 1", "LogPolicyLag"),
    # Collectors
    "ring_occupancy": LoggedMetric(
        "committed, unread rollouts per slot of the ring", "0 to 1", "APPOCollector"
    ),
    "dropped": LoggedMetric(
        "unread rollouts that were overwritten so far", "rollouts", "APPOCollector"
    ),
    "stale": LoggedMetric(
        "rollouts skipped so far because their policy lag exceeded max_policy_lag",
        "rollouts",
        "APPOCollector",
    ),
    "replay_size": LoggedMetric("transitions in the replay", "rows", "ReplayCollector"),
    "restarts": LoggedMetric("workers replaced so far", "workers", "APPOCollector"),
    # APPO, means over the optimiser steps of a rollout
    "loss_objective": LoggedMetric("clipped surrogate, negated", "advantages", "APPOLoss"),
    "loss_critic": LoggedMetric("weighted half squared value error", "scaled return²", "APPOLoss"),
    "kl": LoggedMetric("KL divergence, target to current policy", "nats", "APPOLoss"),
    "clip_fraction": LoggedMetric(
        "share of samples whose surrogate ratio is clipped", "0 to 1", "APPOLoss"
    ),
    "rho_clip_fraction": LoggedMetric(
        "share of samples whose V-trace ratio exceeds rho_bar", "0 to 1", "APPOLoss"
    ),
    "rho_p99": LoggedMetric(
        "99th percentile of the ratio of target to behaviour policy", "ratio", "APPOTrainer"
    ),
    "explained_variance": LoggedMetric(
        "share of the value targets' variance that the critic explains", "up to 1", "APPOTrainer"
    ),
    "lr": LoggedMetric("learning rate after the rollout's steps", "1", "APPOTrainer"),
    # SAC and TD3, means over the updates of a tick. Where an update leaves the policy out, the
    # policy's are those of its last one.
    "loss_qvalue": LoggedMetric(
        "sum of both critics' value losses", "scaled return²", "OffPolicyTrainer"
    ),
    "q_value": LoggedMetric(
        "mean value that the critics give the batch's actions", "scaled return", "OffPolicyTrainer"
    ),
    "td_error": LoggedMetric(
        "mean absolute temporal-difference error", "scaled return", "OffPolicyTrainer"
    ),
    "loss_actor": LoggedMetric("loss of the policy", "scaled return", "OffPolicyTrainer"),
    "alpha": LoggedMetric("SAC's temperature", "scaled return per nat", "OffPolicyTrainer"),
    "loss_alpha": LoggedMetric("loss of SAC's temperature", "nats", "OffPolicyTrainer"),
    # With `eval_interval`
    "eval_return": LoggedMetric(
        "mean return of whole episodes without exploration", "reward", "BackgroundEvaluation"
    ),
    "eval_length": LoggedMetric("mean length of these episodes", "steps", "BackgroundEvaluation"),
    # APPO and SAC
    "entropy": LoggedMetric("mean entropy of the policy", "nats", "APPOLoss"),
}
"""Every metric by its name in the logs, grouped as above."""
