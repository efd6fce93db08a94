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
from pathlib import Path
from typing import Any

import psutil

from tests.support.bounds import DEADLINE, PROMPT
from tests.support.processes import has_ended, live_children, wait_for
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.distributed import UniLabRayScheme
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.modules import make_actor

VERSION = ("next", "policy_version")
IDS = ("collector", "traj_ids")
NODES, ENVS, STEPS = 2, 2, 8
STORE = 80 * 2**20  # bytes, the least that Ray takes
STOPPED = 150  # publishes, of fifty a second, for which a process is stopped
MOUNT = "/dev/shm"


@contextlib.contextmanager
def start_cluster(nodes: int = NODES) -> Iterator[Any]:
    """A cluster of nodes with two cores each, the first of which has this process."""
    import ray
    from ray.cluster_utils import Cluster

    room = {"num_cpus": 2, "object_store_memory": STORE, "wait": False}
    cluster = Cluster()
    try:
        for _ in range(nodes):
            cluster.add_node(**room, include_dashboard=False)
            cluster.wait_for_nodes(DEADLINE)  # by itself Ray waits for 30 s
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def start_alone() -> None:
    """Ray on one node, the smallest that there is."""
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=STORE)


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


@contextlib.contextmanager
def collecting(**settings: Any) -> Iterator[Any]:
    """A `ray_collector`, which is shut down on the way out, and Ray is not."""
    collector = ray_collector(**settings)
    try:
        yield collector
    finally:
        collector.shutdown(shutdown_ray=False)


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
    publisher: Publisher

    @property
    def actor(self) -> int:
        """Process of node 1's collector."""
        parents = psutil.Process(self.worker).parents()
        return next(p.pid for p in parents if "APPOCollector" in " ".join(p.cmdline()))


def kill_actor(scene: Scene) -> None:
    os.kill(scene.actor, signal.SIGKILL)


def stop_actor(scene: Scene) -> None:
    scene.publisher.stop_meanwhile(psutil.Process(scene.actor))


def remove_node(scene: Scene) -> None:
    (node,) = scene.cluster.worker_nodes  # where node 1's collector is
    scene.cluster.remove_node(node, allow_graceful=False)


def kill_worker(scene: Scene) -> None:
    os.kill(scene.worker, signal.SIGKILL)


def kill_mailbox(scene: Scene) -> None:
    import ray

    process = mailbox_process(scene.scheme)
    ray.kill(scene.scheme._mailbox, no_restart=False)
    wait_for(lambda: has_ended(process))  # newer versions come from the next one


def stop_mailbox(scene: Scene) -> None:
    scene.publisher.stop_meanwhile(mailbox_process(scene.scheme))


def mailbox_process(scheme: UniLabRayScheme) -> psutil.Process:
    """Ask a scheme's mailbox for its process, once it has taken what was posted before."""
    import ray

    found: list[int] = []

    def has_answered() -> bool:
        with contextlib.suppress(ray.exceptions.PendingCallsLimitExceeded):
            answer = scheme._mailbox.__ray_call__.remote(lambda _: os.getpid())
            found.append(ray.get(answer, timeout=DEADLINE))
        return bool(found)

    wait_for(has_answered)
    return psutil.Process(found[0])


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
        publishes: How many there were until both nodes were back.
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
        self._due: dict[int, Callable[[], object]] = {}

    def stop_meanwhile(self, process: psutil.Process) -> None:
        """Stop a process until `STOPPED` more publishes have ended: none waits for it."""
        process.suspend()
        self._due[len(self.seconds) + STOPPED] = process.resume

    def run(self) -> None:
        while not self._ended.wait(0.02):
            started = time.perf_counter()
            self.scheme.send()
            self.seconds.append(time.perf_counter() - started)
            self._due.pop(len(self.seconds), bool)()

    def stop(self) -> None:
        for call in [*self._due.values()]:
            call()  # or a publish that waits for what is stopped would not end
        self._ended.set()
        self.join()


def strike(fault: str) -> Outcome:
    """Run a cluster, strike it, and wait until both nodes deliver newer rollouts."""
    before, own = {*os.listdir(MOUNT)}, {*live_children()}
    with start_cluster() as cluster:
        outcome, processes = _strike(cluster, FAULTS[fault])
    outcome.left = [*map(str, _alive(processes - own)), *_names_left(before)]
    return outcome


def _alive(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Processes that do not end, though they are told to."""
    until = time.monotonic() + DEADLINE
    while (alive := [p for p in processes if not has_ended(p)]) and time.monotonic() < until:
        psutil.wait_procs(alive, timeout=0.1)
    return alive


def _names_left(before: set[str]) -> list[str]:
    """New names on the mount that stay, but for those of test runs beside this one.

    Of semaphores, which these may leave for a while, the mount does not say whose they are.
    """
    until, own = time.monotonic() + PROMPT, {os.getpid(), *(p.pid for p in live_children())}
    while True:
        held = _inodes_of_others(own)
        left = [
            file.name
            for file in os.scandir(MOUNT)
            if file.name not in before
            and not file.name.startswith(("sem.", "unilab-tests-"))
            and file.inode() not in held
        ]
        if not left or time.monotonic() > until:
            return sorted(left)


def _inodes_of_others(own: set[int]) -> set[int]:
    """Inodes of the files that other processes have mapped."""
    held = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if int(maps.parent.name) not in own:
            with contextlib.suppress(OSError):  # it has ended
                held.update(int(line.split()[4]) for line in maps.read_text().splitlines())
    return held


def _strike(cluster: Any, fault: Callable[[Scene], None]) -> tuple[Outcome, set[psutil.Process]]:
    """Return the outcome, without what is left, and the processes of the run."""
    import ray

    scheme = UniLabRayScheme(make_large_policy())
    collector = ray_collector(
        policy_factory=make_large_policy, **followed(scheme, restart_workers=3)
    )
    publisher = Publisher(scheme)
    outcome = Outcome(0.0, 0, {}, {node: [] for node in range(NODES)}, 0, [])
    struck, version_then, first = 0.0, 0, 0
    processes: set[psutil.Process] = set()
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
                (worker,) = ray.get(pids)
                scene = Scene(cluster, collector, scheme, worker, publisher)
                processes.update(live_children())
                fault(scene)
                struck, version_then = time.monotonic(), scheme.version
                first = len(publisher.seconds)
            elif struck and version > version_then:
                outcome.back.setdefault(node, now - struck)
            if len(outcome.back) == NODES or (struck and now - struck > DEADLINE):
                break
    finally:
        if publisher.is_alive():
            publisher.stop()
        processes.update(live_children())
        collector.shutdown(shutdown_ray=False)
    after = publisher.seconds[first:]
    outcome.longest, outcome.publishes = max(after), len(after)
    return outcome, processes
