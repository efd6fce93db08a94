"""Whole runs that are hit by a fault at an exact point, and what becomes of them.

A run is a session of its own: its learner, its collector and Python's helpers are found by
their session, whoever their parent is by then. Each starts within milliseconds: the learner
is forked from a process that has imported everything and done nothing, and so is the fork
server that the collector comes from.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing as mp
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.support.bounds import DEADLINE, PROMPT
from tests.support.fault_points import ENV, Cell, install, transformed_env
from tests.support.processes import receive, spawned
from torchrl_unilab.errors import CheckpointError
from torchrl_unilab.shm.segment import named_directory
from torchrl_unilab.trainers import train_appo, train_off_policy
from torchrl_unilab.trainers.runs.checkpoint import RunCheckpoints

STOPPED = 2.5
"""Seconds that a learner is stopped before it is continued."""
MOUNT = Path("/dev/shm")
INJECTED = "injected by a test"
INTERVAL, FRAMES = 128, 384

# What there is to know of a run


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        learner: ``"goes on"`` to the end; ``"goes on when continued"``, if it was stopped
            itself; ``"waits"`` for a stopped collector, if nothing happens in `PROMPT` seconds;
            ``"fails"``; ``"killed"``; or ``"hangs"``.
        seconds: From the fault to the error, with all that is shut down before it surfaces.
        error: The error with its causes, one text each, outermost first.
        left: Seconds from the learner's end until no process was left.
        orphans: Command lines of processes that were left after `PROMPT` seconds.
        segments: Names left in shared memory.
        output: What the run wrote on its standard error and output.
        checkpoint: Frames of the newest checkpoint, which is whole; None if there is none.
    """

    learner: str
    seconds: float
    error: list[str]
    left: float
    orphans: list[str]
    segments: list[str]
    output: str
    checkpoint: int | None

    @property
    def tracker_warnings(self) -> int:
        """Lines in which Python's resource tracker tells of what was left."""
        return sum("resource_tracker" in line for line in self.output.splitlines())

    @property
    def clean(self) -> bool:
        """Whether nothing was left."""
        return not (self.orphans or self.segments or self.tracker_warnings)


def outcome_of(cell: Cell, directory: Path) -> Outcome:
    """Run a cell in an empty directory and return what became of it."""
    with spawned(_watch, cell, directory, method="forkserver") as (_, pipe):
        found: Outcome = receive(pipe, 4 * DEADLINE)
        return found


# The process that watches a run


def _watch(pipe: Connection, cell: Cell, directory: Path) -> None:
    shm = Path(tempfile.mkdtemp(prefix="unilab-faults-", dir=named_directory()))
    events, tell = os.pipe()
    learner = os.fork()
    if not learner:
        os.environ["TORCHRL_UNILAB_SHM_DIR"] = str(shm)
        _be_the_learner(cell, directory, tell)
    os.close(tell)
    seen: dict[int, str] = {}
    try:
        outcome = _follow(cell, directory, learner, os.fdopen(events), shm, seen)
    finally:
        for process in _session(learner, seen):
            process.kill()
        for name in os.listdir(shm):
            (shm / name).unlink()
        shm.rmdir()
    pipe.send(outcome)


def _follow(
    cell: Cell, directory: Path, learner: int, events: Any, shm: Path, seen: dict[int, str]
) -> Outcome:
    ended = os.pidfd_open(learner)
    told: dict[str, dict[str, Any]] = {}

    def hear(until: float, *kinds: str) -> bool:
        """Listen until one of some events has come, the learner has ended, or it is too late."""
        while not told.keys() & set(kinds):
            ready = wait([events, ended], max(0.0, until - time.monotonic()))
            if events in ready:
                line = events.readline()
                if line:
                    event = json.loads(line)
                    told[event.pop("kind")] = event
                    _session(learner, seen)
                    continue
            if ended in ready or not ready:
                break
        return bool(told.keys() & set(kinds))

    began = time.monotonic()
    if not hear(began + DEADLINE, "hit"):
        output = (directory / "output").read_text()
        raise AssertionError(f"{cell}: the point was not reached, {told}\n{output}")
    hit = told["hit"]["at"]
    stopped = cell.fault == "SIGSTOP"
    bound = STOPPED if stopped and cell.victim == "learner" else PROMPT
    came = hear(hit + bound, "end", "failed")
    waits = False
    if not came and stopped:
        victim = told["hit"]["pid"]
        waits = victim in {process.pid for process in _session(learner, seen)}
        if waits:  # and is not ended, as by an ordered stop
            os.kill(victim, signal.SIGCONT)
        hear(time.monotonic() + DEADLINE, "end", "failed")
    over = wait([ended], DEADLINE)
    died = time.monotonic()
    if not over:
        os.kill(learner, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(learner, 0)[1]) and over
    os.close(ended)
    while (rest := _session(learner, seen)) and time.monotonic() < died + PROMPT:
        psutil.wait_procs(rest, timeout=0.02)
    left = time.monotonic() - died
    if not over:
        verdict = "hangs"
    elif "failed" in told:
        verdict = "fails"
    elif killed:
        verdict = "killed"
    elif waits:
        verdict = "waits" if cell.victim == "collector" else "goes on when continued"
    else:
        verdict = "goes on"
    at = told.get("failed", told.get("end", {"at": died}))["at"]
    return Outcome(
        learner=verdict,
        seconds=at - hit,
        error=told.get("failed", {"error": []})["error"],
        left=left,
        orphans=[" ".join(process.cmdline()) for process in rest],
        segments=[*os.listdir(shm), *_named_after(seen)],
        output=(directory / "output").read_text(),
        checkpoint=_checkpoint(directory / "run"),
    )


def _session(learner: int, seen: dict[int, str]) -> list[psutil.Process]:
    """The live processes of a run, by its session; whom they are is noted in `seen`."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == learner and process.status() != psutil.STATUS_ZOMBIE:
                seen[process.pid] = process.name()
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return found


def _named_after(seen: dict[int, str]) -> list[str]:
    """Names on the mount with the process id of one of a run's processes, as torch has them."""
    pids = {str(pid) for pid in seen}
    return [name for name in os.listdir(MOUNT) if pids & set(name.replace("-", "_").split("_"))]


def _checkpoint(run_dir: Path) -> int | None:
    try:
        return RunCheckpoints(run_dir / "checkpoint").newest().frames
    except CheckpointError as error:
        if "no checkpoint in" in str(error):
            return None
        raise


# The run itself


def _be_the_learner(cell: Cell, directory: Path, tell: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)

        def say(kind: str, **what: Any) -> None:
            line = json.dumps({"kind": kind, "at": time.monotonic(), **what}) + "\n"
            os.write(tell, line.encode())

        def strike() -> None:
            try:
                os.close(os.open(directory / "struck", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return  # another one was
            say("hit", pid=os.getpid())
            if cell.fault == "raise":
                raise LookupError(INJECTED)
            if cell.fault == "SIGINT":
                os.killpg(0, signal.SIGINT)  # as a terminal does at Ctrl-C
            else:
                os.kill(os.getpid(), getattr(signal, cell.fault))

        run_dir = directory / "run"
        install_here = partial(install, cell, strike, run_dir)
        start_a_server(tell, install_here if cell.victim == "collector" else lambda: None)
        if cell.victim == "learner":
            install_here()
        train = train_appo if cell.algorithm == "appo" else train_off_policy
        try:
            summary = train(
                ENV,
                frames=FRAMES,
                run_dir=run_dir,
                config=cell.config,  # type: ignore[arg-type]
                create_env=transformed_env if cell.phase == "transform" else None,
                checkpoint_interval=INTERVAL,
                progress_bar=False,
                eval_episodes=1,
            )
        except Exception as error:
            say("failed", error=list(_chain(error)))
        else:
            say("end", frames=summary["frames"])
            code = 0
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # as at the end of an interpreter
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _chain(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__


def start_a_server(tell: int, prepare: Callable[[], None]) -> None:
    """Start the fork server of this process's workers as a copy of it, prepared for them."""
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # those of the process that this one was forked from
    multiprocessing.resource_tracker.ensure_running()
    server: Any = multiprocessing.forkserver._forkserver
    server._forkserver_pid = server._forkserver_alive_fd = server._inherited_fds = None
    mp.set_start_method("forkserver", force=True)
    mp.set_forkserver_preload([])

    def fork_passing(path: bytes, args: Sequence[str], descriptors: Sequence[int]) -> int:
        pid = os.fork()
        if not pid:
            try:
                _close_all_but({0, 1, 2, tell, *descriptors})
                prepare()
                exec(args[-1], {})  # what a new interpreter would be told to run
            finally:
                os._exit(1)
        return pid

    execute = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = fork_passing  # type: ignore[assignment]
    server.ensure_running()
    multiprocessing.util.spawnv_passfds = execute


def _close_all_but(kept: set[int]) -> None:
    for descriptor in range(3, max(map(int, os.listdir("/proc/self/fd"))) + 1):
        if descriptor not in kept:
            with contextlib.suppress(OSError):  # it is not open
                os.close(descriptor)
