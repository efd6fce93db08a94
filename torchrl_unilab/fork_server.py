"""`start_fork_server`: a process that imports what all workers need, once, and forks them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver


def start_fork_server() -> None:
    """Let a process import `torchrl_unilab.preload`, while this one imports it, too.

    Workers are forked from it, unless this process chose another start method. System libraries
    other than Linux's do not survive a fork: elsewhere workers are spawned.
    """
    if sys.platform != "linux" or multiprocessing.get_start_method(allow_none=True) is not None:
        return
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["torchrl_unilab.preload"])
    # Ctrl-C, and the end of a terminal, go to the server, too, and to what it forks.
    signals = (signal.SIGINT, signal.SIGHUP)
    handlers = [signal.signal(each, signal.SIG_IGN) for each in signals]
    # Nor is it to import from this directory first; an empty variable is none.
    safe, os.environ["PYTHONSAFEPATH"] = os.environ.get("PYTHONSAFEPATH", ""), "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ["PYTHONSAFEPATH"] = safe
        for each, handler in zip(signals, handlers, strict=True):
            signal.signal(each, handler)
