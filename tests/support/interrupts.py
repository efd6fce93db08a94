"""Ctrl-C at an exact point of a call: before any bytecode of chosen modules."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any


class Bytecodes:
    """Sends SIGINT before the `nth` bytecode that the given modules execute."""

    def __init__(self, nth: int, modules: Iterable[ModuleType]) -> None:
        self.left = nth
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self

    def interrupts(self, call: Callable[[], object]) -> bool:
        """Make the call; return whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False
