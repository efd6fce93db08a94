"""Settings of runs: one line each, with type, default and help text.

Nothing here imports torch, so that the command line and Hydra know all settings at once.
"""

from torchrl_unilab.configs.algorithms import SETTINGS
from torchrl_unilab.configs.appo import APPOConfig
from torchrl_unilab.configs.off_policy import OffPolicyConfig
from torchrl_unilab.configs.run import Config, RunConfig

__all__ = ["SETTINGS", "APPOConfig", "Config", "OffPolicyConfig", "RunConfig"]
