"""How many of our functions one publish and one rollout call, from the sender to the policy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from torchrl.collectors import Collector

import torchrl_unilab
from tests.support.acting import Context, StillEnv, make_policy, receiver_of
from tests.support.garbage import uncollected
from torchrl_unilab.weight_update import UniLabShmScheme

ROOT = str(Path(torchrl_unilab.__file__).parent)
NOT_COUNTED = {"span", "version", "_wrapped_policy"}
"""A context that is off, an attribute, and what each step looks up."""


def _is_counted(code: CodeType) -> bool:
    ours = code.co_filename.startswith(ROOT)
    return ours and code.co_name not in NOT_COUNTED and not code.co_name.startswith("<")


def _calls(action: Callable[[], Any]) -> list[str]:
    """The names of our functions that `action` calls, in order."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and _is_counted(frame.f_code):
            names.append(frame.f_code.co_name)

    with uncollected():
        sys.setprofile(note)
        try:
            action()
        finally:
            sys.setprofile(None)
    return names


@pytest.mark.filterwarnings("ignore:The env passed to Collector is missing:FutureWarning")
def test_from_send_to_the_policy_there_are_thirteen_calls():
    context, sender = Context(make_policy(0.25)), UniLabShmScheme()
    sender.init_on_sender(model_id="policy", context=context)
    sender.connect()
    collector = Collector(StillEnv, make_policy(), frames_per_batch=1, total_frames=-1)
    collector.worker_idx = 0
    collector.register_scheme_receiver({"policy": receiver_of(sender)})
    sender.send()
    collector.rollout()

    calls = _calls(sender.send) + _calls(collector.rollout)

    assert calls == [
        *("send", "_resolve_weights", "send_weights", "tensors", "publish", "check"),
        *("rollout", "pull", "pull", "read", "tensors", "report_applied", "_forward_weights"),
    ]
    collector.shutdown()
    sender.shutdown()
