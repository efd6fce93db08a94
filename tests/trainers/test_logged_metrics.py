from __future__ import annotations

import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest

import torchrl_unilab
from torchrl_unilab.trainers.logged_metrics import LOGGED_METRICS

MODULES = [
    module.name
    for module in pkgutil.walk_packages(torchrl_unilab.__path__, "torchrl_unilab.")
    if not module.ispkg and not module.name.endswith("__main__")
]


@pytest.fixture(scope="module")
def logged(appo_run: SimpleNamespace, off_policy_runs: dict[str, Any]) -> dict[str, set[str]]:
    """Names that a short run of each algorithm logs; parts of rewards have the table's name."""
    runs = {"appo": appo_run, **off_policy_runs}
    return {
        algorithm: {
            "reward_TERM" if path.stem.startswith("reward_") else path.stem
            for path in (run.run_dir / "logs").rglob("*.csv")
        }
        for algorithm, run in runs.items()
    }


@pytest.mark.parametrize("algorithm", ["appo", "sac", "td3"])
def test_each_logged_name_stands_in_the_table(logged, algorithm):
    assert logged[algorithm] - LOGGED_METRICS.keys() == set()


def test_each_name_of_the_table_is_logged_by_some_run(logged):
    assert LOGGED_METRICS.keys() - set().union(*logged.values()) == set()


def test_each_metric_names_the_class_that_computes_it():
    found = {
        name
        for module in MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, type) and value.__module__ == module
    }
    assert {metric.source for metric in LOGGED_METRICS.values()} <= found


def test_each_metric_has_a_meaning_and_a_unit():
    assert all(metric.meaning and metric.unit for metric in LOGGED_METRICS.values())
