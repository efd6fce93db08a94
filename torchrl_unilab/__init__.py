"""Shared-memory weight sync and asynchronous training for TorchRL.

The names of daily use are here, imported when they are first asked for; all public names live in
the sub-packages that mirror TorchRL's. Importing this package starts nothing and imports no torch.

Example:
    >>> import torchrl_unilab
    >>> torchrl_unilab.APPOConfig.for_task("Hopper-v5").epochs
    10
"""

from __future__ import annotations

import importlib
import typing
from importlib.metadata import version

if typing.TYPE_CHECKING:  # what editors and type checkers see
    from torchrl_unilab.collectors import APPOCollector, ReplayCollector
    from torchrl_unilab.data import (
        DoubleBufferReplayPipeline,
        PackedReplayStorage,
        RolloutRingStorage,
    )
    from torchrl_unilab.envs import MujocoBatchEnv, make_task
    from torchrl_unilab.objectives import APPOLoss
    from torchrl_unilab.trainers import (
        APPOConfig,
        APPOTrainer,
        OffPolicyConfig,
        OffPolicyTrainer,
        evaluate_run,
        load_policy,
        play_run,
        resume_run,
        train_appo,
        train_off_policy,
    )
    from torchrl_unilab.weight_update import UniLabShmScheme, UniLabShmTransport

__all__ = [
    "APPOCollector",
    "APPOConfig",
    "APPOLoss",
    "APPOTrainer",
    "DoubleBufferReplayPipeline",
    "MujocoBatchEnv",
    "OffPolicyConfig",
    "OffPolicyTrainer",
    "PackedReplayStorage",
    "ReplayCollector",
    "RolloutRingStorage",
    "UniLabShmScheme",
    "UniLabShmTransport",
    "evaluate_run",
    "load_policy",
    "make_task",
    "play_run",
    "resume_run",
    "train_appo",
    "train_off_policy",
]

__version__ = version("torchrl-unilab")

# Each imports those before it, so that a search imports little that the name does not need.
_PACKAGES = ("weight_update", "data", "envs", "objectives", "collectors", "trainers")


def __getattr__(name: str) -> typing.Any:
    if name in __all__:
        for package in _PACKAGES:
            module = importlib.import_module(f"{__name__}.{package}")
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
