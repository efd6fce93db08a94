"""Objectives: APPO (IMPACT with V-trace)."""

from torchrl_unilab.objectives.appo import APPOLoss, kl_adapted_lr
from torchrl_unilab.objectives.fused import STATISTICS, FusedAPPOUpdate
from torchrl_unilab.objectives.vtrace import timeout_bootstrap, vtrace

__all__ = [
    "STATISTICS",
    "APPOLoss",
    "FusedAPPOUpdate",
    "kl_adapted_lr",
    "timeout_bootstrap",
    "vtrace",
]
