"""Both sides of the scheme in this process, with a mailbox of a real Ray between them."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector

from tests.support.bounds import DEADLINE
from tests.support.collecting import VERSION
from tests.support.nodes import mailbox_process
from tests.support.processes import has_ended, wait_for
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.distributed import UniLabRayScheme
from torchrl_unilab.distributed.mailbox import load_ray
from torchrl_unilab.distributed.node import POLL_SECONDS, SOON_SECONDS
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError, LayoutKeyError, UsageError, WaitTimeoutError
from torchrl_unilab.modules import make_actor
from torchrl_unilab.weight_update.module_weights import named_tensors

pytestmark = pytest.mark.usefixtures("ray_alone")

FIRST = 5


def make_policy(value: float) -> Any:
    policy = make_actor(11, 3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(value)
    return policy


@pytest.fixture
def scheme() -> Iterator[UniLabRayScheme]:
    """The learner's scheme, which has posted a policy of ones as version `FIRST`."""
    scheme, policy = UniLabRayScheme(first_version=FIRST), make_policy(1.0)
    scheme.init_on_sender(model_id="policy", model=policy, remote_collectors=[None])
    yield scheme
    scheme.shutdown()


create_env = partial(MujocoBatchEnv, "Hopper-v5", 2, num_threads=1)


def make_collector(own: Any, policy: Any = None, **settings: Any) -> APPOCollector:
    """A node's collector, whose own policy has other weights than the learner's."""
    schemes = {"weight_sync_schemes": {"policy": own}}
    policy = make_policy(0.0) if policy is None else policy
    return APPOCollector(create_env, policy, frames_per_batch=8, **schemes, **settings)


@pytest.fixture
def node(scheme) -> Iterator[APPOCollector]:
    """The collector of a node."""
    collector = make_collector(pickle.loads(pickle.dumps(scheme.node())), worker_idx=0)
    yield collector
    collector.shutdown()


@pytest.fixture
def connected(scheme, node) -> UniLabRayScheme:
    """The learner's scheme, whose first version the node's worker acts with."""
    scheme.connect()
    scheme.wait_applied(timeout=DEADLINE)
    return scheme


def follow(node: APPOCollector, version: int) -> None:
    """Collect until all steps are of a version."""
    for rollout in node:
        if rollout[VERSION].unique().tolist() == [version]:
            return


def test_workers_act_with_the_learners_versions_under_the_learners_numbers(scheme, node):
    scheme.connect()
    rollouts = iter(node)
    first = next(rollouts)
    assert first[VERSION].unique().tolist() == [FIRST]
    assert first["loc"].min() > 0  # of ones, not of the node's zeros
    scheme.wait_applied(timeout=DEADLINE)

    scheme.model.load_state_dict(make_policy(0.0).state_dict())
    scheme.send()
    scheme.send()
    while (found := next(rollouts))[VERSION].max() < FIRST + 2:
        pass
    assert not found["loc"].any()
    assert (scheme.version, node.scheme.version) == (FIRST + 2, FIRST + 2)
    scheme.wait_applied(timeout=DEADLINE)
    assert scheme.applied_versions == {(0, 0): FIRST + 2}
    assert scheme.lag == {(0, 0): 0}


def test_workers_that_do_not_collect_are_named(connected):
    connected.send()
    with pytest.raises(WaitTimeoutError, match="node 0 worker 0 at 5"):
        connected.wait_applied(timeout=0.1)
    assert connected.lag == {(0, 0): 1}
    for name, bad in (("version", "2"), ("version", -1), ("timeout", None)):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            connected.wait_applied(**{name: bad})


@pytest.mark.parametrize(("reports", "said"), [({}, "not reported"), ({0: {0: None}}, "at None")])
def test_a_node_that_has_not_reported_a_version_is_behind(scheme, reports, said):
    scheme._last_reports = reports
    with pytest.raises(WaitTimeoutError, match=f"node 0.* {said}"):
        scheme.wait_applied(timeout=0.1)
    assert scheme.lag == ({(0, 0): None} if reports else {})


def test_a_mailbox_that_is_lost_has_the_next_version(connected, node):
    load_ray().kill(connected._mailbox, no_restart=False)
    for rollout in node:
        if rollout[VERSION].max() > FIRST:
            break
        connected.send()
    assert node.scheme.version > FIRST


def test_a_mailbox_that_is_lost_gets_the_newest_version_back(scheme):
    ray = load_ray()
    scheme.send()
    lost, letters = mailbox_process(scheme), []
    ray.kill(scheme._mailbox, no_restart=False)
    wait_for(lambda: has_ended(lost))

    def has_answered() -> bool:
        with contextlib.suppress(ray.exceptions.RayError):  # it is being started again
            # beyond the first one, whose post Ray may repeat before the newest comes again
            answer = scheme._mailbox.poll.remote(FIRST, 0.5, None, {})
            letters.append(ray.get(answer, timeout=DEADLINE))
        return any(letters)

    wait_for(has_answered)
    assert ray.get(letters[-1][0]).version == scheme.version == FIRST + 1


def test_what_nodes_reported_before_their_mailbox_was_lost_still_counts(scheme):
    scheme._last_reports = {0: {0: FIRST}}  # the mailbox of now has none
    assert scheme.applied_versions == {(0, 0): FIRST}


def test_a_mailbox_that_is_stopped_holds_up_no_publish_and_then_has_the_newest(connected, node):
    mailbox = mailbox_process(connected)
    mailbox.suspend()
    try:
        while connected.skipped < 3:
            connected.send()
        assert connected.applied_versions == {(0, 0): FIRST}  # as last reported
    finally:
        mailbox.resume()
    follow(node, connected.version)
    assert node.scheme.version == connected.version
    assert load_ray().is_initialized()


def test_an_interrupted_publish_uses_its_version_up(scheme, node, monkeypatch):
    scheme.connect()

    def interrupt(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # not the one that posts again
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheme, "_mailbox", Mock(**{"post.remote.side_effect": interrupt}))
        with pytest.raises(KeyboardInterrupt):
            scheme.send()
    scheme.send()
    assert scheme.version == FIRST + 2


def test_each_publish_of_several_threads_has_a_version_of_its_own(scheme, monkeypatch):
    posted = []
    mailbox = Mock(**{"post.remote.side_effect": lambda version, _: posted.append(version)})
    with monkeypatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(scheme, "_mailbox", mailbox)
        wait([pool.submit(scheme.send) for _ in range(8)])
    assert {*range(FIRST + 1, FIRST + 9)} <= {*posted}
    assert scheme.version == FIRST + 8


def test_a_scheme_that_is_shut_down_in_mid_publish_fails_with_the_next(scheme, monkeypatch):

    def shut_down(weights: Any) -> dict[str, torch.Tensor]:
        scheme.shutdown()
        return named_tensors(weights)

    monkeypatch.setattr("torchrl_unilab.distributed.scheme.named_tensors", shut_down)
    scheme.send()
    with pytest.raises(UsageError, match="no mailbox"):
        scheme.send()


def test_weights_may_take_long_to_come(scheme, monkeypatch):
    ray, waits = load_ray(), []

    def late(letters: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waits.append(timeout)
        return ([], letters) if len(waits) < 4 else (letters, [])

    monkeypatch.setattr(ray, "wait", late)
    node = scheme.node()
    node._actor = scheme._mailbox
    assert node._poll(-1, DEADLINE, None, {}).version == FIRST
    assert len(waits) == 4
    node._ended.set()
    waits.clear()
    assert node._poll(-1, DEADLINE, None, {}) is None


def test_a_node_that_is_disconnected_in_its_own_thread_ends_that(node, monkeypatch):
    thread = node.scheme._thread  # where the garbage collector may find the collector
    monkeypatch.setattr(node.scheme, "_poll", lambda *_: node.scheme.disconnect())
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert node.scheme._thread is None


def test_a_node_is_disconnected_though_its_call_of_the_mailbox_never_returns(node, monkeypatch):
    thread, called, hung = node.scheme._thread, threading.Event(), threading.Event()
    monkeypatch.setattr("torchrl_unilab.distributed.node._END_SECONDS", 0.1)
    monkeypatch.setattr(node.scheme, "_poll", lambda *_: called.set() or hung.wait())
    assert called.wait(DEADLINE)
    node.scheme.disconnect()
    assert thread.is_alive()
    hung.set()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_a_node_polls_soon_after_a_version_and_then_less_and_less_often(scheme, node, monkeypatch):
    poll, polls = node.scheme._poll, list[tuple[int, float]]()

    def noted(after: int, seconds: float, *report: Any) -> Any:
        polls.append((after, seconds))
        return poll(after, seconds, *report)

    monkeypatch.setattr(node.scheme, "_poll", noted)
    scheme.send()
    wait_for(lambda: polls[-1:] == [(FIRST + 1, POLL_SECONDS)])
    waits = [seconds for after, seconds in polls if after == FIRST + 1]
    assert waits == sorted(waits)
    assert waits[0] == SOON_SECONDS


def test_a_node_publishes_nothing_of_its_own(node):
    with pytest.raises(ConfigError, match="learner's scheme"):
        node.update_policy_weights_()


def test_weights_without_extra_state_keep_the_models(scheme):
    class Counts(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    policy = Counts(2, 2)
    scheme = UniLabRayScheme(policy)
    scheme.init_on_sender(model_id="policy", remote_collectors=[])
    weights = TensorDict.from_module(policy)
    scheme.connect(weights=weights)
    scheme.send(weights)
    assert scheme.version == 2
    scheme.shutdown()


def test_a_collector_without_workers_is_refused(scheme):
    with pytest.raises(ConfigError, match="collector_class: Collector"):
        Collector(
            create_env(),
            make_policy(0.0),
            frames_per_batch=8,
            weight_sync_schemes={"policy": scheme.node()},
            auto_register_policy_transforms=False,
        )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"policy": partial(make_policy, 1.0)}, r"policy: .*\(expected Module\)"),
        ({"policy": 3}, r"policy: .*\(expected Module\)"),
        ({"first_version": -1}, "first_version"),
    ],
)
def test_what_is_no_policy_or_version_is_refused_at_once(setting, message):
    with pytest.raises(ConfigError, match=message):
        UniLabRayScheme(**setting)


def test_other_weights_are_refused_before_anything_is_posted(scheme):
    weights = named_tensors(scheme.model)
    weights.popitem()
    with pytest.raises(LayoutKeyError):
        scheme.send(weights)
    assert scheme.version == FIRST


def test_collectors_that_do_not_follow_the_mailbox_are_named(scheme, monkeypatch):
    monkeypatch.setattr("torchrl_unilab.distributed.scheme._FOLLOW_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"collectors \[0\].*scheme.node\(\)"):
        scheme.connect()


def test_a_node_of_another_policy_is_refused(scheme):
    with pytest.raises(LayoutKeyError, match="Give tensors like"):  # before it has workers
        make_collector(scheme.node(), make_actor(11, 3, hidden=(8,)), inline=True)


def test_the_learners_scheme_in_place_of_its_node_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"UniLabRayScheme's node\(\)\.$"):
        make_collector(UniLabRayScheme(), inline=True)


def test_a_node_without_a_learner_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("torchrl_unilab.distributed.node.FIRST_SECONDS", 0.1)
    with pytest.raises(WaitTimeoutError, match="weight_sync_schemes"):
        make_collector(UniLabRayScheme().node(), inline=True)


@pytest.mark.parametrize("given", [{"model": None, "remote_collectors": []}, {"model": 1}])
def test_a_scheme_without_a_ray_collector_or_its_policy_is_refused(given):
    with pytest.raises(ConfigError, match="RayCollector"):
        UniLabRayScheme().init_on_sender(model_id="policy", **given)


def test_a_second_collector_is_refused_and_the_first_continues(connected, node):
    other = {"model": torch.nn.Linear(2, 2), "remote_collectors": [None] * 2}
    with pytest.raises(UsageError, match=r"serves one collector\)\. Give each its own"):
        connected.init_on_sender(model_id="other", **other)
    connected.send()
    follow(node, FIRST + 1)
    connected.wait_applied(timeout=DEADLINE)


def test_a_scheme_without_references_leaves_no_mailbox_and_no_thread():
    from ray.util import list_named_actors

    before = {*threading.enumerate()}
    scheme = UniLabRayScheme(make_policy(1.0))
    scheme.init_on_sender(model_id="policy", remote_collectors=[])
    scheme.connect()
    assert scheme._name in list_named_actors()
    (thread,) = (t for t in threading.enumerate() if t not in before and t.name == "mailbox")
    again = threading.Event()
    vars(scheme).update(_repost=again.set)
    assert again.wait(DEADLINE)  # the thread has had a reference
    name = scheme._name
    del scheme
    thread.join(timeout=DEADLINE)
    assert not thread.is_alive()
    wait_for(lambda: name not in list_named_actors())


def test_a_scheme_that_is_shut_down_in_its_own_thread_ends_that(scheme, monkeypatch):
    thread = scheme._thread  # which may hold the last reference
    monkeypatch.setattr(scheme, "_repost", scheme.shutdown)
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert scheme._mailbox is None


def test_a_copy_of_a_scheme_ends_nothing(scheme):
    pickle.loads(pickle.dumps(scheme)).shutdown()
    assert mailbox_process(scheme).is_running()
    scheme.send()


def test_a_node_waits_for_a_mailbox_that_is_about_to_be_opened(monkeypatch):
    scheme = UniLabRayScheme(make_policy(1.0))
    opened = partial(scheme.init_on_sender, model_id="policy", remote_collectors=[])
    clock = Mock(monotonic=time.monotonic, sleep=lambda _: opened())
    monkeypatch.setattr("torchrl_unilab.distributed.node.time", clock)
    assert scheme.node()._wait_for_first().version == scheme.version
    scheme.shutdown()


def test_a_scheme_that_is_shut_down_sends_nothing(scheme):
    scheme.shutdown()
    scheme.shutdown()
    with pytest.raises(UsageError, match="no mailbox"):
        scheme.send()
