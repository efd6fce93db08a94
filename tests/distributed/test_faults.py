"""A cluster of two nodes, struck while the learner publishes: `make test-ray`."""

from __future__ import annotations

import pytest

from tests.support.nodes import FAULTS, NODES, strike

pytestmark = pytest.mark.ray

PUBLISHES = 20
"""A publish waits for no node: there are more than these until all nodes are back, at any speed."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_continues_with_newer_weights_on_all_nodes(fault):
    outcome = strike(fault)
    assert sorted(outcome.back) == [*range(NODES)]
    assert outcome.publishes >= PUBLISHES
    assert outcome.torn == 0
    assert outcome.left == []
    for versions in outcome.versions.values():
        assert versions == sorted(versions)  # also where a collector was started again
