"""`start_fork_server`: a copy of this process that forks all workers, which share what it imported.

Python's own server is a new interpreter, which imports everything once more. This one is forked
as soon as torch and the package are imported, and before there is any thread that a fork
would lose (OpenBLAS ends its own). Its pages stay shared until they are written.

A script of the user's, too, is ready in half of the time with it. These are its first lines::

    from torchrl_unilab.fork_server import start_fork_server

    if __name__ == "__main__":
        start_fork_server()
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

_PRELOAD = "torchrl_unilab.preload"


def start_fork_server() -> None:
    """Import `torchrl_unilab.preload`, and fork the process that forks the workers.

    Call it before any other import, which may start threads, and only in the program itself:
    its workers import the program's module. Nothing is forked if this process has threads, as
    a debugger's, or has imported torch, which may have some, or if another start method was
    chosen, as TorchRL does when it is imported. System libraries other than Linux's do not
    survive a fork: elsewhere workers are spawned.
    """
    chosen = multiprocessing.get_start_method(allow_none=True) is not None
    if sys.platform != "linux" or chosen:
        importlib.import_module(_PRELOAD)
        return
    multiprocessing.set_start_method("forkserver")  # before TorchRL chooses another
    multiprocessing.set_forkserver_preload([_PRELOAD])
    resource_tracker.ensure_running()  # which is to be a new interpreter
    used = "torch" in sys.modules  # its threads, if it has any by now, Python does not count
    importlib.import_module(_PRELOAD)
    if used or threading.active_count() > 1:
        return  # Python starts its own server with the first worker
    if sys.stdout is not None:  # closed by `>&-`
        sys.stdout.flush()  # or each worker writes what is not written yet, too
    # Ctrl-C, and the end of a terminal, go to the server, too, and to what it forks.
    signals = (signal.SIGINT, signal.SIGHUP)
    handlers = [signal.signal(each, signal.SIG_IGN) for each in signals]
    try:
        if (server := _fork_server()) is not None:
            server.run()
    finally:
        for each, handler in zip(signals, handlers, strict=True):
            signal.signal(each, handler)


def _fork_server() -> _InServer | None:
    """Return None here, and what is to run in the child, where no exception is handled any more."""
    start_program = util.spawnv_passfds
    try:
        util.spawnv_passfds = _fork
        forkserver.ensure_running()
    except _InServer as server:
        return server
    finally:
        util.spawnv_passfds = start_program
    return None


class _InServer(BaseException):
    """Leaves Python's code in the child, so that it closes what is the parent's there."""

    def __init__(self, command: str, descriptors: Sequence[int]) -> None:
        self._command = command
        self._kept = {each: os.dup(each) for each in descriptors}

    def run(self) -> None:
        """Run the command of Python's server with its descriptors; end the process with it."""
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # Half of it has run: workers are to import it, not to find it.
            sys.modules["__main__"] = types.ModuleType("__main__")
            for number, kept in self._kept.items():
                os.dup2(kept, number)
                os.close(kept)
            with contextlib.suppress(SystemExit):
                exec(self._command, {})  # what Python's server runs
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


def _fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """In place of `spawnv_passfds`, which would start a new interpreter."""
    if process := os.fork():
        return process
    raise _InServer(args[-1], passfds)
