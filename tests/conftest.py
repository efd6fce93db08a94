from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.support.processes import live_children
from torchrl_unilab.shm.segment import named_directory


def _segments() -> set[str]:
    """Names on the shared-memory mount, without the semaphores of Python's live queues."""
    return {name for name in os.listdir(named_directory()) if not name.startswith("sem.")}


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left_behind() -> Iterator[None]:
    """After all tests: no child process and no new shared-memory segment."""
    before = _segments()
    yield
    gc.collect()
    assert not live_children()
    assert _segments() <= before
