"""Statistics of observations that one process puts and others get."""

from __future__ import annotations

import copy
import os
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from tests.support.processes import receive, spawned
from torchrl_unilab.errors import (
    ConfigError,
    LayoutError,
    LayoutShapeError,
    SegmentClosedError,
    SegmentSpaceError,
)
from torchrl_unilab.weight_update import SharedObsNormStats


def _get_stats(pipe: Connection, stats: SharedObsNormStats) -> None:
    first, second = stats.get(), stats.get()
    pipe.send(([t.tolist() for t in first], second))


def test_statistics_are_got_once_each_and_the_latest_first():
    with SharedObsNormStats(2) as stats:
        assert stats.get() is None
        for value in range(100):  # nobody reads, nothing blocks
            stats.put((torch.full((2,), float(value)), torch.ones(2)))
        assert stats.version == 100
        with spawned(_get_stats, stats) as (_, pipe):
            assert receive(pipe) == ([[99.0, 99.0], [1.0, 1.0]], None)
        mean, _ = stats.get()
        assert mean.tolist() == [99.0, 99.0]
        assert stats.get() is None


@pytest.mark.parametrize("size", [0, -1, 2.0, True, (3, 0)])
def test_statistics_of_no_size_are_refused(size):
    with pytest.raises(ConfigError, match="size of observations"):
        SharedObsNormStats(size)


def test_statistics_that_do_not_fit_are_refused_before_any_memory_is_taken():
    with pytest.raises(SegmentSpaceError, match="bytes do not fit"):
        SharedObsNormStats(1 << 50)


def test_statistics_are_put_as_arrays_too():
    stats = SharedObsNormStats(2)

    stats.put((np.array([1.0, 2.0]), np.array([3, 4], dtype=np.float32)))

    assert [t.tolist() for t in stats.get()] == [[1.0, 2.0], [3.0, 4.0]]
    assert copy.copy(stats).get() is not None  # what one process has got is new to another
    stats.close()
    with pytest.raises(SegmentClosedError):
        stats.get()


@pytest.mark.parametrize("kind", ["reversed", "read-only", "of another byte order"])
def test_arrays_that_torch_cannot_share_are_put_too(kind):
    mean = np.arange(3, dtype=np.float32)
    given = {"reversed": mean[::-1], "of another byte order": mean.astype(">f4")}.get(kind, mean)
    given.flags.writeable = kind != "read-only"
    with SharedObsNormStats(3) as stats:
        stats.put((given, [1, 1, 1]))
        assert stats.get()[0].tolist() == given.tolist()


@pytest.mark.parametrize("stats", [None, (torch.zeros(2),), (torch.zeros(2), "a")])
def test_statistics_that_are_no_two_tensors_are_refused_and_the_last_stay(stats):
    with SharedObsNormStats(2) as shared:
        shared.put((torch.zeros(2), torch.ones(2)))
        with pytest.raises(LayoutError, match=r"^statistics: .* \(expected a mean and"):
            shared.put(stats)
        assert shared.version == 1


def test_statistics_have_the_shape_that_they_are_given():
    with SharedObsNormStats((2, 3)) as stats:
        stats.put((torch.zeros(2, 3), torch.ones(2, 3)))
        assert [t.shape for t in stats.get()] == [(2, 3), (2, 3)]


def test_statistics_are_attached_by_name_and_refuse_another_size():
    with (
        SharedObsNormStats(2, name=f"unilab-test-{os.getpid()}") as stats,
        SharedObsNormStats.attach(stats.name, 2) as other,
    ):
        stats.put((torch.zeros(2), torch.ones(2)))
        assert other.get() is not None
        with pytest.raises(LayoutShapeError):
            stats.put((torch.zeros(3), torch.ones(3)))
