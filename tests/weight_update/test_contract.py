"""One suite for the stock scheme and ours: the same scenarios, the same results.

Where the two differ on purpose, a test of its own says how, at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import (
    AsyncCollector,
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme

from tests.support.acting import StillEnv, ValuedEnv, actions, collecting, make_policy, set_action
from tests.support.processes import wait_for
from torchrl_unilab.weight_update import UniLabShmScheme

BOTH = pytest.mark.parametrize("scheme_cls", [SharedMemWeightSyncScheme, UniLabShmScheme])
CPU = torch.device("cpu")
LEARNER, OTHER = 0.25, 0.75

SchemeClass = Callable[..., WeightSyncScheme]


def _settled(batches: Iterator[TensorDict], workers: int = 2) -> set[float]:
    """The actions once no rollout is under way that began before now."""
    for _ in range(2 * workers):
        next(batches)
    return actions(next(batches))


@BOTH
@pytest.mark.parametrize(
    ("cls", "form"),
    [
        (MultiSyncCollector, "None"),
        (MultiSyncCollector, "module"),
        (MultiSyncCollector, "TensorDict"),
        (MultiAsyncCollector, "None"),
    ],
)
def test_weights_arrive_in_every_form(scheme_cls: SchemeClass, cls, form):
    policy = make_policy(LEARNER)
    source = policy if form == "None" else make_policy()
    weights: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "module": lambda: source,
        "TensorDict": lambda: TensorDict.from_module(source),
    }
    schemes = {"policy": scheme_cls()}
    with collecting(cls, [StillEnv], policy, weight_sync_schemes=schemes) as collector:
        batches = iter(collector)
        assert actions(next(batches)) == {LEARNER}
        set_action(source, OTHER)
        collector.update_policy_weights_(weights[form]())
        assert _settled(batches, 1) == {OTHER}


@BOTH
def test_a_free_running_collector_fills_its_buffer_with_published_weights(scheme_cls: SchemeClass):
    policy = make_policy(LEARNER)
    buffer = ReplayBuffer(storage=LazyTensorStorage(64, shared_init=True), shared=True)
    with collecting(
        MultiAsyncCollector,
        [StillEnv] * 2,
        policy,
        replay_buffer=buffer,
        weight_sync_schemes={"policy": scheme_cls()},
    ) as collector:
        collector.start()
        wait_for(lambda: buffer.write_count > 64)
        set_action(policy, OTHER)
        collector.update_policy_weights_()
        with collector.pause():  # both workers have written what was under way
            seen = buffer.write_count
        wait_for(lambda: buffer.write_count > seen + 64)
        assert actions(buffer[:]) == {OTHER}


@BOTH
@pytest.mark.parametrize("kind", ["AsyncCollector", "num_collectors"])
def test_the_other_process_collectors_take_it(scheme_cls: SchemeClass, kind):
    policy = make_policy(LEARNER)
    schemes = {"policy": scheme_cls()}
    if kind == "AsyncCollector":
        make = partial(collecting, AsyncCollector, StillEnv, policy)
    else:
        make = partial(collecting, Collector, StillEnv, policy, num_collectors=2, sync=True)
    with make(weight_sync_schemes=schemes) as collector:
        batches = iter(collector)
        assert actions(next(batches)) == {LEARNER}
        set_action(policy, OTHER)
        collector.update_policy_weights_()
        assert _settled(batches) == {OTHER}


@BOTH
def test_an_evaluators_process_takes_it(scheme_cls: SchemeClass):
    evaluator = Evaluator(
        StillEnv,
        policy_factory=_policy_for_env,
        num_trajectories=1,
        max_steps=4,
        backend="process",
        collector_kwargs={"traj_format": "padded"},
        weight_sync_schemes={"policy": scheme_cls()},
        metrics_fn=_mean_action,
    )
    try:
        first = evaluator.evaluate(make_policy(LEARNER))
        second = evaluator.evaluate(TensorDict.from_module(make_policy(OTHER)).data)
    finally:
        evaluator.shutdown()
    assert (first["eval/action"], second["eval/action"]) == (LEARNER, OTHER)


def _policy_for_env(env: Any = None) -> nn.Module:
    return make_policy()


def _mean_action(trajectories: TensorDict) -> dict[str, float]:
    return {"action": trajectories["action"].mean().item()}


@BOTH
def test_a_uniform_factory_starts_from_its_own_weights(scheme_cls: SchemeClass):
    with collecting(
        MultiSyncCollector,
        [StillEnv],
        policy_factory=partial(make_policy, 0.5),
        weight_sync_schemes={"policy": scheme_cls()},
    ) as collector:
        batches = iter(collector)
        assert actions(next(batches)) == {0.5}
        collector.update_policy_weights_(TensorDict.from_module(make_policy(OTHER)))
        assert _settled(batches, 1) == {OTHER}


@BOTH
def test_distinct_factories_have_weights_of_their_own(scheme_cls: SchemeClass):
    scheme = scheme_cls()
    with collecting(
        MultiSyncCollector,
        [StillEnv] * 2,
        policy_factory=[partial(make_policy, value) for value in (0.5, 0.25)],
        cat_results="stack",
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        batches = iter(collector)
        assert [actions(worker) for worker in next(batches)] == [{0.5}, {0.25}]
        assert scheme.per_worker_weights
        weights = {1: TensorDict.from_module(make_policy(OTHER)).data}
        collector.update_policy_weights_(weights)
        next(batches)
        assert [actions(worker) for worker in next(batches)] == [{0.5}, {OTHER}]
        both = {i: TensorDict.from_module(make_policy(1.0 + i)).data for i in range(2)}
        collector.update_policy_weights_(both)
        next(batches)
        assert [actions(worker) for worker in next(batches)] == [{1.0}, {2.0}]


@BOTH
@pytest.mark.parametrize("way", ["model", "weights", "params_map", "device_map_fn"])
def test_a_scheme_may_be_initialised_before_the_collector(scheme_cls: SchemeClass, way):
    learner = make_policy(LEARNER)
    weights = TensorDict.from_module(learner).data
    scheme = scheme_cls()
    ways: dict[str, dict[str, Any]] = {
        "model": {"model_id": "policy", "model": learner, "devices": [CPU]},
        "weights": {"model_id": "policy", "weights": weights, "devices": [CPU]},
        "params_map": {"params_map": {0: weights.clone().share_memory_()}},
        "device_map_fn": {
            "model_id": "policy",
            "weights": weights,
            "device_map_fn": _shared_weights,
            "num_workers": 1,
        },
    }
    scheme.init_on_sender(**ways[way])
    with collecting(
        MultiSyncCollector,
        [StillEnv],
        policy_factory=make_policy,
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        batches = iter(collector)
        assert actions(next(batches)) == {LEARNER}
        set_action(learner, OTHER)
        collector.update_policy_weights_(TensorDict.from_module(learner).data)
        assert _settled(batches, 1) == {OTHER}


def _shared_weights(worker: int, weights: TensorDict) -> TensorDict:
    return weights.clone().share_memory_()


@BOTH
def test_state_seed_and_reset_continue_working(scheme_cls: SchemeClass):
    policy = make_policy(LEARNER)
    schemes = {"policy": scheme_cls()}
    with collecting(MultiSyncCollector, [StillEnv], policy, weight_sync_schemes=schemes) as c:
        c.set_seed(3)
        batches = iter(c)
        next(batches)
        c.reset()
        state = c.state_dict()
        assert state["worker0"]["policy_state_dict"]["module.2.bias"].item() == LEARNER
        state["worker0"]["policy_state_dict"]["module.2.bias"] = torch.tensor([OTHER])
        c.load_state_dict(state)
        assert _settled(batches, 1) == {OTHER}


@BOTH
@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda scheme: scheme.send(), RuntimeError),
        (lambda scheme: scheme.connect(), RuntimeError),
        (lambda scheme: scheme.receive(), RuntimeError),
        (lambda scheme: scheme.init_on_sender(model_id="policy"), ValueError),
        (lambda scheme: scheme.init_on_sender(model=nn.Linear(1, 1)), ValueError),
        (lambda scheme: scheme.init_on_sender(params_map={0: 1}), ValueError),
        (lambda scheme: scheme.init_on_sender(params_map={"0": TensorDict()}), ValueError),
        (lambda scheme: scheme.init_on_sender(params_map={}, devices=[CPU]), ValueError),
        (lambda scheme: scheme.init_on_sender(context=object()), ValueError),
        (
            lambda scheme: scheme.init_on_sender(
                model=nn.Linear(1, 1), weights=TensorDict(), devices=[CPU]
            ),
            ValueError,
        ),
        (lambda scheme: scheme.init_on_sender(model="policy", devices=[CPU]), TypeError),
    ],
)
def test_misuse_raises_the_same_type(scheme_cls: SchemeClass, misuse, error):
    with pytest.raises(error):
        misuse(scheme_cls())


@BOTH
@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda scheme: scheme.send(), RuntimeError),  # before connect
        (lambda scheme: (scheme.connect(), scheme.connect()), RuntimeError),
        (lambda scheme: (scheme.connect(), scheme.send({0: TensorDict()})), ValueError),
        (lambda scheme: (scheme.connect(), scheme.send(worker_ids=5)), ValueError),
    ],
)
def test_misuse_after_initialisation_raises_the_same_type(scheme_cls: SchemeClass, misuse, error):
    scheme = scheme_cls()
    scheme.init_on_sender(model_id="policy", model=make_policy(), devices=[CPU])
    try:
        with pytest.raises(error):
            misuse(scheme)
    finally:
        scheme.shutdown()


def test_unlike_stock_a_workers_weights_change_by_publishing_alone():
    seen = {}
    for scheme_cls in (SharedMemWeightSyncScheme, UniLabShmScheme):
        policy = make_policy(LEARNER)
        schemes = {"policy": scheme_cls()}
        with collecting(MultiSyncCollector, [StillEnv], policy, weight_sync_schemes=schemes) as c:
            batches = iter(c)
            next(batches)
            c.update_policy_weights_()
            set_action(policy, OTHER)  # an optimiser step, say
            seen[scheme_cls] = _settled(batches, 1)
    assert seen[UniLabShmScheme] == {LEARNER}
    assert seen[SharedMemWeightSyncScheme] == {OTHER}


def test_unlike_stock_state_dicts_and_plain_dictionaries_are_taken():
    """The stock scheme of torchrl 0.14 raises a TypeError for both."""
    policy, source = make_policy(LEARNER), make_policy()
    with pytest.warns(UserWarning, match="state_dict strategy is experimental"):
        scheme = UniLabShmScheme(strategy="state_dict")
    schemes = {"policy": scheme}
    with collecting(MultiSyncCollector, [StillEnv], policy, weight_sync_schemes=schemes) as c:
        batches = iter(c)
        set_action(policy, 0.125)
        c.update_policy_weights_()
        assert _settled(batches, 1) == {0.125}
        set_action(source, 0.5)
        c.update_policy_weights_(source.state_dict())
        assert _settled(batches, 1) == {0.5}
        set_action(source, OTHER)
        c.update_policy_weights_(TensorDict.from_module(source).data.to_dict())
        assert _settled(batches, 1) == {OTHER}


def test_unlike_stock_publishing_an_incomplete_set_of_weights_is_refused():
    incomplete = TensorDict.from_module(make_policy(OTHER)).data.exclude(("module", "0", "bias"))
    for scheme_cls, refused in ((SharedMemWeightSyncScheme, False), (UniLabShmScheme, True)):
        scheme = scheme_cls(sync=False)
        scheme.init_on_sender(model_id="policy", model=make_policy(), devices=[CPU])
        scheme.connect()
        with pytest.raises(KeyError) if refused else contextlib.nullcontext():
            scheme.send(incomplete)
        scheme.shutdown()


def test_unlike_stock_two_models_of_one_collector_are_published_apart():
    """The second model is one of the worker's environment, found by its attribute path.

    With the stock scheme the first publish of the second model waits for ever: the worker
    cannot cascade it, and so never acknowledges.
    """
    policy = make_policy(LEARNER)
    value = nn.Linear(1, 1)
    nn.init.zeros_(value.weight)
    nn.init.constant_(value.bias, 3.0)
    value_scheme = UniLabShmScheme()
    value_scheme.init_on_sender(model_id="env.value", model=value, devices=[CPU])
    schemes = {"policy": UniLabShmScheme(), "env.value": value_scheme}
    with collecting(MultiSyncCollector, [ValuedEnv], policy, weight_sync_schemes=schemes) as c:
        batches = iter(c)
        batch = next(batches)
        assert actions(batch) == {LEARNER}
        assert batch["next", "reward"].unique().tolist() == [3.0]
        nn.init.constant_(value.bias, 5.0)
        c.update_policy_weights_(value, model_id="env.value")
        next(batches)
        batch = next(batches)
        assert actions(batch) == {LEARNER}
        assert batch["next", "reward"].unique().tolist() == [5.0]
        set_action(policy, OTHER)
        nn.init.constant_(value.bias, 7.0)
        c.update_policy_weights_(weights_dict={"policy": policy, "env.value": value})
        next(batches)
        batch = next(batches)
        assert actions(batch) == {OTHER}
        assert batch["next", "reward"].unique().tolist() == [7.0]
