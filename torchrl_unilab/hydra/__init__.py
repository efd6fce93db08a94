"""Hydra: our parts in TorchRL's config groups, and recipes that compose them.

Hydra finds both without an import, by the plugin in `plugins`, which imports no torch.
``python -m torchrl_unilab.hydra --config-name appo`` trains.
"""
