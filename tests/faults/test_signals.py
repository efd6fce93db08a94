"""A collector or a learner is killed or stopped at an exact point of a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.table import CELLS, promised
from tests.support.fault_points import Cell
from tests.support.faults import INTERVAL, outcome_of

SHORT = (
    Cell("appo", "write", "SIGKILL", "collector"),
    Cell("sac", "write", "SIGKILL", "collector"),
    Cell("sac", "checkpoint", "SIGKILL", "learner"),
    Cell("appo", "physics", "SIGSTOP", "collector"),
    Cell("appo", "write", "SIGKILL", "collector", restarts=1),
)


def _marks(cell: Cell) -> list[pytest.MarkDecorator]:
    return [] if cell in SHORT else [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.parametrize("cell", [pytest.param(c, id=str(c), marks=_marks(c)) for c in CELLS])
def test_a_run_that_is_hit_continues_or_says_why_not_at_once_and_leaves_nothing(cell, tmp_path):
    outcome = outcome_of(cell, tmp_path)
    assert promised(cell, outcome), outcome


def test_a_learner_killed_while_it_writes_a_checkpoint_leaves_the_one_before(tmp_path):
    outcome = outcome_of(Cell("appo", "checkpoint", "SIGKILL", "learner"), tmp_path)
    assert outcome.learner == "killed"
    assert outcome.checkpoint == INTERVAL


def test_ctrl_c_in_a_terminal_ends_a_run_with_a_checkpoint_and_in_silence(tmp_path):
    outcome = outcome_of(Cell("appo", "physics", "SIGINT", "learner"), tmp_path)
    assert outcome.learner == "goes on"  # to the summary
    assert outcome.checkpoint == 3 * 32  # before the third update
    assert outcome.output == ""
    assert outcome.clean


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["appo", "sac"])
def test_a_run_whose_collector_is_killed_leaves_a_checkpoint_of_what_was_learnt(
    algorithm, tmp_path: Path
):
    outcome = outcome_of(Cell(algorithm, "physics", "SIGKILL", "collector"), tmp_path)
    assert outcome.learner == "fails"
    assert outcome.checkpoint is not None
