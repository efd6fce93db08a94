from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from tests.support import appo
from tests.support.cuda_graphs import GraphTwin, record_by
from tests.support.off_policy import fused, make_loss, transitions_of
from torchrl_unilab.objectives.fused.graphs import StepGraphs, graphs_of
from torchrl_unilab.runtime.ranks import ALONE, Ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> str:
    """A GPU, or the processor with graphs as a GPU has them."""
    if request.param == "cpu":
        record_by(GraphTwin(), monkeypatch)
    return request.param


def same(device: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal, but for how a GPU's library may sum otherwise in a graph."""
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if device == "cuda" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)


def test_a_step_is_written_twice_and_repeated_ever_after():
    twin, written, total = GraphTwin(), [], torch.zeros(2)
    steps = StepGraphs(twin)

    def step(rows: torch.Tensor) -> torch.Tensor:
        written.append(len(rows))
        return total.add_(rows.sum(0)) * 2.0

    for i in range(1, 6):
        returned = steps(step, torch.full((3, 2), float(i)))
        assert returned.tolist() == [2.0 * sum(range(1, i + 1)) * 3.0] * 2
    assert written == [3, 3]
    assert [graph.replays for graph in twin.made] == [4]


def test_other_rows_and_other_constants_are_recorded_apart():
    twin, factors = GraphTwin(), []
    steps = StepGraphs(twin)
    for size, factor in [(3, 1.0), (4, 1.0), (3, 2.0)] * 3:
        rows = torch.ones(size, 1)
        factors.append(steps(lambda rows, by=factor: rows.sum() * by, rows, factor).item())
    assert factors == [3.0, 4.0, 6.0] * 3
    assert [graph.replays for graph in twin.made] == [2, 2, 2]


def test_graphs_are_kept_of_sixteen_kinds():
    steps = StepGraphs(GraphTwin())
    for size in [*range(20)] * 3:  # each is gone before it comes again
        steps(lambda rows: rows + 1.0, torch.ones(size))
    assert not steps._cuda.made
    for size in [*range(16)] * 3:
        steps(lambda rows: rows + 1.0, torch.ones(size))
    assert len(steps._cuda.made) == 16


def test_steps_are_written_on_a_processor_and_where_ranks_average():
    assert graphs_of(CPU, ALONE) is None
    assert graphs_of(CUDA, Ranks(0, 2)) is None
    assert isinstance(graphs_of(CUDA, ALONE), StepGraphs)


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_recorded_off_policy_steps_equal_written_ones(algorithm, device):
    losses, updates = [], []
    for _ in range(2):
        loss = make_loss(algorithm, layer_norm=True, normalized=True).to(device)
        loss.qvalue_network.normalizer.to(device)
        losses.append(loss)
        updates.append(fused(loss))
    written, recorded = updates
    graphs, written._graphs = recorded._graphs, None
    for i in range(48):
        batch = transitions_of(losses[0], 12 + i % 2, seed=i).to(device)
        observed = []
        for update in updates:
            for optimizer in update.optimizers.values():
                optimizer.param_groups[0]["lr"] = 1e-3 / (1 + i)  # as `anneal` does
                optimizer.param_groups[0]["eps"] = 1e-8 if i < 16 else 1e-4
                if i == 32:  # its state's memory is another one from then on
                    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            torch.manual_seed(i)
            observed.append(update.step(update.prepare(batch), update_policy=i % 3 > 0))
        same(device, *observed)
        same(device, recorded.td_error, written.td_error)
        for ours, theirs in zip(losses[1].parameters(), losses[0].parameters(), strict=True):
            same(device, ours.detach(), theirs.detach())
    # Two sizes, with and without the policy, in each of three times; rates are no kinds.
    assert len(graphs._graphs) == 2 * 2 * 3
    assert None not in graphs._graphs.values()


def test_recorded_appo_steps_equal_written_ones(device):
    losses = [
        appo.make_loss(dtype=torch.float32, target_update_freq=3, value_clip=0.1).to(device)
        for _ in range(2)
    ]
    for loss in losses:
        loss.critic_network.normalizer.to(device)
    written, recorded = updates = [appo.fused(loss) for loss in losses]
    written._graphs = None
    for i in range(30):
        pool = appo.make_pool(losses[0], 12 + i % 2)
        observed = []
        for update in updates:
            update.max_lr = 1e-3 if i < 10 else 5e-4 / i
            observed.append(update.step(update.prepare(pool)))
        same(device, *observed)
        same(device, recorded.lr, written.lr)
        assert 0.0 < written.lr.item() <= written.max_lr * (1 + 1e-6)
        for ours, theirs in zip(losses[1].parameters(), losses[0].parameters(), strict=True):
            same(device, ours.detach(), theirs.detach())
    assert sum(graph is not None for graph in recorded._graphs._graphs.values()) >= 2
