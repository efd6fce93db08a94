"""Rollouts between processes: a shared ring as storage, writer and sampler of TorchRL."""
