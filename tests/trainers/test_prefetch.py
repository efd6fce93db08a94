"""Batches packed while the learner learns, for TorchRL's own trainers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from unittest.mock import create_autospec

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.objectives import SACLoss, SoftUpdate, TD3Loss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import SACTrainer, TD3Trainer
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper

from tests.support.transitions import stamped
from torchrl_unilab.data import DoubleBufferReplayPipeline, PackedReplayStorage
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import make_q_value, make_sac_actor, make_td3_actor
from torchrl_unilab.trainers import PrefetchReplay

TASK, FRAMES, BATCHES, STEPS, ROWS = "InvertedPendulum-v5", 32, 5, 4, 8

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(SAC|TD3)Trainer is an experimental/prototype feature:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:The '(optimizer|post_loss)' hook stage will be replaced:FutureWarning"
    ),
]


@pytest.fixture
def full() -> Iterator[PackedReplayStorage]:
    """A storage of 64 stamped rows."""
    with PackedReplayStorage(64) as storage:
        storage.append(stamped(torch.arange(64)))
        yield storage


def _pipeline(storage: PackedReplayStorage) -> DoubleBufferReplayPipeline:
    return DoubleBufferReplayPipeline(storage, sample_count=STEPS * ROWS, base_seed=7)


def _stamps(batch: TensorDictBase) -> list[int]:
    stamps: list[int] = batch["count"][:, 0].tolist()
    return stamps


def test_minibatches_are_the_parts_of_one_large_sample_a_tick(full):
    with _pipeline(full) as pipeline:
        prefetch = PrefetchReplay(pipeline, STEPS)
        for tick in range(3):
            drawn = [_stamps(prefetch()) for _ in range(STEPS)]
            assert [*itertools.chain(*drawn)] == _stamps(full.sample(STEPS * ROWS, seed=7 + tick))
            assert {len(part) for part in drawn} == {ROWS}
            assert pipeline.start_prepare(tick + 1, STEPS * ROWS) is False  # it has been started


def test_who_loads_a_state_draws_what_came_after_it(full):
    with _pipeline(full) as pipeline:
        prefetch = PrefetchReplay(pipeline, STEPS)
        prefetch()
        saved = copy.deepcopy(prefetch.state_dict())
        for _ in range(2 * STEPS):
            prefetch()
        prefetch.load_state_dict(saved)
        assert _stamps(prefetch()) == _stamps(full.sample(STEPS * ROWS, seed=8))[:ROWS]


def test_large_batches_that_cannot_be_cut_evenly_are_refused(full):
    with _pipeline(full) as pipeline:
        for minibatches in (0, -1, 3, STEPS * ROWS + 1):
            with pytest.raises(ConfigError, match="minibatches of equal size"):
                PrefetchReplay(pipeline, minibatches)


# On TorchRL's trainers


def _arguments(collector: Collector, buffer: ReplayBuffer) -> dict[str, object]:
    return {
        "collector": collector,
        "replay_buffer": buffer,
        "total_frames": BATCHES * FRAMES,
        "frame_skip": 1,
        "optim_steps_per_batch": STEPS,
        "progress_bar": False,
    }


def _sac(env: MujocoBatchEnv, buffer: ReplayBuffer) -> Trainer:
    actor = make_sac_actor(4, 1, low=-3.0, high=3.0, hidden=(8,))
    loss = SACLoss(actor, make_q_value(4, 1, hidden=(8,)), num_qvalue_nets=2)
    return SACTrainer(
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        target_net_updater=SoftUpdate(loss, tau=0.1),
        episode_reward_key="reward",
        **_arguments(_collector(env, actor), buffer),
    )


def _td3(env: MujocoBatchEnv, buffer: ReplayBuffer) -> Trainer:
    actor = make_td3_actor(4, 1, low=-3.0, high=3.0, hidden=(8,))
    critic = make_q_value(4, 1, hidden=(8,))
    loss = TD3Loss(actor, critic, bounds=(-3.0, 3.0), num_qvalue_nets=2)
    groups = (loss.actor_network_params, loss.qvalue_network_params)
    stepper = TD3OptimizationStepper(
        *(torch.optim.Adam(group.flatten_keys().values()) for group in groups)
    )
    return TD3Trainer(
        loss_module=loss,
        optimization_stepper=stepper,
        target_net_updater=SoftUpdate(loss, tau=0.1),
        exploration_module=None,
        **_arguments(_collector(env, actor), buffer),
    )


def _collector(env: MujocoBatchEnv, actor: torch.nn.Module) -> Collector:
    return Collector(
        env, actor, frames_per_batch=FRAMES, total_frames=-1, auto_register_policy_transforms=False
    )


@pytest.mark.parametrize("make", [_sac, _td3])
def test_a_stock_trainer_learns_from_the_pipeline_alone(
    make: Callable[[MujocoBatchEnv, ReplayBuffer], Trainer], monkeypatch: pytest.MonkeyPatch
):
    env = MujocoBatchEnv(TASK, num_envs=2, num_threads=1)
    seen: list[torch.Tensor] = []
    with PackedReplayStorage(1000) as storage:
        buffer = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=ROWS)
        trainer = make(env, buffer)
        # The pipeline needs to know rows before it can be made.
        first = next(iter(trainer.collector)).reshape(-1)
        buffer.extend(first)
        monkeypatch.setattr(buffer, "sample", None)  # whoever calls it fails
        with _pipeline(storage) as pipeline:
            prefetch = PrefetchReplay(pipeline, STEPS)
            prefetch.register(trainer)
            trainer.register_op(
                "process_optim_batch", lambda batch: seen.append(batch["observation"].clone())
            )
            before = [p.detach().clone() for p in trainer.loss_module.parameters()]
            trainer.train()
            assert prefetch.ticks == BATCHES
            assert trainer._modules["prefetch_replay"] is prefetch  # what checkpoints have
            assert prefetch.state_dict() == {"ticks": BATCHES}
            after = trainer.loss_module.parameters()
            assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        trainer.collector.shutdown()
        assert storage.ptr == (BATCHES + 1) * FRAMES
        assert len(seen) == BATCHES * STEPS
        known = {tuple(row) for row in storage[:]["observation"].tolist()}
        for drawn in seen:
            assert drawn.shape == (ROWS, 4)
            assert {tuple(row) for row in drawn.tolist()} <= known


def test_a_buffer_with_priorities_is_refused_and_the_trainer_left_as_it_was(full, monkeypatch):
    env = MujocoBatchEnv(TASK, num_envs=2, num_threads=1)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=ROWS)
    trainer = _sac(env, buffer)
    # TorchRL's own needs an extension that not every build has.
    monkeypatch.setattr(buffer, "_sampler", create_autospec(PrioritizedSampler, instance=True))
    before = list(trainer._process_optim_batch_ops)
    with _pipeline(full) as pipeline:
        with pytest.raises(ConfigError, match="PrioritizedSampler"):
            PrefetchReplay(pipeline, STEPS).register(trainer)
        assert trainer._process_optim_batch_ops == before
    trainer.collector.shutdown()
