"""Hooks on `OffPolicyTrainer`, and what comes through one: interrupts, and what is not finite."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from torch.optim.lr_scheduler import StepLR
from torchrl.envs import Compose, DTypeCastTransform, RenameTransform, TransformedEnv
from torchrl.objectives import SoftUpdate
from torchrl.trainers import (
    CountFramesLog,
    LogScalar,
    LRSchedulerHook,
    RewardNormalizer,
    TargetNetUpdaterHook,
    UTDRHook,
)

from tests.support.off_policy_training import BOTH, QUICK, equal_states, off_policy_trainer, trained
from tests.support.quick import four_pendulums
from torchrl_unilab.errors import ConfigError, DivergedError
from torchrl_unilab.trainers import OffPolicyTrainer


@BOTH
@pytest.mark.parametrize("fused", [True, False])
def test_hooks_of_every_stage_are_called_with_a_tick_as_an_epoch(algorithm, fused):
    trainer = off_policy_trainer(20, algorithm=algorithm, fused=fused)
    calls: Counter[str] = Counter()

    def hook(stage: str, *arguments: object) -> object:
        calls[stage] += 1
        if stage == "process_optim_batch":
            arguments[0]["next", "reward"].fill_(7.0)
        if stage == "post_optim_log":
            assert (arguments[0]["next", "reward"] == 7.0).all()
            assert len(arguments[0]) == QUICK["batch_size"]
        if stage == "post_optim_complete_log":
            assert arguments[1]["td_error" if fused else "loss_actor"].isfinite()
        return {f"seen_{stage}": 1.0} if stage.endswith("_log") else (*arguments, None)[0]

    once = ("pre_epoch", "pre_epoch_log", "post_epoch", "post_epoch_log", "post_optim_complete_log")
    each = ("process_optim_batch", "post_optim_log")
    for stage in (*once, *each):
        trainer.register_op(stage, partial(hook, stage))
    trainer.train()
    ticks = trainer.updates // QUICK["updates_per_step"]
    assert calls == dict.fromkeys(once, ticks) | dict.fromkeys(each, trainer.updates)
    assert len(trainer._log_dict["seen_post_optim_log"]) == trainer.updates
    with pytest.raises(ConfigError, match=r"^hook stage 'post_loss': OffPolicyTrainer takes its"):
        trainer.register_op("post_loss", lambda batch: batch)


def test_hooks_on_batches_that_never_come_are_refused():
    trainer = off_policy_trainer()
    with pytest.raises(ConfigError, match=r"^hook stage 'batch_process': ReplayCollector yields"):
        RewardNormalizer().register(trainer)
    for hook in (CountFramesLog(frame_skip=1), LogScalar(("next", "reward"), "reward")):
        with pytest.raises(
            ConfigError, match=rf"^hook {type(hook).__name__}: ReplayCollector yields"
        ):
            hook.register(trainer)
    trainer.close()


@pytest.mark.parametrize("fused", [True, False])
def test_a_hook_that_would_move_the_targets_again_is_refused(fused):
    trainer, other = off_policy_trainer(fused=fused), off_policy_trainer()
    TargetNetUpdaterHook(SoftUpdate(other.loss_module, tau=0.5)).register(trainer, "other")
    again = TargetNetUpdaterHook(SoftUpdate(trainer.loss_module, tau=0.5))
    with pytest.raises(ConfigError, match=r"^hook TargetNetUpdaterHook: .* set tau in config"):
        again.register(trainer, "targets")
    for each in (trainer, other):
        each.collector.shutdown()
        each.close()


@pytest.mark.parametrize("fused", [True, False])
def test_a_schedule_of_rates_holds_unless_they_are_annealed(fused):
    trainer = off_policy_trainer(10, fused=fused)
    critic = trainer.update.optimizers["critic"]
    LRSchedulerHook(StepLR(critic, 1, gamma=0.5), "optim").register(trainer)
    trained(trainer)
    share = critic.param_groups[0]["lr"] / trainer.config.lr_critic
    assert share == 0.5**trainer.updates < 1.0
    annealed = off_policy_trainer(fused=fused, anneal=1.0)
    schedule = StepLR(annealed.update.optimizers["critic"], 1)
    with annealed.collector, pytest.raises(ConfigError, match=r"anneal=1, .* set anneal=0 in"):
        LRSchedulerHook(schedule).register(annealed)
    annealed.close()


def test_torchrls_hook_tells_the_updates_per_frame():
    trainer = off_policy_trainer(20)
    UTDRHook(trainer).register(trainer)
    trainer.train()
    before = trainer.updates - QUICK["updates_per_step"]  # the last tick's
    ratio = before * QUICK["batch_size"] / trainer.collected_frames
    assert trainer._log_dict["utd_ratio"][-1] == ratio


def test_a_hook_on_minibatches_changes_what_is_learnt_from_and_looking_changes_nothing():
    def look(rows: TensorDictBase) -> TensorDictBase:
        return rows

    def change(rows: TensorDictBase) -> TensorDictBase:
        rows["next", "reward"].fill_(7.0)
        return rows

    weights = []
    for hook in (None, look, change):
        trainer = off_policy_trainer(20)
        if hook is not None:
            trainer.register_op("process_optim_batch", hook)
        weights.append(trained(trainer))
    assert equal_states(weights[0], weights[1])
    assert not equal_states(weights[0], weights[2])


def test_hooks_see_the_minibatches_that_are_learnt_from_however_many_rows_there_are():
    trainer = off_policy_trainer(10, updates_per_step=4, fused=False)
    step, seen, learnt = trainer.update.step, [], []

    def look(rows: TensorDictBase) -> TensorDictBase:
        seen.append(rows["observation"].clone())
        return rows

    def recorded(rows: TensorDictBase, **options: bool) -> torch.Tensor:
        learnt.append(rows["observation"].clone())
        return step(rows, **options)

    trainer.update.step = recorded
    trainer.register_op("pre_epoch", lambda sample: sample[:61])
    trainer.register_op("process_optim_batch", look)
    trained(trainer)
    assert len(seen) == len(learnt) > 0
    assert all(map(torch.equal, seen, learnt))


def _spoilt(update: int, reward: float, **settings: object) -> OffPolicyTrainer:
    """A trainer of four updates a tick, to one of which comes a reward that is not finite."""
    trainer, updates = off_policy_trainer(20, updates_per_step=4, **settings), itertools.count()

    def spoil(rows: TensorDictBase) -> TensorDictBase:
        if next(updates) == update:
            rows["next", "reward"][0] = reward
        return rows

    trainer.register_op("process_optim_batch", spoil)
    return trainer


@pytest.mark.parametrize("poisoned", [2, 3])  # of the first four: the policy moves with the sixth
def test_what_is_not_finite_before_the_policy_moves_ends_the_training_as_well(poisoned):
    trainer = _spoilt(poisoned, math.nan, policy_frequency=6)
    version = trainer.collector.scheme.version
    with pytest.raises(DivergedError, match=r"loss_qvalue is nan \(expected a finite one\)"):
        trainer.train()
    assert trainer.updates == 4
    assert trainer.collector.scheme.version == version + trainer.collected_frames // 4 - 1
    trainer.collector.shutdown()


@pytest.mark.parametrize("of_floats", [True, False])
def test_rewards_are_scaled_by_the_key_that_the_loss_reads_whatever_their_dtype(of_floats):
    def two_rewards() -> TransformedEnv:
        kinds = (torch.float32, torch.float32 if of_floats else torch.int64)
        copied = RenameTransform(["reward"], ["bonus"], create_copy=True)
        cast = DTypeCastTransform(*kinds, in_keys=["bonus"])
        return TransformedEnv(four_pendulums(), Compose(copied, cast))

    seen = []
    for scale in (1.0, 0.25):
        trainer = off_policy_trainer(12, two_rewards, reward_scale=scale, fused=False)
        trainer.loss_module.set_keys(reward="bonus")
        trainer.register_op("process_optim_batch", lambda rows: seen.append(rows.clone()) or rows)
        trained(trainer)
    half = len(seen) // 2
    assert half > 0
    for whole, scaled in zip(seen[:half], seen[half:], strict=True):
        assert torch.equal(whole["next", "reward"], scaled["next", "reward"])
        assert torch.equal(0.25 * whole["next", "bonus"], scaled["next", "bonus"])


@BOTH
def test_what_is_not_finite_in_one_update_of_a_tick_ends_the_training_before_it_is_published(
    algorithm,
):
    trainer = _spoilt(14, math.inf, algorithm=algorithm)  # the third of four
    version = trainer.collector.scheme.version
    with pytest.raises(DivergedError, match=r"loss_\w+ is (nan|inf) \(expected a finite one\)"):
        trainer.train()
    assert trainer.updates == 16
    assert trainer.collector.scheme.version - version < trainer.collected_frames // 4
    worker = trainer.collector._team.service.rollouts.policy
    assert all(p.isfinite().all() for p in worker.parameters())
    trainer.collector.shutdown()


@BOTH
def test_the_policys_losses_are_logged_from_the_tick_of_its_first_step_on(algorithm):
    trainer = off_policy_trainer(8, algorithm=algorithm, policy_frequency=2)
    trained(trainer)
    assert trainer.updates == 2  # the policy moves in the second
    (loss,) = trainer._log_dict["loss_actor"]
    assert math.isfinite(loss)


@BOTH
def test_the_losses_of_a_policy_that_has_not_moved_are_not_logged(algorithm):
    trainer = off_policy_trainer(8, algorithm=algorithm, policy_frequency=3)
    trained(trainer)
    assert trainer.updates == 2
    assert "loss_actor" not in trainer._log_dict
    assert len(trainer._log_dict["loss_qvalue"]) == 1


def test_a_loss_of_ones_own_that_is_nan_ends_the_training_though_the_weights_are_finite():
    trainer = off_policy_trainer(8, fused=False)
    forward = trainer.update._losses
    nan = torch.tensor(math.nan)
    trainer.update._losses = lambda rows: forward(rows).set("loss_own", nan)
    with trainer.collector, pytest.raises(DivergedError, match="loss_own is nan"):
        trainer.train()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("network", ["actor", "qvalue"])
def test_weights_that_the_last_update_of_a_tick_spoilt_are_not_published(network, fused):
    trainer = off_policy_trainer(8, fused=fused)  # in the last of which there are two updates
    updates, version = itertools.count(1), trainer.collector.scheme.version

    def spoil() -> None:
        named = trainer.loss_module.named_parameters()
        if next(updates) == 2:
            next(p for name, p in named if name.startswith(network)).data.fill_(float("nan"))

    trainer.register_op("post_optim", spoil)
    with trainer.collector, pytest.raises(DivergedError, match="norm of the weights is nan"):
        trainer.train()
    assert trainer.collector.scheme.version == version + 7


def test_the_trainers_seed_decides_which_rows_are_drawn():
    trainers = [off_policy_trainer(seed=seed) for seed in (0, 0, 1)]
    first, again, other = (trainer.pipeline.base_seed for trainer in trainers)
    assert first == again != other
    for trainer in trainers:
        trainer.close()
        trainer.collector.shutdown()


def _interrupt(at: int) -> Callable[[], None]:
    """Return what Ctrl-C comes in once, in its call number `at`."""
    calls = itertools.count()

    def interrupt() -> None:
        if next(calls) == at:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize("prefetch", [False, True])
def test_training_continues_after_an_interrupt_in_mid_update(prefetch):
    trainer = off_policy_trainer(20, prefetch=prefetch)
    trainer.register_op("post_optim", _interrupt(at=3))
    with trainer.collector:
        for batch in trainer.collector:
            try:
                trainer.optim_steps(batch)
            except KeyboardInterrupt:
                break
        before = trainer.updates
        assert before == 4  # in the midst of a tick's two
        trainer.optim_steps(None)
        assert trainer.updates == before + QUICK["updates_per_step"]
    trainer.close()


def test_training_continues_after_an_interrupt_between_a_sample_and_its_first_update(monkeypatch):
    trainer = off_policy_trainer(20, prefetch=True)
    prepare, interrupt = trainer.pipeline.start_prepare, _interrupt(at=1)

    def interrupted(*arguments: int) -> None:
        interrupt()
        prepare(*arguments)

    monkeypatch.setattr(trainer.pipeline, "start_prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    before = trainer.updates
    trainer.optim_steps(None)
    assert trainer.updates == before + QUICK["updates_per_step"]
    trainer.close()
