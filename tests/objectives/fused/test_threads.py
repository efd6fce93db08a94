"""Two computations at once: those of an update, and what a busy thread has not begun."""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from tests.support.bounds import DEADLINE
from tests.support.interrupts import each_interrupt
from tests.support.off_policy import (
    ALL,
    BOTH,
    CASES,
    OWN,
    assert_equal_parameters,
    fused,
    make_loss,
    transitions_of,
)
from torchrl_unilab.objectives.fused import threads
from torchrl_unilab.objectives.fused.networks import ReluNetwork
from torchrl_unilab.objectives.fused.threads import run_both
from torchrl_unilab.runtime import worker_thread
from torchrl_unilab.runtime.worker_thread import Task, WorkerThread

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture
def busy_thread():
    """A thread that has other work until the test has ended."""
    begun, over = threading.Event(), threading.Event()
    thread = WorkerThread("busy")
    thread.start(Task(lambda: (begun.set(), over.wait(DEADLINE))))
    assert begun.wait(DEADLINE)
    yield thread
    over.set()
    thread.close()


def test_the_caller_takes_back_what_a_busy_thread_has_not_begun(busy_thread):
    ran_by = run_both(busy_thread, threading.current_thread, threading.current_thread)
    assert ran_by == (threading.main_thread(),) * 2


@pytest.mark.parametrize("failing", ["main", "side"])
def test_after_an_error_a_busy_thread_has_nothing_left_to_run(busy_thread, failing):
    ran = []
    parts = {"main": lambda: ran.append("main"), "side": lambda: ran.append("side")}
    parts[failing] = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run_both(busy_thread, parts["main"], parts["side"])
    later = Task(partial(ran.append, "later"))
    busy_thread.start(later)
    assert later.cancel()  # not begun either
    assert ran == ([] if failing == "main" else ["main"])


def test_an_interrupt_leaves_nothing_running_and_the_thread_ready_for_more():
    thread = WorkerThread("side")
    for interrupt in each_interrupt(threads, worker_thread, least=30):
        begun, noted = SimpleQueue(), []

        def side(begun=begun, noted=noted):
            noted.append("begun")
            begun.put(True)
            time.sleep(0.002)  # the caller, who does not wait, would be gone
            noted.append("ended")

        interrupt.during(partial(run_both, thread, partial(begun.get, timeout=DEADLINE), side))
        assert noted in ([], ["begun", "ended"])
        assert run_both(thread, lambda: 1, lambda: 2) == (1, 2)
    thread.close()


# The policy's thread of an update


@pytest.mark.parametrize(("algorithm", "case"), ALL)
def test_with_a_thread_for_the_policy_steps_are_the_same_bit_for_bit(algorithm, case):
    settings = (CASES | OWN[algorithm])[case]
    losses, observed = [], []
    for policy_thread in (False, True):
        torch.manual_seed(0)
        loss = make_loss(algorithm, **settings)
        update = fused(loss, policy_thread=policy_thread)
        packed = update.prepare(transitions_of(loss, 128, 0))
        steps = [
            update.step(minibatch, update_policy=i != 1)
            for i, minibatch in enumerate(update.minibatches(packed, 4))
        ]
        losses.append(loss)
        observed.append(torch.stack(steps))
    assert_equal_parameters(*losses, rtol=0.0, atol=0.0)
    torch.testing.assert_close(*observed, rtol=0.0, atol=0.0, equal_nan=True)


@BOTH
def test_the_thread_takes_a_critic_s_gradients_in_steps_without_the_policy(algorithm, monkeypatch):
    threads, backward, both = [], ReluNetwork.backward, threading.Barrier(2)

    def note(*args):  # neither ends, and takes the other's network, before both have begun
        threads.append(threading.current_thread().name)
        both.wait(DEADLINE)
        backward(*args)

    monkeypatch.setattr(ReluNetwork, "backward", note)
    loss = make_loss(algorithm)
    with fused(loss, policy_thread=True) as update:
        packed = update.prepare(transitions_of(loss, 32, 0))
        update.step(packed, update_policy=False)
    assert sorted(threads) == ["MainThread", "policy"]


@pytest.mark.parametrize("first", ["_differentiate_policy", "_differentiate_critics"])
@BOTH
def test_neither_gradient_sees_the_others_passes_whichever_is_done_first(algorithm, first):
    torch.manual_seed(0)
    loss, other = (make_loss(algorithm, layer_norm=True) for _ in range(2))
    other.load_state_dict(loss.state_dict())
    batch, done = transitions_of(loss, 32, 0), threading.Event()
    update, serial = fused(loss, policy_thread=True), fused(other)
    network = update._critics if first == "_differentiate_policy" else update._actor
    whole, backward = getattr(update, first), network.backward

    def take_all(*args):
        whole(*args)
        done.set()

    def wait_for_the_other(*args):  # between a forward pass and its backward pass
        assert done.wait(DEADLINE)
        backward(*args)

    setattr(update, first, take_all)
    network.backward = wait_for_the_other
    for one in (update, serial):
        torch.manual_seed(1)
        one.step(one.prepare(batch))
    assert_equal_parameters(loss, other, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("failing", ["_differentiate_policy", "_differentiate_critics"])
@BOTH
def test_an_error_in_either_thread_is_raised_when_both_have_ended(algorithm, failing):
    loss = make_loss(algorithm)
    update = fused(loss, policy_thread=True)
    (other,) = {"_differentiate_policy", "_differentiate_critics"} - {failing}
    begun, failed, ended = (threading.Event() for _ in range(3))
    whole = getattr(update, other)

    def fail(*_):
        assert begun.wait(DEADLINE)
        failed.set()
        raise RuntimeError("no gradient")

    def take_long(*args):
        begun.set()
        assert failed.wait(DEADLINE)
        whole(*args)
        ended.set()

    setattr(update, failing, fail)
    setattr(update, other, take_long)
    packed = update.prepare(transitions_of(loss, 32, 0))
    before = [parameter.clone() for parameter in loss.parameters()]
    with pytest.raises(RuntimeError, match="no gradient"):
        update.step(packed)
    assert ended.is_set()
    torch.testing.assert_close([*loss.parameters()], before, rtol=0.0, atol=0.0)
