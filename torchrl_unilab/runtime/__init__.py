"""Processes, threads and budgets. Imports no torchrl."""

from torchrl_unilab.runtime.budget import ThreadPlan, available_cores, plan_threads
from torchrl_unilab.runtime.workers import Link, WorkerGroup

__all__ = ["Link", "ThreadPlan", "WorkerGroup", "available_cores", "plan_threads"]
