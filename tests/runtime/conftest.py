from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.serving import make_group
from torchrl_unilab.runtime import worker_process
from torchrl_unilab.runtime import workers as workers_module
from torchrl_unilab.runtime.workers import WorkerGroup


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for stopped workers more often than in runs."""
    monkeypatch.setattr(workers_module, "CHECK_SECONDS", 0.05)
    for module in (workers_module, worker_process):
        monkeypatch.setattr(module, "CONTINUE_SECONDS", 0.05)


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    """Two workers at work, which each test leaves at work."""
    with make_group(2) as group:
        yield group


@pytest.fixture
def lone() -> Iterator[WorkerGroup]:
    """One worker that a test may end, stop or deafen."""
    with make_group() as group:
        yield group


@pytest.fixture
def pair() -> Iterator[WorkerGroup]:
    """Two workers that a test may end, stop or deafen."""
    with make_group(2) as group:
        yield group
