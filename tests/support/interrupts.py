"""Ctrl-C at an exact point of a call: after any bytecode of chosen modules that has an effect."""

from __future__ import annotations

import dis
import functools
import itertools
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torchrl.envs.utils import exploration_type, set_exploration_type

from tests.support.garbage import uncollected

_WITHOUT_EFFECT = ("LOAD", "STORE_FAST", "PUSH", "POP", "COPY", "SWAP", "PRECALL", "KW_NAMES")
_WITHOUT_EFFECT += ("COMPARE", "CONTAINS", "IS_OP", "BINARY", "UNARY", "BUILD", "UNPACK", "JUMP_F")


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    """The first bytecode, ends of blocks, and those after one whose effect outlives the frame.

    Anywhere else an interrupt leaves what it leaves at the point before.
    """
    steps = dis.Bytecode(code)
    ends = [block.end for block in steps.exception_entries]
    after = (
        step.offset
        for last, step in itertools.pairwise(steps)
        if not last.opname.startswith(_WITHOUT_EFFECT)
    )
    return frozenset({0, *after, *ends})


class Interrupt:
    """Sends SIGINT at the `nth` point of what the given modules execute.

    Attributes:
        left: How many points are left before it; 0 once it was sent.
        leaves_gradients: Whether gradients were on after the last call.
    """

    def __init__(self, nth: int, modules: Iterable[ModuleType]) -> None:
        self.left, self.leaves_gradients = nth, True
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _points(frame.f_code):
            self.left -= 1
            if self.left == 0:
                sys.stderr.write(f"interrupt in {frame.f_code.co_name}, line {frame.f_lineno}\n")
                signal.raise_signal(signal.SIGINT)
        return self

    def during(self, call: Callable[[], object]) -> bool:
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
                self.leaves_gradients = torch.is_grad_enabled()
        return False


def each_interrupt(*modules: ModuleType, least: int = 10, step: int = 1) -> Iterator[Interrupt]:
    """Give interrupts at the points of a call in turn, to make it with; the last comes too late.

    Args:
        modules: Whose points they are.
        least: The call is known to have more points than these.
        step: From one of the points to the next that is tried.
    """
    for nth in itertools.count(1, step):
        interrupt = Interrupt(nth, modules)
        yield interrupt
        if interrupt.left:
            assert nth > least, "the call was not traced"
            return
