"""Steps of two ranks against those of one process, for each update, fused and general."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import Bounded, Composite, Unbounded

from tests.support.off_policy import make_transitions
from tests.support.quick import four_pendulums
from tests.support.training import trainer_of
from tests.support.worlds import world
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.collectors.worker import closing_env
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.objectives import FusedAPPOUpdate
from torchrl_unilab.runtime import Ranks
from torchrl_unilab.runtime.ranks import SINGLE_RANK
from torchrl_unilab.trainers import APPOConfig, OffPolicyConfig
from torchrl_unilab.trainers.loss_updates import APPOStepper, LossUpdate, make_update
from torchrl_unilab.trainers.runs.builders import Learner, build_learner

OBS, ACT, ROWS, STEPS = 5, 2, 16, 5
UPDATES = [*itertools.product(("appo", "sac", "td3"), ("fused", "general"))]
each = pytest.mark.parametrize("update", UPDATES, ids="-".join)

Step = Callable[[Any, bool], torch.Tensor]
State = dict[str, np.ndarray]
Whole = Callable[[int], Any]
"""The data of a step, of both ranks: halves are its first and its last `ROWS`."""


class NoNoise(TorchDispatchMode):
    """Draws are zero, so that a draw for some rows is one for each of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if "normal" in str(func) or "randn" in str(func) else result


def _env() -> SimpleNamespace:
    bound = torch.ones(ACT)
    return SimpleNamespace(
        batch_size=torch.Size([]),
        observation_spec=Composite(observation=Unbounded(OBS)),
        action_spec=Bounded(-bound, bound, shape=bound.shape, dtype=bound.dtype),
    )


def _off_policy(algorithm: str, fused: bool, ranks: Ranks) -> tuple[Learner, Step, Whole]:
    config = OffPolicyConfig(algorithm, hidden=(8, 8), fused=fused, learner_threads=1)
    learner = build_learner(_env(), config)
    update = make_update(learner.loss, config, ranks)

    def step(half: Any, policy: bool) -> torch.Tensor:
        (minibatch,) = update.minibatches(update.prepare(half.clone()), 1)
        return update.step(minibatch, update_policy=policy)

    return learner, step, lambda i: make_transitions(2 * ROWS, OBS, ACT, seed=i)


def _appo(fused: bool, ranks: Ranks) -> tuple[Learner, Step, Whole]:
    config = APPOConfig(hidden=(8, 8), lr=1e-3, desired_kl=1e-4, target_update_freq=3)
    learner = build_learner(_env(), config)
    loss = learner.loss
    steps = 2 * ROWS * STEPS // 8
    batch = torch.stack([make_transitions(8, OBS, ACT, seed=i) for i in range(steps)], dim=1)
    with torch.no_grad():
        log_b = loss.actor_network.get_dist(batch).log_prob(batch["action"])
    batch["action_log_prob"] = log_b + 0.3 * torch.randn(8, steps)
    limits = {"desired_kl": config.desired_kl, "max_grad_norm": config.max_grad_norm}
    update = FusedAPPOUpdate(loss, lr=config.lr, ranks=ranks, **limits) if fused else None
    stepper = APPOStepper(loss, config, update, ranks)
    loss.register_buffer("lr", stepper.lr)  # the ranks' must not part either
    pool = loss.estimate(batch).reshape(-1)

    def step(half: Any, _: bool) -> torch.Tensor:
        if update is not None:
            return update.step(update.prepare(half))
        losses = stepper.step(None, half)
        return torch.stack([losses[key] for key in loss.out_keys])

    return learner, step, lambda i: pool[2 * ROWS * i : 2 * ROWS * (i + 1)]


def learn(
    update: tuple[str, str], ranks: Ranks, halves: Sequence[int | None], noises: Sequence[int]
) -> State:
    """Take steps, the policy in every second one; return all that has been learnt, and said.

    Args:
        update: Algorithm and kind.
        ranks: Given to the update.
        halves: Which halves of each step's data it sees, one after the other; None for both.
        noises: The seed of the noise for each of them.
    """
    torch.manual_seed(0)
    algorithm, fused = update[0], update[1] == "fused"
    made = _appo(fused, ranks) if algorithm == "appo" else _off_policy(algorithm, fused, ranks)
    learner, step, whole = made
    said = torch.zeros(0)
    for i in range(STEPS):
        for half, noise in zip(halves, noises, strict=True):
            data = whole(i)
            data = data if half is None else data[half * ROWS : (half + 1) * ROWS]
            torch.manual_seed(100 * i + noise)
            try:
                said = step(data, i % 2 == 0)
            except KeptError:
                if not fused:  # a fused update writes over its gradients
                    learner.loss.zero_grad(set_to_none=True)
    states = learner.loss.state_dict().items()
    learnt = {name: tensor.numpy() for name, tensor in states if isinstance(tensor, torch.Tensor)}
    return {**learnt, "said": said.numpy()}


class KeptError(Exception):
    """A half's gradients are there, and wait for those of the other half."""


class Halves(Ranks):
    """One process in the place of two: takes gradients of each half, and averages them."""

    kept: list[torch.Tensor] | None = None

    def mean_(self, gradients: Sequence[torch.Tensor], statistics: Sequence[torch.Tensor]) -> None:
        tensors = [*gradients, *statistics]
        if self.kept is None:
            self.kept = [tensor.clone() for tensor in tensors]
            raise KeptError
        for tensor, first in zip(tensors, self.kept, strict=True):
            tensor.copy_((first + tensor) / 2)
        self.kept = None


class OneHead(nn.Module):
    """A loss of which each rank learns another part."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.heads = rank, nn.ParameterList([torch.zeros(2), torch.zeros(2)])

    def forward(self, _: Any) -> TensorDict:
        return TensorDict(loss_head=self.heads[self.rank].sum())


def learn_heads(ranks: Ranks) -> list[list[float]]:
    loss = OneHead(ranks.rank)
    update = LossUpdate(loss, OffPolicyConfig(lr_critic=0.5), ranks)
    update.step(TensorDict())
    return [head.tolist() for head in loss.heads]


def train_unevenly(ranks: Ranks, steps: int = 8, total_frames: int = 640) -> str:
    """What is said where ranks collect rollouts of other lengths, or to another end."""
    config = APPOConfig(num_envs=4, num_steps=8, minibatches=2, hidden=(8,))
    with closing_env(four_pendulums()) as env:
        learner = build_learner(env, config)
    with APPOCollector(
        four_pendulums, learner.actor, frames_per_batch=4 * steps, inline=True
    ) as collector:
        settings = {"total_frames": total_frames, "config": config, "ranks": ranks}
        with pytest.raises(ConfigError) as refused:
            trainer_of(collector, learner.loss, **settings).train()
    return str(refused.value)


def learn_in_each_way(_: Any) -> dict[str, dict[tuple[str, str], State]]:
    """What a rank learns by each update from its half, from the same data, and without noise."""
    with Ranks.of_torchrun() as ranks:
        half = [ranks.rank]
        own = {update: learn(update, ranks, half, half) for update in UPDATES}
        same = {update: learn(update, ranks, [0], [0]) for update in UPDATES}
        heads, more = learn_heads(ranks), 1 + ranks.rank
        uneven = [train_unevenly(ranks, 8 // more), train_unevenly(ranks, total_frames=640 * more)]
        torch.set_default_dtype(torch.float64)
        with NoNoise():
            quiet = {update: learn(update, ranks, half, half) for update in UPDATES}
        return {"own": own, "same": same, "quiet": quiet, "heads": heads, "uneven": uneven}


@pytest.fixture(scope="module")
def learnt() -> list[dict[str, dict[tuple[str, str], State]]]:
    with world(learn_in_each_way) as ranks:
        return ranks.results()


def _assert_equal(one: State, other: State) -> None:
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name


def test_a_parameter_that_a_rank_has_no_gradient_of_follows_the_others(learnt):
    heads = [one["heads"] for one in learnt]
    assert heads[0] == heads[1]
    assert heads[0] == [pytest.approx([-0.5, -0.5])] * 2


def test_ranks_that_collect_another_number_of_frames_in_a_batch_or_in_all_are_refused(learnt):
    for one in learnt:
        of_a_batch, in_all = one["uneven"]
        assert of_a_batch.startswith("frames until now: 64, 32 on ranks 0 to 1")
        assert in_all.startswith("total_frames: 640, 1280 on ranks 0 to 1")


@each
def test_ranks_are_equal_bit_for_bit(learnt, update):
    _assert_equal(learnt[0]["own"][update], learnt[1]["own"][update])


@each
def test_two_ranks_equal_one_process_that_averages_halves_bit_for_bit(learnt, update):
    _assert_equal(learnt[0]["own"][update], learn(update, Halves(), [0, 1], [0, 1]))


@each
def test_two_ranks_with_the_same_data_equal_one_alone_bit_for_bit(learnt, update):
    _assert_equal(learnt[0]["same"][update], learn(update, SINGLE_RANK, [0], [0]))


@each
def test_two_ranks_equal_one_with_the_doubled_batch(learnt, update, double_precision):
    with NoNoise():
        doubled = learn(update, SINGLE_RANK, [None], [0])
    for name, array in learnt[0]["quiet"][update].items():
        np.testing.assert_allclose(array, doubled[name], rtol=0, atol=1e-6, err_msg=name)


@each
def test_what_ranks_learn_is_not_what_one_learns_from_its_half(learnt, update):
    alone = learn(update, SINGLE_RANK, [0], [0])
    assert any(
        alone[name].tobytes() != array.tobytes() for name, array in learnt[0]["own"][update].items()
    )
