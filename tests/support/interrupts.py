"""Ctrl-C at an exact point of a call: after any bytecode of chosen modules that has an effect."""

from __future__ import annotations

import dis
import functools
import itertools
import signal
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torchrl.envs.utils import exploration_type, set_exploration_type

from tests.support.garbage import uncollected

_WITHOUT_EFFECT = ("LOAD", "STORE_FAST", "PUSH", "POP", "COPY", "SWAP", "PRECALL", "KW_NAMES")
_WITHOUT_EFFECT += ("COMPARE", "CONTAINS", "IS_OP", "BINARY", "UNARY", "BUILD", "UNPACK", "JUMP_F")


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    """The first bytecode, and those after one whose effect outlives the call's frame.

    Anywhere else an interrupt leaves what it leaves at the point before.
    """
    steps = list(dis.get_instructions(code))
    after = (
        step.offset
        for last, step in itertools.pairwise(steps)
        if not last.opname.startswith(_WITHOUT_EFFECT)
    )
    return frozenset({steps[0].offset, *after})


class Bytecodes:
    """Sends SIGINT at the `nth` point of what the given modules execute."""

    def __init__(self, nth: int, modules: Iterable[ModuleType]) -> None:
        self.left = nth
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _points(frame.f_code):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self

    def interrupts(self, call: Callable[[], object]) -> bool:
        """Make the call; return whether it was interrupted."""
        before = sys.gettrace()
        # Between `__enter__` and its block an interrupt leaves the modes that are entered.
        with uncollected(), set_exploration_type(exploration_type()), torch.enable_grad():
            sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it in `settrace`
            sys.settrace(self)
            try:
                call()
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(before)
        return False
