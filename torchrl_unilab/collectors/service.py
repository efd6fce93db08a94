"""What serves a collector's requests: a rollout worker, its sink, and their loop in a process.

`WorkerService` runs in a worker process (`run_worker`) or, inline, in the collector's own, and
does the same in both, so that the inline collector is the serial oracle of the others. A tick
that a service has completed is not collected again, however often it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import cloudpickle
import torch
from torchrl.envs import EnvBase, EnvCreator

from torchrl_unilab.collectors.arguments import unpack_factory
from torchrl_unilab.collectors.metrics import SharedMetrics
from torchrl_unilab.collectors.worker import RolloutWorker, close_env
from torchrl_unilab.errors import ConfigError, WaitTimeoutError
from torchrl_unilab.runtime import trace
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.trace import TraceSettings, span
from torchrl_unilab.weight_update import UniLabShmScheme

_CLAIM_SECONDS = 0.1  # between two checks for a request


class Sink(Protocol):
    """Stores rollouts in memory that the collector shares with its workers.

    The collector pickles its sink to the workers.

    Attributes:
        storage: The memory, which each process closes.
    """

    storage: Any

    def open(self, worker: int) -> None:
        """Become writer `worker`, in the process that stores its rollouts."""

    def collect(
        self, rollouts: RolloutWorker, publish: Callable[[], None], timeout: float | None
    ) -> bool:
        """Collect one rollout and store it; return False if there was no room in time.

        Args:
            rollouts: Collects.
            publish: Publishes the worker's metrics.
            timeout: Seconds to wait for room; as long as the storage waits if None.
        """

    def stored(self) -> int:
        """Return how much all writers have stored; give up what this process has not."""

    def recover(self, worker: int) -> None:
        """Free what a dead writer held, in the collector's process."""


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs: picklable, equal for all workers.

    Attributes:
        payload: Pickled (policy, what makes it explore or None, further arguments of
            `RolloutWorker`), by value, so that pickling moves none of the learner's tensors into
            shared memory.
        batch_size: Of each worker's environment: the memory is cut for it.
        scheme: Where its weights come from.
        sink: Stores rollouts.
        metrics: Of all workers.
        trace: The trace that the worker's events go to, if one is recorded.
    """

    payload: bytes
    batch_size: torch.Size
    scheme: UniLabShmScheme
    sink: Sink
    metrics: SharedMetrics
    trace: TraceSettings | None


class WorkerService:
    """Answers the requests of a collector with one worker.

    Args:
        setup: What to step and how, and where rollouts go.
        env: The environment.
        worker: Number of the worker.

    Raises:
        ConfigError: The environment is of another batch size than the first worker's.

    Attributes:
        rollouts: Collects.
        sink: Stores, as writer `worker`.
        metrics: Where the worker publishes its metrics.
        running: Whether to collect without being asked for ticks.
        ticks: The last tick completed.
    """

    def __init__(self, setup: WorkerSetup, env: EnvBase, worker: int = 0) -> None:
        policy, explore, further = cloudpickle.loads(setup.payload)
        policy.to(further["device"])
        if env.batch_size != setup.batch_size:
            close_env(env)
            raise ConfigError(
                f"environment of worker {worker}: batch size {tuple(env.batch_size)} (expected "
                f"{tuple(setup.batch_size)}, as worker 0 has). Make the same number in each worker."
            )
        scheme = setup.scheme
        scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker)
        scheme.connect(worker_idx=worker)
        acting = policy if explore is None else explore(policy).to(further["device"])
        rollouts = RolloutWorker(env, acting, worker=worker, scheme=scheme, **further)
        self.rollouts, self._pull = rollouts, scheme.pull
        self.sink, self.metrics, self.worker = setup.sink, setup.metrics, worker
        self.running, self.ticks = False, 0
        self.seed, self.reset = rollouts.seed, rollouts.reset
        self.sink.open(worker)

    def serve(self, kind: str, *arguments: Any) -> Any:
        """Serve a request; return the answer.

        Args:
            kind: The name of a method: ``"seed"``, ``"reset"``, or one of those under "Requests".
            *arguments: The method's.
        """
        return getattr(self, kind)(*arguments)

    def publish(self, tick: int | None = None) -> None:
        """Publish the worker's metrics; those that the first worker lacks are left out.

        Args:
            tick: The tick that is complete now; the last one before it if not given.
        """
        rollouts = self.rollouts
        self.metrics.publish(
            self.worker,
            rollouts.frames,
            rollouts.next_trajectory,
            rollouts.log,
            rollouts.clock,
            ticks=self.ticks if tick is None else tick,
            values=rollouts.measure(rollouts.env),
        )

    def wait(self, link: Link) -> tuple[Any, ...] | None:
        """Wait for the next request."""
        self.rollouts.clock.start()
        with span("wait"):
            request = link.request(block=True)
        self.rollouts.clock.to("wait")
        return request

    # Requests

    def collect(self, tick: int) -> None:
        """Collect a tick of this number, unless it is completed.

        Raises:
            WaitTimeoutError: There was no room in time.
        """
        if tick <= self.ticks:
            return
        stored = self.sink.stored()
        try:
            if self.sink.collect(self.rollouts, partial(self.publish, tick), None):
                self.ticks = tick
        except BaseException:  # inline, Ctrl-C may have come at any point
            self.rollouts.reset()  # the environment may be ahead of what was kept of its episodes
            if self.sink.stored() > stored:
                self.ticks = tick
            raise
        if self.ticks < tick:
            raise WaitTimeoutError(
                f"tick {tick}: no slot was freed in time (expected one). Release leases."
            )

    def run(self, running: bool) -> None:
        """Collect without being asked for ticks from now on, or no longer."""
        self.running = running

    def env_attribute(self, name: str) -> Any:
        """Return an attribute of the environment, or the error that says that it has none."""
        try:
            return getattr(self.rollouts.env, name)
        except AttributeError as missing:
            return missing  # the collector raises it, and the worker goes on

    def count_on(self, totals: Mapping[str, Any]) -> None:
        """Count on from fields of `CollectorMetrics`; see `RolloutWorker.count_on`."""
        self.rollouts.count_on(totals)
        self.publish()

    def state(self) -> dict[str, Any]:
        """Return the state of the rollouts."""
        self._pull()  # as TorchRL's workers do: `wait_applied` may wait for an idle one
        return self.rollouts.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.rollouts.load_state_dict(state)
        self.publish()

    def resume(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Continue from the metrics of the worker that this one replaces."""
        self.ticks = int(snapshot["ticks"])
        self.rollouts.resume_from(snapshot)

    def close(self) -> None:
        """Close environment and memory. Idempotent."""
        self.rollouts.close()
        self.sink.storage.close()


def run_worker(link: Link, setup: WorkerSetup, worker: int, factory: bytes | EnvCreator) -> None:
    """Serve the collector in a worker process; while it runs ahead, collect between requests."""
    with contextlib.suppress(FileNotFoundError):  # the trace has been stopped since
        trace.join(setup.trace, f"collector {worker}")
    service = WorkerService(setup, unpack_factory(factory)(), worker)
    link.ready()
    try:
        while True:
            request = link.request(block=False) if service.running else service.wait(link)
            if request is not None:
                link.answer(service.serve(*request))
            else:
                setup.sink.collect(service.rollouts, service.publish, _CLAIM_SECONDS)
    finally:
        service.close()
