"""`ReplayCollector`: workers fill a packed replay while the learner learns from it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType
from torchrl.weight_update import WeightSyncScheme

from torchrl_unilab.collectors.base import (
    CreateEnv,
    WorkerCollector,
    env_factories,
    policy_scheme,
)
from torchrl_unilab.collectors.metrics import LatestMetrics
from torchrl_unilab.collectors.rollout_worker import (
    ADDED,
    RolloutWorker,
    WorkerSetup,
    example_rollout,
    own_randomness,
    serve,
)
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.errors import ConfigError, WorkerError
from torchrl_unilab.runtime import Link, WorkerGroup, trace
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.runtime.workers import START_SECONDS
from torchrl_unilab.weight_update import UniLabShmScheme

__all__ = ["ReplayCollector", "transition_keys"]

Explore = Callable[[TensorDictModuleBase], TensorDictModuleBase]


class ReplayCollector(WorkerCollector):
    """Collects transitions in worker processes into a `PackedReplayStorage`.

    Each worker steps its own environment and writes what it did as rows of the shared
    replay, the true final observations under ``next``. Iterating yields None once per
    *tick*, as TorchRL's collectors with a replay buffer do: after each worker has taken
    ``frames_per_batch`` of steps between them. The workers are then already allowed the
    next tick, so that they collect while the learner learns, and no further: updates per
    frame stay what the learner makes of them. With `lockstep` they collect only while the
    collector is asked for a tick, so with what was published before, and runs are
    repeatable bit for bit, and their rows are in the order of the workers; with `inline`
    the same happens in this process.

    Args:
        create_env_fn: Makes a worker's environment, of any TorchRL kind, or one such
            function per worker; cloudpickled. One environment is made here for its specs.
        policy: Acts in the workers, which get copies; its weights are published.
        capacity: Rows of the replay.
        frames_per_batch: Rows of a tick, of all workers together; a multiple of the
            environments of all of them.
        total_frames: Frames to collect, -1 for no end.
        init_random_frames: Frames at first, of all workers together, with random actions.
        explore: Makes of the policy what acts in a worker, such as a policy with noise;
            what it adds is not published, and keeps its state. Picklable.
        num_collectors: Workers, if `create_env_fn` is one function.
        weight_sync_schemes: ``{"policy": UniLabShmScheme(...)}``, the default.
        lockstep: Collect when asked to, not ahead.
        inline: As `lockstep`, with one worker, in this process.
        num_threads: Torch threads of each worker.
        exploration_type: How the policy acts.
        seed: Seeds environments and noise; from the operating system if None.
        timeout: Seconds to wait for a tick; None waits as long as all workers live.
        restart_workers: How many workers that are lost (killed, stopped, or failed) are replaced
            in the run before the loss of one is an error. A new one acts with the newest
            weights, starts new episodes from seeds of its own and counts on. Rows that the lost
            one had written of a tick and not told of stay, beside those of the tick as it is
            taken again. Such a run is not repeatable.
        **replay: Settings of the `PackedReplayStorage`.

    Raises:
        ConfigError: A setting cannot work.
        SegmentSpaceError: The replay does not fit shared memory; says what would.
        WorkerError: A worker failed, while it started or while a tick was waited for.

    Example:
        >>> collector = ReplayCollector(  # doctest: +SKIP
        ...     partial(MujocoBatchEnv, "HalfCheetah-v5", num_envs=16, num_threads=1),
        ...     actor,
        ...     capacity=1_000_000,
        ...     frames_per_batch=16,
        ...     total_frames=1_000_000,
        ... )
        >>> for _ in collector:  # doctest: +SKIP
        ...     improve(actor, collector.storage.sample(256))
        ...     collector.update_policy_weights_()
    """

    def __init__(
        self,
        create_env_fn: CreateEnv | Sequence[CreateEnv],
        policy: TensorDictModuleBase,
        *,
        capacity: int,
        frames_per_batch: int,
        total_frames: int = -1,
        init_random_frames: int = 0,
        explore: Explore | None = None,
        num_collectors: int | None = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        lockstep: bool = False,
        inline: bool = False,
        num_threads: int = 1,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        seed: int | None = None,
        timeout: float | None = None,
        restart_workers: int = 0,
        **replay: Any,
    ) -> None:
        factories = env_factories(create_env_fn, num_collectors)
        workers = len(factories)
        super().__init__(
            policy,
            workers,
            policy_scheme(weight_sync_schemes),
            total_frames=total_frames,
            timeout=timeout,
            restart_workers=restart_workers,
        )
        if inline and workers > 1:
            raise ConfigError(f"inline: {workers} workers (expected 1). Use lockstep=True.")
        if init_random_frames < 0:
            raise ConfigError(
                f"init_random_frames: {init_random_frames} (expected at least 0). Use 0."
            )
        self.lockstep = lockstep or inline
        # Rows of a tick in the order of the workers, not in that of who is first.
        self._in_turn = self.lockstep and workers > 1
        self.init_random_frames = init_random_frames
        self._owed = False  # a tick was asked for and not answered
        self._unwritten: set[int] = set()  # workers who have stepped, and wait for their turn
        self._come = 0  # ticks that have come and were not yielded
        self._told = [0] * workers  # frames that each had told of before the tick

        env = factories[0]()
        self.num_envs = env.batch_size.numel()
        try:
            together = self.num_envs * workers
            if frames_per_batch < 1 or frames_per_batch % together:
                raise ConfigError(
                    f"frames_per_batch: {frames_per_batch} (expected a multiple of {together}, "
                    f"{workers} worker(s) with {self.num_envs} environment(s) each). Choose "
                    "another."
                )
            self.frames_per_batch = self.requested_frames_per_batch = frames_per_batch
            num_steps = frames_per_batch // together
            keys = transition_keys(env)
            example = example_rollout(env, policy, num_steps).select(*keys, *ADDED)
            self._memory = PackedReplayStorage(
                capacity,
                example=example.select(*keys).reshape(-1)[0],
                writers=workers,
                **replay,
            )
            self._share_policy()
            random_frames = -(-init_random_frames // workers)
            if inline:
                copied, scheme = self._inline_policy()
                self._rows = _RowWorker(
                    self._memory,
                    RolloutWorker(
                        env,
                        copied if explore is None else explore(copied),
                        num_steps,
                        scheme=scheme,
                        exploration_type=exploration_type,
                    ),
                    example.clone(),
                    random_frames,
                )
                self._inline = self._rows.steps
            else:
                payload = cloudpickle.dumps((factories, policy, explore, example.clone()))
                setup = WorkerSetup(payload, num_steps, exploration_type, trace.settings())
                shared = (self._memory.without_buffers(), setup, self.scheme, self._latest)
                self._group = WorkerGroup(
                    collect_rows,
                    [(*shared, worker, workers, random_frames) for worker in range(workers)],
                    name="collector",
                    num_threads=num_threads,
                )
            self._connect(seed)
        except BaseException:
            self.shutdown()
            raise
        finally:
            if self._inline is None or self._inline.env is not env:
                env.close()

    def iterator(self) -> Iterator[None]:
        """Yield None once per tick until `total_frames`.

        Raises:
            WorkerError: A worker failed.
        """
        self._check_open()
        while self.total_frames < 0 or self._frames < self.total_frames:
            if not self._owed and not self._come:
                self._ask_for_a_tick()
            self._settle()
            self._come -= 1
            self._frames += self.frames_per_batch
            wanted = self.total_frames < 0 or self._frames < self.total_frames
            if wanted and not self.lockstep:
                self._ask_for_a_tick()
            yield None

    def _ask_for_a_tick(self) -> None:
        if self._inline is None:
            if self.restart_workers:
                self._told = [self._frames_of(worker) for worker in range(self.num_workers)]
            self._unwritten = set(range(self.num_workers)) if self._in_turn else set()
            self._owed = True
            self._collect(self._in_turn)
            return
        with own_randomness(self._random):
            self._rows.step()
            self._rows.write(self._open_metrics(), 0)
        self._come += 1

    def _settle(self) -> None:
        if self._owed:
            with span("wait"):
                self._finish_tick()
            self._owed = False
            self._come += 1

    def _finish_tick(self) -> None:
        self._ask_the_rest()
        while self._owing or self._unwritten:
            if self._owing:
                worker = min(self._owing)
                if self._answer(worker, self.timeout) is not None:
                    self._owing.discard(worker)
                continue
            worker = min(self._unwritten)
            try:
                self._running().send(worker, "write")
            except WorkerError as lost:
                self._replace(lost)  # by one that owes its steps again
            else:
                if self._answer(worker, START_SECONDS) is not None:
                    self._unwritten.discard(worker)

    def _recover(self, worker: int) -> None:
        super()._recover(worker)
        if self._frames_of(worker) > self._told[worker]:
            self._owing.discard(worker)  # its rows are there: it died after it had told of them
            self._unwritten.discard(worker)
        elif worker in self._unwritten - self._unasked:
            self._owing.add(worker)  # the steps that it would have written

    def _frames_of(self, worker: int) -> int:
        return int(self._open_metrics().of(worker)["frames"])

    def state_dict(self, *, workers: bool = True) -> OrderedDict[str, Any]:
        """Return what `WorkerCollector.state_dict` does, and the ticks not yielded yet.

        The rows are the replay's: save both while the learner does not collect.
        """
        state = super().state_dict(workers=workers)
        state["come"] = self._come
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: The state is of another number of workers.
        """
        super().load_state_dict(state_dict)
        self._come = state_dict["come"]

    @property
    def storage(self) -> PackedReplayStorage:
        """The replay."""
        self._check_open()
        storage: PackedReplayStorage = self._memory
        return storage

    def status(self) -> dict[str, float]:
        """Return how many rows the replay holds."""
        return {"replay_size": self.storage.size, **super().status()}

    def getattr_rb(self, attr: str) -> Any:
        """Return ``write_count``, the frames of all ticks so far: trainers ask for it."""
        if attr != "write_count":
            raise AttributeError(
                f"{attr!r} of the replay (expected 'write_count'). Ask `storage` itself."
            )
        return self._frames

    def __repr__(self) -> str:
        return (
            f"ReplayCollector({self.num_workers} workers, {self.frames_per_batch} frames a tick, "
            f"lockstep={self.lockstep})"
        )


class _RowWorker:
    """Steps one environment and writes its transitions as rows.

    Args:
        storage: The replay, as its writer.
        steps: Steps the environment.
        slot: Private memory of what is collected at once, [..., T].
        random_frames: Frames at first with random actions.
    """

    def __init__(
        self,
        storage: PackedReplayStorage,
        steps: RolloutWorker,
        slot: TensorDictBase,
        random_frames: int,
    ) -> None:
        self.storage = storage
        self.steps = steps
        self._slot = slot
        self._rows = slot.select(*transition_keys(steps.env))
        self._random_frames = random_frames
        self._policy = steps.policy
        self._unwritten = False

    def step(self) -> None:
        """Take `num_steps` steps."""
        steps = self.steps
        random = steps.frames < self._random_frames
        steps.policy = _RandomActions(steps.env) if random else self._policy
        with span("rollout"):
            steps.rollout(self._slot)
        self._unwritten = True

    def write(self, metrics: LatestMetrics, worker: int) -> None:
        """Write the steps taken, and tell about them. Doing so again changes nothing."""
        if not self._unwritten:
            return
        steps = self.steps
        steps.clock.start()
        self.storage.add(self._rows.reshape(steps.num_envs, steps.num_steps))
        steps.clock.to("write")
        steps.tell(metrics, worker)
        self._unwritten = False


class _RandomActions(TensorDictModuleBase):
    """Acts at random, by an environment's action spec."""

    in_keys = ()
    out_keys = ("action",)

    def __init__(self, env: EnvBase) -> None:
        super().__init__()
        self._act = env.rand_action

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        out: TensorDictBase = self._act(tensordict)
        return out


def transition_keys(env: EnvBase) -> list[Any]:
    """Return what a transition consists of: observations, action, and all that follows."""
    observations = list(env.observation_spec.keys(True, True))
    after = [*observations, *env.reward_keys, *env.done_keys]
    return [*observations, *env.action_keys, *(("next", key) for key in after)]


def collect_rows(
    link: Link,
    storage: PackedReplayStorage,
    setup: WorkerSetup,
    scheme: UniLabShmScheme,
    metrics: LatestMetrics,
    worker: int,
    workers: int,
    random_frames: int,
) -> None:
    """A worker process: write transitions into the replay when the parent asks for them.

    Requests: ``("collect", False)``; ``("collect", True)``, which leaves it to ``("write",)``
    to write the rows; and those of `serve`. Each is answered when it is done.

    Args:
        link: To the parent.
        storage: The replay, as writer `worker`.
        setup: What to step and how.
        scheme: Where the policy's weights come from.
        metrics: Where to tell about the work.
        worker: Number of this worker.
        workers: How many there are.
        random_frames: Frames of this worker at first with random actions.
    """
    with contextlib.suppress(FileNotFoundError):  # the trace has been stopped since
        trace.join(setup.trace, f"collector {worker}")
    create_env, policy, explore, slot = cloudpickle.loads(setup.payload)
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker)
    scheme.connect(worker_idx=worker)
    steps = RolloutWorker(
        create_env[worker](),
        policy if explore is None else explore(policy),
        setup.num_steps,
        worker=worker,
        workers=workers,
        scheme=scheme,
        exploration_type=setup.exploration_type,
    )
    storage.use_writer(worker)
    rows = _RowWorker(storage, steps, slot, random_frames)
    link.ready()
    try:
        while True:
            waited = steps.clock
            waited.start()
            with span("wait"):
                request = link.request(block=True)
            waited.to("wait")
            assert request is not None, "a blocking request waits for one"
            if request[0] == "collect":
                rows.step()
                if not request[1]:
                    rows.write(metrics, worker)
                link.answer()
            elif request[0] == "write":
                rows.write(metrics, worker)
                link.answer()
            else:
                serve(link, steps, request, metrics, worker)
    finally:
        steps.close()
        storage.close()
