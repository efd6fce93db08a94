from __future__ import annotations

import copy
import gc
import time
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.modules.inference_server import InferenceServer, ThreadingTransport
from torchrl.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme

from tests.support.acting import StillEnv, actions, make_policy, make_policy_at_half, set_action
from tests.support.bounds import DEADLINE
from torchrl_unilab.errors import (
    ConfigError,
    LayoutDtypeError,
    LayoutKeyError,
    LayoutShapeError,
    WaitTimeoutError,
)
from torchrl_unilab.weight_update import UniLabShmScheme

CPU = torch.device("cpu")
NEVER_ENDING = {"frames_per_batch": 8, "total_frames": -1}


def _multi(cls, *, policy=None, scheme=None, workers=2, **kwargs):
    return cls(
        [StillEnv] * workers,
        policy,
        weight_sync_schemes={"policy": scheme or UniLabShmScheme()},
        **(NEVER_ENDING | kwargs),
    )


def _pair(model: nn.Module, **kwargs) -> tuple[UniLabShmScheme, UniLabShmScheme, nn.Module]:
    """A connected sender and receiver in one process, without a collector."""
    sender = UniLabShmScheme(**kwargs)
    sender.init_on_sender(model_id="policy", model=model, devices=[CPU])
    sender.connect()
    receiver = UniLabShmScheme()
    receiver.__setstate__(sender.__getstate__())
    acting = make_policy(-1.0)
    receiver.init_on_receiver(model_id="policy", model=acting, worker_idx=0)
    receiver.connect()
    return sender, receiver, acting


def test_it_is_registered_as_a_torchrl_backend():
    scheme = WeightSyncScheme.from_backend("unilab_shm", pull="manual")
    assert isinstance(scheme, UniLabShmScheme)
    assert scheme.pull_at == "manual"


@pytest.mark.parametrize(
    ("cls", "first"), [(MultiSyncCollector, 0), (MultiAsyncCollector, 0), (MultiSyncCollector, 40)]
)
def test_rollouts_after_a_publish_act_with_it_and_carry_its_version(cls, first):
    policy = make_policy(0.25)
    scheme = UniLabShmScheme(first_version=first)
    collector = _multi(cls, policy=policy, scheme=scheme, track_policy_version=True)
    try:
        batches = iter(collector)
        batch = next(batches)
        assert actions(batch) == {0.25}
        assert batch["next", "policy_version"].unique().tolist() == [first]
        set_action(policy, 0.75)
        unpublished = [actions(next(batches)) for _ in range(3)]
        assert unpublished == [{0.25}] * 3
        collector.update_policy_weights_()
        published = first + 1
        assert scheme.version == published
        newest = 0
        until = time.monotonic() + DEADLINE
        while newest < published or set(scheme.applied_versions.values()) != {published}:
            assert time.monotonic() < until, "a worker does not take what was published"
            batch = next(batches)  # an asynchronous worker may have rollouts under way
            (newest,) = batch["next", "policy_version"].unique().tolist()
            assert actions(batch) == {0.75 if newest > first else 0.25}
        scheme.wait_applied(published, timeout=DEADLINE)
        assert scheme.applied_versions == {0: published, 1: published}
    finally:
        collector.shutdown()


def test_a_uniform_policy_factory_is_served_and_a_hook_of_the_user_still_runs():
    calls: list[int] = []
    collector = _multi(
        MultiSyncCollector,
        policy_factory=make_policy_at_half,
        pre_collect_hook=partial(calls.append, 1),
        workers=1,
    )
    try:
        batches = iter(collector)
        assert actions(next(batches)) == {0.5}
        collector.update_policy_weights_(make_policy(0.75))
        assert actions(next(batches)) == {0.75}
        collector.pre_collect_hook = None
        collector.update_policy_weights_(TensorDict.from_module(make_policy(0.125)))
        assert actions(next(batches)) == {0.125}
        state = make_policy(1.5).state_dict()
        collector.update_policy_weights_(state)
        assert actions(next(batches)) == {1.5}
    finally:
        collector.shutdown()


def test_an_idle_worker_answers_with_what_was_published():
    policy = make_policy(0.25)
    collector = _multi(MultiSyncCollector, policy=policy, workers=1)
    try:
        next(iter(collector))
        set_action(policy, 0.75)
        collector.update_policy_weights_()
        state = collector.state_dict()["worker0"]["policy_state_dict"]
        assert state["module.2.bias"].item() == 0.75
    finally:
        collector.shutdown()


def test_a_node_with_sub_collectors_hands_the_weights_on():
    inner_policy = make_policy(0.25)
    inner = _multi(MultiSyncCollector, policy=inner_policy, workers=1)
    outer_policy = make_policy(0.5)
    sender, receiver = UniLabShmScheme(), UniLabShmScheme()
    try:
        sender.init_on_sender(model_id="policy", model=outer_policy, devices=[CPU])
        sender.connect()
        receiver.__setstate__(sender.__getstate__())
        inner.worker_idx = 0
        inner.register_scheme_receiver({"policy": receiver})
        batches = iter(inner)
        assert actions(next(batches)) == {0.5}
        set_action(outer_policy, 0.75)
        sender.send()
        inner.receive_weights()
        assert actions(next(batches)) == {0.75}
    finally:
        inner.shutdown()
        sender.shutdown()


@pytest.mark.filterwarnings("ignore:The env passed to Collector is missing:FutureWarning")
def test_a_single_process_collector_publishes_to_whoever_attaches():
    policy = make_policy(0.25)
    scheme = UniLabShmScheme()
    collector = Collector(StillEnv, policy, weight_sync_schemes={"policy": scheme}, **NEVER_ENDING)
    receiver, acting = UniLabShmScheme(), make_policy()
    try:
        receiver.__setstate__(scheme.__getstate__())
        receiver.init_on_receiver(model_id="policy", model=acting, worker_idx=0)
        receiver.connect()
        set_action(policy, 0.75)
        collector.update_policy_weights_()
        assert receiver.pull()
        assert acting(TensorDict(observation=torch.zeros(3)))["action"].item() == 0.75
        assert scheme.applied_versions == {0: 1}
    finally:
        collector.shutdown()
        scheme.shutdown()


def test_publishing_waits_for_nobody():
    policy = make_policy()
    scheme = UniLabShmScheme()
    scheme.init_on_sender(model=policy, devices=[CPU] * 3)
    scheme.connect()
    for _ in range(1000):
        scheme.send()
    assert scheme.version == 1000
    assert scheme.applied_versions == {0: None, 1: None, 2: None}
    with pytest.raises(WaitTimeoutError, match="worker 0 never connected"):
        scheme.wait_applied(timeout=0.01)
    scheme.shutdown()


def _per_worker(workers: int) -> UniLabShmScheme:
    """A sender whose workers have weights apart, all at version 0."""
    weights = {i: TensorDict.from_module(make_policy()).data for i in range(workers)}
    scheme = UniLabShmScheme(per_worker_weights=True)
    scheme.init_on_sender(params_map=weights)
    scheme.connect()
    return scheme


def _receiver(sender: UniLabShmScheme, worker: int) -> tuple[UniLabShmScheme, nn.Module]:
    receiver, acting = UniLabShmScheme(), make_policy(-1.0)
    receiver.__setstate__(sender.__getstate__())
    receiver.init_on_receiver(model_id="policy", model=acting, worker_idx=worker)
    receiver.connect()
    return receiver, acting


def test_workers_that_a_publish_left_out_are_not_waited_for():
    sender = _per_worker(2)
    (first, _), (_second, _) = _receiver(sender, 0), _receiver(sender, 1)
    sender.send(make_policy(), worker_ids=0)
    first.pull()

    sender.wait_applied(sender.version, timeout=0)

    assert sender.applied_versions == {0: 1, 1: 0}
    sender.shutdown()


def test_each_publish_raises_the_version_whichever_workers_it_is_for():
    sender = _per_worker(2)
    receiver, _ = _receiver(sender, 1)
    sender.send(make_policy(), worker_ids=0)

    sender.send(make_policy(), worker_ids=1)

    receiver.pull()
    assert sender.version == receiver.applied_version == 2
    sender.shutdown()


def test_an_inference_server_counts_updates_as_with_the_stock_scheme():
    learner = make_policy(0.25)
    sender = UniLabShmScheme()
    sender.init_on_sender(model_id="policy", model=learner, devices=[CPU])
    sender.connect()
    receiver, acting = UniLabShmScheme(), make_policy()
    receiver.__setstate__(sender.__getstate__())
    server = InferenceServer(acting, ThreadingTransport(), weight_sync=receiver)
    server._init_weight_sync()
    versions = [server.policy_version]
    sender.send()

    server._poll_weight_update()

    versions.append(server.policy_version)
    assert versions == [0, 1]
    sender.shutdown()


@pytest.mark.parametrize("end", ["collected", "shut down"])
def test_the_end_of_a_copy_leaves_the_originals_memory_open(end):
    sender = UniLabShmScheme()
    sender.init_on_sender(model=make_policy(), devices=[CPU])
    sender.connect()
    other = copy.copy(sender)
    if end == "shut down":
        other.shutdown()
    del other
    gc.collect()

    sender.send()

    assert sender.version == 1
    sender.shutdown()


class Bare:
    """A receiver's context that has a policy and no worker_idx."""

    def __init__(self) -> None:
        self.policy = make_policy(-1.0)


class Finder:
    """A receiver's context that has `get_model` alone."""

    def __init__(self) -> None:
        self.found = make_policy(-1.0)

    def get_model(self, model_id: str) -> nn.Module:
        assert model_id == "policy"
        return self.found


@pytest.mark.parametrize("context", [Bare(), Finder()], ids=["bare", "get_model"])
def test_a_receivers_context_may_lack_what_the_stock_scheme_does_not_need(context):
    sender, _, _ = _pair(make_policy(0.25))
    receiver = UniLabShmScheme()
    receiver.__setstate__(sender.__getstate__())

    receiver.init_on_receiver(model_id="policy", context=context)
    receiver.connect(worker_idx=0)

    acting = context.policy if isinstance(context, Bare) else context.found
    assert acting(TensorDict(observation=torch.zeros(3)))["action"].item() == 0.25
    sender.shutdown()


class Halved(UniLabShmScheme):
    """Publishes half of each weight."""

    def prepare_weights(self, weights, model_id, strategy, context=None):
        return super().prepare_weights(weights, model_id, strategy, context).data * 0.5


def test_prepare_weights_of_a_subclass_is_called_as_by_the_stock_scheme():
    sender = Halved()
    sender.init_on_sender(model_id="policy", model=nn.Linear(1, 1), devices=[CPU])
    sender.connect()

    sender.send(TensorDict(weight=torch.ones(1, 1), bias=torch.ones(1)))

    _, published = sender.create_transport().newest(0)
    assert published["weight"].item() == 0.5
    sender.shutdown()


@pytest.mark.parametrize("scheme_cls", [SharedMemWeightSyncScheme, UniLabShmScheme])
def test_a_senders_weights_are_the_initial_ones_without_a_model(scheme_cls):
    scheme = scheme_cls()
    scheme.init_on_sender(weights=TensorDict(w=torch.ones(2)), devices=[CPU])

    assert scheme.weights["w"].tolist() == [1.0, 1.0]
    scheme.shutdown()


@pytest.mark.parametrize("scheme_cls", [SharedMemWeightSyncScheme, UniLabShmScheme])
def test_a_receivers_weights_are_those_of_the_sender(scheme_cls):
    sender, receiver = scheme_cls(), scheme_cls()
    sender.init_on_sender(weights=TensorDict(w=torch.ones(2)), devices=[CPU])
    receiver.__setstate__(sender.__getstate__())
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))

    receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)

    assert receiver.weights["w"].tolist() == [1.0, 1.0]
    sender.shutdown()


def test_initial_weights_on_the_meta_device_are_refused_by_their_keys():
    with pytest.raises(ConfigError, match=r"'module.0.weight', .*on the meta device"):
        UniLabShmScheme().init_on_sender(
            model=make_policy().to("meta"), devices=[torch.device("cpu")]
        )


def test_versions_go_on_from_the_first_on_both_sides():
    policy = make_policy(0.5)
    sender, receiver, _ = _pair(policy, first_version=40)
    assert (sender.version, receiver.applied_version, sender.applied_versions) == (40, 40, {0: 40})
    for version in (41, 42, 43, 44):  # more than there are slots
        set_action(policy, version / 100)
        sender.send()
        assert (sender.version, receiver.applied_version, sender.lag) == (
            version,
            version - 1,
            {0: 1},
        )
        with pytest.raises(
            WaitTimeoutError, match=rf"at version {version - 1} \(expected .*{version}\)"
        ):
            sender.wait_applied(timeout=0)
        assert receiver.pull()
        sender.wait_applied(version, timeout=0)
        assert receiver.applied_version == version
    assert sender.statistics["publishes"] == 4
    with pytest.raises(WaitTimeoutError):
        sender.wait_applied(45, timeout=0)
    sender.shutdown()


def test_a_receiver_has_tensors_of_its_own():
    policy = make_policy(0.25)
    sender, receiver, acting = _pair(policy)
    set_action(policy, 0.75)
    assert acting(TensorDict(observation=torch.zeros(1, 3)))["action"].item() == 0.25
    assert receiver.pull() is False
    sender.send()
    assert receiver.pull() is True
    assert acting(TensorDict(observation=torch.zeros(1, 3)))["action"].item() == 0.75
    sender.shutdown()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda state: state.pop("module.0.bias"), LayoutKeyError, r"missing \['module.0.bias'\]"),
        (
            lambda state: state.update({"module.0.bias": torch.zeros(3)}),
            LayoutShapeError,
            r"'module.0.bias': \(3,\) \(expected \(8,\)\)",
        ),
        (
            lambda state: state.update({"module.0.bias": torch.zeros(8).double()}),
            LayoutDtypeError,
            "'module.0.bias': torch.float64",
        ),
    ],
)
def test_weights_that_do_not_match_are_refused_before_anything_changes(change, error, message):
    sender, receiver, _ = _pair(make_policy(0.25))
    state = make_policy(0.75).state_dict()
    change(state)
    with pytest.raises(error, match=message):
        sender.send(state)
    assert sender.version == 0
    assert receiver.pull() is False
    sender.shutdown()


@pytest.mark.parametrize("kwargs", [{"pull": "sometimes"}, {"slots": 1}, {"first_version": -1}])
def test_settings_that_cannot_work_are_refused(kwargs):
    with pytest.raises(ConfigError):
        UniLabShmScheme(**kwargs)


def test_misuse_raises_what_the_stock_scheme_raises():
    scheme = UniLabShmScheme()
    with pytest.raises(RuntimeError, match="initialized on sender before"):
        scheme.send()
    with pytest.raises(ValueError, match="must be provided"):
        scheme.init_on_sender(model_id="policy")
    scheme.init_on_sender(model=make_policy(), devices=[CPU])
    with pytest.raises(RuntimeError, match="synchronized on sender before"):
        scheme.send()
    scheme.connect()
    with pytest.raises(RuntimeError, match="twice"):
        scheme.connect()
    with pytest.raises(ValueError, match="Worker 7 not registered"):
        scheme.send(worker_ids=7)
    scheme.shutdown()
    scheme.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        scheme.send()
