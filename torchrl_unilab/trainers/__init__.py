"""Trainers, their hooks and settings, and whole runs."""

from torchrl_unilab.trainers.appo import APPOTrainer
from torchrl_unilab.trainers.configs.appo import APPO_TASKS, APPOConfig
from torchrl_unilab.trainers.configs.off_policy import OFF_POLICY_TASKS, OffPolicyConfig
from torchrl_unilab.trainers.hooks import BusyTime, PublishWeights
from torchrl_unilab.trainers.off_policy import (
    OffPolicyTrainer,
    build_reward_comparison_metrics,
    compute_train_start_threshold,
    replay_buffer_ready_for_learning,
)
from torchrl_unilab.trainers.prefetch import PrefetchReplay
from torchrl_unilab.trainers.reports import (
    CollectorReport,
    EpisodeReturns,
    LearningCurve,
    LogPolicyLag,
    StopWhen,
)
from torchrl_unilab.trainers.runs.budget import RunBudget
from torchrl_unilab.trainers.runs.builders import Learner, build_learner, plan_run
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints
from torchrl_unilab.trainers.runs.playback import play_run
from torchrl_unilab.trainers.runs.resume import resume_run
from torchrl_unilab.trainers.runs.saved import evaluate, evaluate_run
from torchrl_unilab.trainers.runs.train import train_appo, train_off_policy
from torchrl_unilab.trainers.runs.video import Mp4Logger, write_video

__all__ = [
    "APPO_TASKS",
    "APPOConfig",
    "APPOTrainer",
    "BusyTime",
    "CollectorReport",
    "EpisodeReturns",
    "Learner",
    "LearningCurve",
    "LogPolicyLag",
    "Mp4Logger",
    "OFF_POLICY_TASKS",
    "OffPolicyConfig",
    "OffPolicyTrainer",
    "PrefetchReplay",
    "PublishWeights",
    "RunBudget",
    "RunCheckpoints",
    "StopWhen",
    "build_learner",
    "build_reward_comparison_metrics",
    "compute_train_start_threshold",
    "evaluate",
    "evaluate_run",
    "plan_run",
    "play_run",
    "replay_buffer_ready_for_learning",
    "resume_run",
    "train_appo",
    "train_off_policy",
    "write_video",
]
