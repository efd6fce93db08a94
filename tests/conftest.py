from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.support import fork_server
from tests.support.processes import live_children

# Several test processes may run at once: each has a directory of its own for named segments.
_MOUNTS = (os.environ.get("TORCHRL_UNILAB_SHM_DIR", ""), "/dev/shm", tempfile.gettempdir())
_MOUNT = next(path for path in _MOUNTS if os.access(path, os.W_OK))
_OWN = Path(tempfile.mkdtemp(prefix="unilab-tests-", dir=_MOUNT))
os.environ["TORCHRL_UNILAB_SHM_DIR"] = str(_OWN)
_BEFORE, _BEGAN = set(os.listdir(_MOUNT)), time.time()
os.environ["PYTHONSTARTUP"] = fork_server.__file__
# Ray's own 15 starve its processes beside a busy program: its start takes more than a minute.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray's spelling)
# A shell ignores Ctrl-C for what it starts in the background, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is no claim of any test. `make test-all` tries more of them.
for _profile, _examples in {"tests": 100, "thorough": 200}.items():
    hypothesis.settings.register_profile(
        _profile,
        max_examples=_examples,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Import all of the package where tests run, which takes seconds: not where they are dealt out.

    It freezes what collections would look through.
    """
    if not config.getoption("numprocesses", None):
        from torchrl_unilab import preload  # noqa: F401


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    """Tensors are small, and threads of several test processes would wait for each other.

    What a test draws does not depend on the tests that its process ran before, nor does torch's
    number of threads, or its default dtype.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def deleted_directory(tmp_path, monkeypatch) -> None:
    """A working directory that is there no more, as after `rm -r` in another shell."""
    directory = tmp_path / "deleted"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()


@pytest.fixture
def double_precision() -> None:
    """Make float64 the default dtype, so that equations hold to many digits."""
    import torch

    torch.set_default_dtype(torch.float64)


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """Let children take the end of a terminal as usual, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True, scope="module")
def _earlier_objects_are_frozen() -> None:
    """Collections do not look through what earlier modules of tests imported, or left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left_behind() -> Iterator[None]:
    """After all tests of a process: no child process and no segment of ours."""
    yield
    gc.unfreeze()
    gc.collect()
    assert not live_children()
    assert not os.listdir(_OWN)
    gc.freeze()  # pytest collects again and again at its end


def pytest_sessionfinish(session: pytest.Session) -> None:
    """At the very end: nothing new on the shared-memory mount, whatever made it.

    Semaphores of Python's live queues do not count, nor does another test run beside this one, nor
    what CUDA, and torch's counts of memory on a GPU, leave there, nor what programs hold that ran
    before.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the others are still at work
    torch = sys.modules.get("torch")
    on_gpu = ("cuda.shm.", "torch_") if torch and torch.cuda.is_initialized() else ()
    others = ("sem.", "unilab-tests-", *on_gpu)
    left = {name for name in os.listdir(_MOUNT) if not name.startswith(others)} - _BEFORE
    for program in psutil.process_iter() if left else ():
        with contextlib.suppress(psutil.Error):
            if program.create_time() < _BEGAN and program.pid != os.getpid():
                maps = program.memory_maps() if sys.platform == "linux" else []
                left -= {Path(file.path).name for file in (*program.open_files(), *maps)}
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write(f"\nleft on {_MOUNT}: {sorted(left)} (expected nothing)\n")


def pytest_unconfigure() -> None:
    """Remove the directory, which is empty."""
    os.rmdir(_OWN)
