"""Collectors on a Ray cluster of this machine, and what strikes them while a learner publishes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.distributed import UniLabRayScheme
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.modules import make_actor

VERSION = ("next", "policy_version")
IDS = ("collector", "traj_ids")
NODES, ENVS, STEPS = 2, 2, 8
STORE = 80 * 2**20  # bytes, the least that Ray takes
DEADLINE = 120.0  # for a node to deliver again


@contextlib.contextmanager
def start_cluster(nodes: int = NODES) -> Iterator[Any]:
    """A cluster of nodes with two cores each, the first of which has this process."""
    import ray
    from ray.cluster_utils import Cluster

    room = {"num_cpus": 2, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**room)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def ray_collector(**settings: Any) -> Any:
    """A `RayCollector` of an `APPOCollector` on each node."""
    from torchrl.collectors.distributed import RayCollector

    make_env = partial(MujocoBatchEnv, "Hopper-v5", ENVS, num_threads=1)
    defaults = {
        "collector_class": APPOCollector,
        "frames_per_batch": ENVS * STEPS,
        "total_frames": 10**9,  # it knows no -1
        "sync": False,
        "remote_configs": [
            {
                "num_cpus": 1,
                "num_gpus": 0,
                "memory": 2**28,
                "scheduling_strategy": strategy,
                "max_restarts": 3,
                "max_task_retries": -1,
            }
            for strategy in one_on_each()
        ],
    }
    settings = {**defaults, **settings}
    if "policy_factory" not in settings:
        settings["policy"] = make_actor(11, 3)
    return RayCollector([make_env] * NODES, **settings)


def make_large_policy() -> Any:
    """A policy that takes more than 100 KB: Ray keeps no such argument for a restart."""
    return make_actor(11, 3, hidden=(256, 256))


def one_on_each() -> list[Any]:
    """Where collectors are started: on this process's node first; on any, if theirs is gone."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    ids = sorted((node["NodeID"] for node in ray.nodes()), key=lambda node: node != here)
    return [NodeAffinitySchedulingStrategy(node, soft=True) for node in ids]


def followed(scheme: UniLabRayScheme, **settings: Any) -> dict[str, Any]:
    """Arguments of `ray_collector` for a scheme and what its nodes follow it by."""
    own = {"weight_sync_schemes": {"policy": scheme.node()}, **settings}
    return {"weight_sync_schemes": {"policy": scheme}, "collector_kwargs": own}


def node_of(rollout: Any) -> int:
    """The node that collected a rollout, by its trajectories."""
    return int(rollout[IDS].flatten()[0]) >> 40


@dataclass
class Scene:
    """Where a fault strikes."""

    cluster: Any
    collector: Any
    scheme: UniLabRayScheme
    worker: int
    """Process of node 1's worker."""

    @property
    def actor(self) -> int:
        """Process of node 1's collector."""
        parents = psutil.Process(self.worker).parents()
        return next(p.pid for p in parents if "APPOCollector" in " ".join(p.cmdline()))


def kill_actor(scene: Scene) -> None:
    os.kill(scene.actor, signal.SIGKILL)


def stop_actor(scene: Scene) -> None:
    actor = scene.actor
    os.kill(actor, signal.SIGSTOP)
    threading.Timer(3.0, os.kill, (actor, signal.SIGCONT)).start()


def remove_node(scene: Scene) -> None:
    (node,) = scene.cluster.worker_nodes  # where node 1's collector is
    scene.cluster.remove_node(node, allow_graceful=False)


def kill_worker(scene: Scene) -> None:
    os.kill(scene.worker, signal.SIGKILL)


def kill_mailbox(scene: Scene) -> None:
    import ray

    ray.kill(scene.scheme._mailbox, no_restart=False)


def stop_mailbox(scene: Scene) -> None:
    (mailbox,) = (p for p in psutil.process_iter() if "ray::Mailbox" in p.name())
    mailbox.suspend()
    threading.Timer(3.0, mailbox.resume).start()


FAULTS: dict[str, Callable[[Scene], None]] = {
    "actor killed": kill_actor,
    "actor stopped for 3 s": stop_actor,
    "node removed": remove_node,
    "worker killed": kill_worker,
    "mailbox killed": kill_mailbox,
    "mailbox stopped for 3 s": stop_mailbox,
}


@dataclass
class Outcome:
    """What became of a run that was struck.

    Attributes:
        longest: Seconds of the learner's longest publish after the fault.
        publishes: How many there were.
        back: Seconds until each node delivered with a version that was published after it.
        versions: Of all rollouts, by node, in order.
        torn: Rollouts of several versions, or of one that was not published yet.
        left: Processes, and names in /dev/shm, that the run left.
    """

    longest: float
    publishes: int
    back: dict[int, float]
    versions: dict[int, list[int]]
    torn: int
    left: list[str]


class Publisher(threading.Thread):
    """Publishes fifty times a second, whatever the collectors do."""

    def __init__(self, scheme: UniLabRayScheme) -> None:
        super().__init__()
        self.scheme, self.seconds = scheme, list[float]()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            started = time.perf_counter()
            self.scheme.send()
            self.seconds.append(time.perf_counter() - started)

    def stop(self) -> None:
        self._ended.set()
        self.join()


def strike(fault: str) -> Outcome:
    """Run a cluster, strike it, and wait until both nodes deliver newer rollouts."""
    before, own = set(os.listdir("/dev/shm")), psutil.Process().children(recursive=True)
    with start_cluster() as cluster:
        outcome = _strike(cluster, FAULTS[fault])
    children = psutil.Process().children(recursive=True)
    outcome.left += [str(child) for child in children if child not in own]
    outcome.left += sorted(set(os.listdir("/dev/shm")) - before)
    return outcome


def _strike(cluster: Any, fault: Callable[[Scene], None]) -> Outcome:
    import ray

    scheme = UniLabRayScheme(make_large_policy())
    collector = ray_collector(
        policy_factory=make_large_policy, **followed(scheme, restart_workers=3)
    )
    publisher = Publisher(scheme)
    outcome = Outcome(0.0, 0, {}, {node: [] for node in range(NODES)}, 0, [])
    struck, version_then, first = 0.0, 0, 0
    try:
        collector.update_policy_weights_()
        publisher.start()
        for rollout in collector:
            now, found = time.monotonic(), rollout[VERSION].unique().tolist()
            node, version = node_of(rollout), found[0]
            outcome.torn += len(found) > 1 or version > scheme.version
            outcome.versions[node].append(version)
            if not struck and min(map(len, outcome.versions.values())) >= 5:
                pids = collector.remote_collectors[1].get_distant_attr.remote("pids")
                scene = Scene(cluster, collector, scheme, *ray.get(pids))
                first = len(publisher.seconds)
                fault(scene)
                struck, version_then = time.monotonic(), scheme.version
            elif struck and version > version_then:
                outcome.back.setdefault(node, now - struck)
            if len(outcome.back) == NODES or (struck and now - struck > DEADLINE):
                break
    finally:
        if publisher.is_alive():
            publisher.stop()
        collector.shutdown(shutdown_ray=False)
    after = publisher.seconds[first:]
    outcome.longest, outcome.publishes = max(after), len(after)
    return outcome
