"""When a collector that pulls looks for published weights, and what it reports."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import AsyncBatchedCollector, Collector
from torchrl.modules.inference_server import InferenceServerConfig

from tests.support.acting import StillEnv, actions, collecting, make_policy, receiver_of, set_action
from tests.support.bounds import DEADLINE
from torchrl_unilab.errors import LayoutError, UsageError
from torchrl_unilab.weight_update import UniLabShmScheme

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:The env passed to Collector is missing")


class Stepped(StillEnv):
    """Calls `on_step` before each step."""

    on_step: Callable[[], object] = staticmethod(lambda: None)

    def _step(self, tensordict):
        self.on_step()
        return super()._step(tensordict)


@pytest.fixture
def pulling(make_sender) -> Iterator[Callable]:
    """Makes a sender, a collector of this process that pulls from it as a worker's, and its env."""
    with ExitStack() as stack:

        def make(policy: nn.Module, **settings):
            sender = make_sender(settings, model_id="policy", model=policy, devices=[CPU])
            receiver, env = receiver_of(sender), Stepped()
            collector = Collector(env, make_policy(), frames_per_batch=4, total_frames=-1)
            stack.callback(collector.shutdown)
            collector.worker_idx = 0
            collector.register_scheme_receiver({"policy": receiver})
            return sender, collector, env

        yield make


def _publish(sender: UniLabShmScheme, policy: nn.Module, value: float) -> None:
    set_action(policy, value)
    sender.send()


def _fail() -> None:
    raise ValueError("the physics has failed")


def test_a_policy_that_is_read_in_mid_rollout_keeps_its_weights(pulling):
    policy = make_policy(0.25)
    sender, collector, env = pulling(policy)
    env.on_step = lambda: (_publish(sender, policy, 0.75), collector.policy)

    assert actions(collector.rollout()) == {0.25}


def test_after_a_rollout_that_failed_the_policy_is_what_was_published(pulling):
    policy = make_policy(0.25)
    sender, collector, env = pulling(policy)
    env.on_step = _fail
    with pytest.raises(ValueError, match="physics"):
        collector.rollout()

    _publish(sender, policy, 0.75)

    assert collector.policy.module[2].bias.item() == 0.75


@pytest.mark.parametrize(("pull", "applied"), [("rollout", 1), ("step", 1), ("manual", 0)])
@pytest.mark.parametrize(
    "ask",
    [
        lambda collector: collector.policy,
        lambda collector: collector.state_dict(),
        lambda collector: collector.get_distant_attr("total_frames"),
    ],
    ids=["policy", "state", "attribute"],
)
def test_a_collector_that_is_asked_pulls_unless_by_hand(pulling, pull, applied, ask):
    sender, collector, _ = pulling(make_policy(), pull=pull)
    sender.send()

    ask(collector)

    assert sender.applied_versions == {0: applied}


def test_a_collector_without_a_policy_has_no_such_attribute(pulling):
    _, collector, _ = pulling(make_policy())
    del collector.__dict__["policy"]

    assert not hasattr(collector, "policy")


class Tied(nn.Module):
    """Two layers with one weight, of a value; two buffers without elements."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.two = nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight
        nn.init.constant_(self.one.weight, value)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("other", torch.empty(0))


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_weights_that_the_model_ties_are_refused_where_they_differ_and_leave_it_as_it_was(
    value, make_sender
):
    published, model = Tied(1.0), Tied()
    sender = make_sender(model_id="policy", model=published, devices=[CPU])
    receiver = receiver_of(sender)
    receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    receiver.connect()
    nn.init.constant_(published.one.weight, value)
    sender.send()
    assert receiver.pull()
    assert model.two.weight is model.one.weight
    published.two.weight = nn.Parameter(torch.full((2, 2), 2.0))
    sender.send()

    with pytest.raises(LayoutError, match=r"'one\.weight' and 'two\.weight' differ \(expected"):
        receiver.pull()

    torch.testing.assert_close(model.one.weight.detach(), torch.full((2, 2), value), equal_nan=True)
    assert sender.applied_versions == {0: 1}


def test_a_transposed_view_of_a_weight_is_not_taken_for_the_weight(make_sender):
    def make(value: float) -> nn.Module:
        layer = nn.Linear(2, 2)
        nn.init.constant_(layer.weight, value)
        layer.weight.data[0, 1] = 9.0
        layer.register_buffer("turned", layer.weight.detach().t())
        return layer

    sender = make_sender(model_id="policy", model=make(0.25), devices=[CPU])
    receiver, model = receiver_of(sender), make(0.75)
    receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    receiver.connect()
    assert model.weight.tolist() == model.turned.t().tolist() == [[0.25, 9.0], [0.25, 0.25]]


def test_a_state_that_was_refused_is_not_called_published(pulling):
    sender, collector, _ = pulling(make_policy())
    state = collector.state_dict()
    del state["policy_state_dict"]["module.2.bias"]

    with pytest.raises(RuntimeError, match=r"module\.2\.bias"):
        collector.load_state_dict(state)

    assert sender.applied_versions == {0: None}
    collector.load_state_dict(state, strict=False)


@pytest.mark.parametrize(("model_id", "version"), [("policy", 40), (None, 40), ("env.value", 0)])
def test_a_collector_takes_the_version_of_its_policy_alone(make_sender, model_id, version):
    model = make_policy()
    sender = make_sender({"first_version": 40}, model_id=model_id, model=model, devices=[CPU])
    receiver = receiver_of(sender)
    receiver.init_on_receiver(model_id=model_id, model=model, worker_idx=0)
    receiver.connect()
    settings = {"frames_per_batch": 4, "total_frames": -1, "track_policy_version": True}
    with collecting(Collector, StillEnv, make_policy(), **settings) as collector:
        receiver.context = collector

        assert collector.policy_version_tracker.version == version


def test_a_collector_with_a_scheme_of_its_own_publishes_on_what_it_receives(make_sender):
    policy, own = make_policy(0.5), UniLabShmScheme()
    sender = make_sender(model_id="policy", model=policy, devices=[CPU])
    receiver = receiver_of(sender)
    schemes = {"policy": own}
    with collecting(Collector, StillEnv, make_policy(), weight_sync_schemes=schemes) as collector:
        collector.worker_idx = 0
        collector.register_scheme_receiver({"policy": receiver})
        _publish(sender, policy, 0.75)

        assert actions(collector.rollout()) == {0.75}

        assert own.weights["module", "2", "bias"].item() == 0.75
    own.shutdown()


@pytest.fixture
def apart(make_sender) -> UniLabShmScheme:
    """A sender whose two workers have weights apart, that make actions 0 and 1."""
    weights = {i: TensorDict.from_module(make_policy(i)).data.clone() for i in range(2)}
    return make_sender({"per_worker_weights": True}, params_map=weights)


class Numbered:
    """A receiver's context that says which worker it is."""

    def __init__(self) -> None:
        self.policy, self.worker_idx = make_policy(-1.0), 0


@pytest.mark.parametrize("at", ["init_on_receiver", "connect"])
def test_the_worker_that_is_named_beats_the_one_known_before(at, apart):
    receiver, context = receiver_of(apart), Numbered()
    named = {"init_on_receiver": {}, "connect": {}} | {at: {"worker_idx": 1}}

    receiver.init_on_receiver(model_id="policy", context=context, **named["init_on_receiver"])
    receiver.connect(**named["connect"])

    assert (receiver.worker_idx, apart.applied_versions) == (1, {0: None, 1: 0})
    assert receiver.weights["module", "2", "bias"].item() == 1.0


def test_a_receiver_without_a_number_is_refused(apart):
    receiver = receiver_of(apart)
    receiver.init_on_receiver(model_id="policy", model=make_policy())

    with pytest.raises(UsageError, match="no worker_idx"):
        receiver.connect()


def test_a_receiver_receives_once_it_is_initialised_and_connected(apart):
    receiver = receiver_of(apart)
    with pytest.raises(UsageError, match="before init_on_receiver"):
        receiver.receive()
    receiver.init_on_receiver(model_id="policy", model=make_policy(), worker_idx=0)
    with pytest.raises(UsageError, match="before connect"):
        receiver.receive()


def test_to_receive_waits_for_a_version_that_is_to_come(pair, monkeypatch):
    sender, receiver = pair(make_policy(), make_policy())
    monkeypatch.setattr(time, "sleep", lambda _: sender.send())

    assert receiver.receive(timeout=DEADLINE) is not None


def test_a_connected_receiver_has_version_and_number_of_its_own_which_a_copy_has_not(pair):
    _, receiver = pair(make_policy(), make_policy())
    assert (receiver.applied_version, receiver.worker_idx) == (0, 0)

    copied = copy.copy(receiver)

    assert (copied.applied_version, copied.worker_idx) == (-1, None)


def test_a_receiver_that_was_shut_down_pulls_nothing_more(pair):
    sender, receiver = pair(make_policy(), make_policy())
    receiver.shutdown()
    sender.send()

    assert not receiver.pull()


@pytest.mark.parametrize("where", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_an_inference_server_acts_with_what_was_published_before_a_request(where, make_sender):
    policy = make_policy()
    sender = make_sender(model_id="policy", model=policy, devices=[CPU])
    served = {"policy": make_policy()} if where == "thread" else {"policy_factory": make_policy}
    with collecting(
        AsyncBatchedCollector,
        [StillEnv] * 2,
        **served,
        server_config=InferenceServerConfig(service_backend=where),
        env_backend="threading",
        weight_sync=copy.copy(sender),
    ) as collector:
        batches = iter(collector)
        for value in (0.25, 0.75):
            _publish(sender, policy, value)
            next(batches)  # has what was asked for before
            assert actions(next(batches)) == {value}
        assert sender.applied_versions == {0: 2}
