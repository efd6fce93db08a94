"""Collectors whose workers never wait for the learner's weights."""

from torchrl_unilab.collectors.appo import APPOCollector
from torchrl_unilab.collectors.metrics import CollectorMetrics
from torchrl_unilab.collectors.replay import ReplayCollector

__all__ = ["APPOCollector", "CollectorMetrics", "ReplayCollector"]
