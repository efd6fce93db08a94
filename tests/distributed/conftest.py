from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.nodes import start_alone, start_cluster
from tests.support.processes import has_ended, live_children, wait_for

_RAYS_OWN = (
    "ignore::ResourceWarning",
    "ignore::FutureWarning",
    "ignore:The policy is not an nn.Module",  # where a factory makes it
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "distributed":
            for warning in _RAYS_OWN:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of this machine."""
    with start_cluster() as nodes:
        yield nodes
    gc.collect()


@pytest.fixture(scope="module")
def ray_alone() -> Iterator[None]:
    """Ray on one node, the smallest that there is."""
    import ray

    before = {*live_children()}
    start_alone()
    yield
    started = {*live_children()} - before
    ray.shutdown()
    wait_for(lambda: all(map(has_ended, started)))  # as it has asked them to
    gc.collect()


@pytest.fixture
def unused_tcp_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
