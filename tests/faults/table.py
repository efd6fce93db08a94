"""The table of faults: ``python -m tests.faults.table``, in markdown."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.bounds import PROMPT
from tests.support.fault_points import Cell
from tests.support.faults import Outcome, outcome_of

PHASES = ("start-up", "physics", "write", "publish", "checkpoint", "shutdown")
HEAD = (
    "run",
    "phase",
    "fault",
    "of",
    "may replace",
    "learner",
    "after",
    "all gone after",
    "orphans",
    "segments",
    "tracker",
    "promised",
)
CELLS = tuple(
    Cell(algorithm, phase, fault, victim, restarts)
    for algorithm in ("appo", "sac")
    for phase in PHASES
    for fault in ("SIGKILL", "SIGSTOP")
    for victim, restarts in (("collector", 0), ("collector", 1), ("learner", 0))
)


def promised(cell: Cell, outcome: Outcome) -> bool:
    """Whether a run did what it has to: end well, or fail at once and say why; and be gone."""
    if cell.victim == "learner":
        learner = {"SIGKILL": "killed", "SIGSTOP": "goes on when continued"}[cell.fault]
        done = outcome.learner == learner
    elif cell.restarts and cell.phase != "start-up":
        done = outcome.learner == "goes on"
    elif outcome.learner == "fails":
        done = outcome.seconds < PROMPT and cell.fault in outcome.error[0]
    else:
        done = outcome.learner == "goes on"
    return done and outcome.clean


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cells and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=2, help="cells that run at the same time")
    parser.add_argument("--only", default="", help="cells with this in their names, as sac-write")
    options = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if options.only in str(cell)]
    multiprocessing.set_forkserver_preload(["tests.support.faults"])
    sys.stdout.write("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|\n")
    with ThreadPoolExecutor(options.at_once) as pool:
        for cell, outcome in zip(cells, pool.map(_run, cells), strict=True):
            sys.stdout.write(_row(cell, outcome) + "\n")
            sys.stdout.flush()


def _run(cell: Cell) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        return outcome_of(cell, Path(directory))


def _row(cell: Cell, outcome: Outcome) -> str:
    columns = (
        cell.algorithm,
        cell.phase,
        cell.fault,
        cell.victim,
        cell.restarts,
        outcome.learner,
        f"{outcome.seconds:.2f} s",
        f"{outcome.left:.2f} s",
        len(outcome.orphans),
        len(outcome.segments),
        outcome.tracker_warnings,
        "yes" if promised(cell, outcome) else "**no**",
    )
    return "| " + " | ".join(map(str, columns)) + " |"


if __name__ == "__main__":
    main()
