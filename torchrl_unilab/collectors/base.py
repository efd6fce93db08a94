"""What all collectors with worker processes have in common."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl import logger as torchrl_logger
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.weight_update import WeightSyncScheme

from torchrl_unilab.collectors.metrics import CollectorMetrics, LatestMetrics
from torchrl_unilab.collectors.rollout_worker import RolloutWorker, own_randomness
from torchrl_unilab.errors import ConfigError, SegmentClosedError, WorkerError
from torchrl_unilab.runtime import WorkerGroup
from torchrl_unilab.runtime.workers import START_SECONDS
from torchrl_unilab.weight_update import UniLabShmScheme

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CreateEnv", "WorkerCollector", "env_factories", "policy_scheme"]

CreateEnv = Callable[[], EnvBase]


class WorkerCollector(BaseCollector):
    """Workers that act with published weights, in processes or (`inline`) in this one.

    A collector derived from it sets `_memory` to what its workers fill, and `_group` or
    `_inline` to those who fill it, and then calls `_connect`.

    Args:
        policy: Acts in the workers, which get copies.
        workers: How many there are.
        scheme: Publishes the policy's weights.
        total_frames: Frames to yield, -1 for no end.
        timeout: Seconds to wait for data; None waits as long as all workers live.
        restart_workers: How many lost workers are replaced before the loss of one is an error.

    Attributes:
        restarts: Workers replaced so far.
    """

    num_envs: int

    def __init__(
        self,
        policy: TensorDictModuleBase,
        workers: int,
        scheme: UniLabShmScheme,
        *,
        total_frames: int,
        timeout: float | None,
        restart_workers: int,
    ) -> None:
        if restart_workers < 0:
            raise ConfigError(
                f"restart_workers: {restart_workers} (expected at least 0). Use 0 for none."
            )
        super().__init__()
        self.policy = policy
        self.policy_factory = [None] * workers
        self.policy_device = [torch.device("cpu")] * workers
        self.num_workers = workers
        self.total_frames = total_frames
        self.timeout = timeout
        self.scheme = scheme
        self._weight_sync_schemes = {"policy": scheme}
        self.restart_workers = restart_workers
        self.restarts = 0
        self._frames = 0
        self._seed = 0
        self._task: tuple[Any, ...] = ()  # what workers were last asked to collect
        self._unasked: set[int] = set()  # those who were not yet, and only if Ctrl-C came between
        self._owing: set[int] = set()  # those who have not done it yet
        self._closing = threading.RLock()
        self._memory: Any = None
        self._latest: LatestMetrics | None = None
        self._group: WorkerGroup | None = None
        self._inline: RolloutWorker | None = None

    def _share_policy(self) -> None:
        """Allocate what the policy is published through, before any worker starts."""
        self._latest = LatestMetrics(self.num_workers)
        self.scheme.init_on_sender(model_id="policy", context=self)

    def _inline_policy(self) -> tuple[TensorDictModuleBase, UniLabShmScheme]:
        """Return a copy of the policy as a worker would have it, and its end of the scheme."""
        policy = copy.deepcopy(self.policy)
        scheme = copy.copy(self.scheme)  # of the same shared memory, as a receiver
        scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=0)
        scheme.connect(worker_idx=0)
        self._random = [torch.get_rng_state()]
        return policy, scheme

    def _connect(self, seed: int | None) -> None:
        """Make the workers known to the scheme, and seed them."""
        self.scheme.connect()
        self.set_seed(seed)

    def _collect(self, *how: Any) -> None:
        """Have all workers collect, which each owes from then on."""
        self._task, self._owing = ("collect", *how), set()
        self._unasked = set(range(self.num_workers))
        self._ask_the_rest()

    def _ask_the_rest(self) -> None:
        """Go on with asking the workers to collect, where that was interrupted."""
        while self._unasked:
            worker = min(self._unasked)
            self._persist(partial(self._running().send, worker, *self._task))
            self._owing.add(worker)
            self._unasked.discard(worker)

    def _ask(self, *requests: tuple[Any, ...]) -> list[Any]:
        """Ask each worker its own request; return the answers."""
        answers = []
        for worker, request in enumerate(requests):
            answer = None
            while answer is None:
                self._persist(partial(self._running().send, worker, *request))
                answer = self._answer(worker, START_SECONDS)
            answers.append(answer[0])
        return answers

    def _answer(self, worker: int, timeout: float | None) -> tuple[Any] | None:
        """Return what a worker answers; None if it was lost, and another is in its place."""
        while True:
            try:
                return (self._running().receive(worker, timeout),)
            except WorkerError as lost:
                if worker in self._replace(lost):
                    return None

    def _persist(self, call: Callable[[], None]) -> None:
        """Call something until no worker is found to be lost.

        Raises:
            WorkerError: A worker was lost, and may not be replaced.
        """
        while True:
            try:
                return call()
            except WorkerError as lost:
                self._replace(lost)

    def _replace(self, lost: WorkerError) -> set[int]:
        """Put a new worker in the place of one that was lost, if one is allowed.

        Returns:
            Those that were replaced: while one is, another may be lost.
        """
        losses, replaced = [lost], set()
        while losses:
            lost = losses.pop()
            if lost.worker is None or self.restarts >= self.restart_workers:
                raise lost
            self.restarts += 1
            torchrl_logger.warning(
                "Worker %d is replaced (%d of %d times). %s",
                lost.worker,
                self.restarts,
                self.restart_workers,
                lost,
            )
            try:
                self._renew(lost.worker)
                replaced.add(lost.worker)
            except WorkerError as another:
                losses += [another] if another.worker == lost.worker else [lost, another]
            except BaseException:  # as Ctrl-C: one that is half in its place is lost as well
                if self._group is not None:
                    self._group.end(lost.worker)
                raise
        return replaced

    def _renew(self, worker: int) -> None:
        """Start a worker anew: it takes what the lost one held and counted, and what it owes."""
        group = self._running()
        group.end(worker)
        self._recover(worker)
        group.restart(worker)
        seeds = np.random.SeedSequence((self._seed, worker, self.restarts)).generate_state(2)
        # Environments count on from theirs, which is to stay a seed for NumPy.
        group.ask(worker, "seed", int(seeds[0]) >> 1, int(seeds[1]))
        group.ask(worker, "succeed", cloudpickle.dumps(self._open_metrics().of(worker)))
        if worker in self._owing:
            group.send(worker, *self._task)

    def _recover(self, worker: int) -> None:
        """Take from a worker that has ended what it held of the memory."""
        self._memory.recover(worker)

    def _running(self) -> WorkerGroup:
        if self._group is None:
            raise self._shut_down()
        return self._group

    def _settle(self) -> None:
        """Wait for what workers still owe an answer to."""

    def _check_open(self) -> None:
        if self._memory is None:
            raise self._shut_down()

    @staticmethod
    def _shut_down() -> SegmentClosedError:
        return SegmentClosedError(
            "cannot use the collector: it is shut down (expected a running one). Build a new one."
        )

    # What there is to know

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [] if self._group is None else self._group.pids

    def metrics(self) -> CollectorMetrics:
        """Return what the workers last told about their work. Waits for nobody."""
        self._check_open()
        return self._open_metrics().read()

    def status(self) -> dict[str, float]:
        """Return what there is to log of the memory that the workers fill, and of them."""
        return {"restarts": self.restarts}

    # BaseCollector

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until `total_frames`.

        If one fails the workers end, while what they filled stays until `shutdown`: the rows
        of a replay are saved though a worker was lost.
        """
        self._iteration_started = True
        try:
            yield from self.iterator()
        except Exception:
            self._end_workers()
            raise

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int:
        """Seed environments and noise; what is collected next starts new episodes.

        Worker ``w`` seeds its environment with ``seed + w * num_envs``, and environments
        in a batch count on from there: no two environments share a seed. What was
        collected before stays.

        Args:
            seed: The first seed; None takes one from the operating system.
            static_seed: Give all workers `seed` itself.

        Returns:
            The first seed that is not used yet.
        """
        self._check_open()
        self._settle()
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        self._seed = seed
        requests = []
        for worker in range(self.num_workers):
            noise = np.random.SeedSequence((seed, worker)).generate_state(1, np.uint64)[0]
            own = seed if static_seed else seed + worker * self.num_envs
            requests.append(("seed", own, int(noise)))
        if self._inline is not None:
            with own_randomness(self._random):
                self._inline.seed(*requests[0][1:])
        else:
            self._ask(*requests)
        return seed + self.num_workers * self.num_envs

    def reset(self) -> None:
        """Start new episodes with what the workers collect next."""
        self._check_open()
        self._settle()
        if self._inline is not None:
            self._inline.reset()
        else:
            self._ask(*[("reset",)] * self.num_workers)

    def state_dict(self, *, workers: bool = True) -> OrderedDict[str, Any]:
        """Return the workers' states and the count of frames. Safe while iterating.

        Args:
            workers: Whether to ask the workers; if one was lost, only the count is left.

        Raises:
            WorkerError: A worker failed.
        """
        self._check_open()
        if not workers:
            return OrderedDict(workers=None, frames=self._frames)
        self._settle()
        if self._inline is not None:
            with own_randomness(self._random):
                states = [self._inline.state_dict()]
        else:
            answers = self._ask(*[("state",)] * self.num_workers)
            states = [cloudpickle.loads(answer) for answer in answers]
        return OrderedDict(workers=states, frames=self._frames)

    def load_state_dict(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Restore the workers' states, or new episodes if there are none in it.

        With `MujocoBatchEnv` the workers go on in the midst of their episodes, with other
        environments they start new ones.

        Raises:
            ConfigError: The state is of another number of workers.
        """
        self._check_open()
        self._settle()
        states = state_dict["workers"]
        if states is None:
            self._count_from(state_dict["frames"])
            return
        if len(states) != self.num_workers:
            raise ConfigError(
                f"state of {len(states)} workers (expected {self.num_workers}). "
                "Use as many workers as when it was saved."
            )
        if self._inline is not None:
            with own_randomness(self._random):
                self._inline.load_state_dict(states[0])
            self._inline.tell(self._open_metrics(), 0)
        else:
            self._ask(*(("load", cloudpickle.dumps(state)) for state in states))
        self._frames = state_dict["frames"]

    def _count_from(self, frames: int) -> None:
        """Count on from so many frames, shared evenly by the workers."""
        share = frames // self.num_workers
        if self._inline is not None:
            self._inline.frames = share
        else:
            self._ask(*[("frames", share)] * self.num_workers)
        self._frames = frames

    def _open_metrics(self) -> LatestMetrics:
        assert self._latest is not None, "there are metrics until the collector is shut down"
        return self._latest

    def shutdown(self, timeout: float | None = None, close_env: bool = True, **_: Any) -> None:
        """End the workers and free the memory they filled. Idempotent.

        Threads may call it at once: all return when it is done. In a forked copy of the process
        it lets go of all, and ends nobody.
        """
        with self._closing:
            self._end_workers(timeout)
            if self._inline is not None and close_env:
                self._inline.close()
            if self._memory is not None:
                self._give_up_memory()
                self._memory = None
            if self._latest is not None:
                self._latest.close()
                self._latest = None

    def _end_workers(self, timeout: float | None = None) -> None:
        if self._group is not None:
            self._group.stop() if timeout is None else self._group.stop(timeout)
            self._group = None

    def _give_up_memory(self) -> None:
        """Free `_memory`."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if "_group" in self.__dict__:  # absent if the arguments were refused
            self.shutdown()


def env_factories(
    create_env_fn: CreateEnv | Sequence[CreateEnv], num_collectors: int | None
) -> list[CreateEnv]:
    """Return one environment function per worker.

    Raises:
        ConfigError: There are none, or not as many as workers.
    """
    if callable(create_env_fn):
        workers = 1 if num_collectors is None else num_collectors
        if workers < 1:
            raise ConfigError(f"num_collectors: {workers} (expected at least 1). Use 1.")
        return [create_env_fn] * workers
    factories = list(create_env_fn)
    if not factories or num_collectors not in (None, len(factories)):
        raise ConfigError(
            f"num_collectors: {num_collectors} with {len(factories)} environment functions "
            "(expected one function for each). Leave num_collectors out."
        )
    return factories


def policy_scheme(schemes: Mapping[str, WeightSyncScheme] | None) -> UniLabShmScheme:
    """Return the one scheme of ``{"policy": UniLabShmScheme()}``, or a new one.

    Raises:
        ConfigError: There are others.
    """
    scheme = UniLabShmScheme() if schemes is None else schemes.get("policy")
    if not isinstance(scheme, UniLabShmScheme) or (schemes is not None and len(schemes) != 1):
        raise ConfigError(
            f"weight_sync_schemes: {schemes!r} (expected {{'policy': UniLabShmScheme()}}). "
            "Leave it out."
        )
    return scheme
