"""One worker's process as its parent sees it: whether it lives, is stopped, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from torchrl_unilab.processes import process_id, process_is_alive, process_is_stopped, process_word
from torchrl_unilab.runtime.link import Channel

_PAUSE_SECONDS = 0.01  # between two looks at a process whose sentinel is silent, or spent
CONTINUE_SECONDS = 0.25  # within which all of a terminal's job run once it is continued


@dataclass
class WorkerProcess:
    """A worker's process, and the parent's end of its pipe.

    Attributes:
        index: Number of the worker.
        name: What it is called.
        process: The process.
        channel: The parent's end of the pipe.
        ready: Whether it has reported that it is ready.
        requests: How many requests it was sent.
    """

    index: int
    name: str
    process: BaseProcess
    channel: Channel
    ready: bool = False
    requests: int = 0
    _word: int = field(init=False)  # 0 if it died at once

    def __post_init__(self) -> None:
        self._word = process_word(self.process.pid or 0)

    @property
    def ended(self) -> bool:
        """Whether it is dead.

        The sentinel knows first. But it is silent while a child of the worker's holds its pipe,
        and, with a fork server, between the reading of the exit code and the end of the pipe.
        """
        return bool(wait([self.process.sentinel], 0)) or not self.process.is_alive()

    @property
    def alive(self) -> bool:
        """Whether it lives: the system knows it also if a fork server was killed, and left it."""
        return process_is_alive(self._word)

    @property
    def stopped(self) -> bool:
        """Whether a signal stopped it, so that it neither works nor ends."""
        return process_is_stopped(self._word)

    def kill(self) -> None:
        """Kill it, if it lives; return when it is dead."""
        if self.process.is_alive():
            if self.alive:  # else its fork server is about to say that it is dead
                self.process.kill()
            self.process.join()
        while self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id(self._word), signal.SIGKILL)
            time.sleep(_PAUSE_SECONDS)

    def end(self, deadline: float) -> None:
        """Wait for its end until a deadline of ``time.monotonic``; then, or if stopped, kill it."""
        while (left := deadline - time.monotonic()) > 0.0 and self.alive and not self.stopped:
            if wait([self.process.sentinel], min(left, CONTINUE_SECONDS)):
                time.sleep(_PAUSE_SECONDS)  # it is about to end, or its fork server has
        self.kill()
