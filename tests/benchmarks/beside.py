"""Programs that never wait, and a benchmark beside them.

``python -m tests.benchmarks.beside 1 ring [arguments of bench_ring]``
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["neighbours"]


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that never wait; they end with this one, however it ends."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    busy = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    """Run a benchmark, and return what it returns."""
    count, name, *arguments = sys.argv[1:]
    print(f"{count} busy programs beside\n", flush=True)
    module = f"tests.benchmarks.bench_{name.replace('-', '_')}"
    os.environ["BUSY"] = count  # for those who record it
    with neighbours(int(count)):
        return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
