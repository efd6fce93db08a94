from __future__ import annotations

import gc
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil
import pytest

from tests.support.processes import DEADLINE
from tests.support.rings import make_ring, read, write
from torchrl_unilab.shm import SharedSegment


class Apart:
    """Is pickled by itself, as a closure among the arguments of a process is."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __getstate__(self) -> bytes:
        return bytes(ForkingPickler.dumps(self.held))

    def __setstate__(self, state: bytes) -> None:
        self.held = pickle.loads(state)


def _use_both(segments: list[Any], rings: list[Any]) -> None:
    for index, apart in enumerate(segments):
        apart.held.buffer[index] = 1
    for apart in rings:
        write(apart.held)
        apart.held.close()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_what_is_pickled_twice_for_one_process_is_there_twice(method):
    context, descriptors = multiprocessing.get_context(method), []
    for _ in range(2):
        with SharedSegment(4096) as segment, make_ring(slots=2) as ring:
            both = [[Apart(segment), Apart(segment)], [Apart(ring), Apart(ring)]]
            process = context.Process(target=_use_both, args=both)
            process.start()
            process.join(DEADLINE)
            assert process.exitcode == 0
            assert segment.buffer[:3].tolist() == [1, 1, 0]
            assert [read(ring), read(ring), read(ring)] == [(0, 1), (0, 2), None]
        process.close()
        gc.collect()
        descriptors.append(psutil.Process().num_fds())
    assert descriptors[1] <= descriptors[0]
