from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.tables import Table, make_pipeline
from torchrl_unilab.data import DoubleBufferReplayPipeline


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture(params=["thread", "inline"])
def packer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pipeline(table: Table, packer: str) -> Iterator[DoubleBufferReplayPipeline]:
    with make_pipeline(table, packer=packer) as pipeline:
        yield pipeline
