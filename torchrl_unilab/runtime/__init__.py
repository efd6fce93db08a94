"""Processes, threads, budgets and traces. Imports no torchrl."""

from torchrl_unilab.runtime.budget import MemoryBudget

__all__ = ["MemoryBudget"]
