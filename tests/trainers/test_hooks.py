from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import Mock, call

import psutil
import pytest
from torchrl.trainers import UpdateWeights

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.trainers import PublishWeights, hooks
from torchrl_unilab.trainers.hooks import BusyTime, CollectorTime


def test_weights_are_published_every_nth_batch():
    collector = Mock()
    hook = PublishWeights(collector, every=3)
    for _ in range(7):
        hook()
    assert collector.update_policy_weights_.call_count == 2
    restored = PublishWeights(collector, every=3)
    restored.load_state_dict(hook.state_dict())
    for _ in range(2):
        restored()
    assert collector.update_policy_weights_.call_count == 3


def test_a_batch_that_is_left_out_neither_counts_nor_is_published():
    collector = Mock()
    hook = PublishWeights(collector, every=2)
    for left_out in (True, False, True, False):
        if left_out:
            hook.skip()
        hook()
    collector.update_policy_weights_.assert_called_once_with()


def test_the_hook_that_is_replaced_names_where_the_trainer_keeps_each_model():
    collector, trainer = Mock(), Mock()
    trainer.loss_module.actor = "the actor"
    paths = {"policy": "loss_module.actor"}
    replaced = UpdateWeights(collector, weight_update_map=paths, trainer=trainer)
    other = UpdateWeights(Mock())
    trainer._post_steps_ops = [(replaced, {}), (other, {})]
    hook = PublishWeights(collector)

    hook.register(trainer)
    hook()

    collector.update_policy_weights_.assert_called_once_with(weights_dict={"policy": "the actor"})
    assert trainer._post_steps_ops == [(other, {})]
    trainer.register_module.assert_called_once_with("publish_weights", hook)


def test_publishing_never_is_refused():
    with pytest.raises(ConfigError, match=r"every: 0 \(expected an integer"):
        PublishWeights(None, every=0)


def test_the_time_of_a_collector_and_of_its_replacement_is_summed(monkeypatch):
    seconds = {1: 5.0, 2: 7.0}

    def process(pid: int) -> SimpleNamespace:
        if pid not in seconds:
            raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(
            cpu_times=lambda: SimpleNamespace(user=seconds[pid] / 2, system=seconds[pid] / 2)
        )

    monkeypatch.setattr(psutil, "Process", process)
    monkeypatch.setattr(hooks, "time", SimpleNamespace(perf_counter=iter([0.0, 2.0, 4.0]).__next__))
    collector = SimpleNamespace(pids=[1])
    times = CollectorTime(collector)
    times.start()
    seconds[1] = 8.0
    times.sample()
    assert times.busy == [(8.0 - 5.0) / 2.0]

    del seconds[1]
    collector.pids = [2]
    times.sample()

    assert times.busy == [(8.0 - 5.0 + 7.0) / 4.0]


def test_times_are_taken_at_the_start_of_training_and_at_both_ends_of_a_batch():
    trainer, busy, times = Mock(), BusyTime(), CollectorTime(Mock(pids=[1]))
    busy.register(trainer)
    times.register(trainer)
    assert trainer.register_op.call_args_list == [
        call("pre_steps_log", busy.arrived),
        call("post_steps_log", busy.finished),
        call("setup", times.start),
        call("post_steps", times.sample),
    ]


def test_this_process_is_busy():
    times = CollectorTime(SimpleNamespace(pids=[os.getpid()]))
    times.start()
    before = psutil.Process().cpu_times()[:2]
    while psutil.Process().cpu_times()[:2] == before:  # which the kernel counts in ticks
        pass
    times.sample()
    assert times.busy[0] > 0


def test_a_learner_that_waits_three_of_four_seconds_is_busy_for_a_quarter(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(hooks, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    busy = BusyTime()
    assert busy.busy == 0.0  # as nothing has come yet
    busy.arrived(None)
    clock.now = 1.0
    busy.finished(None)
    clock.now = 4.0
    busy.arrived(None)
    assert (busy.waited, busy.busy) == (3.0, 0.25)
