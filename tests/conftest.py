from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

from torchrl_unilab.shm.segment import named_directory


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left_behind() -> Iterator[None]:
    """After all tests: no child process and no new shared-memory segment."""
    before = set(os.listdir(named_directory()))
    yield
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if not any("resource_tracker" in part for part in child.cmdline())
    ]
    assert not children
    assert set(os.listdir(named_directory())) <= before
