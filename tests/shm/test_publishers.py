"""Who publishes in a cell: one process at a time, also in the moment of a change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from tests.support.processes import receive, spawned
from torchrl_unilab.errors import SegmentError
from torchrl_unilab.shm import SnapshotCell


def _publish_and_stay(pipe: Connection, cell: SnapshotCell) -> None:
    pipe.send(cell.publish([torch.ones(2)]))
    pipe.recv()


def test_a_publish_that_has_begun_is_refused_if_another_process_comes_to_write_before_it_writes():
    name = f"unilab-test-{os.getpid()}"
    with SnapshotCell({"w": torch.zeros(2)}, name=name) as cell, contextlib.ExitStack() as stack:
        other = SnapshotCell.attach(name, cell.layout)
        other.publish([torch.ones(2)])
        cell.publish([torch.ones(2)])

        @contextlib.contextmanager
        def late() -> Iterator[None]:
            """Be the lock, for which the publish waits too long."""
            other.close()  # gives up the process's right to publish
            _, pipe = stack.enter_context(spawned(_publish_and_stay, cell))
            assert receive(pipe) == 3
            yield

        cell._publishing = late()
        with pytest.raises(SegmentError, match="publishes here"):
            cell.publish([torch.ones(2)])
        assert cell.version == 3
