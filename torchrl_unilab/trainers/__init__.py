"""Trainers, their hooks and settings, and whole runs."""

from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.configs.off_policy import OffPolicyConfig, compute_train_start_threshold
from torchrl_unilab.trainers.appo import APPOTrainer
from torchrl_unilab.trainers.evaluation import BackgroundEvaluation, evaluate
from torchrl_unilab.trainers.hooks import PublishWeights
from torchrl_unilab.trainers.off_policy import (
    OffPolicyTrainer,
    build_reward_comparison_metrics,
    replay_buffer_ready_for_learning,
)
from torchrl_unilab.trainers.prefetch import PrefetchReplay
from torchrl_unilab.trainers.reports import EpisodeReturns, LogPolicyLag
from torchrl_unilab.trainers.runs.builders import build_learner, plan_run
from torchrl_unilab.trainers.runs.policy import evaluate_run, load_policy, play_run
from torchrl_unilab.trainers.runs.resume import resume_run
from torchrl_unilab.trainers.runs.train import train_appo, train_off_policy
from torchrl_unilab.trainers.video import Mp4Logger

__all__ = [
    "APPOConfig",
    "APPOTrainer",
    "BackgroundEvaluation",
    "EpisodeReturns",
    "LogPolicyLag",
    "Mp4Logger",
    "OffPolicyConfig",
    "OffPolicyTrainer",
    "PrefetchReplay",
    "PublishWeights",
    "build_learner",
    "build_reward_comparison_metrics",
    "compute_train_start_threshold",
    "evaluate",
    "evaluate_run",
    "load_policy",
    "plan_run",
    "play_run",
    "replay_buffer_ready_for_learning",
    "resume_run",
    "train_appo",
    "train_off_policy",
]
