"""What each process and thread of a run does when: spans and counters for Perfetto.

Code says what it does with `span` and `counter`. While nothing is recorded, both return at
once. The learner's process starts a trace (`start`); its workers are handed `settings` and
join it (`join`); each process writes its events to a separate file, and `stop` merges the
files into one in the trace event format (JSON), which https://ui.perfetto.dev opens.

All times are ``time.monotonic_ns``, which on Linux is CLOCK_MONOTONIC: one clock for all
processes of a machine. So a span of the learner and one of a worker compare to the
microsecond, with no synchronisation.

An event is written when it is complete, by one system call: a process that is killed leaves
all of its events but the spans that it was in. No event is kept in memory meanwhile, and no
file grows beyond `MAX_EVENTS` events.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torchrl_unilab.errors import ConfigError, UsageError

MAX_EVENTS = 250_000
"""Events that a process writes at most; ten minutes and more of a usual run, 25 MB."""

_OFF: AbstractContextManager[None] = contextlib.nullcontext()
_quoted = functools.lru_cache(maxsize=256)(json.dumps)


@dataclass(frozen=True)
class TraceSettings:
    """What a process needs to join a trace: picklable.

    Attributes:
        directory: Where the files of all processes lie until they are merged.
        origin: Time 0 of the trace, by ``time.monotonic_ns``, ns.
    """

    directory: str
    origin: int


class Tracer:
    """Records what one process does. Threads may use it at the same time.

    The functions of this module are the methods of the one tracer that a process needs.

    Examples:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> tracer = Tracer()
        >>> with tracer.span("update"):  # costs next to nothing: no trace is recorded
        ...     pass
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     tracer.start(Path(directory) / "trace.json")
        ...     with tracer.span("update"):
        ...         tracer.counter("policy_lag", 1)
        ...     events = json.loads(tracer.stop().read_text())["traceEvents"]
        >>> [(event["ph"], event["name"]) for event in events if event["ph"] != "M"]
        [('X', 'update'), ('C', 'policy_lag')]
    """

    def __init__(self) -> None:
        self._part: _EventFile | None = None
        self._path: Path | None = None  # where to merge to, in the process that started

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is recorded, for one use, if a trace is.

        Args:
            name: What is done meanwhile; use few different names.
        """
        part = self._part
        return _OFF if part is None else _Span(part, name)

    def counter(self, name: str, value: float) -> None:
        """Record that a number has this value from now on; what is not finite is left out."""
        part = self._part
        if part is not None and math.isfinite(value):
            part.event("C", name, time.monotonic_ns(), f'"args":{{"value":{float(value)}}}')

    def settings(self) -> TraceSettings | None:
        """Return what a worker needs to join the trace; None if none is recorded."""
        part = self._part
        return None if part is None else part.settings

    def start(self, path: str | os.PathLike[str]) -> None:
        """Record from now on. Writes nothing at `path` before `stop`.

        Call it before you make a collector: workers that run already do not join.
        Where this process is killed, what all recorded stays in ``unilab-trace-...``, in the
        directory of temporary files.

        Args:
            path: File to write in the end, usually ending in ``.json``.

        Raises:
            ConfigError: `path` is a directory.
            UsageError: This process records already.
        """
        path = Path(path)
        if path.is_dir():
            raise ConfigError(
                f"trace to {path}: a directory (expected a file). Name one that may be replaced."
            )
        self._check_off()
        directory = tempfile.mkdtemp(prefix="unilab-trace-")
        self.join(TraceSettings(directory, time.monotonic_ns()), "learner")
        self._path = path.absolute()

    def join(self, settings: TraceSettings | None, process: str) -> None:
        """Record in a process started by the one that records; nothing if that does not.

        Args:
            settings: The other process's `settings`.
            process: What to call this process.

        Raises:
            FileNotFoundError: The trace has been stopped.
            UsageError: This process records already.
        """
        if settings is not None:
            self._check_off()
            self._part = _EventFile(settings, process)

    def stop(self, *, keep: bool = True) -> Path | None:
        """End recording; write the trace of all processes if they joined this one's. Idempotent.

        What processes that still run record from now on is lost.

        Args:
            keep: Whether to write the trace, or drop it.

        Returns:
            The file written, if one was.

        Raises:
            OSError: The file cannot be written.
        """
        part, path = self._part, self._path
        self._part = self._path = None
        if part is not None:
            part.close()
        if part is None or path is None:
            return None
        try:
            if not keep:
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(path.name + ".part")
            try:
                _merge(Path(part.settings.directory), draft)
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            return path
        finally:
            shutil.rmtree(part.settings.directory, ignore_errors=True)

    def _check_off(self) -> None:
        if self._part is not None:
            raise UsageError(
                "cannot start a trace: this process records one (expected none). Stop it first."
            )

    def _forget(self) -> None:
        """Start as a forked child: what the parent records is not this process's."""
        if self._part is not None:
            self._part.close_unlocked()  # a thread of the parent may hold the lock for ever
        self._part = self._path = None


class _EventFile:
    """The events of one process, in a separate file: one line of JSON each."""

    def __init__(self, settings: TraceSettings, process: str) -> None:
        self._pid, self.settings = os.getpid(), settings
        self._left = MAX_EVENTS
        self._thread = threading.local()
        self._lock = threading.Lock()
        path = Path(settings.directory) / f"{self._pid}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file: int | None = os.open(path, flags, 0o600)
        self._write(self._meta("process_name", 0, "name", process))

    def close(self) -> None:
        """Record nothing more."""
        with self._lock:
            self.close_unlocked()

    def close_unlocked(self) -> None:
        """Record nothing more, where no other thread does."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def event(self, phase: str, name: str, begin: int, rest: str) -> None:
        """Record an event that began at `begin`, by ``time.monotonic_ns``; `rest`: further JSON."""
        since, tid = (begin - self.settings.origin) / 1e3, self._tid()
        line = (
            f'{{"ph":"{phase}","name":{_quoted(name)},"pid":{self._pid},"tid":{tid},'
            f'"ts":{since:.3f},{rest}}}\n'
        )
        with self._lock:
            self._left -= 1
            if self._left >= 0:
                self._write(line)
            elif self._left == -1:
                self._write(self._meta("process_labels", 0, "labels", "too many events: cut off"))

    def _tid(self) -> int:
        try:
            tid: int = self._thread.tid
        except AttributeError:
            tid = self._thread.tid = threading.get_native_id()
            thread = threading.current_thread()
            name = "main" if thread is threading.main_thread() else thread.name
            with self._lock:
                self._write(self._meta("thread_name", tid, "name", name))
        return tid

    def _meta(self, what: str, tid: int, key: str, value: str) -> str:
        """Return the line of a metadata event, which names a process or a thread."""
        event = {"ph": "M", "name": what, "pid": self._pid, "tid": tid, "ts": 0.0}
        return json.dumps(event | {"args": {key: value}}) + "\n"

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            # A full disk must cost the trace, not the training.
            self.close_unlocked()
            warnings.warn(
                f"trace of process {self._pid}: {error} (expected to write). What this process "
                "does from here on is missing in the trace. Make room, and trace again.",
                stacklevel=2,
            )


class _Span:
    """Records the time between entering and leaving it."""

    __slots__ = ("_begin", "_name", "_part", "_processor")

    def __init__(self, part: _EventFile, name: str) -> None:
        self._part, self._name = part, name

    def __enter__(self) -> None:
        self._begin, self._processor = time.monotonic_ns(), time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        processor = (time.thread_time_ns() - self._processor) / 1e3
        took = (time.monotonic_ns() - self._begin) / 1e3
        self._part.event("X", self._name, self._begin, f'"dur":{took:.3f},"tdur":{processor:.3f}')


def _merge(directory: Path, path: Path) -> None:
    """Write all events of the files in a directory: metadata first, then by start time."""
    events = [event for part in sorted(directory.glob("*.jsonl")) for event in _events(part)]
    events.sort()
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(line for *_, line in events))
        file.write("\n]}\n")


def _events(part: Path) -> Iterator[tuple[bool, float, float, str]]:
    """Yield each line of a file with its sort key before it; a span sorts before those within."""
    with part.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # the disk was full, or its process was killed, in the middle of it
            event = json.loads(line)
            yield event["ph"] != "M", event["ts"], -event.get("dur", 0.0), line.rstrip("\n")


_tracer = Tracer()
span = _tracer.span
counter = _tracer.counter
settings = _tracer.settings
start = _tracer.start
join = _tracer.join
stop = _tracer.stop
os.register_at_fork(after_in_child=_tracer._forget)
