"""A thread that runs functions one by one, in which no interrupt of the caller leaves a lock held.

`concurrent.futures` takes locks in code of Python's. If a Ctrl-C comes there, one can stay held,
and the next call waits for ever. Here each step that another thread may wait for is one call into
C. The policy's thread of an update and the one that packs replay batches are such threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from torchrl_unilab.errors import SegmentClosedError

_T = TypeVar("_T")


class Task(Generic[_T]):
    """One run of a function, and its result. Its methods are those of a `Future`.

    Args:
        function: It runs at most once.

    Examples:
        >>> from torchrl_unilab.runtime.worker_thread import Task
        >>> task = Task(lambda: 2 + 3)
        >>> task.run()
        >>> task.result(), task.cancel()
        (5, False)
    """

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._claims: dict[str, str] = {}
        self._outcome: tuple[_T | None, BaseException | None] | None = None
        self._end = threading.Lock()  # held until there is an outcome
        self._end.acquire()

    def run(self) -> None:
        """Run the function, unless that was cancelled; keep what it returns or raises."""
        if self._claim("run"):
            try:
                self._outcome = self._function(), None
            except BaseException as error:  # `result` raises it
                self._outcome = None, error
            del self._function  # it may hold what holds this task
            self._end.release()

    def cancel(self) -> bool:
        """Keep the function from being run, for good; return false if it has begun.

        A task that was cancelled has no result: waiting for it would not end.
        """
        return self._claim("cancel")

    def done(self) -> bool:
        """Return whether the function has ended."""
        return self._outcome is not None

    def exception(self) -> BaseException | None:
        """Wait until the function has ended; return what it raised, if anything."""
        return self._wait()[1]

    def result(self) -> _T:
        """Wait until the function has ended; return what it returned, or raise what it raised."""
        value, error = self._wait()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def _wait(self) -> tuple[_T | None, BaseException | None]:
        while self._outcome is None:
            with self._end:
                pass
        return self._outcome

    def _claim(self, claim: str) -> bool:
        return self._claims.setdefault("first", claim) == claim  # atomic; the first claim stays


class WorkerThread:
    """Runs tasks in a thread of its own, in the order in which they were started.

    The thread ends, after its last task, with `close`, with this object, or with the process.

    Args:
        name: The thread's.

    Examples:
        >>> import threading
        >>> from torchrl_unilab.runtime.worker_thread import Task, WorkerThread
        >>> thread = WorkerThread("adder")
        >>> task = Task(lambda: (2 + 3, threading.current_thread().name))
        >>> thread.start(task)
        >>> task.result()
        (5, 'adder')
        >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._closed = False
        self._loop = Task(partial(_run_all, self._tasks))
        # At exit a thread that is no daemon would be waited for before the finalizer ends it.
        self._thread = threading.Thread(target=self._loop.run, name=name, daemon=True)
        self._end = partial(_end, self._tasks, self._loop, self._thread, os.getpid())
        weakref.finalize(self, self._end)
        self._thread.start()

    def start(self, task: Task[Any]) -> None:
        """Have the thread run a task once it is done with those before.

        Raises:
            SegmentClosedError: The thread was told to end. The task will not run.
        """
        self._tasks.put(task)
        if self._closed and task.cancel():  # else it came before the end
            raise SegmentClosedError(
                f"cannot start a task: thread {self._thread.name!r} is closed (expected open). "
                "Make a new one."
            )

    def close(self) -> None:
        """End the thread after its last task, and wait for it. Idempotent.

        Any thread may call it, and a signal's handler.
        """
        self._closed = True
        self._end()


def _run_all(tasks: SimpleQueue[Task[Any] | None]) -> None:
    for task in iter(tasks.get, None):
        task.run()
        del task  # what it holds lives no longer than for its callers


def _end(
    tasks: SimpleQueue[Task[Any] | None], loop: Task[None], thread: threading.Thread, process: int
) -> None:
    tasks.put(None)
    # `join` and `is_alive`, if interrupted, take the thread for ended from then on.
    if process == os.getpid() and thread.ident not in (None, threading.get_ident()):
        loop.exception()
        thread.join()
