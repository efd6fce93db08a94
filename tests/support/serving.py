"""Workers that do what the parent asks for."""

from __future__ import annotations

import os
import signal
import threading

import psutil

from tests.support.processes import wait_for
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.workers import WorkerGroup

LARGE = 20_000_000
"""Bytes of a message that no pipe holds as a whole."""


def serve(link: Link) -> None:
    """Do what the parent asks for; say nothing to other words."""
    link.ready()
    while True:
        request = link.request(block=True)
        if request[0] == "double":
            link.answer(2 * request[1])
        elif request[0] == "raise":
            _raise(request[1])
        elif request[0] == "be deaf":
            link.answer()
            threading.Event().wait()
        elif request[0] == "hang up":
            link.close()
            threading.Event().wait()
        elif request[0] == "fork":
            if not (child := os.fork()):
                threading.Event().wait()
            link.answer(child)
        elif request[0] == "leave":
            return
        elif request[0] == "exit":
            os._exit(request[1])
        elif request[0] == "answer at length":
            link.answer(bytes(request[1]))
        elif request[0] == "measure":
            link.answer(len(request[1]))


def _raise(message: str) -> None:
    raise LookupError(message)


def make_group(count: int = 1) -> WorkerGroup:
    """So many workers at work."""
    return WorkerGroup(serve, [()] * count, name="server")


def stop_process(pid: int) -> psutil.Process:
    """Stop a process, and return when it is."""
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
    return process


def gone(pids: list[int]) -> bool:
    """Whether none of some processes is left."""
    return not any(psutil.pid_exists(pid) for pid in pids)
