"""A cluster of two nodes, struck while the learner publishes: `make test-ray`."""

from __future__ import annotations

import pytest

from tests.support.nodes import FAULTS, NODES, strike

pytestmark = pytest.mark.ray

PUBLISH_SECONDS = 2.0
"""A publish waits for no node: it takes a millisecond, and a busy machine is granted more."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_continues_with_newer_weights_on_all_nodes(fault):
    outcome = strike(fault)
    assert sorted(outcome.back) == [*range(NODES)]
    assert outcome.longest < PUBLISH_SECONDS
    assert outcome.torn == 0
    assert outcome.left == []
    for versions in outcome.versions.values():
        assert versions == sorted(versions)  # also where a collector was started again
