"""SAC's and TD3's fused updates by compiled code, with and without the policy's thread."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor import cpu_vec_isa

from tests.support.off_policy import assert_equal_parameters, fused, make_loss, transitions_of
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.objectives.compiler import compiled
from torchrl_unilab.objectives.fused.off_policy import FusedOffPolicyUpdate

COMPILE = torch.compile
BOTH = pytest.mark.parametrize("algorithm", ["sac", "td3"])

pytestmark = pytest.mark.usefixtures("double_precision")


def _trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the compiler run what it traced as it is, behind its guards."""

    def traced(function, *, options, **kwargs):
        options.pop("cpp_wrapper")
        return COMPILE(function, backend="eager", options=options, **kwargs)

    monkeypatch.setattr(torch, "compile", traced)


@contextlib.contextmanager
def _audited() -> Iterator[list[str]]:
    """List what audit hooks are told of reads of attributes; a hook stays, and is silent later."""
    told: list[str] = []
    listening = True

    def hook(event: str, arguments: tuple) -> None:
        if listening and event == "object.__getattr__":
            told.append(arguments[1])

    sys.addaudithook(hook)
    try:
        yield told
    finally:
        listening = False


@contextlib.contextmanager
def _alarms() -> Iterator[list[int]]:
    """Make interrupts of alarms; list those that came."""
    sent: list[int] = []

    def interrupt(number: int, _: object) -> None:
        sent.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        yield sent
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _step_until_alarmed(update: FusedOffPolicyUpdate, packed: torch.Tensor, sent: list) -> None:
    before = len(sent)
    signal.setitimer(signal.ITIMER_VIRTUAL, random.uniform(1e-6, 4e-3))
    while len(sent) == before:
        update.step(packed)


def _steps(algorithm: str, settings: dict, *, compiled: bool, **options) -> tuple:
    """A loss after steps on minibatches of two sizes, one without the policy; statistics."""
    torch.manual_seed(0)
    loss = make_loss(algorithm, **settings)
    update = fused(loss, **options)
    if compiled:
        update.compile()
    packed = update.prepare(transitions_of(loss, 126, 0))
    observed = [
        update.step(minibatch, update_policy=i != 1)
        for i, minibatch in enumerate(update.minibatches(packed, 4))
    ]
    return loss, torch.stack(observed)


def _assert_compiled_steps_are_the_same(algorithm: str, settings: dict) -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    loss, observed = _steps(algorithm, settings, compiled=False)
    other, others = _steps(algorithm, settings, compiled=True)
    assert counters["frames"]["ok"] == 4  # two parts, two sizes
    third, thirds = _steps(algorithm, settings, compiled=True, policy_thread=True)
    assert counters["frames"]["ok"] == 8  # of its own
    assert not counters["graph_break"]
    assert_equal_parameters(loss, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(observed, others, equal_nan=True)
    assert_equal_parameters(other, third, rtol=0.0, atol=0.0)
    torch.testing.assert_close(others, thirds, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@BOTH
def test_traced_steps_are_the_same(algorithm, monkeypatch):
    _trace_only(monkeypatch)
    _assert_compiled_steps_are_the_same(algorithm, {"layer_norm": True, "normalized": True})


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("algorithm", "thread"), [("sac", True), ("td3", False)], ids=["thread", "alone"]
)
def test_no_interrupt_is_lost_in_compiled_steps(algorithm, thread, monkeypatch):
    _trace_only(monkeypatch)
    loss = make_loss(algorithm)
    with fused(loss, policy_thread=thread) as update, _alarms() as sent:
        update.compile()
        packed = update.prepare(transitions_of(loss, 32, 0))
        update.step(packed)
        for _ in range(200):
            with pytest.raises(KeyboardInterrupt):
                _step_until_alarmed(update, packed, sent)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    "settings",
    [{}, {"layer_norm": True}, {"loss_function": "l2"}, {"state": True, "normalized": True}],
    ids=["plain", "layer norm", "squares", "privileged critics"],
)
@BOTH
def test_compiled_steps_are_the_same(algorithm, settings):
    _assert_compiled_steps_are_the_same(algorithm, settings)


@BOTH
def test_without_a_compiler_an_update_is_not_compiled(algorithm, monkeypatch):
    loss = make_loss(algorithm)
    update = fused(loss)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no 'no-such-compiler' on the path"):
        update.compile()
    update.step(update.prepare(transitions_of(loss, 32, 0)))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@BOTH
def test_no_audit_hook_is_called_in_a_compiled_step_where_an_interrupt_would_be_lost(
    algorithm, monkeypatch
):
    _trace_only(monkeypatch)
    loss = make_loss(algorithm)
    with fused(loss) as update:
        update.compile()
        packed = update.prepare(transitions_of(loss, 32, 0))
        update.step(packed)
        with _audited() as told:
            update.step(packed)
    assert not told


def test_no_trial_build_tells_what_vectors_the_processor_has(monkeypatch):
    build = Mock(return_value=False)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", build)
    compiler = Mock()
    monkeypatch.setattr(torch, "compile", compiler)
    compiled(len)
    with inductor.patch(compiler.call_args.kwargs["options"]):
        assert cpu_vec_isa.VecAVX2()
    build.assert_not_called()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    function = compiled(lambda x: (x * 3.25).sin())
    refused = pytest.raises(ConfigError, match=r"compile: No working C\+\+ compiler .*'false'")
    with inductor.patch({"cpp.cxx": (None, "false")}), refused:
        function(torch.ones(3))
