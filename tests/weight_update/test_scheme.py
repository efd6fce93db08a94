from __future__ import annotations

import copy
import gc
import io
import pickle
import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.modules.inference_server import InferenceServer, ThreadingTransport
from torchrl.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme

from tests.support.acting import StillEnv, actions, collecting, make_policy, receiver_of, set_action
from tests.support.bounds import DEADLINE
from torchrl_unilab.errors import ConfigError, SegmentClosedError, UsageError, WaitTimeoutError
from torchrl_unilab.shm import seqlock
from torchrl_unilab.weight_update import UniLabShmScheme, UniLabShmTransport

CPU = torch.device("cpu")


def _multi(cls, *, policy=None, scheme=None, workers=2, **kwargs):
    schemes = {"policy": scheme or UniLabShmScheme()}
    return collecting(cls, [StillEnv] * workers, policy, weight_sync_schemes=schemes, **kwargs)


def test_it_is_registered_as_a_torchrl_backend():
    scheme = WeightSyncScheme.from_backend("unilab_shm", pull="manual")
    assert isinstance(scheme, UniLabShmScheme)
    assert scheme.pull_at == "manual"


@pytest.mark.parametrize(("cls", "first"), [(MultiSyncCollector, 40), (MultiAsyncCollector, 0)])
def test_rollouts_after_a_publish_act_with_it_and_carry_its_version(cls, first):
    policy = make_policy(0.25)
    scheme = UniLabShmScheme(first_version=first)
    with _multi(cls, policy=policy, scheme=scheme, track_policy_version=True) as collector:
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


def test_a_node_with_sub_collectors_hands_the_weights_on(make_sender):
    outer_policy = make_policy(0.5)
    sender = make_sender(model_id="policy", model=outer_policy, devices=[CPU])
    receiver = receiver_of(sender)
    with _multi(MultiSyncCollector, policy=make_policy(0.25), workers=1) as inner:
        inner.worker_idx = 0
        inner.register_scheme_receiver({"policy": receiver})
        batches = iter(inner)
        assert actions(next(batches)) == {0.5}
        set_action(outer_policy, 0.75)
        sender.send()
        inner.receive_weights()
        assert actions(next(batches)) == {0.75}


@pytest.mark.filterwarnings("ignore:The env passed to Collector is missing:FutureWarning")
def test_a_single_process_collector_publishes_to_each_that_attaches(make_receiver):
    policy = make_policy(0.25)
    scheme, acting = UniLabShmScheme(), make_policy()
    schemes = {"policy": scheme}
    with collecting(Collector, StillEnv, policy, weight_sync_schemes=schemes) as collector:
        receiver = make_receiver(scheme, acting)
        set_action(policy, 0.75)
        collector.update_policy_weights_()
        assert receiver.pull()
        assert acting(TensorDict(observation=torch.zeros(3)))["action"].item() == 0.75
        assert scheme.applied_versions == {0: 1}
    scheme.shutdown()


@pytest.mark.parametrize("given", [TensorDict.from_module, lambda policy: policy])
def test_a_single_process_collector_acts_with_weights_that_it_is_given(given):
    schemes = {"policy": UniLabShmScheme()}
    settings = {"weight_sync_schemes": schemes, "auto_register_policy_transforms": False}
    policy = make_policy(0.25).share_memory()
    with collecting(Collector, StillEnv, policy, **settings) as collector:
        batches = iter(collector)
        assert actions(next(batches)) == {0.25}
        collector.update_policy_weights_(given(make_policy(0.75)))
        assert actions(next(batches)) == {0.75}
    assert all(parameter.is_shared() for parameter in policy.parameters())
    schemes["policy"].shutdown()


def test_a_single_process_collector_acts_with_each_version_at_once():
    scheme = UniLabShmScheme()
    settings = {"weight_sync_schemes": {"policy": scheme}, "auto_register_policy_transforms": False}
    with collecting(Collector, StillEnv, make_policy(0.25), **settings) as collector, scheme:
        for version in (0, 1, 2):
            if version:
                collector.update_policy_weights_()
            assert scheme.applied_versions == {0: version}
            scheme.wait_applied(timeout=0)
    with pytest.raises(UsageError, match="shut down"):
        scheme.version  # noqa: B018


@pytest.mark.parametrize("timeout", [0.01, float("nan")])
def test_publishing_never_waits(timeout, make_sender):
    scheme = make_sender(model=make_policy(), devices=[CPU] * 3)
    for _ in range(1000):
        scheme.send()
    assert scheme.version == 1000
    assert scheme.applied_versions == {0: None, 1: None, 2: None}
    assert scheme.statistics["publishes"] == 1000  # to one cell
    with pytest.raises(WaitTimeoutError, match="worker 0 never connected"):
        scheme.wait_applied(timeout=timeout)


@pytest.fixture
def apart(make_sender, make_receiver) -> tuple[UniLabShmScheme, list[UniLabShmScheme]]:
    """A sender whose two workers have weights apart, all at version 0, and both receivers."""
    weights = {i: TensorDict.from_module(make_policy()).data for i in range(2)}
    sender = make_sender({"per_worker_weights": True}, params_map=weights)
    return sender, [make_receiver(sender, make_policy(-1.0), worker) for worker in weights]


def test_workers_that_a_publish_left_out_are_not_waited_for_and_have_no_lag(apart):
    sender, receivers = apart
    sender.send({np.int64(0): make_policy()}, worker_ids=np.int64(0))
    assert sender.lag == {0: 1, 1: 0}
    assert [receiver.pull() for receiver in receivers] == [True, False]

    sender.wait_applied(sender.version, worker_ids=np.arange(2), timeout=0)

    assert sender.applied_versions == {0: 1, 1: 0}


def test_each_publish_raises_the_version_whichever_workers_it_is_for(apart):
    sender, receivers = apart
    sender.send(make_policy(), worker_ids=0)

    sender.send(make_policy(), worker_ids=1)

    receivers[1].pull()
    assert sender.version == receivers[1].applied_version == 2


def test_an_inference_server_counts_updates_as_with_the_stock_scheme(make_sender):
    sender = make_sender(model_id="policy", model=make_policy(0.25), devices=[CPU])
    receiver = receiver_of(sender)
    server = InferenceServer(make_policy(), ThreadingTransport(), weight_sync=receiver)
    server._init_weight_sync()
    versions = [server.policy_version]
    sender.send()

    server._poll_weight_update()

    assert [*versions, server.policy_version] == [0, 1]
    assert receiver.context is server  # which it set before the scheme was initialised without one


@pytest.mark.parametrize("end", ["collected", "shut down"])
def test_the_end_of_a_copy_leaves_the_originals_memory_open(end, make_sender):
    sender = make_sender(model=make_policy(), devices=[CPU])
    other = copy.copy(sender)
    if end == "shut down":
        other.shutdown()
    del other
    gc.collect()

    sender.send()

    assert sender.version == 1


@pytest.mark.parametrize("name", ["policy", "get_model"])
def test_a_receivers_context_may_lack_what_the_stock_scheme_does_not_need(pair, name):
    sender, _ = pair(make_policy(0.25), make_policy(-1.0))
    receiver, acting = receiver_of(sender), make_policy(-1.0)
    has = {"policy": acting, "get_model": {"policy": acting}.__getitem__}[name]
    context = Mock(spec=[name], **{name: has})

    receiver.init_on_receiver(model_id="policy", context=context)
    receiver.connect(worker_idx=0)

    assert acting(TensorDict(observation=torch.zeros(3)))["action"].item() == 0.25


class Halved(UniLabShmScheme):
    """Publishes half of each weight."""

    def prepare_weights(self, weights, model_id, strategy, context=None):
        return super().prepare_weights(weights, model_id, strategy, context).data * 0.5


def test_prepare_weights_of_a_subclass_is_called_as_by_the_stock_scheme(make_sender):
    sender = make_sender(scheme=Halved, model_id="policy", model=nn.Linear(1, 1), devices=[CPU])

    sender.send(TensorDict(weight=torch.ones(1, 1), bias=torch.ones(1)))

    _, published = sender.create_transport().newest(0)
    assert published["weight"].item() == 0.5


@pytest.mark.parametrize("scheme_cls", [SharedMemWeightSyncScheme, UniLabShmScheme])
def test_a_senders_weights_are_the_initial_ones_without_a_model_and_a_receivers_are_its(scheme_cls):
    sender, receiver = scheme_cls(), scheme_cls()
    sender.init_on_sender(weights=TensorDict(w=torch.ones(2)), devices=[CPU])
    assert sender.weights["w"].tolist() == [1.0, 1.0]
    receiver.__setstate__(sender.__getstate__())
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))

    receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)

    assert receiver.weights["w"].tolist() == [1.0, 1.0]
    sender.shutdown()


def test_initial_weights_on_the_meta_device_are_refused_by_their_keys():
    with pytest.raises(ConfigError, match=r"'module.0.weight', .*on the meta device"):
        UniLabShmScheme().init_on_sender(model=make_policy().to("meta"), devices=[CPU])


@pytest.mark.parametrize("given", ["model", "weights"])
def test_sparse_weights_are_refused_by_their_keys_before_anything_is_allocated(given, monkeypatch):
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    allocate = Mock()
    monkeypatch.setattr(seqlock, "SharedSegment", allocate)
    source = {given: model if given == "model" else TensorDict(model.state_dict())}
    with pytest.raises(ConfigError, match=r"\{'graph': 'torch\.sparse_coo'\} \(expected dense"):
        UniLabShmScheme().init_on_sender(**source, devices=[CPU])
    allocate.assert_not_called()


def test_versions_continue_from_the_first_on_both_sides(pair):
    policy = make_policy(0.5)
    sender, receiver = pair(policy, make_policy(-1.0), first_version=40)
    assert (sender.version, receiver.applied_version, sender.applied_versions) == (40, 40, {0: 40})
    for version in (41, 42, 43, 44):  # more than there are slots
        set_action(policy, version / 100)
        sender.send()
        assert (sender.version, sender.lag) == (version, {0: 1})
        assert receiver.applied_version == version - 1
        late = rf"at version {version - 1} \(expected .*{version}\)"
        with pytest.raises(WaitTimeoutError, match=late):
            sender.wait_applied(timeout=0)
        assert receiver.pull()
        sender.wait_applied(version, timeout=0)
        assert receiver.applied_version == version
    nbytes = sender.create_transport().unique_cells[0].layout.nbytes
    assert sender.statistics == {"publishes": 4, "bytes": 4 * nbytes, "retries": 0}
    with pytest.raises(WaitTimeoutError):
        sender.wait_applied(45, timeout=0)


@pytest.mark.parametrize("kwargs", [{"pull": "sometimes"}, {"slots": 1}, {"first_version": -1}])
def test_settings_that_cannot_work_are_refused(kwargs):
    with pytest.raises(ConfigError):
        UniLabShmScheme(**kwargs)


def test_a_scheme_that_was_shut_down_says_so(make_sender):
    scheme = make_sender(model=make_policy(), devices=[CPU])
    scheme.shutdown()
    scheme.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        scheme.send()


def test_a_scheme_whose_collector_is_gone_says_so(make_sender):
    context = _Named()
    scheme = make_sender(model_id="policy", context=context)
    scheme.send()
    del context
    for model in (None, "policy"):
        with pytest.raises(UsageError, match=r"collector is gone .* a scheme of its own\.$"):
            scheme.send(model)


def test_a_sender_that_is_shut_down_closes_its_memory(make_sender):
    sender = make_sender({"slots": 5}, model=make_policy(), devices=[CPU])
    transport = sender.create_transport()
    assert transport.cell(0).slots == 5
    sender.shutdown()
    with pytest.raises(SegmentClosedError):
        transport.newest(0)


class _Shared(pickle.Pickler):
    """Pickles as for a worker; refuses the learner's tensors."""

    def persistent_id(self, obj):
        assert not isinstance(obj, torch.Tensor)
        return "transport" if isinstance(obj, UniLabShmTransport) else None


def test_what_a_worker_is_sent_holds_no_model_of_this_process(pair):
    sender, receiver = pair(make_policy(), make_policy())
    sender.send()
    for scheme in (sender, receiver):
        _Shared(io.BytesIO()).dump(scheme)


def test_weights_to_connect_with_are_published():
    sender = UniLabShmScheme()
    sender.init_on_sender(weights=TensorDict(w=torch.zeros(1)), devices=[CPU])
    sender.connect(weights=TensorDict(w=torch.ones(1)))
    assert (sender.version, sender.weights["w"].item()) == (1, 1.0)
    sender.shutdown()


def test_retries_of_all_readers_are_counted(apart):
    sender, receivers = apart
    sender.send(make_policy())
    for worker, receiver in enumerate(receivers):
        receiver.create_transport().cell(worker).overtaken = 3 + worker
        receiver.pull()
    assert sender.statistics["retries"] == 3 + 4


class _Named:
    """What a sender needs of a collector that has two policies."""

    def __init__(self) -> None:
        self.policy, self.other, self.policy_device = make_policy(0.25), make_policy(0.75), CPU


def test_a_model_of_the_context_is_published_by_its_name(make_sender):
    context = _Named()
    sender = make_sender(model_id="policy", context=context)
    sender.send("other")
    assert sender.weights["module", "2", "bias"].item() == 0.75


def test_a_model_is_not_published_by_its_name_where_no_context_has_it(make_sender):
    sender = make_sender(model_id="policy", model=make_policy(), devices=[CPU])
    with pytest.raises(ConfigError, match="the model 'policy': the scheme has no collector"):
        sender.send("policy")
    assert sender.version == 0


def test_a_policy_beside_a_factory_is_published(make_sender):
    collector = _Factories()
    collector._fallback_policy = make_policy(0.5)
    sender = make_sender(model_id="policy", context=collector)
    set_action(collector._fallback_policy, 0.75)
    sender.send()
    assert sender.weights["module", "2", "bias"].item() == 0.75


def test_an_unknown_worker_is_named(make_sender):
    with pytest.raises(ValueError, match="Worker 7 not registered"):
        make_sender(model=make_policy(), devices=[CPU]).send(worker_ids=7)


def test_a_worker_without_weights_of_its_own_is_named(apart):
    sender, _ = apart
    with pytest.raises(ConfigError, match=r"none for workers \[1\]"):
        sender.send({0: make_policy()}, worker_ids=[0, 1])
    assert sender.version == 0


class _Factories:
    """What a sender needs of a collector whose policies are made by factories."""

    policy, policy_device = None, (CPU,)
    policy_factory = (make_policy,)


@pytest.mark.parametrize("weights", [None, "policy"])
def test_to_publish_a_policy_that_a_factory_made_needs_its_weights(weights):
    scheme, collector = UniLabShmScheme(), _Factories()
    scheme.init_on_sender(model_id="policy", context=collector)
    scheme.connect()
    with pytest.raises(ConfigError, match=r"none given .* update_at_each_batch needs"):
        scheme.send(weights)
    scheme.shutdown()
