from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.acting import make_policy
from tests.support.collecting import appo_collector
from torchrl_unilab.collectors import APPOCollector


@pytest.fixture(scope="module")
def kept() -> Iterator[Callable[..., APPOCollector]]:
    """Collectors that several tests use, by their settings; made again if one was shut down."""
    collectors: dict[str, APPOCollector] = {}

    def get(**settings: object) -> APPOCollector:
        name = str(settings)
        if name not in collectors or collectors[name]._team.stopped:
            collectors[name] = appo_collector(make_policy(0.0), **settings)
        return collectors[name]

    yield get
    for collector in collectors.values():
        collector.shutdown()


@pytest.fixture
def free(kept) -> APPOCollector:
    """Two workers that collect ahead."""
    return kept(num_collectors=2)


@pytest.fixture
def lone(kept) -> APPOCollector:
    """One worker that collects ahead."""
    return kept()


@pytest.fixture
def pair(kept) -> APPOCollector:
    """Two workers in lockstep."""
    return kept(num_collectors=2, lockstep=True)


@pytest.fixture
def inline() -> Iterator[APPOCollector]:
    collector = appo_collector(make_policy(0.0), inline=True)
    yield collector
    collector.shutdown()
