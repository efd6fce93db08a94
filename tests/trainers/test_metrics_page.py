from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import torchrl_unilab

PAGE = Path(__file__).parents[2] / "tutorials" / "metrics.md"
ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
]
NAMES = {row[0] for row in ROWS}
MODULES = [
    module.name
    for module in pkgutil.walk_packages(torchrl_unilab.__path__, "torchrl_unilab.")
    if not module.ispkg and not module.name.endswith("__main__")
]


@pytest.fixture(scope="module")
def logged(appo_run: SimpleNamespace, off_policy_runs: dict[str, Any]) -> dict[str, set[str]]:
    """Names that a short run of each algorithm logs; parts of rewards have the page's name."""
    runs = {"appo": appo_run, **off_policy_runs}
    return {
        algorithm: {
            "reward_TERM" if path.stem.startswith("reward_") else path.stem
            for path in (run.run_dir / "logs").rglob("*.csv")
        }
        for algorithm, run in runs.items()
    }


@pytest.mark.parametrize("algorithm", ["appo", "sac", "td3"])
def test_each_logged_name_stands_on_the_page(logged, algorithm):
    assert logged[algorithm] - NAMES == set()


def test_each_name_on_the_page_is_logged_by_some_run(logged):
    assert NAMES - set().union(*logged.values()) == set()


def test_each_metric_names_the_class_that_computes_it():
    found = {
        name
        for module in MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, type) and value.__module__ == module
    }
    assert {name for *_, source in ROWS for name in source.split("`, `")} <= found


def test_each_metric_has_a_name_a_meaning_a_unit_and_a_source():
    assert all(len(row) == 4 and all(row) for row in ROWS)
    assert len(NAMES) == len(ROWS)
