"""``python -m torchrl_unilab``, and the script ``torchrl-unilab``."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import traceback

from torchrl_unilab.cli import main

_DEEPEST = 4  # calls from the interpreter to `run`: below `python -m` two are of runpy


def run() -> int:
    """Run the command line, and end the process.

    Python would take apart all that was imported, which takes a quarter of a second, and makes
    copies of the memory that the fork server shares. It still does so where it waits for threads,
    and below a profiler or a debugger, which has its own work to do at the end.
    """
    code = main()
    if threading.active_count() == 1 and len(traceback.extract_stack()) <= _DEEPEST:
        atexit._run_exitfuncs()
        if sys.stdout is not None:  # closed by `>&-`
            sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what MuJoCo printed
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(run())
