from __future__ import annotations

import pytest

from torchrl_unilab.configs import SETTINGS, benchmark_results
from torchrl_unilab.configs.benchmark_results import RESULTS, results_for_task
from torchrl_unilab.configs.benchmark_results import BenchmarkResult as Result
from torchrl_unilab.envs import make_task


def test_each_entry_is_of_a_task_with_settings_for_its_algorithm():
    for entry in RESULTS:
        make_task(entry.task)
        assert entry.task in SETTINGS[entry.algorithm].tasks


def test_a_task_and_an_algorithm_have_one_entry():
    names = [(entry.task, entry.algorithm) for entry in RESULTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_fastest_of_the_highest_returns_comes_first(monkeypatch: pytest.MonkeyPatch, sign: int):
    best, fast = Result("A", "sac", 9.0 + sign, 50, 10, 5), Result("A", "appo", 9.0, 20, 100, 5)
    low, other = Result("A", "td3", 6.0, 1, 10, 5), Result("B", "td3", 99.0, 1, 10, 5)
    monkeypatch.setattr(benchmark_results, "RESULTS", (low, other, best, fast))
    assert results_for_task("A") == [fast, best, low]


def test_one_run_is_one_seed():
    assert str(Result("A", "sac", 9.0, 50, 1000, 1)) == "sac 9 after 50 s, 1,000 frames (1 seed)"


def test_returns_below_0_that_are_close_are_within_a_tenth_too(monkeypatch: pytest.MonkeyPatch):
    best, fast, low = (
        Result("A", name, mean_return, seconds, 10, 5)
        for name, mean_return, seconds in (("sac", -10.0, 9), ("appo", -10.9, 2), ("td3", -12, 1))
    )
    monkeypatch.setattr(benchmark_results, "RESULTS", (low, best, fast))
    assert results_for_task("A") == [fast, best, low]
    assert results_for_task("B") == []
