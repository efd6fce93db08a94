"""Latency of publishing and of reading weights, ours beside TorchRL's.

``python -m tests.benchmarks.bench_weights [--megabytes 0.45 6.5] [--workers 1 2 4]``

Each case builds a collector per scheme over the same policy, lets its workers connect, and
publishes through ``update_policy_weights_`` in turns, in blocks of fifty, so that noise of
the machine falls on all alike. A pause before each block lets the threads settle that the
other schemes' queues leave busy. Workers are idle, as between two batches of a synchronous
collector. Prints medians and 99th percentiles as Markdown tables, with the time to copy as
many bytes once (memcpy) in the same run.
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
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from tests.support.acting import StillEnv
from torchrl_unilab.weight_update import UniLabShmScheme

SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    "unilab": UniLabShmScheme,
    "SharedMem": SharedMemWeightSyncScheme,
    "MultiProcess": MultiProcessWeightSyncScheme,
}
BLOCK = 50
PAUSE = 0.02


def make_policy(megabytes: float) -> TensorDictModule:
    """A two-hidden-layer network of about `megabytes` of float32 parameters."""
    hidden = max(8, round(math.sqrt(megabytes * 1e6 / 4)))
    net = nn.Sequential(
        nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def summary(seconds: list[float]) -> str:
    """Median and 99th percentile in microseconds."""
    tail = sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    return f"{statistics.median(seconds) * 1e6:.1f} ({tail * 1e6:.0f})"


def tail(seconds: list[float]) -> str:
    """Percentiles 50, 90, 99 in microseconds but for the first of each block; median of these."""
    first = seconds[::BLOCK]
    others = [value for i, value in enumerate(seconds) if i % BLOCK]
    points = [*np.percentile(others, (50, 90, 99)), statistics.median(first)]
    return " | ".join(f"{point * 1e6:.1f}" for point in points)


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of `times` calls."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return taken


def publishing(
    megabytes: float, workers: int, publishes: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each publish, by scheme; schemes take turns. ``memcpy`` takes turns too."""
    collectors = {
        name: MultiSyncCollector(
            [StillEnv] * workers,
            make_policy(megabytes).to(device),
            frames_per_batch=4 * workers,
            total_frames=-1,
            policy_device="cpu",
            weight_sync_schemes={"policy": scheme()},
        )
        for name, scheme in SCHEMES.items()
    }
    source = np.ones(int(megabytes * 1e6), np.uint8)
    target = np.zeros_like(source)
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", *collectors)}
    try:
        for collector in collectors.values():
            next(iter(collector))
        for _ in range(max(publishes // BLOCK, 1)):
            time.sleep(PAUSE)
            seconds["memcpy"] += timed(lambda: np.copyto(target, source), BLOCK)
            for name, collector in collectors.items():
                time.sleep(PAUSE)
                seconds[name] += timed(collector.update_policy_weights_, BLOCK)
    finally:
        for collector in collectors.values():
            collector.shutdown()
    return seconds


def reading(megabytes: float, times: int, device: str) -> dict[str, list[float]]:
    """Seconds of a worker's steps in one process: poll, pull; and of the transport's write."""
    learner, acting = make_policy(megabytes).to(device), make_policy(megabytes)
    sender, receiver = UniLabShmScheme(), UniLabShmScheme()
    sender.init_on_sender(model=learner, devices=[torch.device("cpu")])
    sender.connect()
    receiver.__setstate__(sender.__getstate__())
    receiver.init_on_receiver(model_id="policy", model=acting, worker_idx=0)
    receiver.connect()
    transport, tensors = sender.create_transport(), list(learner.parameters())
    cell = transport.unique_cells[0]
    source = np.ones(cell.layout.nbytes, np.uint8)
    target = np.zeros_like(source)
    seconds: dict[str, list[float]] = {"poll": timed(receiver.pull, times)}
    seconds |= {"memcpy": [], "write": [], "pull": []}
    for _ in range(times):
        seconds["memcpy"] += timed(lambda: np.copyto(target, source), 1)
        seconds["write"] += timed(lambda: cell.publish(tensors), 1)
        seconds["pull"] += timed(receiver.pull, 1)
    sender.shutdown()
    return seconds


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 0.45, 6.5, 40])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--publishes", type=int, default=200)
    parser.add_argument("--device", default="cpu", help="of the learner; workers are on the CPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("Publishing, median µs (99th percentile); ratio: SharedMem to unilab\n")
    print(f"| MB | workers | memcpy | {' | '.join(SCHEMES)} | ratio |")
    print("|---:|---:|---:|" + "---:|" * (len(SCHEMES) + 1))
    tails: list[str] = []
    for megabytes in options.megabytes:
        for workers in options.workers:
            seconds = publishing(megabytes, workers, options.publishes, options.device)
            ratio = statistics.median(seconds["SharedMem"]) / statistics.median(seconds["unilab"])
            cells = " | ".join(summary(values) for values in seconds.values())
            print(f"| {megabytes:g} | {workers} | {cells} | {ratio:.1f}x |", flush=True)
            tails += [
                f"| {megabytes:g} | {workers} | {name} | {tail(seconds[name])} |"
                for name in ("memcpy", "unilab")
            ]
    print("\nPercentiles in a block of fifty but for its first call, and that, after a pause, µs\n")
    print("| MB | workers | | 50 | 90 | 99 | first |\n|---:|---:|---|---:|---:|---:|---:|")
    print("\n".join(tails))
    print("\nA worker's side and the bare transport, median µs (99th percentile)\n")
    print("| MB | memcpy | transport write | of memcpy | pull | poll, nothing new |")
    print("|---:|---:|---:|---:|---:|---:|")
    for megabytes in options.megabytes:
        seconds = reading(megabytes, max(options.publishes, 100), options.device)
        ratio = statistics.median(seconds["write"]) / statistics.median(seconds["memcpy"])
        print(
            f"| {megabytes:g} | {summary(seconds['memcpy'])} | {summary(seconds['write'])} "
            f"| {ratio:.2f}x | {summary(seconds['pull'])} | {summary(seconds['poll'])} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
