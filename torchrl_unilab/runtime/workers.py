"""Worker processes: started with a handshake, watched by their sentinels, stopped in order.

A worker runs ``target(link, *args)``. Its `Link` is a pipe to the parent: the parent asks, the
worker answers; the worker's end also shows when the parent is gone. What a worker raises is raised
in the parent as a `WorkerError`, with its traceback; a worker that is killed is named with its
signal as soon as it is dead, and one that is stopped within a second.

Workers start as multiprocessing's start method says: ``"spawn"`` with TorchRL, ``"forkserver"`` in
milliseconds if it preloads `torchrl_unilab.trainers`; never as a fork of the parent, which may have
threads by then. The command line's `fork_server` is forked from it before.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing as mp
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, NoReturn

from torchrl_unilab.checks import as_integer
from torchrl_unilab.errors import ConfigError, PeerGoneError, UsageError, WorkerError
from torchrl_unilab.limits import files_to_open
from torchrl_unilab.processes import working_directory
from torchrl_unilab.runtime.link import Channel, PickledArguments, serve
from torchrl_unilab.runtime.worker_process import CONTINUE_SECONDS, WorkerProcess
from torchrl_unilab.waits import deadline, watch

START_SECONDS = 120.0
STOP_SECONDS = 2.0
FAILED_START_SECONDS = 0.2  # workers that are still starting do not listen
CHECK_SECONDS = 0.5  # between two checks for stopped workers
_HINTS = {
    "SIGKILL": "See whether the system was out of memory, by `dmesg`.",
    "SIGBUS": "See whether shared memory was full, by `torchrl-unilab budget`.",
    "SIGSEGV": "Native code crashed: look at the physics, the model or an extension.",
    "SIGABRT": "Native code gave up: look at its message above.",
}

_Workers = Sequence[WorkerProcess]
_Test = Callable[[WorkerProcess], bool]


class WorkerGroup(contextlib.AbstractContextManager["WorkerGroup"]):
    """Processes that all run one target.

    Args:
        target: Top-level function ``target(link, *args)``. It returns when the parent asks
            it to or is gone.
        arguments: One tuple of arguments per worker, picklable.
        name: What the workers are called, followed by their number.
        num_threads: Torch threads of each worker.

    Raises:
        WorkerError: A worker failed while it started; the others are stopped.
        ConfigError: This process is daemonic, and so may have none, or may open no more files, or
            its working directory was deleted.

    Examples:
        >>> from torchrl_unilab.runtime import WorkerGroup
        >>> from torchrl_unilab.runtime.link import Link
        >>> with WorkerGroup(Link.ready, [()]) as group:
        ...     len(group.pids)
        1
    """

    def __init__(
        self,
        target: Callable[..., None],
        arguments: Sequence[tuple[Any, ...]],
        *,
        name: str = "worker",
        num_threads: int = 1,
    ) -> None:
        if mp.current_process().daemon:
            raise ConfigError(
                f"cannot start {name}s: multiprocessing made this process daemonic (expected one "
                "that may have children). Start it with daemon=False."
            )
        method = mp.get_start_method()
        self._context: Any = mp.get_context("spawn" if method == "fork" else method)
        self._target, self._arguments = target, arguments
        self._name, self._num_threads = name, num_threads
        self._owner = os.getpid()
        self._stopping = threading.RLock()
        # When this process ends: before multiprocessing waits for all its children, and before
        # what the workers use is closed.
        self._at_exit = Finalize(None, _stop, (weakref.ref(self),), exitpriority=1)
        self._workers: list[WorkerProcess] = []
        self._next_check = 0.0
        try:
            for index in range(len(arguments)):
                self._workers.append(self._start(index))
            for worker in self._workers:
                self._receive(worker, START_SECONDS, self._workers)
        except BaseException:
            self.stop(FAILED_START_SECONDS)
            raise

    def _start(self, index: int) -> WorkerProcess:
        working_directory()  # multiprocessing asks for it, too
        # It also asks for this, which Python 3.11's debugger clears away (python -m pdb).
        vars(sys.modules["__main__"]).setdefault("__spec__", None)
        with files_to_open(f"{self._name}s", "more, for their pipes", "start fewer"):
            return self._start_process(index)

    def _start_process(self, index: int) -> WorkerProcess:
        here, there = self._context.Pipe()
        pickled = PickledArguments(self._arguments[index])
        process = self._context.Process(
            target=serve,
            args=(there, self._target, pickled, self._num_threads),
            name=f"{self._name}-{index}",
            daemon=False,  # a worker may have processes, as ParallelEnv has
        )
        try:
            process.start()
        except (OSError, ValueError) as error:
            # A fork server passes few descriptors: CPython refuses 252, and Linux 250.
            refused = error.args[0] in ("too many fds", errno.EINVAL)
            if not refused or self._context.get_start_method() != "forkserver":
                raise
            self._context = mp.get_context("spawn")
            here.close()
            return self._start_process(index)
        finally:
            pickled.close()
            there.close()
        return WorkerProcess(index, f"{self._name} {index}", process, Channel(here))

    def __len__(self) -> int:
        return len(self._workers)

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _worker(self, index: int) -> WorkerProcess:
        if not self._workers:
            raise UsageError(
                f"{self._name}s: stopped (expected running ones). Make a new WorkerGroup."
            )
        remedy, last = "Number them from 0.", len(self._workers) - 1
        number = as_integer(f"{self._name} index", index, remedy, least=0, most=last)
        return self._workers[number]

    def send(self, index: int, *request: Any, timeout: float | None = START_SECONDS) -> None:
        """Send a request; `receive` returns its answer, if it has one.

        A request that fits the pipe is sent at once, a larger one when the worker listens.

        Raises:
            WorkerError: The worker has failed, is stopped while the request does not fit the
                pipe, or has not taken it in `timeout` seconds.
        """
        worker = self._worker(index)
        worker.requests += 1  # first: no two requests have one number, whatever interrupts this
        worker.channel.post((worker.requests, request))
        self._exchange_until(self._has_sent, worker, timeout, [worker])

    def ask(self, index: int, *request: Any, timeout: float | None = START_SECONDS) -> Any:
        """Send a request and return the answer, even if other workers fail meanwhile.

        Raises:
            WorkerError: The worker has failed, or has not taken the request, or answered it, in
                `timeout` seconds; None waits as long as it lives.
        """
        self.send(index, *request, timeout=timeout)
        worker = self._worker(index)
        return self._receive(worker, timeout, [worker])

    def poll(self, index: int) -> bool:
        """Return whether `receive` would return at once.

        Raises:
            WorkerError: A worker has failed.
        """
        answered = self._has_answered(self._worker(index))
        if not answered:
            self.check()
        return answered

    def receive(self, index: int, timeout: float | None = None) -> Any:
        """Return the answer to the newest request; those to older ones are discarded.

        Call it again if an interrupt kept the answer from you.

        Raises:
            WorkerError: A worker has failed, or this one has not answered in `timeout` seconds;
                None waits as long as all live.
        """
        return self._receive(self._worker(index), timeout, self._workers)

    def wait(self, descriptors: Sequence[int], timeout: float | None) -> bool:
        """Wait until one of `descriptors` is readable; return whether one is.

        Raises:
            WorkerError: A worker failed meanwhile, or had before, and no descriptor is
                readable.
        """
        return self._wait(dict.fromkeys(descriptors, select.POLLIN), timeout, self._workers)

    def check(self) -> None:
        """Raise what a worker failed with, if one did.

        Raises:
            WorkerError: A worker ended without being asked to, or is stopped.
        """
        self._check(self._workers)

    def end(self, index: int) -> None:
        """Kill a worker, if it is alive; what it held may then be reclaimed. Idempotent."""
        self._worker(index).kill()

    def restart(self, index: int) -> None:
        """Start a worker anew in place of one that failed.

        Raises:
            WorkerError: The worker failed while it started.
            ConfigError: This process may open no more files.
        """
        self.end(index)
        worker = self._start(index)  # if that fails, or is interrupted, the old one stays dead
        old = self._workers[index]
        self._workers[index] = worker
        old.channel.close()
        old.process.close()
        self._receive(worker, START_SECONDS, [worker])

    def _wait(self, events: dict[int, int], timeout: float | None, watched: _Workers) -> bool:
        """Wait until a descriptor has the events that it is given with; return whether one has.

        Raises:
            WorkerError: None has, and a watched worker has ended or is stopped.
        """
        sentinels = {worker.process.sentinel: select.POLLIN for worker in watched}
        for ready in watch(sentinels | events, timeout, CHECK_SECONDS):
            if any(descriptor in events for descriptor in ready):
                return True
            self._check(watched)
        return False

    def _check(self, watched: _Workers) -> None:
        """Raise if a worker has ended; now and then, also if one is stopped."""
        for worker in watched:
            if worker.ended:
                self._fail(worker)
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        stopped = [worker for worker in watched if worker.stopped]
        if stopped:
            # All of a terminal's job may have been stopped, and this process continued first.
            time.sleep(CONTINUE_SECONDS)
        for worker in stopped:
            if worker.stopped:
                raise self._error(worker, "was stopped by a signal, as SIGSTOP or SIGTSTP")

    def _receive(self, worker: WorkerProcess, timeout: float | None, watched: _Workers) -> Any:
        """Return the answer to the newest request; the answer to request 0 says "ready"."""
        self._exchange_until(self._has_answered, worker, timeout, watched)
        worker.ready = True
        _, _, answer = worker.channel.messages[0]
        return answer  # stays queued: after an interrupt it can be received again

    def _exchange_until(
        self, is_done: _Test, worker: WorkerProcess, timeout: float | None, watched: _Workers
    ) -> None:
        """Exchange messages with a worker until it `is_done`.

        Both ways at once: a worker that answers at length takes no request meanwhile.
        """
        end, channel = deadline(timeout), worker.channel
        while not is_done(worker):
            left = end - time.monotonic()
            if left < 0.0:
                late = "request not taken" if channel.unsent else "no answer"
                raise WorkerError(
                    f"{worker.name}, process {worker.process.pid}: {late} within {timeout or 0.0:g}"
                    " s (expected one). Check what it waits for."
                )
            events = select.POLLIN | (select.POLLOUT if channel.unsent else 0)
            self._wait({channel.connection.fileno(): events}, left, watched)

    def _has_sent(self, worker: WorkerProcess) -> bool:
        """Exchange what the pipe has and takes; return whether all requests are sent."""
        channel = worker.channel
        try:
            channel.flush()
            channel.fill()
        except PeerGoneError:
            if channel.unsent or not channel.messages:
                self._fail(worker)
        return not channel.unsent

    def _has_answered(self, worker: WorkerProcess) -> bool:
        """Exchange what the pipe has and takes; return whether the newest request is answered."""
        self._has_sent(worker)
        while messages := worker.channel.messages:
            kind, number, value = messages[0]
            if kind == "error":
                raise self._error(worker, f"failed:\n{value}")
            if number == worker.requests:
                return True
            messages.popleft()
        return False

    def _fail(self, worker: WorkerProcess) -> NoReturn:
        """Raise what a dead worker failed with."""
        worker.process.join(STOP_SECONDS)
        with contextlib.suppress(PeerGoneError):
            while worker.channel.fill():
                pass
        for kind, _, value in worker.channel.messages:
            if kind == "error":
                raise self._error(worker, f"failed:\n{value}")
        code = worker.process.exitcode
        if code is not None and code < 0:
            known = -code in {*signal.Signals}  # `Signals` lacks most real-time signals
            name = signal.Signals(-code).name if known else f"signal {-code}"
            raise self._error(worker, f"was ended by {name}", _HINTS.get(name, ""))
        when = "" if worker.ready else " before it was ready"
        hint = "" if worker.ready else _start_hint()
        how = "closed its connection" if code is None else f"ended by itself with exit code {code}"
        if code is not None and worker.alive:  # the code is multiprocessing's own
            how = "lost its fork server, which was killed"
        raise self._error(worker, f"{how}{when}", hint)

    def _error(self, worker: WorkerProcess, text: str, remedy: str = "") -> WorkerError:
        text, gap = text.rstrip(), "\n" if "\n" in text else " "  # a traceback ends its own line
        error = WorkerError(
            f"{worker.name}, process {worker.process.pid}, {text}{gap}(expected it to keep "
            f"running). {remedy or 'Remove the cause, and start again.'}"
        )
        error.worker = worker.index
        return error

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Ask all workers to end; kill those that have not after `timeout`. Idempotent.

        Several threads may call it at once: all return when the workers have ended. In a forked
        copy of the process it only forgets the workers, which are not the copy's.
        """
        if os.getpid() != self._owner:
            self._workers = []
            return
        with self._stopping:
            end = deadline(timeout)
            try:
                for worker in self._workers:
                    worker.channel.close()  # the worker reads end-of-file
                while self._workers:
                    self._workers[0].end(end)
                    self._workers.pop(0).process.close()
            except BaseException:  # such as a second Ctrl-C: no worker may be left behind
                for worker in self._workers:
                    worker.process.kill()
                raise
            self._at_exit.cancel()


def _start_hint() -> str:
    """Return what a script may lack if its workers end before they are ready."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and not os.path.exists(script):
        return f"Workers import the script, and there is no file {script}: write it to a file."
    return (
        "Its own words are above. A script must start what has workers below "
        '`if __name__ == "__main__":`, for each worker imports the script.'
    )


def _stop(group: weakref.ref[WorkerGroup]) -> None:
    alive = group()
    if alive is not None:
        alive.stop()
