"""Objectives: APPO (IMPACT with V-trace), and lean updates of APPO, SAC and TD3."""

from torchrl_unilab.objectives.appo import APPOLoss
from torchrl_unilab.objectives.fused.appo import FusedAPPOUpdate
from torchrl_unilab.objectives.fused.sac import FusedSACUpdate
from torchrl_unilab.objectives.fused.td3 import FusedTD3Update
from torchrl_unilab.objectives.vtrace import timeout_bootstrap, vtrace

__all__ = [
    "APPOLoss",
    "FusedAPPOUpdate",
    "FusedSACUpdate",
    "FusedTD3Update",
    "timeout_bootstrap",
    "vtrace",
]
