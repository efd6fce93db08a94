"""``torchrl-unilab`` and ``python -m torchrl_unilab``: the command line in its own process."""

import atexit
import os
import sys

from torchrl_unilab.cli import main


def run() -> int:
    """Run the command line, and return its exit code. The process ends soon after."""
    code = main()
    atexit.register(_end, code)  # last, so that it is called first
    return code


def _end(code: int) -> None:
    """End the process, once all else was called that is called at its end.

    Python would take apart all that was imported: that takes longer than many a command, and
    copies the pages that workers share.
    """
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by `>&-`
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    raise SystemExit(run())
