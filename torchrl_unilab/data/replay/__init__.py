"""Transitions in shared memory, one packed row each, for TorchRL's replay buffers."""
