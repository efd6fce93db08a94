"""`ReplayCollector`: workers fill a packed replay while the learner learns from it.

A tick is one short rollout of each worker, whose transitions become rows of the shared replay
before the worker answers. The learner samples the replay itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from torchrl_unilab.checks import as_integer
from torchrl_unilab.collectors.arguments import CreateEnv, ReplaySettings
from torchrl_unilab.collectors.base import Explore, WorkerCollector
from torchrl_unilab.collectors.worker import (
    POLICY_VERSION,
    TRAJECTORIES,
    RolloutWorker,
    example_rollout,
)
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.data.schema import TensorSchema
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.runtime.trace import span


@dataclass
class ReplaySink:
    """Stores rollouts as rows of a replay.

    Attributes:
        storage: The replay.
        schema: Of a rollout.
    """

    storage: PackedReplayStorage
    schema: TensorSchema

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplaySink, (self.storage.without_buffers(), self.schema)

    def open(self, worker: int) -> None:
        """Become writer `worker` of the replay, with private memory for a rollout."""
        self.storage.use_writer(worker)
        self._slot = self.schema.empty()
        self._rows = self._slot.exclude(POLICY_VERSION)

    def collect(
        self, rollouts: RolloutWorker, publish: Callable[[], None], timeout: float | None
    ) -> bool:
        """Collect one rollout, write its rows, and then count them in the metrics."""
        with span("rollout"):
            rollouts.rollout(self._slot)
        rollouts.clock.start()
        self.storage.add(self._rows.reshape(rollouts.num_envs, rollouts.num_steps))
        rollouts.clock.to("write")
        publish()
        return True

    def stored(self) -> int:
        """Return how many rows there have been."""
        return self.storage.ptr

    def recover(self, worker: int) -> None:
        """Do nothing: rows that a dead worker had not completed are below no `head`."""


class ReplayCollector(WorkerCollector):
    """Collects transitions in worker processes into a `PackedReplayStorage`.

    Each worker steps its environment and writes rows into the shared replay, with the true final
    observations under ``next`` and the episode under ``("collector", "traj_ids")``. Iterating
    yields None once per *tick*, as TorchRL's collectors with a replay buffer do. A tick ends when
    the workers together have taken ``frames_per_batch`` steps. The workers may then start the next
    tick, so that they collect while the learner learns, but go no further: the learner decides on
    the updates per frame. With `lockstep` they collect only while the collector waits for a tick.

    Args:
        create_env_fn: Makes a worker's environment, or one such function per worker.
        policy: Acts in the workers; its weights are published. None with ``policy_factory``.
        capacity: Rows of the replay.
        frames_per_batch: Rows of a tick, of all workers together; a multiple of the
            environments of all of them.
        init_random_frames: Frames with random actions at the start, of all workers together.
        explore: Wraps the policy that acts in a worker, for example with exploration noise. What it
            adds is not published, and keeps its state. Picklable; None adds nothing.
        replay: Settings of the `PackedReplayStorage`; its defaults if None. Sample slices by a
            `PackedSliceSampler`: rows of all workers' environments alternate.
        **workers: Further arguments of `torchrl_unilab.collectors.base.WorkerCollector`, such as
            ``num_collectors``, ``lockstep``, ``seed``. If a worker is replaced, its tick is
            collected again; rows of that tick that were written but not yet counted stay.

    Raises:
        ConfigError: A setting cannot work.
        SegmentSpaceError: The replay does not fit shared memory; says what size would.
        WorkerError: A worker failed, at its start or during a tick.

    Attributes:
        learners: Number of ranks that learn together, each with its own collector like this one. A
            trainer sets it, and counts the frames of all ranks.
        batch_size: Rows that each rank samples for an update. A trainer sets it.

    Examples:
        >>> from functools import partial
        >>> from torchrl_unilab.collectors import ReplayCollector
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.modules import make_actor
        >>> make_env = partial(MujocoBatchEnv, "HalfCheetah-v5", num_envs=8, num_threads=1)
        >>> collector = ReplayCollector(
        ...     make_env, make_actor(17, 6), capacity=1000, frames_per_batch=16, total_frames=32
        ... )
        >>> for _ in collector:
        ...     print(collector.storage.sample(4).shape)  # learn from it, then publish
        ...     collector.update_policy_weights_()
        torch.Size([4])
        torch.Size([4])
        >>> collector.shutdown()
    """

    _saved: ClassVar[tuple[str, ...]] = (*WorkerCollector._saved, "come")

    def __init__(
        self,
        create_env_fn: CreateEnv | Sequence[CreateEnv],
        policy: TensorDictModuleBase | None = None,
        *,
        capacity: int,
        frames_per_batch: int,
        init_random_frames: int = 0,
        explore: Explore | None = None,
        replay: Mapping[str, Any] | None = None,
        **workers: Unpack[ReplaySettings],
    ) -> None:
        super().__init__(create_env_fn, policy, **workers)
        own = {} if replay is None else replay
        decided = {"max_size", "example", "writers"}
        if not isinstance(own, Mapping) or decided & own.keys():
            raise ConfigError(
                f"replay: {own!r} (expected settings by name without {sorted(decided)}: capacity, "
                "environments and workers decide these). Leave them out."
            )
        self.init_random_frames = as_integer(
            "init_random_frames", init_random_frames, "Use 0.", least=0
        )
        self.learners = 1
        self.batch_size: int | None = None
        self._replay = {"max_size": capacity, **own}
        self._yielded = 0  # ticks
        self._launch(frames_per_batch, share=self.num_workers, explore=explore)

    def _make_sink(self, env: EnvBase, num_steps: int) -> ReplaySink:
        keys = row_keys(env)
        example = example_rollout(env, self.policy, num_steps).select(*keys, POLICY_VERSION)
        row = example.select(*keys).reshape(-1)[0]
        storage = PackedReplayStorage(example=row, writers=self.num_workers, **self._replay)
        return ReplaySink(storage, TensorSchema.of(example))

    def iterator(self) -> Iterator[None]:
        """Yield None once per tick until `total_frames`.

        Raises:
            WorkerError: A worker failed.
        """
        while self._wants_more():
            team = self._finish_tick()
            if team.ticks == self._yielded:
                team.start_tick()
                self._finish_tick()
            self._yielded += 1
            self._frames += self.frames_per_batch
            if self._wants_more() and not self.lockstep:
                team.start_tick()
            yield None

    def state_dict(self, *, workers: bool = True) -> OrderedDict[str, Any]:
        """Return what `WorkerCollector.state_dict` does, and the ticks not yielded yet.

        The rows are the replay's: save both while the learner does not collect.
        """
        state = super().state_dict(workers=workers)
        state["come"] = 0 if self._team is None else self._team.ticks - self._yielded
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: The state is of another number of workers.
        """
        super().load_state_dict(state_dict)
        self._yielded = self._open_team().ticks - state_dict["come"]

    @property
    def storage(self) -> PackedReplayStorage:
        """The replay."""
        storage: PackedReplayStorage = self._open_sink().storage
        return storage

    def status(self) -> dict[str, float]:
        """Return how many rows the replay holds."""
        return {"replay_size": self.storage.size, **super().status()}

    def getattr_rb(self, attr: str) -> Any:
        """Return what trainers ask of the replay, over all ticks and learners.

        ``write_count`` is the frames; ``batch_size`` the rows of an update, None without a trainer.
        """
        match attr:
            case "write_count":
                return self._frames * self.learners
            case "batch_size":
                return None if self.batch_size is None else self.batch_size * self.learners
        raise AttributeError(
            f"{attr!r} of the replay (expected 'write_count' or 'batch_size'). Read it from "
            "`storage`."
        )


def transition_keys(env: EnvBase) -> list[Any]:
    """Return the keys of a transition: observations, action, and what follows under ``next``."""
    observations = list(env.observation_spec.keys(True, True))
    after = [*observations, *env.reward_keys, *env.done_keys]
    return [*observations, *env.action_keys, *(("next", key) for key in after)]


def row_keys(env: EnvBase) -> list[Any]:
    """Return the keys of a row of the replay: those of a transition, and its trajectory id."""
    return [*transition_keys(env), TRAJECTORIES]
