"""Bounds on the waits of the tests, in seconds: one place for all of them.

A test waits for events that normally come at once; its bound only turns a hang into a failure, so
it is far above what the most loaded machine needs. No test asserts that anything is fast: that is
what `tests/benchmarks` measures. `TORCHRL_UNILAB_TEST_PATIENCE` multiplies every bound.
"""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("TORCHRL_UNILAB_TEST_PATIENCE", "1"))

DEADLINE = 120.0 * PATIENCE
"""Until an event that normally comes at once must have come."""
PROMPT = DEADLINE / 4
"""Until a failure must have surfaced, where waiting out a time-out would take `DEADLINE`."""
