"""Shared-memory weight sync and asynchronous training for TorchRL.

Public names live in the sub-packages that mirror TorchRL's: `weight_update`, `envs`,
`modules`, `objectives`, `trainers`. Importing this package starts nothing.
"""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("torchrl-unilab")
