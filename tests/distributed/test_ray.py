"""`RayCollector` on a cluster of two nodes of this machine: `make test-ray`."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import psutil
import pytest
from torchrl.collectors import Collector, MultiAsyncCollector

from tests.support.bounds import DEADLINE
from tests.support.nodes import IDS, NODES, VERSION, collecting, followed, node_of, ray_collector
from tests.support.processes import has_ended, wait_for
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.distributed import UniLabRayScheme
from torchrl_unilab.errors import ConfigError, UsageError, WorkerError
from torchrl_unilab.weight_update import UniLabShmScheme

pytestmark = pytest.mark.ray


def nested() -> dict[str, Any]:
    return {"weight_sync_schemes": {"policy": UniLabShmScheme()}}


def test_a_scheme_of_one_machine_is_refused_with_the_way_out(cluster):
    with pytest.raises(ConfigError, match="collector_kwargs"):
        ray_collector(**nested())


@pytest.mark.parametrize("mailbox", [False, True], ids=["TorchRL's scheme", "mailbox"])
@pytest.mark.parametrize("collector_class", [APPOCollector, MultiAsyncCollector])
def test_published_weights_reach_the_workers_of_both_nodes(cluster, collector_class, mailbox):
    import ray

    schemes = followed(UniLabRayScheme()) if mailbox else {"collector_kwargs": nested()}
    with collecting(collector_class=collector_class, **schemes) as collector:
        for parameter in collector.policy.parameters():  # actions have a mean of zero
            parameter.data.zero_()
        collector.update_policy_weights_()
        for node in collector.remote_collectors:
            acted = 1.0
            while acted:  # a mailbox is not waited for, and rollouts may have begun before
                rollout = ray.get(node.next.remote())
                acted = rollout["loc"].abs().max().item()
                if collector_class is APPOCollector:
                    assert rollout[VERSION].unique().numel() == 1
            assert not ray.get(node.next.remote())["loc"].any()


@pytest.mark.parametrize("collector_class", [APPOCollector, MultiAsyncCollector])
def test_rollouts_of_all_nodes_have_the_learners_versions(cluster, collector_class):
    scheme, settings = UniLabRayScheme(first_version=7), {}
    if collector_class is MultiAsyncCollector:
        settings["track_policy_version"] = True
    with collecting(
        collector_class=collector_class, num_workers_per_collector=2, **followed(scheme, **settings)
    ) as collector:
        collector.update_policy_weights_()
        seen: list[int] = []
        for rollout in collector:
            versions = rollout[VERSION]
            assert 7 <= versions.min() <= versions.max() <= scheme.version
            seen.append(int(versions.max()))
            collector.update_policy_weights_()
            if len(seen) >= 20 and seen[-1] > 20:
                break
        scheme.wait_applied(7, DEADLINE)  # until all have reported
        assert {*scheme.applied_versions} == {(n, w) for n in range(NODES) for w in range(2)}
        assert all(7 <= v <= scheme.version for v in scheme.applied_versions.values())


def test_collectors_that_do_not_follow_the_scheme_are_refused(cluster, monkeypatch):
    monkeypatch.setattr("torchrl_unilab.distributed.scheme._FOLLOW_SECONDS", 0.2)
    with (
        collecting(
            weight_sync_schemes={"policy": UniLabRayScheme()}, collector_kwargs=nested()
        ) as collector,
        pytest.raises(ConfigError, match=r"collectors \[0, 1\].*scheme.node\(\)"),
    ):
        collector.update_policy_weights_()


def test_collectors_without_workers_are_refused_on_the_learners_side(cluster):
    scheme = UniLabRayScheme()
    with pytest.raises(ConfigError, match=r"^collector_class: Collector "):
        ray_collector(collector_class=Collector, **followed(scheme))
    assert not scheme.initialized_on_sender


def test_a_collector_that_fails_leaves_no_mailbox(cluster):
    from ray.exceptions import RayError
    from ray.util import list_named_actors

    with pytest.raises(RayError, match="unknown"):
        ray_collector(**followed(UniLabRayScheme(), unknown=1))

    def are_none_left() -> bool:
        gc.collect()
        return not list_named_actors()

    wait_for(are_none_left)


def test_a_second_ray_collector_is_refused_and_the_first_continues(cluster):
    scheme = UniLabRayScheme()
    with collecting(**followed(scheme)) as collector:
        with pytest.raises(UsageError, match="serves one collector"):
            ray_collector(**followed(scheme))
        collector.update_policy_weights_()
        newest = scheme.version
        assert any(rollout[VERSION].min() >= newest for rollout in collector)


def test_nodes_share_no_trajectory_ids_and_no_seeds(cluster):
    with collecting(collector_kwargs={"seed": 3}, sync=True, total_frames=32) as collector:
        collector.update_policy_weights_()
        both = next(iter(collector))
        ids = [{*one.flatten().tolist()} for one in both[IDS]]
        assert not ids[0] & ids[1]
        assert [node_of(one) for one in both] == [0, 1]
        assert not both["observation"][0, :, 0].equal(both["observation"][1, :, 0])


def test_a_collector_that_ray_restarts_before_a_publish_has_other_ids_and_seeds(cluster):
    import ray

    with collecting(collector_kwargs={"seed": 3}) as collector:
        collector.update_policy_weights_()
        node = collector.remote_collectors[1]
        first = ray.get(node.next.remote())
        (pid,) = ray.get(node.get_distant_attr.remote("pids"))
        lost = psutil.Process(pid)
        ray.kill(node, no_restart=False)
        wait_for(lambda: has_ended(lost))
        again = ray.get(node.next.remote(), timeout=DEADLINE)
        ids, others = ({*one[IDS].flatten().tolist()} for one in (first, again))
        assert not ids & others
        assert node_of(again) == 1
        assert not first["observation"][:, 0].equal(again["observation"][:, 0])


def test_the_loss_of_a_worker_on_a_node_reaches_the_learner(cluster):
    import ray

    once = {"num_cpus": 1, "num_gpus": 0, "memory": 2**28}  # a task that fails is not repeated
    with collecting(remote_configs=once) as collector:
        collector.update_policy_weights_()
        (pid,) = ray.get(collector.remote_collectors[1].get_distant_attr.remote("pids"))
        os.kill(pid, signal.SIGKILL)
        asked = (collector.remote_collectors[1].next.remote() for _ in range(100))
        with pytest.raises(WorkerError, match="SIGKILL"):
            [ray.get(batch, timeout=DEADLINE) for batch in asked]
