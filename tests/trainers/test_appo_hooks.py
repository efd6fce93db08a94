"""Hooks of an `APPOTrainer`, by fused steps and others, and whose optimiser it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torchrl.collectors.utils import split_trajectories
from torchrl.objectives.value import GAE
from torchrl.trainers import LRSchedulerHook, RewardNormalizer, UpdateWeights, ValueEstimatorHook

from tests.support.training import (
    FRAMES,
    appo_trainer,
    assert_equal,
    parameters_of,
    pendulum_rollouts,
    trainer_of,
)
from torchrl_unilab.errors import ConfigError, DivergedError, LayoutShapeError
from torchrl_unilab.trainers import APPOTrainer


def _calls(trainer: APPOTrainer, *names: str) -> dict[str, list]:
    """Register hooks at `names`; what they are called with is collected."""
    calls: dict[str, list] = {name: [] for name in names}

    def hook(name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            calls[name].append(args[0] if args else None)
            return {"seen": 1.0} if name.endswith("log") else (args[0] if args else None)

        return call

    for name in names:
        trainer.register_op(name, hook(name))
    return calls


WHOLE = ("pre_optim_steps", "pre_epoch_log", "post_optim", "post_epoch_log", "post_epoch")
ONCE = "post_optim_complete_log"
WITHIN = ("pre_epoch", "process_optim_batch", "post_optim_log")


def test_hooks_are_called_at_their_places_by_both_kinds_of_steps():
    seeing = appo_trainer()
    calls = _calls(seeing, *WHOLE, *WITHIN, ONCE)
    fused = appo_trainer()
    fused_calls = _calls(fused, *WHOLE)
    [batch] = pendulum_rollouts(1)
    for trainer in (seeing, fused):
        torch.manual_seed(5)
        trainer.optim_steps(batch)
        trainer.collector.shutdown()
    expected = {"pre_optim_steps": 1, "post_optim": 4} | dict.fromkeys(WHOLE[1:2] + WHOLE[3:], 2)
    assert {name: len(fused_calls[name]) for name in WHOLE} == expected
    assert {name: len(calls[name]) for name in WHOLE} == expected
    logged_of = calls["pre_epoch_log"] + calls["post_epoch_log"]
    assert all(td is batch for td in logged_of)
    assert calls[ONCE] == [4]  # steps so far
    assert [td.numel() for td in calls["pre_epoch"]] == [64, 64]
    assert [td.numel() for td in calls["process_optim_batch"]] == [32] * 4
    assert [td.numel() for td in calls["post_optim_log"]] == [32] * 4
    for name, value in parameters_of(seeing).items():  # of one and the same optimiser's steps
        torch.testing.assert_close(parameters_of(fused)[name], value, rtol=2e-3, atol=2e-4)


def test_a_stage_that_an_update_does_not_have_is_refused():
    trainer = appo_trainer()
    with trainer.collector, pytest.raises(ConfigError, match=r"^hook stage 'optimizer': APPOTr"):
        trainer.register_op("optimizer", lambda losses: losses)


def test_hooks_that_would_publish_again_or_estimate_or_scale_too_late_are_refused():
    trainer = appo_trainer()
    with trainer.collector as collector:
        with pytest.raises(ConfigError, match=r"^hook UpdateWeights: APPOTrainer publishes"):
            UpdateWeights(collector, 1).register(trainer)
        with pytest.raises(ConfigError, match=r"^hook RewardNormalizer: .* reward_scale"):
            RewardNormalizer().register(trainer)
        gae = GAE(gamma=0.9, lmbda=0.9, value_network=trainer.loss_module.critic_network)
        with pytest.raises(
            ConfigError, match=r"^hook ValueEstimatorHook: .* set gamma and lambda_"
        ):
            ValueEstimatorHook(gae).register(trainer)


@pytest.mark.parametrize("fused", [True, False])
def test_a_schedule_of_the_rate_that_the_divergence_steers_is_refused(fused):
    trainer = appo_trainer(fused=fused)
    other = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    with trainer.collector:
        LRSchedulerHook(StepLR(other, 1)).register(trainer)
        with pytest.raises(ConfigError, match=r"^hook LRSchedulerHook: .* set anneal in config"):
            LRSchedulerHook(StepLR(trainer.optimizer, 1)).register(trainer)


def test_what_a_hook_makes_of_a_batch_is_learnt_from():
    trainer = appo_trainer(1)
    trainer.register_op("batch_process", lambda batch: batch.apply(torch.zeros_like))
    trainer.train()
    assert not trainer.pool.data["next", "reward"].any()


def test_padding_is_not_learnt_from():
    trainer = appo_trainer()
    [batch] = pendulum_rollouts(1)
    padded = batch.set(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
    trainer.register_op("batch_process", hook := Mock())
    with trainer.collector, pytest.raises(ConfigError, match=r"padded, .* Leave split_trajs out"):
        trainer._process_batch_hook(padded)
    hook.assert_not_called()


def test_padding_that_a_hook_makes_is_not_learnt_from():
    trainer = appo_trainer(1)
    trainer.register_op("batch_process", split_trajectories)
    with (
        trainer.collector,
        pytest.raises(ConfigError, match=r"padded, .* Leave split_trajs out of the collector, and"),
    ):
        trainer.train()


def test_rollouts_that_a_hook_puts_end_to_end_are_not_taken_for_one_trajectory():
    trainer = appo_trainer(1)
    trainer.register_op("batch_process", lambda batch: batch.reshape(-1))
    with trainer.collector, pytest.raises(LayoutShapeError, match=r"rollouts: .* is followed"):
        trainer.train()
    assert not trainer.normalizers["observation"].count


def test_a_hook_may_change_a_minibatch_and_the_optimiser_stays_the_same_one():
    trainer = appo_trainer()
    first, second = pendulum_rollouts(2)
    trainer.optim_steps(first)
    [state] = trainer.optimizer.state.values()
    before, steps = state["exp_avg"].clone(), state["step"].item()
    trainer.register_op(
        "process_optim_batch", lambda td: td.clone().set("advantage", 0 * td["advantage"])
    )
    actor = [p.clone() for p in trainer.loss_module.actor_network.parameters()]
    trainer.optim_steps(second)
    [state] = trainer.optimizer.state.values()
    assert state["step"].item() == steps + 4
    assert not torch.equal(state["exp_avg"], before)
    moved = max(
        (p - q).abs().max().item()
        for p, q in zip(actor, trainer.loss_module.actor_network.parameters(), strict=True)
    )
    assert moved > 0.0  # by what the optimiser still remembers
    trainer.collector.shutdown()


@pytest.mark.parametrize("dropped", [None, "loss_module", "optimizer"])
def test_gradients_that_a_user_dropped_keep_no_step_from_the_networks(dropped):
    trainer = appo_trainer()
    trainer.register_op("process_optim_batch", lambda td: td)
    if dropped is not None:
        getattr(trainer, dropped).zero_grad()
    before = parameters_of(trainer)
    trainer.train()
    after = parameters_of(trainer)
    assert not any(torch.equal(before[name], value) for name, value in after.items())
    assert_equal(after, _hooked())


@cache
def _hooked() -> dict[str, torch.Tensor]:
    trainer = appo_trainer()
    trainer.register_op("process_optim_batch", lambda td: td)
    trainer.train()
    return parameters_of(trainer)


@pytest.mark.parametrize("seeing", [False, True])
def test_of_two_trainers_of_one_loss_the_first_is_refused(seeing):
    trainer = appo_trainer()
    if seeing:
        trainer.register_op("process_optim_batch", lambda td: td)
    other = trainer_of(trainer.collector, trainer.loss_module)
    [batch] = pendulum_rollouts(1)
    with trainer.collector, pytest.raises(ConfigError, match="its memory has moved"):
        trainer.optim_steps(batch)
    other.optim_steps(batch)


def test_a_trainer_continues_bit_for_bit_from_a_file_that_torch_load_takes_by_default(tmp_path):
    def save() -> None:
        if one.collected_frames == 2 * FRAMES:
            torch.save((one.state_dict(), torch.get_rng_state()), tmp_path / "trainer.pt")

    one, other = appo_trainer(), appo_trainer()
    one.register_op("post_steps", save)
    one.train()
    state, random = torch.load(tmp_path / "trainer.pt", weights_only=True)
    other.load_state_dict(state)
    other.collector.update_policy_weights_()  # as with any trainer of TorchRL's
    torch.set_rng_state(random)
    assert other.collected_frames == 2 * FRAMES
    other.train()
    assert_equal(parameters_of(one), parameters_of(other))


@pytest.mark.parametrize("spoilt", ["nan", "inf"])
@pytest.mark.parametrize("fused", [True, False])
def test_weights_that_the_last_step_of_an_update_spoilt_are_not_published(fused, spoilt):
    trainer = appo_trainer(fused=fused)
    [batch] = pendulum_rollouts(1)
    version, steps = trainer.collector.scheme.version, itertools.count(1)

    def spoil() -> None:
        if next(steps) == 4:  # the losses are of before
            trainer.loss_module.critic_network.net[0].bias.data[0] = float(spoilt)

    trainer.register_op("post_optim", spoil)
    with trainer.collector, pytest.raises(DivergedError, match=f"weights is {spoilt}"):
        trainer.optim_steps(batch)
    assert trainer.collector.scheme.version == version


def test_a_hook_may_leave_samples_out_of_an_epoch():
    trainer = appo_trainer()
    sizes = []
    trainer.register_op("pre_epoch", lambda rows: rows[:33])
    trainer.register_op("post_optim_log", lambda rows: sizes.append(len(rows)))
    [batch] = pendulum_rollouts(1)
    trainer.optim_steps(batch)
    assert sizes == [17, 16] * 2
    trainer.collector.shutdown()


@pytest.mark.parametrize(("stage", "rows"), [("pre_epoch", 1), ("process_optim_batch", 0)])
def test_hooks_that_leave_a_minibatch_without_samples_are_refused(stage, rows):
    trainer = appo_trainer()
    trainer.register_op(stage, lambda samples: samples[:rows])
    [batch] = pendulum_rollouts(1)
    with trainer.collector, pytest.raises(ConfigError, match=r"^samples of a minibatch: 0 \(exp"):
        trainer.optim_steps(batch)
