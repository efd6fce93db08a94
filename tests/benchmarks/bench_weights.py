"""Publish latency through ``update_policy_weights_``, ours beside TorchRL's.

``python -m tests.benchmarks.bench_weights [--megabytes 0.45 6.5] [--workers 1 2 4]``

Each case builds a collector per scheme over the same policy, lets its workers connect, and
publishes in turns, in blocks of twenty, so that noise of the machine falls on all alike.
A pause before each block lets the threads settle that the other scheme's queues leave busy.
Workers are idle, as between two batches of a synchronous collector. Prints medians and 99th
percentiles as a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme

from tests.support.acting import StillEnv
from torchrl_unilab.weight_update import UniLabShmScheme

SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    "unilab": UniLabShmScheme,
    "SharedMem": SharedMemWeightSyncScheme,
}


BLOCK = 20
PAUSE = 0.02


def make_policy(megabytes: float) -> TensorDictModule:
    """A two-hidden-layer network of about `megabytes` of float32 parameters."""
    hidden = max(8, round(math.sqrt(megabytes * 1e6 / 4)))
    net = nn.Sequential(
        nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(megabytes: float, workers: int, publishes: int) -> dict[str, list[float]]:
    """Seconds of each publish, by scheme; schemes take turns."""
    collectors = {}
    for name, scheme in SCHEMES.items():
        collectors[name] = MultiSyncCollector(
            [StillEnv] * workers,
            make_policy(megabytes),
            frames_per_batch=4 * workers,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme()},
        )
    seconds: dict[str, list[float]] = {name: [] for name in collectors}
    try:
        for collector in collectors.values():
            next(iter(collector))
        for _ in range(max(publishes // BLOCK, 1)):
            for name, collector in collectors.items():
                time.sleep(PAUSE)
                for _ in range(BLOCK):
                    started = time.perf_counter()
                    collector.update_policy_weights_()
                    seconds[name].append(time.perf_counter() - started)
    finally:
        for collector in collectors.values():
            collector.shutdown()
    return seconds


def memcpy_seconds(megabytes: float) -> float:
    """Median seconds to copy as many bytes once."""
    source = np.ones(int(megabytes * 1e6), np.uint8)
    target = np.zeros_like(source)
    taken = []
    for _ in range(300):
        started = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.45, 6.5])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--publishes", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| MB | workers | memcpy µs | unilab µs (p99) | SharedMem µs (p99) | ratio |")
    print("|---:|---:|---:|---:|---:|---:|")
    for megabytes in options.megabytes:
        limit = memcpy_seconds(megabytes) * 1e6
        for workers in options.workers:
            seconds = measure(megabytes, workers, options.publishes)
            ours, stock = (statistics.median(seconds[n]) * 1e6 for n in SCHEMES)
            tails = [percentile(seconds[n], 0.99) * 1e6 for n in SCHEMES]
            print(
                f"| {megabytes:g} | {workers} | {limit:.1f} | {ours:.1f} ({tails[0]:.0f}) "
                f"| {stock:.0f} ({tails[1]:.0f}) | {stock / ours:.1f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
