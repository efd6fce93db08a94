"""Objectives: APPO (IMPACT with V-trace)."""

from torchrl_unilab.objectives.appo import APPOLoss, kl_adapted_lr
from torchrl_unilab.objectives.vtrace import vtrace

__all__ = ["APPOLoss", "kl_adapted_lr", "vtrace"]
