"""Processes, threads and budgets. Imports no torchrl."""

from torchrl_unilab.runtime.budget import ThreadPlan, available_cores, plan_threads

__all__ = ["ThreadPlan", "available_cores", "plan_threads"]
