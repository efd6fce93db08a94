from __future__ import annotations

import pytest

from torchrl_unilab.configs import SETTINGS, known
from torchrl_unilab.configs.known import KNOWN, Known, known_of
from torchrl_unilab.envs import make_task


def test_each_entry_is_of_a_task_with_settings_for_its_algorithm():
    for entry in KNOWN:
        make_task(entry.task)
        assert entry.task in SETTINGS[entry.algorithm].tasks


def test_a_task_and_an_algorithm_have_one_entry():
    names = [(entry.task, entry.algorithm) for entry in KNOWN]
    assert len(set(names)) == len(names)


def test_the_highest_return_comes_first_and_of_equals_the_fastest(monkeypatch: pytest.MonkeyPatch):
    slow, fast = Known("A", "sac", 9.0, 50, 10, 5), Known("A", "appo", 9.0, 20, 100, 5)
    low, other = Known("A", "td3", 8.0, 1, 10, 5), Known("B", "td3", 99.0, 1, 10, 5)
    monkeypatch.setattr(known, "KNOWN", (low, other, slow, fast))
    assert known_of("A") == [fast, slow, low]
