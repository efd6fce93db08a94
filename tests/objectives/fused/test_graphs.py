from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.support import appo
from tests.support.cuda_graphs import GraphTwin, capture_by
from tests.support.off_policy import fused, make_loss, transitions_of
from torchrl_unilab.objectives.fused import graphs
from torchrl_unilab.objectives.fused.graphs import StepGraphs, graphs_of
from torchrl_unilab.objectives.fused.threads import run_both
from torchrl_unilab.runtime.ranks import SINGLE_RANK, Ranks

CPU = torch.device("cpu")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BOTH = pytest.mark.parametrize("algorithm", ["sac", "td3"])


@pytest.fixture
def twin() -> GraphTwin:
    return GraphTwin()


@pytest.fixture
def steps(twin) -> StepGraphs:
    return StepGraphs(twin, CPU)


def add_one(rows: torch.Tensor) -> torch.Tensor:
    return rows + 1.0


def test_a_step_is_eager_then_captured_and_replayed_ever_after(twin, steps):
    run, total = [], torch.zeros(2)

    def step(rows: torch.Tensor) -> torch.Tensor:
        run.append(len(rows))
        return total.add_(rows.sum(0)) * 2.0

    for i in range(1, 6):
        returned = steps(step, torch.full((3, 2), float(i)))
        assert returned.tolist() == [2.0 * sum(range(1, i + 1)) * 3.0] * 2
    assert run == [3, 3]
    assert [graph.replays for graph in twin.made] == [4]


def test_other_rows_and_other_constants_are_captured_apart(twin, steps):
    factors = []
    kinds = [(3, 1.0, torch.float32), (4, 1.0, torch.float32), (3, 2.0, torch.float32)]
    for size, factor, dtype in [*kinds, (3, 1.0, torch.float64)] * 3:
        rows = torch.ones(size, 1, dtype=dtype)
        step = steps(lambda rows, by=factor: rows.sum() * by, rows, factor)
        assert step.dtype == dtype
        factors.append(step.item())
    assert factors == [3.0, 4.0, 6.0, 3.0] * 3
    assert [graph.replays for graph in twin.made] == [2] * 4


def test_graphs_are_kept_of_the_sixteen_kinds_that_were_used_last(twin, steps):
    for _ in range(3):
        steps(add_one, torch.ones(1))
    for size in [*range(2, 22)] * 3:  # each is gone before it comes again
        steps(add_one, torch.ones(size))
        steps(add_one, torch.ones(1))
    assert len(twin.made) == 1
    for size in [*range(1, 17)] * 3:
        steps(add_one, torch.ones(size))
    assert len(twin.made) == 16


@pytest.mark.parametrize("when", [0, 1])
def test_a_step_that_failed_is_eager_again_before_it_is_captured(twin, steps, when):
    calls = []

    def step(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(twin.made))
        if len(calls) == when + 1:
            raise KeyboardInterrupt
        return rows + 1.0

    for i in range(4):
        if i == when:
            with pytest.raises(KeyboardInterrupt):
                steps(step, torch.ones(2))
        else:
            assert steps(step, torch.ones(2)).tolist() == [2.0, 2.0]
    assert calls == ([0, 0, 1] if when == 0 else [0, 1, 1, 2])


def test_a_device_is_captured_on_a_stream_of_its_own(twin):
    device = torch.device("cuda:1")
    steps = StepGraphs(twin, device)
    for _ in range(3):
        steps(add_one, torch.ones(2))
    (graph,) = twin.made
    assert graph.stream.device == graph.device == device


def test_what_runs_on_a_side_stream_is_forked_and_joined(twin):
    twin.order.clear()
    side = StepGraphs(twin, CPU).branch()
    run_both(side, lambda: twin.order.append("here"), lambda: twin.order.append("there"))
    assert twin.order == ["side waits for main", "there", "here", "main waits for side"]
    for failing in ((lambda: 1 / 0, lambda: None), (lambda: None, lambda: 1 / 0)):
        twin.order.clear()
        with pytest.raises(ZeroDivisionError):
            run_both(side, *failing)
        assert twin.order[-1] == "main waits for side"


def test_steps_are_eager_on_a_processor_and_where_ranks_average(twin, monkeypatch):
    assert graphs_of(CPU, SINGLE_RANK) is None
    capture_by(twin, monkeypatch)
    assert graphs_of(CPU, Ranks(0, 2)) is None
    assert isinstance(graphs_of(CPU, SINGLE_RANK), StepGraphs)


def eager_and_replayed(
    make: Callable[[Any], Any], losses: Iterable[Any], device: str, monkeypatch
) -> list[Any]:
    """Two updates, of which the first one's steps are eager."""
    updates = []
    for loss in losses:
        updates.append(make(loss))
        if device == "cpu":  # from the second one on
            capture_by(GraphTwin(), monkeypatch)
    updates[0]._graphs = None
    return updates


def assert_same(device: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal, but for how a GPU's library may sum otherwise in a graph."""
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if device == "cuda" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)


def load_itself(optimizer: torch.optim.Optimizer) -> None:
    """Give its state other memory."""
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))


def set_group(**settings: Any) -> Callable[[Any], None]:
    def change(update: Any) -> None:
        for optimizer in update.optimizers.values():
            optimizer.param_groups[0].update(settings)

    return change


OFF_POLICY_CHANGES: list[Callable[[Any], Any]] = [
    lambda update: None,
    set_group(eps=1e-4),
    set_group(betas=(0.5, 0.9)),
    set_group(weight_decay=0.5),
    lambda update: setattr(update, "tau", 0.5),
    lambda update: [load_itself(optimizer) for optimizer in update.optimizers.values()],
    lambda update: set_group(lr=torch.tensor(2.0**-9))(update),
]


@DEVICES
@BOTH
def test_replayed_off_policy_steps_equal_eager_ones(algorithm, device, monkeypatch):
    losses = []
    for _ in range(2):
        losses.append(make_loss(algorithm, layer_norm=True, normalized=True).to(device))
        losses[-1].qvalue_network.normalizer.to(device)
    updates = eager_and_replayed(fused, losses, device, monkeypatch)
    eager, replayed = updates
    for change in OFF_POLICY_CHANGES:
        for update in updates:
            change(update)
        for i in range(8):
            batch = transitions_of(losses[0], 12 + i % 2, seed=i).to(device)
            observed = []
            for update in updates:
                for optimizer in update.optimizers.values():  # as `anneal`, or a scheduler, does
                    group, rate = optimizer.param_groups[0], 2.0 ** -(9 + i % 4)
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"].fill_(rate)
                    else:
                        group["lr"] = rate
                torch.manual_seed(i)
                observed.append(update.step(update.prepare(batch), update_policy=i % 4 > 1))
            assert_same(device, *observed)
            assert_same(device, replayed.td_error, eager.td_error)
            for ours, theirs in zip(losses[1].parameters(), losses[0].parameters(), strict=True):
                assert_same(device, ours.detach(), theirs.detach())
    # Two sizes, with and without the policy, after each change: more than are kept.
    assert len(replayed._graphs._graphs) == 16
    assert None not in replayed._graphs._graphs.values()


@BOTH
def test_a_rate_that_lies_on_the_device_is_read_there(algorithm, twin, monkeypatch, no_looks):
    capture_by(twin, monkeypatch)
    loss = make_loss(algorithm)
    update = fused(loss)
    set_group(lr=torch.tensor(1e-3))(update)
    packed = update.prepare(transitions_of(loss, 8, 0))
    with no_looks():
        for _ in range(3):
            update.step(packed)
    assert twin.made


@BOTH
def test_what_was_captured_before_compile_is_not_replayed(algorithm, twin, monkeypatch):
    capture_by(twin, monkeypatch)
    loss = make_loss(algorithm)
    update, called = fused(loss), []
    packed = update.prepare(transitions_of(loss, 8, 0))
    update.step(packed)
    update.step(packed)

    def counted(owner, name, **_):
        method = getattr(owner, name)
        return lambda *args: (called.append(len(twin.made)), method(*args))[1]

    monkeypatch.setattr("torchrl_unilab.objectives.fused.off_policy.compiled_method", counted)
    update.compile()
    for _ in range(3):
        update.step(packed)
    assert called == [1, 1, 2, 2]  # critics and policy: eager once, and captured


APPO_CHANGES: list[Callable[[Any], Any]] = [
    lambda update: None,
    lambda update: setattr(update, "desired_kl", 1e-4),
    lambda update: update.optimizer.param_groups[0].update(eps=1e-3),
    lambda update: load_itself(update.optimizer),
    lambda update: setattr(update.loss, "entropy_coeff", 0.3),
    lambda update: setattr(update.loss, "critic_coeff", 3.0),
]


@DEVICES
def test_replayed_appo_steps_equal_eager_ones(device, monkeypatch):
    losses = [
        appo.make_loss(dtype=torch.float32, target_update_freq=3, value_clip=0.1).to(device)
        for _ in range(2)
    ]
    for loss in losses:
        loss.critic_network.normalizer.to(device)
    updates = eager_and_replayed(appo.fused, losses, device, monkeypatch)
    eager, replayed = updates
    for change in APPO_CHANGES:
        for update in updates:
            change(update)
        for i in range(12):
            pool = appo.make_pool(losses[0], 12 + i % 2)
            observed = []
            for update in updates:
                update.max_lr = 1e-3 if i < 10 else 5e-4 / i
                update.loss._estimated_at = update.loss.steps  # each third one does not steer
                observed.append(update.step(update.prepare(pool)))
            assert_same(device, *observed)
            assert_same(device, replayed.lr, eager.lr)
            assert 0.0 < eager.lr.item() <= 1e-3 * (1.0 + 1e-6)
            for ours, theirs in zip(losses[1].parameters(), losses[0].parameters(), strict=True):
                assert_same(device, ours.detach(), theirs.detach())
    assert len(replayed._graphs._graphs) == graphs._MOST < 2 * 2 * len(APPO_CHANGES)
    assert None not in replayed._graphs._graphs.values()
