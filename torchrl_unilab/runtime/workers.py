"""Worker processes: started with a handshake, watched by their sentinels, stopped in order.

A worker runs ``target(link, *args)``. Its `Link` is a pipe to the parent: the parent asks,
the worker answers; the worker's end also shows when the parent is gone, however it went.
What a worker raises is relayed with its traceback and raised in the parent as a
`WorkerError`; a worker that is killed is named with its signal as soon as it is dead.

Workers start as multiprocessing's start method says, which TorchRL sets to ``"spawn"``. With
``"forkserver"``, and `torchrl_unilab.trainers` among what it preloads, they start in
milliseconds. They are never forked from the parent, whose threads and locks they would copy.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch

from torchrl_unilab.errors import WorkerError

__all__ = ["Link", "WorkerGroup"]

START_SECONDS = 120.0
STOP_SECONDS = 2.0
FAILED_START_SECONDS = 0.2  # workers that are still starting listen to nobody
_RELAYED_CHARACTERS = 20_000  # of a traceback: what fits the pipe though nobody reads it yet
_HINTS = {
    "SIGKILL": "The system may have been out of memory.",
    "SIGBUS": "Shared memory may have been full.",
    "SIGSEGV": "Native code crashed: look at the physics, the model or an extension.",
    "SIGABRT": "Native code gave up: look at its message above.",
}


class ParentGoneError(Exception):
    """The parent closed its end of the link or died: the worker is to end."""


class Link:
    """A worker's end of its pipe to the parent.

    Args:
        connection: The pipe's end.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ready(self, value: Any = None) -> None:
        """Tell the parent that the worker has started, once, with what it wants to know."""
        self._connection.send(("ready", value))

    def request(self, *, block: bool) -> tuple[Any, ...] | None:
        """Return the parent's next request, or None if there is none and `block` is false.

        Raises:
            ParentGoneError: There is no parent any more.
        """
        try:
            if not block and not self._connection.poll():
                return None
            request: tuple[Any, ...] = self._connection.recv()
            return request
        except (EOFError, OSError):
            raise ParentGoneError from None

    def answer(self, value: Any = None) -> None:
        """Answer the parent's request."""
        self._connection.send(("answer", value))


@dataclass
class _Worker:
    name: str
    process: BaseProcess
    connection: Connection


class WorkerGroup:
    """Processes that all run one target.

    Args:
        target: Top-level function ``target(link, *args)``. It returns when the parent asks
            it to or is gone.
        arguments: One tuple of arguments per worker, picklable.
        name: What the workers are called, followed by their number.
        num_threads: Torch threads of each worker.

    Raises:
        WorkerError: A worker failed while it started; the others are stopped.

    Attributes:
        started: What each worker said when it was ready.
    """

    def __init__(
        self,
        target: Callable[..., None],
        arguments: Sequence[tuple[Any, ...]],
        *,
        name: str = "worker",
        num_threads: int = 1,
    ) -> None:
        method = mp.get_start_method()
        context: Any = mp.get_context("spawn" if method == "fork" else method)
        # When this process ends: before multiprocessing waits for all its children, and before
        # what the workers use is closed.
        self._at_exit = Finalize(None, _stop, (weakref.ref(self),), exitpriority=1)
        self._workers: list[_Worker] = []
        self._failed: WorkerError | None = None
        try:
            for index, args in enumerate(arguments):
                here, there = context.Pipe()
                process = context.Process(
                    target=_run,
                    args=(there, target, args, num_threads),
                    name=f"{name}-{index}",
                    daemon=False,  # a worker may have processes of its own, as ParallelEnv has
                )
                process.start()
                there.close()
                self._workers.append(_Worker(f"{name} {index}", process, here))
            self.started = [self._receive(w, "ready", START_SECONDS) for w in self._workers]
        except BaseException:
            self.stop(FAILED_START_SECONDS)
            raise

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid or 0 for worker in self._workers]

    def send(self, index: int, *request: Any) -> None:
        """Send a request that is not answered.

        Raises:
            WorkerError: The worker has failed.
        """
        worker = self._workers[index]
        try:
            worker.connection.send(request)
        except OSError:
            self._fail(worker)

    def ask(self, index: int, *request: Any, timeout: float = START_SECONDS) -> Any:
        """Send a request and return the answer.

        Raises:
            WorkerError: The worker has failed, or has not answered in `timeout` seconds.
        """
        self.send(index, *request)
        return self.receive(index, timeout)

    def receive(self, index: int, timeout: float | None = None) -> Any:
        """Return the answer to the oldest request sent that has not been received.

        Raises:
            WorkerError: The worker has failed, or has not answered in `timeout` seconds,
                None being as many as it lives.
        """
        return self._receive(self._workers[index], "answer", timeout)

    def wait(self, descriptors: Sequence[int], timeout: float | None) -> bool:
        """Wait until one of `descriptors` is readable; return whether one is.

        Raises:
            WorkerError: A worker failed meanwhile, or had before, and no descriptor is
                readable.
        """
        ready = wait([*descriptors, *self._sentinels()], timeout)
        if any(descriptor in ready for descriptor in descriptors):
            return True
        self.check()
        return False

    def check(self) -> None:
        """Raise what a worker failed with, if one did.

        Raises:
            WorkerError: A worker ended that had not been told to.
        """
        if self._failed is not None:
            raise self._failed
        for worker in self._workers:
            if wait([worker.process.sentinel], 0):  # knows before `is_alive` does
                self._fail(worker)

    def _sentinels(self) -> list[int]:
        return [worker.process.sentinel for worker in self._workers]

    def _receive(self, worker: _Worker, kind: str, timeout: float | None) -> Any:
        ready = wait([worker.connection, *self._sentinels()], timeout)
        try:
            if worker.connection.poll():
                found, value = worker.connection.recv()
                if found == kind:
                    return value
                raise self._error(worker, f"failed:\n{value}")
        except (EOFError, OSError):
            self._fail(worker)
        if ready:
            self.check()  # another one failed, which is no less of a reason
        raise WorkerError(
            f"{worker.name}, process {worker.process.pid}: no answer within {timeout or 0:g} s "
            "(expected one). See whether it is stopped, or waits for something."
        )

    def _fail(self, worker: _Worker) -> None:
        """Raise what a dead worker failed with."""
        if self._failed is not None:
            raise self._failed  # the pipe told it once
        worker.process.join(STOP_SECONDS)
        try:
            while worker.connection.poll():
                kind, value = worker.connection.recv()
                if kind == "error":
                    raise self._error(worker, f"failed:\n{value}")
        except (EOFError, OSError):
            pass
        code = worker.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            raise self._error(worker, f"was ended by {name}. {_HINTS.get(name, '')}".rstrip())
        raise self._error(worker, f"ended by itself with exit code {code}.")

    def _error(self, worker: _Worker, text: str) -> WorkerError:
        self._failed = WorkerError(
            f"{worker.name}, process {worker.process.pid}, {text}\n(expected it to run on). "
            "Mend the cause and start again."
        )
        return self._failed

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Ask all workers to end; kill those that have not after `timeout`. Idempotent."""
        for worker in self._workers:
            worker.connection.close()  # which tells the worker
        until = time.monotonic() + timeout
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers = []
        self._at_exit.cancel()


def _stop(group: weakref.ref[WorkerGroup]) -> None:
    alive = group()
    if alive is not None:
        alive.stop()


def _run(
    connection: Connection, target: Callable[..., None], args: tuple[Any, ...], num_threads: int
) -> None:
    """Run a worker; relay what it raises."""
    # Ctrl-C reaches the whole terminal; the parent decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(num_threads)
    try:
        target(Link(connection), *args)
    except ParentGoneError:
        pass
    except BaseException:
        text = traceback.format_exc()
        if len(text) > _RELAYED_CHARACTERS:
            half = _RELAYED_CHARACTERS // 2
            text = f"{text[:half]}\n[...]\n{text[-half:]}"
        try:
            connection.send(("error", text))
        except OSError:
            sys.stderr.write(text)  # nobody is left to relay it to
    finally:
        connection.close()
        sys.stderr.flush()
