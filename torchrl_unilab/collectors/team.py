"""The workers of one collector, in processes or inline: ticks, requests, replacement of the lost.

A tick is *outstanding* at a worker from the request to the answer. Workers do not collect a tick
twice, so that a request may be repeated at any point: Ctrl-C, and the loss of a worker, leave a
team that continues where it was. `WorkerCollector` owns the team.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchrl import logger as torchrl_logger

from torchrl_unilab.collectors.metrics import SharedMetrics
from torchrl_unilab.collectors.seeding import random_seed
from torchrl_unilab.collectors.service import Sink, WorkerService
from torchrl_unilab.errors import WorkerError
from torchrl_unilab.runtime.workers import START_SECONDS, WorkerGroup

CLOSE_SECONDS = 10.0
"""For workers to close environments, which may have processes."""


class WorkerTeam:
    """Workers that store rollouts in one sink.

    Args:
        workers: Their processes, or the service of the one worker in this process.
        sink: The collector's end of the sink.
        metrics: Where the workers publish.
        timeout: Seconds to wait for a tick; None waits as long as all workers live.
        restart_workers: How many lost workers are replaced before the loss of one is an error.

    Attributes:
        service: The one worker in this process, if there is one.
        group: The processes of the workers, if they have any.
        count: Number of workers.
        stopped: Whether the worker processes were ended.
        restarts: Workers replaced so far.
        seed: First seed of the run, from which those of replacements follow.
    """

    service: WorkerService | None = None
    group: WorkerGroup

    def __init__(
        self,
        workers: WorkerGroup | WorkerService,
        sink: Sink,
        metrics: SharedMetrics,
        *,
        timeout: float | None,
        restart_workers: int,
    ) -> None:
        if isinstance(workers, WorkerService):
            self.service, self.count = workers, 1
        else:
            self.group, self.count = workers, len(workers)
        self.stopped = False
        self.restarts, self.seed = 0, 0
        self._sink, self._metrics = sink, metrics
        self._timeout, self._restart_workers = timeout, restart_workers
        self._rng_state = torch.get_rng_state()  # torch's, of a worker in this process
        self._ahead = False
        self._tick = 0  # the last tick that workers were asked for
        self._outstanding: set[int] = set()  # workers that have not answered to it
        self._asked = True  # whether all of these were asked for it

    @property
    def ticks(self) -> int:
        """Ticks that all workers have completed."""
        return self._tick - 1 if self._outstanding else self._tick

    def start_tick(self) -> None:
        """Ask all workers for the next tick."""
        self._asked = False
        self._outstanding = set(range(self.count))
        self._tick += 1
        self._ask_outstanding()

    def _ask_outstanding(self) -> None:
        for worker in sorted(self._outstanding):
            if self.service is not None:
                self._serve("collect", self._tick)
                self._outstanding.discard(worker)
            else:
                self._retry(self.group.send, worker, "collect", self._tick)
        self._asked = True

    def finish_tick(self) -> None:
        """Wait for the tick that is outstanding, if one is.

        Raises:
            WorkerError: A worker failed, or did not answer in time.
        """
        if not self._asked:  # such as after Ctrl-C between two requests
            self._ask_outstanding()
        self._retry(self._take_answers)

    def _take_answers(self) -> None:
        for worker in sorted(self._outstanding):
            self.group.receive(worker, self._timeout)
            self._outstanding.discard(worker)

    def run_ahead(self, ahead: bool) -> None:
        """Let workers collect without being asked for ticks, or pause them."""
        self._ahead = ahead
        self.ask_all("run", ahead)

    def ask(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Ask each worker its own request; return the answers.

        Raises:
            WorkerError: A worker failed, or did not answer in time.
        """
        if self.service is not None:
            return [self._serve(*requests[0])]
        # Between two rollouts it answers, which may take as long as one, or as its start.
        timeout = None if self._timeout is None else max(self._timeout, START_SECONDS)
        return [
            self._retry(self.group.ask, worker, *request, timeout=timeout)
            for worker, request in enumerate(requests)
        ]

    def ask_all(self, *request: Any) -> list[Any]:
        """Ask all workers the same request; return the answers."""
        return self.ask([request] * self.count)

    def env_attribute(self, name: str) -> Any:
        """Return an attribute of the first worker's environment.

        Raises:
            AttributeError: It has none of that name.
        """
        (found,) = self.ask([("env_attribute", name)])
        if isinstance(found, AttributeError):
            raise found
        return found

    def _serve(self, *request: Any) -> Any:
        assert self.service is not None, "the worker is in this process"
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._rng_state)
            try:
                return self.service.serve(*request)
            finally:
                self._rng_state = torch.get_rng_state()

    # Lost workers

    def wait(self, descriptors: Sequence[int], timeout: float | None) -> bool:
        """Wait until one of `descriptors` is readable; return whether one is.

        Returns also, with True, after a lost worker was replaced.

        Raises:
            WorkerError: A worker failed, and may not be replaced.
        """
        try:
            return self.group.wait(descriptors, timeout)
        except WorkerError as lost:
            self._replace(lost)
            return True

    def check(self) -> None:
        """Replace workers that were lost.

        Raises:
            WorkerError: A lost worker may not be replaced.
        """
        self._retry(self.group.check)

    def _retry(self, call: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Call, and repeat the call after each lost worker that is replaced; return its result.

        Raises:
            WorkerError: A worker was lost, and may not be replaced.
        """
        while True:
            try:
                return call(*arguments, **settings)
            except WorkerError as lost:
                self._replace(lost)

    def _replace(self, lost: WorkerError) -> None:
        """Replace a lost worker, and replacements that are lost; raise if that is not allowed."""
        while (worker := lost.worker) is not None and self.restarts < self._restart_workers:
            self.restarts += 1
            times = f"{self.restarts} of {self._restart_workers} times"
            torchrl_logger.warning(f"Collector {worker} is replaced ({times}). {lost}")
            try:
                return self._start_replacement(worker)
            except WorkerError as another:
                lost = another
            except BaseException:  # such as Ctrl-C: a half-started replacement is lost as well
                self.group.end(worker)
                raise
        raise lost

    def _start_replacement(self, worker: int) -> None:
        """Start a worker that continues the counts and the tick of the lost one."""
        group = self.group
        group.end(worker)
        self._sink.recover(worker)
        group.restart(worker)
        entropy = self.seed, worker, self.restarts
        group.ask(worker, "seed", random_seed(*entropy), random_seed(*entropy, 1))
        group.ask(worker, "resume", self._metrics.snapshot(worker))
        group.ask(worker, "run", self._ahead)
        if worker in self._outstanding:
            group.send(worker, "collect", self._tick)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [] if self.service is not None else self.group.pids

    def stop(self, timeout: float | None = None) -> None:
        """End the worker processes. Idempotent."""
        if self.service is None:
            self.stopped = True
            self.group.stop(CLOSE_SECONDS if timeout is None else timeout)
