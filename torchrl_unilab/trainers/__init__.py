"""Trainers, their hooks and settings, and whole runs."""

from torchrl_unilab.trainers.appo import APPOTrainer
from torchrl_unilab.trainers.configs import APPO_TASKS, APPOConfig
from torchrl_unilab.trainers.evaluation import evaluate
from torchrl_unilab.trainers.hooks import (
    BusyTime,
    CollectorReport,
    EpisodeReturns,
    LearningCurve,
    LogPolicyLag,
    PublishWeights,
    StopWhen,
)
from torchrl_unilab.trainers.runs import evaluate_run, train_appo

__all__ = [
    "APPO_TASKS",
    "APPOConfig",
    "APPOTrainer",
    "BusyTime",
    "CollectorReport",
    "EpisodeReturns",
    "LearningCurve",
    "LogPolicyLag",
    "PublishWeights",
    "StopWhen",
    "evaluate",
    "evaluate_run",
    "train_appo",
]
