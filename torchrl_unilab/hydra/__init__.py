"""Hydra: our parts in TorchRL's config groups, and recipes that compose them.

Hydra finds both without an import, by the plugin in `plugins`; importing this package registers
them, too. Neither imports torch. ``python -m torchrl_unilab.hydra --config-name appo`` trains.
"""

from torchrl_unilab.hydra.nodes import register as _register

_register()
