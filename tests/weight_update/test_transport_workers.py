"""One transport for several workers, each with weights of its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from torchrl_unilab.errors import ConfigError, LayoutShapeError, SegmentClosedError
from torchrl_unilab.weight_update import UniLabShmTransport


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), value)}


def test_workers_may_be_numbers_of_numpy_and_are_refused_where_they_are_none():
    with UniLabShmTransport({0: _weights(0.0), 1: _weights(0.0)}) as transport:
        transport.send_weights(_weights(1.0), np.int64(1))
        assert [transport.newest(worker)[0] for worker in (0, 1)] == [0, 1]
        transport.send_weights(_weights(2.0), np.arange(2))
        assert [transport.newest(worker)[0] for worker in (0, 1)] == [2, 2]
        for ids in (torch.tensor([0, 1]), "01", True, [1.0]):
            with pytest.raises(ConfigError, match=r"worker_ids: .* \(expected an integer"):
                transport.send_weights(_weights(3.0), ids)


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ({}, "initial weights: 0 "),
        ({-1: {"w": (2,)}, 0: {"w": (2,)}}, r"a worker .* -1 \(expected"),
    ],
)
def test_there_is_a_worker_and_they_are_numbered_from_zero(initial, message):
    with pytest.raises(ConfigError, match=message):
        UniLabShmTransport(initial)


@pytest.fixture
def apart() -> Iterator[UniLabShmTransport]:
    """Two workers with weights apart, the second's twice as many."""
    with UniLabShmTransport({0: {"w": torch.zeros(2)}, 1: {"w": torch.zeros(4)}}) as transport:
        yield transport


class _Single(nn.Module):
    """Has one parameter."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def test_what_fits_one_worker_and_not_the_other_is_written_to_neither(apart):
    cells, fits = apart.cells, torch.ones(2)
    for publish in (
        lambda: apart.send_weights({"w": fits}),
        lambda: apart.send_weights(_Single(fits)),
        lambda: apart.send_each({cells[0]: {"w": fits}, cells[1]: {"w": fits}}),
    ):
        with pytest.raises(LayoutShapeError):
            publish()
        assert (cells[0].version, cells[1].version) == (0, 0)


@pytest.mark.parametrize("kind", [_Single, lambda w: {"w": w}], ids=["module", "dict"])
def test_a_publish_has_the_version_that_is_asked_for_or_the_next(apart, kind):
    first, second = apart.cells.values()
    assert apart.send_weights(kind(torch.ones(2)), 0, version=10) == 10
    assert apart.send_weights(kind(torch.ones(4)), 1, version=3) == 11
    assert apart.send_weights(kind(torch.ones(4)), []) == 11  # to nobody
    assert (first.version, second.version) == (10, 11)
    apart.send_each({first: {"w": torch.ones(2)}}, version=20)
    apart.send_each({second: {"w": torch.ones(4)}}, version=3)
    assert (first.version, second.version) == (20, 21)


@pytest.mark.parametrize("weights", [_Single(torch.ones(2)), {"w": torch.ones(2)}])
def test_one_cell_takes_the_version_that_is_asked_for(weights):
    with UniLabShmTransport({0: {"w": torch.zeros(2)}}) as transport:
        transport.send_weights(weights, version=10)
        assert transport.version == 10


def test_modules_that_were_published_are_let_go_of():
    with UniLabShmTransport({0: {"w": torch.zeros(2)}}) as transport:
        published = []
        for value in range(5):
            module = _Single(torch.full((2,), float(value)))
            transport.send_weights(module)
            published.append(weakref.ref(module))
        del module
        gc.collect()
        assert sum(reference() is not None for reference in published) <= 2


def test_weights_that_workers_share_are_published_to_them_once():
    weights = {"w": torch.zeros(2)}
    with UniLabShmTransport({0: weights, 1: weights}) as transport:
        transport.send_weights({"w": torch.ones(2)}, [0, 1])
        assert (transport.version, transport.cells[0].publishes) == (1, 1)


def test_a_worker_reads_though_those_before_it_are_left_out():
    with UniLabShmTransport({5: {"w": torch.zeros(2)}}) as transport:
        transport.cell(5).become_reader(5, 0)
        assert transport.cell(5).reader(5).applied == 0


def test_a_closed_transport_has_closed_all_its_cells(apart):
    apart.close()
    for cell in apart.cells.values():
        with pytest.raises(SegmentClosedError):
            cell.newest()


def test_the_first_workers_weights_are_received_and_applied_by_the_strategy(apart):
    apart.send_weights({"w": torch.ones(2)}, 0)
    model, strategy = Mock(), Mock()
    received = apart.receive_weights(model=model, strategy=strategy)
    assert received["w"].tolist() == [1.0, 1.0]
    strategy.apply_weights.assert_called_once_with(model, received)


def test_each_worker_gets_weights_by_their_keys_and_the_first_is_the_lowest():
    w, b = torch.zeros(2), torch.ones(2)
    with UniLabShmTransport({1: {"b": b, "w": w}, 0: {"w": w, "b": b}}) as transport:
        transport.send_weights({"b": b * 3, "w": b * 2})
        for worker in (0, 1):
            _, newest = transport.newest(worker)
            assert (newest["w"].tolist(), newest["b"].tolist()) == ([2.0, 2.0], [3.0, 3.0])
        transport.send_weights({"b": b * 5, "w": b * 4}, 1)
        assert transport.receive_weights()["w"].tolist() == [2.0, 2.0]
