"""Processes, threads, budgets and traces. Imports no torchrl."""

from torchrl_unilab.runtime.budget import (
    MemoryBudget,
    MemoryItem,
    MemoryLimit,
    ThreadPlan,
    available_cores,
    plan_threads,
)
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.trace import Tracer, TraceSettings
from torchrl_unilab.runtime.workers import WorkerGroup

__all__ = [
    "Link",
    "MemoryBudget",
    "MemoryItem",
    "MemoryLimit",
    "ThreadPlan",
    "TraceSettings",
    "Tracer",
    "WorkerGroup",
    "available_cores",
    "plan_threads",
]
