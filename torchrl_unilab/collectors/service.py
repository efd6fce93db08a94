"""What serves a collector's requests: a rollout worker, its sink, and their loop in a process.

`WorkerService` runs in a worker process (`run_worker`) or, inline, in the collector's own, and
does the same in both, so that the inline collector is the serial oracle of the others. A tick
that a service has completed is not collected again, however often it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import torch
from torchrl.envs import EnvBase, EnvCreator
from torchrl.envs.utils import ExplorationType

from torchrl_unilab.collectors.metrics import SharedMetrics
from torchrl_unilab.collectors.worker import RolloutWorker, close_env
from torchrl_unilab.errors import ConfigError, WaitTimeoutError
from torchrl_unilab.runtime import trace
from torchrl_unilab.runtime.link import Link
from torchrl_unilab.runtime.trace import TraceSettings, span
from torchrl_unilab.weight_update import UniLabShmScheme

_CLAIM_SECONDS = 0.1  # between two looks at the collector's requests


class Sink(Protocol):
    """Stores rollouts in memory that the collector shares with its workers.

    The collector pickles its sink to the workers.

    Attributes:
        storage: The memory, which each process closes.
    """

    storage: Any

    def open(self, rollouts: RolloutWorker, worker: int) -> None:
        """Become writer `worker`, in the process that stores its rollouts."""
        ...

    def collect(
        self, rollouts: RolloutWorker, publish: Callable[[], None], timeout: float | None
    ) -> bool:
        """Collect one rollout and store it; return False if there was no room in time.

        Args:
            rollouts: Collects.
            publish: Publishes the worker's metrics.
            timeout: Seconds to wait for room; as long as the storage waits if None.
        """
        ...

    def recover(self, worker: int) -> None:
        """Free what a dead writer held, in the collector's process."""
        ...


class WorkerService:
    """Answers the requests of a collector with one worker.

    Args:
        rollouts: Collects.
        sink: Stores, as writer `worker`.
        metrics: Where the worker publishes its metrics.
        worker: Number of the worker.

    Attributes:
        running: Whether to collect without being asked for ticks.
        ticks: The last tick completed.
    """

    def __init__(
        self, rollouts: RolloutWorker, sink: Sink, metrics: SharedMetrics, worker: int = 0
    ) -> None:
        self.rollouts = rollouts
        self.sink = sink
        self.metrics = metrics
        self.worker = worker
        self.running = False
        self.ticks = 0
        self._requests: Mapping[str, Callable[..., Any]] = {
            "collect": self._tick,
            "run": self._run,
            "seed": rollouts.seed,
            "reset": rollouts.reset,
            "frames": self._set_frames,
            "state": rollouts.state_dict,
            "load": self._load,
            "resume": self._resume,
        }
        sink.open(rollouts, worker)

    def serve(self, kind: str, *arguments: Any) -> Any:
        """Serve a request; return the answer.

        Args:
            kind: ``"collect"`` (the number of a tick), ``"run"`` (whether to), ``"seed"``
                (of the environment, of torch), ``"reset"``, ``"frames"`` (a count),
                ``"state"``, ``"load"`` (a state) or ``"resume"`` (a snapshot of metrics).
            *arguments: As in brackets.
        """
        return self._requests[kind](*arguments)

    def publish(self) -> None:
        """Publish the worker's metrics; those that the first worker lacks are left out."""
        own, names = self.rollouts, self.metrics.names
        measured = own.measure(own.env)
        self.metrics.publish(
            self.worker,
            own.frames,
            own.next_trajectory,
            own.log,
            own.clock,
            ticks=self.ticks,
            values={name: measured[name] for name in names if name in measured},
        )

    def wait(self, link: Link) -> tuple[Any, ...] | None:
        """Wait for the next request."""
        self.rollouts.clock.start()
        with span("wait"):
            request = link.request(block=True)
        self.rollouts.clock.to("wait")
        return request

    def _tick(self, tick: int) -> None:
        if tick <= self.ticks:
            return
        before, self.ticks = self.ticks, tick
        try:
            if not self.sink.collect(self.rollouts, self.publish, None):
                raise WaitTimeoutError(
                    f"tick {tick}: no slot was freed in time (expected one). Release leases."
                )
        except BaseException:
            self.ticks = before
            raise

    def _run(self, running: bool) -> None:
        self.running = running

    def _set_frames(self, frames: int) -> None:
        self.rollouts.frames = frames
        self.publish()

    def _load(self, state: Mapping[str, Any]) -> None:
        self.rollouts.load_state_dict(state)
        self.publish()

    def _resume(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        self.ticks = int(snapshot["ticks"])
        self.rollouts.resume_from(snapshot)

    def close(self) -> None:
        """Close environment and memory. Idempotent."""
        self.rollouts.close()
        self.sink.storage.close()


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs beside the memory it shares: picklable, equal for all workers.

    Attributes:
        payload: Pickled (environment factories, policy, what makes it explore or None, what
            measures the environment), by value, so that pickling moves none of the learner's
            tensors into shared memory.
        batch_size: Of each worker's environment: the memory is cut for it.
        num_steps: Steps of each environment in a rollout.
        exploration_type: How the policy acts.
        random_frames: Frames of each worker at first with random actions.
        device: Where the policy acts.
        trace: The trace that the worker's events go to, if one is recorded.
        first_trajectory: Id of the first trajectory of all workers.
        creators: Environment factories that are not in the payload, by number.
    """

    payload: bytes
    batch_size: torch.Size
    num_steps: int
    exploration_type: ExplorationType
    random_frames: int
    device: torch.device
    trace: TraceSettings | None
    first_trajectory: int = 0
    creators: Mapping[int, EnvCreator] = field(default_factory=dict)


def build_service(
    setup: WorkerSetup,
    scheme: UniLabShmScheme,
    sink: Sink,
    metrics: SharedMetrics,
    worker: int = 0,
    workers: int = 1,
    env: EnvBase | None = None,
) -> WorkerService:
    """Return the service of a worker, in the process that steps its environment.

    Args:
        setup: What to step and how.
        scheme: Where the policy's weights come from.
        sink: Where rollouts go.
        metrics: Where to publish metrics.
        worker: Number of this worker.
        workers: How many there are.
        env: The environment; by default a new one.

    Raises:
        ConfigError: The environment is of another batch size than the first worker's.
    """
    factories, policy, explore, measure = cloudpickle.loads(setup.payload)
    policy.to(setup.device)
    if env is None:
        env = (setup.creators.get(worker) or factories[worker])()
    if env.batch_size != setup.batch_size:
        close_env(env)
        raise ConfigError(
            f"environment of worker {worker}: batch size {tuple(env.batch_size)} (expected "
            f"{tuple(setup.batch_size)}, as worker 0 has). Make as many in each."
        )
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker)
    scheme.connect(worker_idx=worker)
    rollouts = RolloutWorker(
        env,
        policy if explore is None else explore(policy).to(setup.device),
        setup.num_steps,
        worker=worker,
        workers=workers,
        first_trajectory=setup.first_trajectory,
        scheme=scheme,
        exploration_type=setup.exploration_type,
        random_frames=setup.random_frames,
        device=setup.device,
        measure=measure,
    )
    return WorkerService(rollouts, sink, metrics, worker)


def run_worker(
    link: Link,
    setup: WorkerSetup,
    scheme: UniLabShmScheme,
    sink: Sink,
    metrics: SharedMetrics,
    worker: int,
    workers: int,
) -> None:
    """A worker process: serve the collector; while it runs ahead, collect between requests.

    Args:
        link: To the collector.
        setup: What to step and how.
        scheme: As `build_service` has it, and so are the others.
        sink: Stores rollouts.
        metrics: Of all workers.
        worker: The number of this one.
        workers: How many there are.
    """
    with contextlib.suppress(FileNotFoundError):  # the trace has been stopped since
        trace.join(setup.trace, f"collector {worker}")
    service = build_service(setup, scheme, sink, metrics, worker, workers)
    link.ready()
    try:
        while True:
            request = link.request(block=False) if service.running else service.wait(link)
            if request is not None:
                link.answer(service.serve(*request))
            else:
                sink.collect(service.rollouts, service.publish, _CLAIM_SECONDS)
    finally:
        service.close()
