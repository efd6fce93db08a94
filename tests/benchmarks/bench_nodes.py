"""Weight sync over two nodes of a Ray cluster: bytes on the wire and milliseconds per publish.

``python -m tests.benchmarks.bench_nodes [--publishes 30]``, or ``make bench-nodes``.

The learner is on one node, all collectors on the other, both on this machine, so that what crosses
the network is what the kernel counts on the loopback device: each byte twice, as sent and as
received. Weights that cross once are 2.0 times their size. Collectors do not collect meanwhile.
*RayWeightSyncScheme* is TorchRL's, which publishes to the same collectors by `UniLabShmScheme`.

The second table is a simulation: as many nodes as it says are threads that wait for slow
environments, and poll a real mailbox; the learner sleeps for each rollout.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchrl.collectors import MultiAsyncCollector
from torchrl.weight_update import RayWeightSyncScheme

from tests.support.nodes import STORE, start_cluster
from torchrl_unilab.distributed import UniLabRayScheme
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.modules import make_actor
from torchrl_unilab.weight_update import UniLabShmScheme

WIDTHS = {0.3: 256, 4.2: 1024}
"""Megabytes of weights to the width of two hidden layers."""
SETTLE = 0.15  # seconds for a version to cross
ROLLOUT_SECONDS, LEARN_SECONDS = 1.0, 0.01


def loopback_bytes() -> int:
    """Return what the kernel has counted on the loopback device, received and sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counts,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(counts[0]) + int(counts[8])


def make_collector(scheme: Any, node: Any, width: int, actors: int, workers: int) -> Any:
    """Return collectors on the far node."""
    from torchrl.collectors.distributed import RayCollector

    make_env = partial(MujocoBatchEnv, "Hopper-v5", 1, num_threads=1)
    return RayCollector(
        [make_env] * actors,
        make_actor(11, 3, hidden=(width, width)),
        collector_class=MultiAsyncCollector,
        num_workers_per_collector=workers,
        collector_kwargs={"weight_sync_schemes": {"policy": node}},
        weight_sync_schemes={"policy": scheme},
        frames_per_batch=8 * workers,
        total_frames=10**9,
        sync=False,
        remote_configs={"num_cpus": 0, "num_gpus": 0, "memory": 2**20, "resources": {"far": 1}},
    )


def measure(collector: Any, publishes: int) -> tuple[list[float], float]:
    """Return the milliseconds of each publish, and the bytes per publish beyond those at rest."""
    collector.update_policy_weights_()
    time.sleep(10 * SETTLE)
    started = loopback_bytes()
    time.sleep(publishes * SETTLE)
    at_rest = loopback_bytes() - started
    milliseconds, started = [], loopback_bytes()
    for _ in range(publishes):
        begun = time.perf_counter()
        collector.update_policy_weights_()
        taken = time.perf_counter() - begun
        milliseconds.append(taken * 1e3)
        time.sleep(max(0.0, SETTLE - taken))
    return milliseconds, max(0, loopback_bytes() - started - at_rest) / publishes


def real(publishes: int) -> None:
    """Print the table of real nodes."""
    print("| MB | collectors x workers | scheme | ms, median | p99 | bytes : weights |")
    print("|---:|---|---|---:|---:|---:|")
    for megabytes, width in WIDTHS.items():
        for actors, workers in ((1, 1), (2, 1), (4, 1), (2, 2)):
            for name in ("unilab", "RayWeightSyncScheme"):
                ours = UniLabRayScheme() if name == "unilab" else None
                scheme = ours or RayWeightSyncScheme()
                node = ours.node() if ours else UniLabShmScheme()
                collector = make_collector(scheme, node, width, actors, workers)
                try:
                    milliseconds, wire = measure(collector, publishes)
                finally:
                    collector.shutdown(shutdown_ray=False)
                size = sum(p.numel() * p.element_size() for p in collector.policy.parameters())
                tail = statistics.quantiles(milliseconds, n=100, method="inclusive")[98]
                print(
                    f"| {megabytes} | {actors} x {workers} | {name} "
                    f"| {statistics.median(milliseconds):.1f} | {tail:.1f} | {wire / size:.1f} |",
                    flush=True,
                )


def follow(name: str, ended: threading.Event, rollouts: queue.Queue[int]) -> None:
    """Be a node: deliver a rollout of the newest version after each of the slow environment's."""
    import ray

    mailbox, version = ray.get_actor(name), -1
    while not ended.is_set():
        posted: list[Any] | None = ray.get(mailbox.poll.remote(version, 0.001, None, {}))
        if posted is not None:
            version = ray.get(posted[0]).version
        ended.wait(ROLLOUT_SECONDS)
        rollouts.put(version)


def simulated(nodes: int, seconds: float) -> str:
    """Return a row of the simulation."""
    scheme = UniLabRayScheme()
    policy = make_actor(11, 3, hidden=(256, 256))
    scheme.init_on_sender(model_id="policy", model=policy, remote_collectors=[])
    scheme.connect()
    rollouts, ended = queue.Queue[int](), threading.Event()
    threads = [
        threading.Thread(target=follow, args=(scheme._name, ended, rollouts)) for _ in range(nodes)
    ]
    for thread in threads:
        thread.start()
    milliseconds, lags, busy, began = [], [], 0.0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        version = rollouts.get()
        lags.append(scheme.version - version)
        begun = time.perf_counter()
        time.sleep(LEARN_SECONDS)
        learnt = time.perf_counter()
        scheme.send()
        milliseconds.append((time.perf_counter() - learnt) * 1e3)
        busy += time.perf_counter() - begun
    taken = time.perf_counter() - began
    ended.set()
    for thread in threads:
        thread.join()
    scheme.shutdown()
    return (
        f"| {nodes} | {len(lags) / taken:.1f} | {busy / taken:.2f} | {statistics.mean(lags):.1f} "
        f"| {statistics.median(milliseconds):.1f} | {max(milliseconds):.1f} |"
    )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--publishes", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each simulation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with start_cluster(1) as nodes:  # the learner's, and one with the resource "far"
        nodes.add_node(num_cpus=1, object_store_memory=STORE, resources={"far": 100})
        real(options.publishes)
        print(
            f"\nSimulation: rollouts of {ROLLOUT_SECONDS:g} s, {LEARN_SECONDS * 1e3:g} ms to learn "
            "from each, 0.3 MB of weights\n"
        )
        print("| nodes | rollouts/s | learner busy | mean lag | publish ms, median | longest |")
        print("|---:|---:|---:|---:|---:|---:|")
        for nodes in (2, 4, 8, 16, 32, 64):
            print(simulated(nodes, options.seconds), flush=True)


if __name__ == "__main__":
    main()
