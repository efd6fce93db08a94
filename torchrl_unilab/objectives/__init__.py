"""Objectives: APPO (IMPACT with V-trace), and lean updates of APPO, SAC and TD3."""

from torchrl_unilab.objectives.appo import APPOLoss, kl_adapted_lr
from torchrl_unilab.objectives.fused.appo import STATISTICS, FusedAPPOUpdate
from torchrl_unilab.objectives.fused.sac import FusedSACUpdate
from torchrl_unilab.objectives.fused.td3 import FusedTD3Update
from torchrl_unilab.objectives.vtrace import timeout_bootstrap, vtrace

__all__ = [
    "STATISTICS",
    "APPOLoss",
    "FusedAPPOUpdate",
    "FusedSACUpdate",
    "FusedTD3Update",
    "kl_adapted_lr",
    "timeout_bootstrap",
    "vtrace",
]
