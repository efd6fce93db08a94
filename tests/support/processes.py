"""Helper processes with a deadline: no test waits for ever, none leaves a child behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import multiprocessing.forkserver
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.bounds import DEADLINE


def server_of_this_process() -> dict[str, Any]:
    """What a process needs to start processes from the same server: see `use_server`."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running()
    names = ("_forkserver_address", "_forkserver_authkey")
    return {name: vars(server)[name] for name in names if name in vars(server)}


def use_server(server: dict[str, Any]) -> None:
    """Start processes from another process's server, so that none has to import all again."""
    vars(multiprocessing.forkserver._forkserver).update(  # type: ignore[attr-defined]
        server, ensure_running=lambda: None
    )


@contextlib.contextmanager
def spawned(
    target: Callable[..., Any], *args: Any, method: str | None = None, daemon: bool = True
) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run `target(pipe, *args)` in a process of its own, which is ended on the way out.

    Args:
        target: Top-level function.
        *args: Its other arguments.
        method: How to start the process, if it matters how that one ends.
        daemon: Whether it has no processes of its own.
    """
    here, there = mp.Pipe()
    context: Any = mp.get_context(method)
    process = context.Process(target=target, args=(there, *args), daemon=daemon)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join(DEADLINE)
        process.close()
        here.close()


def live_children() -> list[psutil.Process]:
    """Child processes of this one, without Python's own resource tracker and fork server."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.pid != server and _is_at_work(child)]


def _is_at_work(process: psutil.Process) -> bool:
    try:
        return not any("resource_tracker" in part for part in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False  # it has ended since it was listed


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, also if its parent has not asked how."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def shared_mappings() -> int:
    """Return how many anonymous segments of ours this process maps."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:unilab")


def receive(pipe: Connection, deadline: float = DEADLINE) -> Any:
    """Receive from a pipe, or fail once the deadline has passed."""
    assert pipe.poll(deadline), f"no answer within {deadline} s"
    return pipe.recv()


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when something has come to pass, which it must."""
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, "it does not come to pass"


def within(seconds: float, call: Callable[[], object]) -> BaseException | None:
    """Return what `call` raises, in a thread: a call that does not return is an error."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"no return within {seconds:g} s"
    return raised[0] if raised else None


def _clock_tick() -> int:
    """When a process would start that started now, as the kernel counts it."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


@contextlib.contextmanager
def process_with_id(pid: int) -> Iterator[None]:
    """Run another process under the id of one that has died; skip where that is not allowed."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    began = _clock_tick()
    wait_for(lambda: _clock_tick() > began)  # processes of one id and one tick are one
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        try:
            last.write_text(str(pid - 1))
        except OSError:
            pytest.skip("the kernel does not let this user choose a process id")
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            if process.pid == pid:
                yield
                return
        finally:
            process.kill()
            process.communicate()
    raise TimeoutError(f"process id {pid} was not to be had within {DEADLINE:g} s")
