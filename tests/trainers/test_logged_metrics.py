from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import torchrl_unilab
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig, train_appo, train_off_policy
from torchrl_unilab.trainers.logged_metrics import LOGGED_METRICS

QUIET = {"progress_bar": False, "eval_episodes": 1, "announce": lambda _: None}
ENV = "InvertedPendulum-v5"
MODULES = [
    module.name
    for module in pkgutil.walk_packages(torchrl_unilab.__path__, "torchrl_unilab.")
    if not module.ispkg and not module.name.endswith("__main__")
]


def _appo(run_dir: Path) -> None:
    config = APPOConfig(num_envs=8, num_steps=16, epochs=1, minibatches=1, hidden=(8,))
    train_appo(ENV, frames=2048, run_dir=run_dir, config=config, **QUIET)


def _off_policy(run_dir: Path) -> None:
    config = OffPolicyConfig(
        run_dir.name,
        num_envs=4,
        batch_size=16,
        learning_starts=5,
        replay_buffer_n=1000,
        hidden=(8,),
    )
    train_off_policy(ENV, frames=400, run_dir=run_dir, config=config, **QUIET)


RUNS = {"appo": _appo, "sac": _off_policy, "td3": _off_policy}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names that a short run of each algorithm logs."""
    names = {}
    for algorithm, run in RUNS.items():
        run_dir = tmp_path_factory.mktemp("runs") / algorithm
        run(run_dir)
        names[algorithm] = {path.stem for path in (run_dir / "logs").rglob("*.csv")}
    return names


@pytest.mark.parametrize("algorithm", RUNS)
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
