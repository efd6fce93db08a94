from __future__ import annotations

import pytest

from torchrl_unilab.cli import main
from torchrl_unilab.envs.registry import EXAMPLES, TASKS
from torchrl_unilab.trainers.configs import known
from torchrl_unilab.trainers.configs.known import Known


def _listed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The lines of the command ``tasks`` by their first word."""
    assert main(["tasks"]) == 0
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}


def test_every_task_is_listed(capsys):
    assert {*TASKS, *EXAMPLES} <= set(_listed(capsys))


def test_a_task_is_listed_with_the_algorithms_that_have_settings_for_it(capsys):
    assert _listed(capsys)["InvertedPendulum-v5"].split()[1:4] == ["appo", "sac", "td3"]


def test_a_task_is_listed_with_what_is_known_and_the_algorithm_to_choose(capsys, monkeypatch):
    entries = (Known("Ant-v5", "sac", 10, 9, 80, 3), Known("Ant-v5", "appo", 4304, 60, 900_000, 5))
    monkeypatch.setattr(known, "KNOWN", entries)
    assert _listed(capsys)["Ant-v5"].endswith(
        " appo    appo 4,304 after 60 s, 900,000 frames (5 seeds); sac 10 after 9 s, 80 frames "
        "(3 seeds)"
    )


def test_what_is_not_measured_is_said(capsys, monkeypatch):
    monkeypatch.setattr(known, "KNOWN", ())
    assert _listed(capsys)["Ant-v5"].endswith(" -       not measured")
