"""Processes, ranks, threads, budgets and traces. Imports no torchrl."""

from torchrl_unilab.runtime.budget import MemoryBudget
from torchrl_unilab.runtime.ranks import Ranks
from torchrl_unilab.runtime.workers import WorkerGroup

__all__ = ["MemoryBudget", "Ranks", "WorkerGroup"]
