"""The initial weights of each worker, from whatever a sender is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors.distributed import DistributedCollector, RPCCollector

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.weight_update import UniLabShmScheme
from torchrl_unilab.weight_update.initial_weights import initial_weights

CPU = torch.device("cpu")


def _collector(*factories):
    """What a sender needs of a collector that makes policies by factories."""
    devices = [CPU] * len(factories)
    return SimpleNamespace(policy=None, policy_factory=list(factories), policy_device=devices)


def test_collectors_on_other_machines_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"collector_kwargs=\{'weight_sync_schemes'"):
        initial_weights(False, model_id="policy", model=nn.Linear(2, 1), remote_collectors=[])


@pytest.mark.parametrize("kind", [DistributedCollector, RPCCollector])
def test_a_distributed_collector_is_refused_with_the_way_out(kind):
    class Own(kind):
        """A subclass of the user's."""

    with pytest.raises(ConfigError, match=r"of a distributed collector: .* made there"):
        initial_weights(False, model_id="policy", context=object.__new__(Own))


def test_workers_of_one_model_have_the_same_object():
    model = nn.Linear(2, 1)

    initial = initial_weights(False, model=model, devices=[CPU, CPU])

    assert initial.of_workers == {0: model, 1: model}
    assert initial.model is model


def test_workers_with_separate_weights_have_an_object_each():
    weights = TensorDict(w=torch.zeros(2))

    initial = initial_weights(True, weights=weights, devices=[CPU, CPU])

    assert initial.of_workers[0] is not initial.of_workers[1]
    assert initial.per_worker


def test_workers_have_weights_apart_where_one_of_their_factories_is_another():
    one, other = (lambda: nn.Linear(2, 1)), (lambda: nn.Linear(2, 1))

    initial = initial_weights(False, model_id="policy", context=_collector(one, other, one))

    assert initial.per_worker
    assert len({id(weights) for weights in initial.of_workers.values()}) == 3


@pytest.mark.parametrize(
    ("source", "beside"),
    [
        ("params_map", {"context": _collector(), "model_id": "policy"}),
        ("params_map", {"model_id": "policy"}),
        ("params_map", {"num_workers": 1}),
        ("params_map", {"device_map_fn": lambda _, weights: weights}),
        ("context", {"num_workers": 2}),
        ("context", {"devices": [CPU]}),
    ],
)
def test_sources_that_exclude_each_other_are_refused_by_name(source, beside):
    sources = {
        "params_map": {"params_map": {0: TensorDict(w=torch.zeros(2))}},
        "context": {"model_id": "policy", "context": _collector(lambda: nn.Linear(2, 1))},
    }
    with pytest.raises(ConfigError, match=f"{next(iter(beside))}: given beside {source}"):
        initial_weights(False, **sources[source] | beside)


def test_a_context_may_come_with_the_number_of_its_own_workers():
    factory = nn.Linear(2, 1).requires_grad_
    initial = initial_weights(
        False, model_id="policy", context=_collector(factory, factory), num_workers=2
    )
    assert [*initial.of_workers] == [0, 1]


def test_a_map_of_devices_needs_the_number_of_workers_and_keeps_the_model_to_publish():
    source = {"model": nn.Linear(2, 1), "device_map_fn": lambda _, weights: weights.clone()}
    with pytest.raises(ConfigError, match="no weights"):
        initial_weights(False, **source)
    assert initial_weights(False, **source, num_workers=1).model is source["model"]


def test_a_refused_source_leaves_the_scheme_as_it_was():
    scheme = UniLabShmScheme()
    context = _collector(lambda: nn.Linear(2, 1), lambda: "no module")

    with pytest.raises(TypeError, match=r"expected an nn\.Module"):
        scheme.init_on_sender(model_id="policy", context=context)

    assert not scheme.per_worker_weights


def test_a_collector_without_a_policy_is_refused_with_the_way_out():
    collector = _collector(None, None)

    with pytest.raises(TypeError, match=r"expected an nn\.Module\)\. Leave the scheme out"):
        initial_weights(False, model_id="policy", context=collector)
