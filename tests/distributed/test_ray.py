"""Collectors on a Ray cluster of two nodes of this machine: `make test-ray`."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torchrl.collectors import MultiAsyncCollector

from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError, WorkerError
from torchrl_unilab.modules import make_actor
from torchrl_unilab.weight_update import UniLabShmScheme

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]

VERSION = ("next", "policy_version")
IDS = ("collector", "traj_ids")
NODES, ENVS, STEPS = 2, 2, 8
STORE = 80 * 2**20  # bytes, the least that Ray takes


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster

    room = {"num_cpus": 2, "object_store_memory": STORE}
    nodes = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    try:
        nodes.add_node(**room)
        ray.init(address=nodes.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()
        gc.collect()


def ray_collector(**settings: Any) -> Any:
    from torchrl.collectors.distributed import RayCollector

    make_env = partial(MujocoBatchEnv, "Hopper-v5", ENVS, num_threads=1)
    defaults = {
        "collector_class": APPOCollector,
        "frames_per_batch": ENVS * STEPS,
        "total_frames": 10 * ENVS * STEPS,
        "sync": False,
        "remote_configs": {"num_cpus": 1, "num_gpus": 0, "memory": 2**28},
    }
    return RayCollector([make_env] * NODES, make_actor(11, 3), **{**defaults, **settings})


def nested() -> dict[str, Any]:
    return {"weight_sync_schemes": {"policy": UniLabShmScheme()}}


def test_a_scheme_of_the_ray_collectors_own_is_refused_with_the_way_out(cluster):
    with pytest.raises(ConfigError, match="collector_kwargs"):
        ray_collector(**nested())


@pytest.mark.parametrize("collector_class", [APPOCollector, MultiAsyncCollector])
def test_published_weights_reach_the_workers_of_both_nodes(cluster, collector_class):
    collector = ray_collector(collector_class=collector_class, collector_kwargs=nested())
    try:
        for parameter in collector.policy.parameters():  # actions have a mean of zero
            parameter.data.zero_()
        acted = []
        collector.update_policy_weights_()
        for rollout in collector:
            acted.append(rollout["loc"].abs().max().item())
            if collector_class is APPOCollector:
                assert rollout[VERSION].unique().numel() == 1
        assert len(acted) == 10
        assert acted[-2:] == [0.0, 0.0]
    finally:
        collector.shutdown(shutdown_ray=False)


def test_nodes_share_no_trajectory_ids_and_no_seeds(cluster):
    collector = ray_collector(collector_kwargs={"seed": 3}, sync=True, total_frames=32)
    try:
        collector.update_policy_weights_()
        both = next(iter(collector))
        ids = [{*one.flatten().tolist()} for one in both[IDS]]
        assert not ids[0] & ids[1]
        assert not both["observation"][0, :, 0].equal(both["observation"][1, :, 0])
    finally:
        collector.shutdown(shutdown_ray=False)


def test_the_loss_of_a_worker_on_a_node_reaches_the_learner(cluster):
    import ray

    collector = ray_collector(total_frames=-1)
    try:
        collector.update_policy_weights_()
        (pid,) = ray.get(collector.remote_collectors[1].get_distant_attr.remote("pids"))
        os.kill(pid, signal.SIGKILL)
        asked = (collector.remote_collectors[1].next.remote() for _ in range(100))
        with pytest.raises(WorkerError, match="SIGKILL"):
            [ray.get(batch, timeout=60) for batch in asked]
    finally:
        collector.shutdown(shutdown_ray=False)
