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
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs import RewardScaling
from torchrl.trainers import Trainer

from tests.support.collecting import single_env
from tests.support.stock import WARNINGS, Stock, stock_sac, stock_td3
from tests.support.transitions import stamped
from torchrl_unilab.data import DoubleBufferReplayPipeline, PackedReplayStorage
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import PrefetchReplay

FRAMES, BATCHES, STEPS, ROWS = 32, 5, 4, 8

pytestmark = WARNINGS


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
        for minibatches in (3, STEPS * ROWS + 1):
            with pytest.raises(ConfigError, match="minibatches of equal size"):
                PrefetchReplay(pipeline, minibatches)


def test_what_is_no_pipeline_or_no_number_of_minibatches_is_refused(full):
    with _pipeline(full) as pipeline:
        for minibatches in (0, -1, 2.0, "8"):
            with pytest.raises(ConfigError, match=r"minibatches: .* \(expected an integer of at"):
                PrefetchReplay(pipeline, minibatches)
    with pytest.raises(ConfigError, match=r"PackedReplayStorage \(expected DoubleBufferReplay"):
        PrefetchReplay(full, 1)


# On TorchRL's trainers


def _trainer(stock: Stock, buffer: ReplayBuffer) -> Trainer:
    collector = Collector(
        single_env(),
        stock.policy,
        frames_per_batch=FRAMES,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    return stock.make(
        collector=collector,
        replay_buffer=buffer,
        total_frames=BATCHES * FRAMES,
        optim_steps_per_batch=STEPS,
    )


@pytest.mark.parametrize("make", [stock_sac, stock_td3])
def test_a_stock_trainer_learns_from_the_pipeline_alone(
    make: Callable[[], Stock], monkeypatch: pytest.MonkeyPatch
):
    seen: list[torch.Tensor] = []
    with PackedReplayStorage(1000) as storage:
        buffer = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=ROWS)
        trainer = _trainer(make(), buffer)
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
            assert drawn.shape == (ROWS, 3)
            assert {tuple(row) for row in drawn.tolist()} <= known


def test_hooks_that_came_after_the_sampling_still_do(full):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=ROWS)
    trainer, order = _trainer(stock_sac(), buffer), []
    trainer.register_op("process_optim_batch", order.append)  # a method, as the sampling is
    with _pipeline(full) as pipeline:
        PrefetchReplay(pipeline, STEPS).register(trainer)
        assert len(trainer._process_optim_batch_hook(None)) == ROWS
    assert [len(batch) for batch in order] == [ROWS]
    trainer.collector.shutdown()


def test_a_buffer_with_transforms_or_another_sampler_is_refused(full):
    scaled = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), batch_size=ROWS, transform=RewardScaling(0.0, 0.1)
    )
    once = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), batch_size=ROWS, sampler=SamplerWithoutReplacement()
    )
    own = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), batch_size=ROWS, sampler=type("Own", (RandomSampler,), {})()
    )
    for buffer, found in (
        (scaled, "RandomSampler and 1"),
        (once, "WithoutReplacement and 0"),
        (own, "Own and 0"),
    ):
        trainer = _trainer(stock_sac(), buffer)
        with _pipeline(full) as pipeline, pytest.raises(ConfigError, match=found):
            PrefetchReplay(pipeline, STEPS).register(trainer)
        trainer.collector.shutdown()


def test_a_buffer_with_priorities_is_refused_and_the_trainer_left_as_it_was(full, monkeypatch):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=ROWS)
    trainer = _trainer(stock_sac(), buffer)
    # TorchRL's own needs an extension that not every build has.
    monkeypatch.setattr(buffer, "_sampler", create_autospec(PrioritizedSampler, instance=True))
    before = list(trainer._process_optim_batch_ops)
    with _pipeline(full) as pipeline:
        with pytest.raises(ConfigError, match="PrioritizedSampler"):
            PrefetchReplay(pipeline, STEPS).register(trainer)
        assert trainer._process_optim_batch_ops == before
    trainer.collector.shutdown()
