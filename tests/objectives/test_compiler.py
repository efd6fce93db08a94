"""SAC's and TD3's fused updates by compiled code, with and without the policy's thread."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor

from tests.support.off_policy import assert_equal_parameters, fused, make_loss, transitions_of
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.objectives.compiler import compiled

BOTH = pytest.mark.parametrize("algorithm", ["sac", "td3"])

pytestmark = pytest.mark.usefixtures("double_precision")


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
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (loss, observed), (other, others), (third, thirds) = (
        _steps(algorithm, settings, compiled=compiled, policy_thread=thread)
        for compiled, thread in ((False, False), (True, False), (True, True))
    )
    assert torch._dynamo.utils.counters["frames"]["ok"] == 4  # two parts, two sizes
    assert not torch._dynamo.utils.counters["graph_break"]
    assert_equal_parameters(loss, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(observed, others, equal_nan=True)
    assert_equal_parameters(other, third, rtol=0.0, atol=0.0)
    torch.testing.assert_close(others, thirds, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@BOTH
def test_traced_steps_are_the_same(algorithm, monkeypatch):
    monkeypatch.setattr(
        "torchrl_unilab.objectives.fused.off_policy.compiled",
        lambda function, **_: torch.compile(function, dynamic=False, backend="eager"),
    )
    _assert_compiled_steps_are_the_same(algorithm, {"layer_norm": True, "normalized": True})


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
def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    function = compiled(lambda x: (x * 3.25).sin())
    refused = pytest.raises(ConfigError, match=r"compile: No working C\+\+ compiler .*'false'")
    with inductor.patch({"cpp.cxx": (None, "false")}), refused:
        function(torch.ones(3))
