"""Which versions the workers act with: lag, and waiting for a version to be applied.

Workers report to their cells when they apply a version. `WorkerVersions` reads the reports on the
sender: the part of `UniLabShmScheme` that watches and publishes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol

from torchrl_unilab.checks import as_indices, as_instance, as_integer
from torchrl_unilab.errors import UsageError, WaitTimeoutError
from torchrl_unilab.processes import process_id, process_is_alive, process_is_stopped
from torchrl_unilab.waits import poll_while
from torchrl_unilab.weight_update.transport import UniLabShmTransport, WorkerIds

POLL_SECONDS = 0.0005


class PolicyVersions(Protocol):
    """What the policy lag is computed from: a scheme's published and applied versions."""

    @property
    def version(self) -> int:
        """The newest published version."""

    @property
    def applied_versions(self) -> Mapping[Any, int | None]:
        """For each worker, the version it acts with."""


class WorkerVersions:
    """Reads a transport's versions: the published ones, and those that workers applied."""

    _shared_transport: UniLabShmTransport | None

    def _require_transport(self) -> UniLabShmTransport:
        if self._shared_transport is None:
            raise UsageError(
                "cannot use the scheme: it was shut down or never initialised (expected "
                "init_on_sender). Give a new one to a collector, below RPCCollector to those that "
                "it makes."
            )
        return self._shared_transport

    @property
    def version(self) -> int:
        """The newest published version; `first_version`, 0, is the initial weights.

        All workers share one count: a publish to some of them raises it too.
        """
        return self._require_transport().version

    @property
    def applied_versions(self) -> dict[int, int | None]:
        """For each worker, the version it acts with.

        None before it connected, and after it loaded weights that were not published
        (``collector.load_state_dict``), until the next publish.
        """
        cells = self._require_transport().cells
        return {worker: cell.reader(worker).applied for worker, cell in cells.items()}

    @property
    def lag(self) -> dict[int, int | None]:
        """For each worker, how many versions it is behind what was published to it.

        None before it connected, and while it acts with weights that were not published.
        """
        cells = self._require_transport().cells
        return {
            worker: None if version is None else cells[worker].version - version
            for worker, version in self.applied_versions.items()
        }

    @property
    def statistics(self) -> dict[str, int]:
        """Totals: ``publishes`` and ``bytes`` written here, ``retries`` of overtaken readers."""
        transport = self._require_transport()
        return {
            "publishes": sum(cell.publishes for cell in transport.unique_cells),
            "bytes": sum(c.publishes * c.layout.nbytes for c in transport.unique_cells),
            "retries": sum(cell.reader(w).overtaken for w, cell in transport.cells.items()),
        }

    def wait_applied(
        self, version: int | None = None, timeout: float = 10.0, *, worker_ids: WorkerIds = None
    ) -> None:
        """Wait until workers act with what was published to them up to `version`, or newer.

        Workers pull when a rollout starts, or when they are asked for their state: an idle
        worker that is not asked stays behind.

        Args:
            version: The version to wait for; the newest if not given. If it was not published to a
                worker, that worker's newest one before it counts, or else its next one.
            worker_ids: Which workers; all if not given.
            timeout: Seconds to wait.

        Raises:
            WaitTimeoutError: Workers are still behind; names them, and which are dead or stopped.
            ConfigError: `version` is no number of one, or there is no `timeout`, which would wait
                for a dead worker without end.
        """
        transport = self._require_transport()
        if version is not None:
            version = as_integer("version", version, "Take `scheme.version`.", least=0)
        as_instance("timeout", timeout, Real, "Use 10.0, for example.")
        workers = as_indices("worker_ids", transport.cells if worker_ids is None else worker_ids)

        def find_behind() -> list[int]:
            return [worker for worker in workers if _is_behind(transport, worker, version)]

        if behind := poll_while(find_behind, timeout, POLL_SECONDS):
            states = ", ".join(_describe(transport, worker) for worker in behind)
            raise WaitTimeoutError(
                f"workers behind after {timeout:g} s: {states} (expected version "
                f"{transport.version if version is None else version}). "
                "Check that they are collecting."
            )


def _is_behind(transport: UniLabShmTransport, worker: int, version: int | None) -> bool:
    cell = transport.cell(worker)
    newest, applied = cell.version, cell.reader(worker).applied
    # Published versions above this worker's newest one were published to other workers only.
    left_out = version is not None and newest <= version <= transport.version
    wanted = newest if version is None or left_out else version
    return applied is None or applied < wanted


def _describe(transport: UniLabShmTransport, worker: int) -> str:
    applied, process, _ = transport.cell(worker).reader(worker)
    if not process:
        return f"worker {worker} never connected"
    state = "alive" if process_is_alive(process) else "dead"
    if process_is_stopped(process):
        state = "stopped by a signal"
    where = "with weights that it loaded itself" if applied is None else f"at version {applied}"
    return f"worker {worker} (pid {process_id(process)}, {state}) {where}"
