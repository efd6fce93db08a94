"""What a publish carries, and what it leaves as it was."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from tensordict import TensorDict, TensorDictParams, from_modules
from torch import nn
from torchrl.collectors.utils import _make_meta_policy
from torchrl.modules import MultiAgentMLP

from tests.support.acting import Context
from torchrl_unilab.errors import ConfigError, LayoutDtypeError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.weight_update import UniLabShmScheme, UniLabShmTransport

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Parameters and buffers of many kinds, tied, nested, and with extra state."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.brain = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.strided = nn.Parameter(torch.zeros(4, 3).t())
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("float16", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.params = TensorDictParams(TensorDict(a={"b": nn.Parameter(torch.zeros(2))}))
        self.counter = Counter()
        self.fill(value)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(bool(value) if tensor.dtype is torch.bool else value)
        self.counter.count = int(value)
        self.counter.statistics["mean"].fill_(value)


class Counter(nn.Module):
    """Keeps its state outside parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.statistics = {"mean": torch.zeros(2)}

    def get_extra_state(self):
        return {"count": self.count, "statistics": self.statistics}

    def set_extra_state(self, state) -> None:
        self.count = state["count"]
        self.statistics = state["statistics"]


def _describe(module: nn.Module) -> dict[str, tuple]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        key: (type(t), t.dtype, tuple(t.shape), t.requires_grad, t.is_leaf)
        for key, t in named.items()
    }


def _equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(
        (*one.parameters(), *one.buffers()), (*other.parameters(), *other.buffers()), strict=True
    )
    return (
        all(torch.equal(a, b) for a, b in pairs)
        and one.counter.count == other.counter.count
        and torch.equal(one.counter.statistics["mean"], other.counter.statistics["mean"])
    )


def test_every_kind_of_tensor_and_extra_state_arrives(pair):
    learner, worker = Mixed(1.0), Mixed(5.0)
    sender, receiver = pair(learner, worker)
    assert _equal(worker, learner)
    learner.fill(2.0)
    sender.send()
    assert receiver.pull()
    assert _equal(worker, learner)
    assert type(worker.counter.count) is int


def test_a_thousand_publishes_leave_both_modules_registered_as_they_were(pair):
    learner, worker = Mixed(1.0), Mixed()
    before = _describe(learner), _describe(worker), list(learner.state_dict())
    pointers = {key: t.data_ptr() for key, t in learner.named_parameters()}
    sender, receiver = pair(learner, worker)
    acting = {key: t.data_ptr() for key, t in worker.named_parameters()}
    for i in range(1000):
        learner.scalar.data.fill_(i)
        sender.send()
        receiver.pull()
    assert worker.scalar.item() == 999
    assert (_describe(learner), _describe(worker), list(learner.state_dict())) == before
    assert {key: t.data_ptr() for key, t in learner.named_parameters()} == pointers
    # In place: what was compiled or captured on the worker's tensors stays valid.
    assert {key: t.data_ptr() for key, t in worker.named_parameters()} == acting
    assert not any(t.is_shared() for t in learner.parameters())


def test_a_worker_takes_private_tensors_where_it_was_given_shared_ones(pair):
    worker = Mixed().share_memory()
    pair(Mixed(4.0), worker)
    assert not any(t.is_shared() for t in (*worker.parameters(), *worker.buffers()))
    assert worker.params["a", "b"].tolist() == [4.0, 4.0]


def test_extra_state_whose_dictionary_was_built_anew_in_another_order_arrives(pair):
    policy, acting = Mixed(1.0), Mixed(5.0)
    sender, receiver = pair(policy, acting)
    sender.send()
    policy.counter.get_extra_state = lambda: {
        "statistics": {"mean": torch.full((2,), 9.0)},
        "count": 7,
    }
    sender.send()
    receiver.pull()
    assert acting.counter.count == 7
    assert acting.counter.statistics["mean"].tolist() == [9.0, 9.0]


def test_a_state_dict_without_what_is_not_persistent_keeps_the_last_published(pair):
    learner = Mixed(1.0)
    worker = Mixed()
    sender, receiver = pair(learner, worker)
    state = {k: v for k, v in Mixed(7.0).state_dict().items() if "_extra_state" not in k}
    assert "cache" not in state
    sender.send(state)
    receiver.pull()
    assert worker.scalar.item() == 7.0
    assert worker.cache.tolist() == [1.0, 1.0]
    assert worker.counter.count == 1


def test_a_full_state_dict_carries_extra_state(pair):
    worker = Mixed()
    sender, receiver = pair(Mixed(1.0), worker)
    sender.send(Mixed(6.0).state_dict())
    receiver.pull()
    assert worker.counter.count == 6


class Ensemble(nn.Module):
    """Two linear layers in one vmapped call: its parameters are leaves at the top level."""

    def __init__(self) -> None:
        super().__init__()
        self.params = from_modules(nn.Linear(3, 1), nn.Linear(3, 1), as_module=True)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self._one, (0, None))(self.params, observation)

    @staticmethod
    def _one(params: TensorDict, observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(observation, params["weight"], params["bias"])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (
            partial(
                MultiAgentMLP, 3, 1, 2, centralized=False, share_params=False, depth=1, num_cells=4
            ),
            (5, 2, 3),
        ),
        (Ensemble, (5, 3)),
    ],
    ids=["nested", "at the top of a TensorDict"],
)
def test_a_policy_that_came_through_the_meta_device_gets_memory_everywhere(pair, make, shape):
    # As TorchRL sends a policy to a spawned worker; MultiAgentMLP keeps TensorDictParams.
    learner = make()
    with _make_meta_policy(learner):
        worker = pickle.loads(pickle.dumps(learner))
    pair(learner, worker)
    assert not any(t.is_meta for t in worker.parameters())
    observation = torch.randn(shape)
    assert torch.equal(worker(observation), learner(observation))


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _same(one: nn.Module, other: nn.Module) -> bool:
    observation = torch.randn(5, 3)
    return torch.equal(one(observation), other(observation))


@pytest.mark.parametrize("replaced", ["learner's", "worker's"])
def test_a_replaced_layer_of_either_takes_part_in_the_next_publish(replaced, pair):
    policy, worker = _net(), _net()
    sender, receiver = pair(policy, worker)
    (policy if replaced == "learner's" else worker)[2] = nn.Linear(4, 2)

    sender.send()

    receiver.pull()
    assert _same(policy, worker)


def test_a_replaced_layer_of_a_module_that_is_sent_again_is_published(pair):
    worker, other = _net(), _net()
    sender, receiver = pair(_net(), worker)
    sender.send(other)
    other[2] = nn.Linear(4, 2)

    sender.send(other)

    receiver.pull()
    assert _same(other, worker)


def test_a_replaced_policy_of_the_context_is_published(make_sender, make_receiver):
    worker, context = _net(), Context(_net())
    sender = make_sender(model_id="policy", context=context)
    receiver = make_receiver(sender, worker)
    sender.send()
    context.policy = _net()

    sender.send()

    receiver.pull()
    assert _same(context.policy, worker)


def test_a_replaced_parameter_dictionary_leaf_is_published(pair):
    learner = Ensemble()
    worker = copy.deepcopy(learner)
    sender, receiver = pair(learner, worker)
    learner.params = from_modules(nn.Linear(3, 1), nn.Linear(3, 1), as_module=True)

    sender.send()

    receiver.pull()
    assert _same(learner, worker)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda net: net.__setitem__(2, nn.Linear(4, 3)), LayoutShapeError, r"'2.weight': \(3, 4"),
        (lambda net: net.append(nn.Linear(2, 2)), LayoutKeyError, r"unknown \['3.bias', '3.weig"),
        (lambda net: setattr(net[2], "bias", None), LayoutKeyError, r"missing \['2.bias'\]"),
        (lambda net: nn.utils.weight_norm(net[2]), LayoutKeyError, r"missing \['2.weight'\]"),
        (
            lambda net: nn.utils.parametrizations.weight_norm(net[2]),
            LayoutKeyError,
            r"missing \['2.weight'\]",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_policy_that_has_other_tensors_now_is_refused_by_their_names(
    pair, change, error, message
):
    policy, worker = _net(), _net()
    sender, _ = pair(policy, worker)
    change(policy)

    with pytest.raises(error, match=message):
        sender.send()

    assert sender.version == 0


def test_a_parameter_that_was_absent_is_refused_by_its_name(pair):
    policy, worker = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    sender, _ = pair(policy, worker)
    policy.bias = nn.Parameter(torch.zeros(2))

    with pytest.raises(LayoutKeyError, match=r"unknown \['bias'\]"):
        sender.send()


@pytest.mark.parametrize(
    ("bias", "error"),
    [
        (torch.zeros(3), LayoutShapeError),
        (torch.zeros(2, 2), LayoutShapeError),  # into which the published one would spread
        (torch.zeros(2, dtype=torch.float64), LayoutDtypeError),
    ],
)
def test_a_worker_whose_tensor_is_of_another_form_now_is_refused_and_written_nothing(
    bias, error, pair
):
    policy, worker = _net(), _net()
    sender, receiver = pair(policy, worker)
    worker[2].bias = nn.Parameter(bias)
    before = copy.deepcopy(worker.state_dict())
    nn.init.constant_(policy[0].weight, 3.0)
    sender.send()

    with pytest.raises(error):
        receiver.pull()

    assert all(torch.equal(before[key], now) for key, now in worker.state_dict().items())
    assert receiver.applied_versions == {0: 0}


@pytest.mark.parametrize("given", [None, {}])
def test_a_model_without_weights_is_published_too(pair, given):
    sender, receiver = pair(nn.Tanh(), nn.Tanh())
    sender.send(given)
    assert receiver.pull()
    assert receiver.applied_versions == {0: 1}


def test_a_worker_with_another_architecture_is_refused_at_connect(pair):
    with pytest.raises(LayoutKeyError, match="the same architecture"):
        pair(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))


@pytest.mark.parametrize("way", ["params_map", "device_map_fn"])
def test_workers_that_were_given_dtypes_of_their_own_keep_them(way, make_sender):
    learner = nn.Linear(2, 2)
    weights = TensorDict.from_module(learner).data
    mapped = {
        "model": learner,
        "device_map_fn": lambda i, weights: weights.bfloat16() if i else weights,
        "num_workers": 2,
    }
    given = {0: weights, 1: weights.bfloat16()}
    scheme = make_sender(**({"params_map": given} if way == "params_map" else mapped))
    nn.init.constant_(learner.weight, 3.0)
    scheme.send(learner)
    for worker, dtype in ((0, torch.float32), (1, torch.bfloat16)):
        _, values = scheme.create_transport().newest(worker)
        assert values["weight"].dtype is dtype
        assert values["weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("key", [0, "a.b", "a#int"])
def test_extra_state_by_keys_that_would_arrive_as_others_is_refused(key):
    model = Mixed()
    model.counter.statistics = {key: torch.ones(1)}
    with pytest.raises(ConfigError, match=rf"statistics': key {key!r}"):
        UniLabShmScheme().init_on_sender(model=model, devices=[CPU])


def test_numbers_of_extra_state_are_read_into_a_module():
    sent, received = Mixed(1.0), Mixed(2.0)
    sent.counter.count = 5
    with UniLabShmTransport.from_state_dict(sent) as transport:
        transport.read_weights_into(received)
    assert received.counter.count == 5


def test_numbers_of_extra_state_in_a_state_dict_are_refused_and_nothing_is_read():
    sent, received = Counter(), Counter()
    sent.statistics["mean"].fill_(3.0)
    with (
        UniLabShmTransport.from_state_dict(sent) as transport,
        pytest.raises(ConfigError, match=r"\['_extra_state.count#int'\] are no tensors"),
    ):
        transport.read_weights_into(received.state_dict())
    assert received.statistics["mean"].tolist() == [0.0, 0.0]
