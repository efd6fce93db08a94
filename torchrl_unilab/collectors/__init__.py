"""Collectors whose workers never wait for the learner's weights."""

from torchrl_unilab.collectors.replay import ReplayCollector
from torchrl_unilab.collectors.rollouts import APPOCollector

__all__ = ["APPOCollector", "ReplayCollector"]
