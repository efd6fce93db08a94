"""Torn reads under continuous publishing: two readers of our cell, and TorchRL's buffer.

``python -m tests.benchmarks.bench_tearing [--reads 1000000]``

A spawned writer publishes versions without a pause; version v fills every element with v,
so a copy with two values is torn. TorchRL's scheme has no copy of its own to check: its
workers act on the very buffer that ``send`` updates in place, so the same reader looks at
that buffer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from tensordict import TensorDict

from tests.support.processes import receive, spawned
from tests.support.tearing import ELEMENTS, count_torn, make_cell, publish_until_told
from torchrl_unilab.shm import SnapshotCell


def update_until_told(pipe: Connection, shared: TensorDict) -> None:
    """Do to a shared buffer what TorchRL's scheme does on each send, until told to stop."""
    torch.set_num_threads(1)
    fresh = TensorDict(half=torch.zeros(ELEMENTS // 2), other=torch.zeros(ELEMENTS // 2))
    pipe.send("ready")
    version = 0
    while not pipe.poll():
        for _ in range(100):
            version += 1
            fresh["half"].fill_(version % 65_536)
            fresh["other"].fill_(version % 65_536)
            shared.data.update_(fresh.data)
    pipe.send(version)


def count_torn_in_place(shared: TensorDict, reads: int) -> int:
    """Look at the shared buffer `reads` times; return how often it mixed versions."""
    half, other = shared["half"], shared["other"]
    torn = 0
    for _ in range(reads):
        seen = torch.cat([half, other])
        torn += bool((seen != seen[0]).any())
    return torn


def read_and_tell(pipe: Connection, cell: SnapshotCell, reads: int) -> None:
    """Read as a second reader, and tell how many copies were torn."""
    torch.set_num_threads(1)
    pipe.send("ready")
    pipe.send(count_torn(cell, reads, checked=True)[0])


def two_readers(cell: SnapshotCell, reads: int) -> int:
    """Read here and in a second process; return how many copies were torn in both."""
    with spawned(read_and_tell, cell, reads // 2) as (_, pipe):
        receive(pipe)
        here, _ = count_torn(cell, reads - reads // 2, checked=True)
        return here + receive(pipe, deadline=600.0)


def report(name: str, reads: int, run: Callable[[], int], pipe: Connection) -> None:
    """Print one row of the table."""
    receive(pipe)
    started = time.perf_counter()
    torn = run()
    seconds = time.perf_counter() - started
    pipe.send("stop")
    versions = receive(pipe)
    words = reads * ELEMENTS
    print(f"| {name} | {reads:,} | {words:.1e} | {versions:,} | {torn:,} | {seconds:.0f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reads", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    few = max(options.reads // 20, 1)
    print("| reader | reads | words | versions published | torn | seconds |")
    print("|---|---:|---:|---:|---:|---:|")
    with make_cell(slots=3) as cell, spawned(publish_until_told, cell) as (_, pipe):
        reads = options.reads
        report("unilab, two readers", reads, lambda: two_readers(cell, reads), pipe)
    with make_cell(slots=2) as cell, spawned(publish_until_told, cell) as (_, pipe):
        report("unilab, check left out", few, lambda: count_torn(cell, few, checked=False)[0], pipe)
    shared = TensorDict(half=torch.zeros(ELEMENTS // 2), other=torch.zeros(ELEMENTS // 2))
    shared.share_memory_()
    with spawned(update_until_told, shared) as (_, pipe):
        report("SharedMem's buffer", few, lambda: count_torn_in_place(shared, few), pipe)


if __name__ == "__main__":
    main()
