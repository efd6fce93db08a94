"""Which versions the workers act with: lag, and waiting for a version to be applied.

Workers report to their cells when they apply a version; these functions read the reports on the
sender, for `UniLabShmScheme`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torchrl_unilab.errors import WaitTimeoutError
from torchrl_unilab.shm.liveness import process_id, process_is_alive
from torchrl_unilab.weight_update.transport import UniLabShmTransport

__all__ = ["POLL_SECONDS", "applied_versions", "lag", "wait_applied"]

POLL_SECONDS = 0.0005


def applied_versions(transport: UniLabShmTransport) -> dict[int, int | None]:
    """Return for each worker the version it acts with, or None without a published one."""
    return {worker: cell.reader(worker).applied for worker, cell in transport.cells.items()}


def lag(transport: UniLabShmTransport) -> dict[int, int | None]:
    """Return for each worker how many versions it is behind its cell, or None as above."""
    applied = applied_versions(transport)
    return {
        worker: None if (version := applied[worker]) is None else cell.version - version
        for worker, cell in transport.cells.items()
    }


def wait_applied(
    transport: UniLabShmTransport,
    version: int | None,
    worker_ids: int | Sequence[int] | None,
    timeout: float,
) -> None:
    """Wait until workers act with what was published to them up to `version`, or newer.

    Args:
        transport: Has the workers' cells.
        version: The version; the newest if None.
        worker_ids: Which workers; all if None.
        timeout: Seconds to wait.

    Raises:
        WaitTimeoutError: Some are still behind; names them and says which are dead.
    """
    ids = [worker_ids] if isinstance(worker_ids, int) else worker_ids
    workers = list(transport.cells if ids is None else ids)
    deadline = time.monotonic() + timeout
    while behind := [w for w in workers if _is_behind(transport, w, version)]:
        if time.monotonic() >= deadline:
            states = ", ".join(_describe(transport, worker) for worker in behind)
            raise WaitTimeoutError(
                f"workers behind after {timeout:g} s: {states} (expected version "
                f"{transport.version if version is None else version}). "
                "Check that they are collecting."
            )
        time.sleep(POLL_SECONDS)


def _is_behind(transport: UniLabShmTransport, worker: int, version: int | None) -> bool:
    cell = transport.cell(worker)
    newest, applied = cell.version, cell.reader(worker).applied
    left_out = version is not None and newest <= version <= transport.version
    wanted = newest if version is None or left_out else version
    return applied is None or applied < wanted


def _describe(transport: UniLabShmTransport, worker: int) -> str:
    applied, process, _ = transport.cell(worker).reader(worker)
    if not process:
        return f"worker {worker} never connected"
    state = "alive" if process_is_alive(process) else "dead"
    where = "with weights that it loaded itself" if applied is None else f"at version {applied}"
    return f"worker {worker} (pid {process_id(process)}, {state}) {where}"
