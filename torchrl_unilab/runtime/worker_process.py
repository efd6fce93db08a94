"""One worker's process as its parent sees it: whether it lives, is stopped, and how it is ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import psutil

from torchrl_unilab.limits import process_status
from torchrl_unilab.runtime.link import Channel

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

    @property
    def ended(self) -> bool:
        """Whether it is dead.

        The sentinel knows first. But it is silent while a child of the worker's holds its pipe,
        and, with a fork server, between the reading of the exit code and the end of the pipe.
        """
        return bool(wait([self.process.sentinel], 0)) or not self.process.is_alive()

    @property
    def stopped(self) -> bool:
        """Whether a signal stopped it, so that it neither works nor ends."""
        return process_status(self.process.pid) == psutil.STATUS_STOPPED

    def end(self, deadline: float) -> None:
        """Wait for its end until a deadline of ``time.monotonic``; then, or if stopped, kill it."""
        while (left := deadline - time.monotonic()) > 0.0 and not (self.ended or self.stopped):
            wait([self.process.sentinel], min(left, CONTINUE_SECONDS))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
