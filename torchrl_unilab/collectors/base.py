"""The base of collectors: TorchRL's surface on a team of workers that fill shared memory.

`APPOCollector` and `ReplayCollector` choose the sink of the workers, and iterate.
"""

from __future__ import annotations

import abc
import copy
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType
from torchrl.weight_update import WeightSyncScheme

from torchrl_unilab.checks import as_integer, as_seconds
from torchrl_unilab.collectors.arguments import (
    STOCK_ARGUMENTS,
    CreateEnv,
    check_done_keys,
    check_settings,
    check_state,
    env_factories,
    exploration_of,
    find_device,
    metric_names,
    pack,
    pack_factory,
    policy_scheme,
    refuse_hook,
    resolve_policy,
    steps_per_rollout,
    unpack_factory,
)
from torchrl_unilab.collectors.metrics import CollectorMetrics, SharedMetrics
from torchrl_unilab.collectors.seeding import as_seed, first_seed, first_trajectory, worker_seeds
from torchrl_unilab.collectors.service import Sink, WorkerService, WorkerSetup, run_worker
from torchrl_unilab.collectors.team import WorkerTeam
from torchrl_unilab.collectors.worker import Measure, check_env, close_env, on_host, reward_terms
from torchrl_unilab.data.stock import check_stock_arguments
from torchrl_unilab.errors import SegmentClosedError, UsageError
from torchrl_unilab.owner import closed_error
from torchrl_unilab.runtime import trace
from torchrl_unilab.runtime.trace import span
from torchrl_unilab.runtime.workers import STOP_SECONDS, WorkerGroup

Explore = Callable[[TensorDictModuleBase], TensorDictModuleBase]


class WorkerCollector(BaseCollector, abc.ABC):
    """Workers that act with published weights, in processes or (`inline`) in this one.

    Args:
        create_env_fn: Makes a worker's environment, of any TorchRL kind, or one such
            function per worker; cloudpickled. One environment is made here for its specs, so with
            `inline` it is called twice, and may hold no transform.
        policy: Acts in the workers, which get copies. None where `policy_factory` makes it; may
            have no parameters.
        total_frames: Frames to yield, -1 for no end.
        num_collectors: Workers, if `create_env_fn` is one function.
        weight_sync_schemes: ``{"policy": UniLabShmScheme(...)}``, the default.
        lockstep: Collect only when asked, with the weights published before, so that runs are
            repeatable bit for bit.
        inline: As `lockstep`, with one worker, in this process: the serial oracle.
        num_threads: Torch threads of each worker.
        exploration_type: How the policy acts.
        seed: Seeds environments and noise; from the operating system if None.
        timeout: Seconds to wait for data; None waits as long as all workers live.
        restart_workers: How many workers that are lost (killed, stopped, or failed) are replaced
            in the run before the loss of one is an error; 0 in lock-step. A new one acts with
            the newest weights, starts new episodes from further seeds and counts on. Such a run
            is not repeatable.
        policy_device: Where policies act; environments and what is collected are on the CPU.
        measure: Returns metrics of a worker's environment by name, after each rollout; by default
            the means of a `MujocoBatchEnv`'s reward terms.
        worker_idx: Number of this collector among those of a `RayCollector`, which sets it: their
            trajectory ids and their environments' seeds do not overlap, even if one is started
            again.
        policy_factory: Makes the policy, in place of `policy`: small, where it is sent.
        **stock: Arguments of TorchRL's collectors, such as ``device``, at values that change
            nothing here.

    Raises:
        ConfigError: A setting cannot work.
        SegmentSpaceError: What the workers fill does not fit shared memory; says what would.
        WorkerError: A worker failed, at its start or later: carries its traceback or signal.
    """

    num_envs: int
    frames_per_batch: int
    init_random_frames = 0
    _saved: ClassVar[tuple[str, ...]] = ("workers", "frames")
    pre_collect_hook = post_collect_hook = property(lambda _: None, refuse_hook)

    def __init__(
        self,
        create_env_fn: CreateEnv | Sequence[CreateEnv],
        policy: TensorDictModuleBase | None = None,
        *,
        total_frames: int = -1,
        num_collectors: int | None = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        lockstep: bool = False,
        inline: bool = False,
        num_threads: int = 1,
        exploration_type: ExplorationType | str | None = ExplorationType.RANDOM,
        seed: int | None = None,
        timeout: float | None = None,
        restart_workers: int = 0,
        policy_device: torch.device | str | None = "cpu",
        measure: Measure = reward_terms,
        worker_idx: int | None = None,
        policy_factory: Callable[[], TensorDictModuleBase] | None = None,
        **stock: Any,
    ) -> None:
        check_stock_arguments(type(self).__name__, stock, STOCK_ARGUMENTS)
        self._factories = env_factories(create_env_fn, num_collectors)
        workers = len(self._factories)
        check_settings(
            workers,
            inline=inline,
            lockstep=lockstep,
            restart_workers=restart_workers,
            worker_idx=worker_idx,
        )
        super().__init__()
        self.scheme = policy_scheme(weight_sync_schemes)
        self._weight_sync_schemes = {"policy": self.scheme}
        self.policy = resolve_policy(policy, policy_factory)
        self.policy_factory = [None] * workers
        self.policy_device = [find_device("policy_device", policy_device or "cpu")] * workers
        self.worker_idx = None if worker_idx is None else int(worker_idx)
        self.num_workers, self._measure = workers, measure
        self.total_frames = as_integer("total_frames", total_frames, "Use -1 for no end.", least=-1)
        self.lockstep = lockstep or inline
        self.timeout = None if timeout is None else as_seconds("timeout", timeout, zero=True)
        self.restart_workers = restart_workers
        self._inline, self._num_threads = inline, as_integer("num_threads", num_threads, "Use 1.")
        self.exploration_type = exploration_of(exploration_type)
        self._first_seed, self._frames = as_seed(seed), 0
        self._iter = -1  # index of the last batch yielded, which TorchRL's `stats` reads
        self._closing = threading.RLock()
        self._sink: Sink | None = None
        self._metrics: SharedMetrics | None = None
        self._team: WorkerTeam | None = None

    @abc.abstractmethod
    def _make_sink(self, env: EnvBase, num_steps: int) -> Sink:
        """Return what the workers store rollouts of `num_steps` in."""

    def _launch(
        self, frames_per_batch: int, share: int = 1, explore: Explore | None = None
    ) -> None:
        """Allocate shared memory, start the workers, and seed them.

        `share` workers collect a batch together; `explore` wraps the policy in each.
        """
        make_env = self._factories[0]
        # A transform that a factory holds belongs to one environment only.
        env = (make_env if self._inline else unpack_factory(pack_factory(make_env)))()
        check_env(env)
        try:
            check_done_keys(env)
            self.num_envs = env.batch_size.numel()
            num_steps = steps_per_rollout(frames_per_batch, self.num_envs, share)
            self.frames_per_batch = self.requested_frames_per_batch = frames_per_batch
            self._sink = sink = self._make_sink(env, num_steps)
            names = metric_names(self._measure, env)
            self._metrics = metrics = SharedMetrics(self.num_workers, names=names)
            self.scheme.init_on_sender(model_id="policy", context=self)
            rollouts = {
                "num_steps": num_steps,
                "workers": self.num_workers,
                "first_trajectory": first_trajectory(self.worker_idx, self.scheme.first_version),
                "exploration_type": self.exploration_type,
                "random_frames": -(-self.init_random_frames // self.num_workers),
                "device": self.policy_device[0],
                "measure": self._measure,
            }
            payload = pack("policy, explore or measure", (on_host(self.policy), explore, rollouts))
            scheme = copy.copy(self.scheme) if self._inline else self.scheme
            setup = WorkerSetup(payload, env.batch_size, scheme, sink, metrics, trace.settings())
            workers = self._start_workers(setup)
            self._team = WorkerTeam(
                workers, sink, metrics, timeout=self.timeout, restart_workers=self.restart_workers
            )
            self.scheme.connect()
            self.set_seed(self._first_seed)
        except BaseException:
            self.shutdown()
            raise
        finally:
            inline = None if self._team is None else self._team.service
            if inline is None or inline.rollouts.env is not env:  # a function may return one twice
                close_env(env)

    def _start_workers(self, setup: WorkerSetup) -> WorkerService | WorkerGroup:
        if self._inline:  # the environment that was stepped is not used: transforms may keep state
            return WorkerService(setup, self._factories[0]())
        factories = map(pack_factory, self._factories)
        arguments = [(setup, worker, make) for worker, make in enumerate(factories)]
        return WorkerGroup(run_worker, arguments, name="collector", num_threads=self._num_threads)

    def _open_sink(self) -> Any:
        if self._sink is None:
            raise closed_error("collector", "Build a new one.")
        return self._sink

    def _open_team(self) -> WorkerTeam:
        self._open_sink()
        if self._team is None or self._team.stopped:
            raise SegmentClosedError(
                "cannot use the collector's workers: all ended when one was lost (expected running "
                "ones). Save the counts by state_dict(workers=False), and build a new collector."
            )
        return self._team

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [] if self._team is None else self._team.pids

    @property
    def restarts(self) -> int:
        """Workers replaced so far."""
        return 0 if self._team is None else self._team.restarts

    @property
    def policy_version(self) -> int:
        """Version of the newest published weights."""
        return self.scheme.version

    def get_policy_version(self) -> int:
        """Return `policy_version`, by a method that a remote caller can call."""
        return self.policy_version

    def metrics(self) -> CollectorMetrics:
        """Return the newest metrics of the workers. Does not block."""
        self._open_sink()
        assert self._metrics is not None, "made with the sink"
        return self._metrics.total()

    def status(self) -> dict[str, float]:
        """Return values to log about the shared memory and the workers."""
        return {"restarts": self.restarts}

    def _wants_more(self) -> bool:
        return self.total_frames < 0 or self._frames < self.total_frames

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until `total_frames`.

        If one fails the workers end, while what they filled stays until `shutdown`: the rows
        of a replay are saved though a worker was lost.

        Raises:
            SegmentClosedError: Another thread has shut the collector down meanwhile.
        """
        try:
            for batch in self.iterator():
                self._iter += 1
                yield batch
        except Exception:
            with self._closing:  # a shutdown that has begun ends first
                self._open_sink()
            if self._team is not None:
                self._team.stop(STOP_SECONDS)  # they may hang
            raise

    def update_policy_weights_(self, *weights: Any, **which: Any) -> None:
        """Publish weights: the policy's as it is, if none are given; see TorchRL."""
        self._open_sink()
        super().update_policy_weights_(*weights, **which)

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int:
        """Seed environments and noise; what is collected next starts new episodes.

        Worker ``w`` seeds its environment with ``seed + w * num_envs``, and environments
        in a batch count on from there: no two environments share a seed. What was
        collected before stays. With a `worker_idx` all seeds are those after the seeds of the
        collectors before this one, which have as many workers; others, if it was started again.

        Args:
            seed: The first seed; None takes one from the operating system.
            static_seed: Give all workers `seed` itself.

        Returns:
            The first seed that is not used yet.

        Raises:
            ConfigError: The seed is no integer of at least 0.
        """
        seed, environments = as_seed(seed), self.num_workers * self.num_envs
        team = self._finish_tick()
        if not static_seed:
            seed = first_seed(seed, self.worker_idx, self.scheme.first_version, environments)
        team.seed = seed
        seeds = worker_seeds(seed, self.num_workers, 0 if static_seed else self.num_envs)
        team.ask([("seed", *own) for own in seeds])
        return seed + environments

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the first worker's environment, which must be picklable."""
        return self._finish_tick().env_attribute(attr)

    def reset(self) -> None:
        """Start new episodes with what the workers collect next."""
        self._finish_tick().ask_all("reset")

    def _finish_tick(self) -> WorkerTeam:
        """Wait for the tick that workers were asked to collect; return their team."""
        with span("wait"):
            team = self._open_team()
            team.finish_tick()
        return team

    def state_dict(self, *, workers: bool = True) -> OrderedDict[str, Any]:
        """Return the workers' states and the count of frames. Safe while iterating.

        Args:
            workers: Whether to ask the workers; if one was lost, only the counts are left.

        Raises:
            WorkerError: A worker failed.
        """
        if not workers:
            return OrderedDict(workers=None, frames=self._frames, totals=asdict(self.metrics()))
        return OrderedDict(workers=self._finish_tick().ask_all("state"), frames=self._frames)

    def load_state_dict(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Restore the workers' states, or new episodes if there are none in it.

        With `MujocoBatchEnv` the workers continue their episodes, with other environments they
        start new ones.

        Raises:
            ConfigError: The state is of another collector. Nothing has changed then.
        """
        check_state(state_dict, self._saved, [self.num_envs] * self.num_workers)
        team = self._finish_tick()
        states, frames = state_dict["workers"], state_dict["frames"]
        if states is None:
            team.ask_all("count_on", state_dict.get("totals", {"frames": frames}))
        else:
            team.ask([("load", state) for state in states])
        self._frames = frames

    def shutdown(self, timeout: float | None = None, close_env: bool = True, **_: Any) -> None:
        """End the workers and free the memory they filled. Idempotent.

        Threads may call it at once: all return when it is done. In a forked copy of the process
        it closes what the copy has, and ends no worker.
        """
        with self._closing:
            if self._team is not None:
                self._team.stop(timeout)
            if self._sink is not None:
                self._sink.storage.close()
                self._sink = None
            if self._metrics is not None:
                self._metrics.close()
            self.scheme.disconnect()
            if self._team is not None and self._team.service is not None and close_env:
                self._team.service.rollouts.close()  # last, for it may fail

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Absent if the arguments were refused. At the end of an interpreter the workers have ended.
        if "_team" in self.__dict__ and not is_ending():
            self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(  # a copy would end the workers when it goes
            f"cannot copy or pickle {type(self).__name__}: it has processes (expected to stay "
            "where it is). Make another one, and load this one's state_dict() there."
        )

    def __bool__(self) -> bool:
        return True  # TorchRL's has a length, which fails where there is no end

    def __repr__(self) -> str:
        # Ray asks for it though the constructor has failed, and hides why if this fails, too.
        names = ("num_workers", "frames_per_batch", "lockstep")
        settings = [f"{name}={self.__dict__[name]}" for name in names if name in self.__dict__]
        return f"{type(self).__name__}({', '.join(settings)})"
