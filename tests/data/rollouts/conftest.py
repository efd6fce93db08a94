from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rollouts import make_rollout
from torchrl_unilab.data import RolloutRingStorage


@pytest.fixture
def storage() -> Iterator[RolloutRingStorage]:
    """A ring of four slots, and one writer."""
    with RolloutRingStorage(4, example=make_rollout()) as storage:
        yield storage
