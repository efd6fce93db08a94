from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.nodes import start_cluster

# Ray's own 15 starve the mailbox beside a busy program, and its start takes more than a minute.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray's spelling)

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

    before = {*psutil.Process().children(recursive=True)}
    memory = 80 * 2**20
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=memory)
    started = {*psutil.Process().children(recursive=True)} - before
    yield
    ray.shutdown()
    psutil.wait_procs(started, timeout=30.0)  # which it has asked to end
    gc.collect()


@pytest.fixture
def unused_tcp_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
