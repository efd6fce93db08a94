"""People's own code raises in the midst of a whole run: it surfaces once, with its traceback."""

from __future__ import annotations

import pytest

from tests.support.bounds import PROMPT
from tests.support.fault_points import Cell
from tests.support.faults import INJECTED, outcome_of

LONG = (pytest.mark.faults, pytest.mark.slow)
ERROR = f"LookupError: {INJECTED}"


@pytest.mark.parametrize(
    ("algorithm", "point", "frame"),
    [
        pytest.param("appo", "physics", "in _step", id="env-appo"),
        pytest.param("sac", "physics", "in _step", id="env-sac", marks=LONG),
        pytest.param(
            "appo", "policy", "carrier = act(policy, carrier)", id="policy-appo", marks=LONG
        ),
        pytest.param("sac", "policy", "carrier = act(policy, carrier)", id="policy-sac"),
        pytest.param("appo", "transform", "transform", id="transform-appo", marks=LONG),
        pytest.param("sac", "transform", "transform", id="transform-sac", marks=LONG),
        pytest.param("appo", "write", "storage.commit()", id="ring-appo", marks=LONG),
        pytest.param("sac", "write", "in half", id="replay-sac", marks=LONG),
    ],
)
def test_what_a_collector_raises_surfaces_once_with_its_traceback(
    algorithm, point, frame, tmp_path
):
    outcome = outcome_of(Cell(algorithm, point, "raise", "collector"), tmp_path)
    assert outcome.learner == "fails"
    assert outcome.seconds < PROMPT
    assert outcome.error[0].startswith("WorkerError: collector 0, process ")
    assert frame in outcome.error[0]
    assert "\n".join(outcome.error).count(ERROR) == 1
    assert outcome.output == ""
    assert outcome.clean


@pytest.mark.parametrize(
    ("algorithm", "point"),
    [
        pytest.param("appo", "logger", id="logger-appo"),
        pytest.param("sac", "logger", id="logger-sac", marks=LONG),
        pytest.param("appo", "physics", id="update-appo", marks=LONG),
        pytest.param("sac", "physics", id="update-sac", marks=LONG),
        pytest.param("appo", "checkpoint", id="checkpoint-appo", marks=LONG),
        pytest.param("sac", "publish", id="publish-sac", marks=LONG),
    ],
)
def test_what_the_learner_raises_surfaces_as_it_is(algorithm, point, tmp_path):
    outcome = outcome_of(Cell(algorithm, point, "raise", "learner"), tmp_path)
    assert outcome.learner == "fails"
    assert outcome.seconds < PROMPT
    assert outcome.error == [ERROR]
    assert outcome.output == ""
    assert outcome.clean
