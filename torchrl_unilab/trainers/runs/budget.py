"""What a run of some settings needs, known before any of it is allocated.

`RunSizes` measures one transition and the networks. From them and the settings the items are
sums of what each resource says of its own bytes. Nothing is allocated. `Run` refuses what does
not fit; `plan_run` shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.objectives import LossModule

from torchrl_unilab.checks import as_integer
from torchrl_unilab.collectors.metrics import SharedMetrics
from torchrl_unilab.collectors.replay import row_keys
from torchrl_unilab.collectors.worker import example_rollout, reward_terms
from torchrl_unilab.configs import APPOConfig, Config, OffPolicyConfig
from torchrl_unilab.data.pipeline.pipeline import SLOTS
from torchrl_unilab.data.replay.form import RowForm
from torchrl_unilab.data.replay.gather import batch_nbytes
from torchrl_unilab.data.schema import TensorSchema, leaves
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.limits import available_cores, available_memory, local_ranks
from torchrl_unilab.runtime.budget import (
    MemoryBudget,
    MemoryItem,
    MemoryLimit,
    Place,
    ThreadPlan,
    plan_threads,
)
from torchrl_unilab.shm.layout import BlockLayout, dotted
from torchrl_unilab.shm.ring import RolloutRing
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.segment import free_bytes, named_by_default, named_directory
from torchrl_unilab.shm.seqlock import SnapshotCell
from torchrl_unilab.weight_update.module_weights import named_tensors

PROCESS_BYTES = 300 << 20
"""Private memory of a process with Python, torch and TorchRL: 285 to 310 MiB measured on Linux."""
ENVIRONMENT_BYTES = 16 << 10
"""Of one environment of a batch: 8 KiB measured for Humanoid-v5, and its steps."""
LOCK_BYTES = 64 << 10
"""Of locks and counters of Python's own, each on a page of the shared-memory mount."""


@dataclass(frozen=True)
class RunSizes:
    """What determines the size of a run, besides its settings.

    Attributes:
        frame: Dotted key to one frame of a rollout, shapes and dtypes.
        transition: One row of the replay, shapes and dtypes.
        snapshot: The published weights.
        weights: Bytes of all networks' parameters and buffers.
        trained: Bytes of the parameters that have gradients.
        device: The learner's.
        metrics: How many metrics collectors publish besides their own.
    """

    frame: Mapping[str, torch.Tensor]
    transition: TensorDictBase
    snapshot: BlockLayout
    weights: int
    trained: int
    device: torch.device
    metrics: int = 0

    @classmethod
    def of(cls, env: EnvBase, actor: TensorDictModuleBase, loss: LossModule) -> RunSizes:
        """Measure an environment of any batch size, which is stepped once, and the networks."""
        frame = example_rollout(env, actor, 1).reshape(-1)[0].to("meta")
        held = {t.data_ptr(): t.nbytes for t in (*loss.parameters(), *loss.buffers())}
        return cls(
            frame={dotted(path): leaf for path, leaf in leaves(frame).items()},
            transition=frame.select(*row_keys(env)),
            snapshot=BlockLayout.of(named_tensors(actor)),
            weights=sum(held.values()),
            trained=sum(p.nbytes for p in loss.parameters() if p.requires_grad),
            device=next(loss.parameters()).device,
            metrics=len(reward_terms(env)),
        )

    @property
    def learner(self) -> Place:
        """Where the learner's tensors lie."""
        return "private" if self.device.type == "cpu" else "device"

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame of a rollout."""
        return sum(leaf.nbytes for leaf in self.frame.values())


@dataclass(frozen=True)
class RunBudget:
    """Threads and memory of a run, and what is free.

    Attributes:
        threads: The threads of each process.
        memory: All that the run allocates, and the limits.
    """

    threads: ThreadPlan
    memory: MemoryBudget

    @classmethod
    def of(cls, config: Config, sizes: RunSizes, own: Sequence[MemoryItem]) -> RunBudget:
        """Add up a run, with its algorithm's `own` items: `ring_items` or `replay_items`."""
        items = (*own, *_common_items(config, sizes))
        return cls(run_threads(config), MemoryBudget(items, memory_limits(sizes.device)))

    def __str__(self) -> str:
        """Return threads and memory as lines of text."""
        return f"threads: {self.threads}\nmemory:\n{self.memory.table()}"

    def as_dict(self) -> dict[str, Any]:
        """Return threads and memory as plain data; sizes in bytes."""
        return {"threads": dataclasses.asdict(self.threads), "memory": self.memory.as_dict()}

    def refusal(self) -> str | None:
        """Return why the run cannot start, with its largest item; None if it can."""
        return self.memory.refusal()

    def check(self) -> None:
        """Refuse a run that does not fit.

        Raises:
            ConfigError: With the breakdown, and the settings to lower.
        """
        if refusal := self.refusal():
            raise ConfigError(f"{refusal}\n{self.memory.table()}")


def check_frames(frames: int, config: Config, ranks: int = 1, name: str = "frames") -> None:
    """Refuse what is no number of frames, and fewer than the first update needs."""
    remedy = "Set the frames to collect, of all ranks together."
    as_integer(name, frames, remedy)
    if isinstance(config, OffPolicyConfig):
        remedy = "The first update needs so many: raise it, or lower learning_starts or batch_size."
    as_integer(name, frames, remedy, least=config.min_frames * ranks)


def run_threads(config: Config) -> ThreadPlan:
    """Share this process's cores out among learner and collectors."""
    cores = available_cores()
    learner = config.learner_threads or min(2, cores)
    return plan_threads(cores, config.num_collectors, config.physics_threads, learner)


def memory_limits(device: torch.device) -> tuple[MemoryLimit, ...]:
    """Return what is free now: memory, the mount of shared segments, the learner's device.

    Segments without a name are bounded by memory alone, not by the mount. Ranks of one machine
    share memory and mount, and have a device each.
    """
    ranks = local_ranks()
    limits = [MemoryLimit("memory", available_memory() // ranks, ("shared", "private"))]
    if named_by_default():
        name = f"shared-memory mount {named_directory()}"
        limits.insert(0, MemoryLimit(name, free_bytes(named=True) // ranks, ("shared",)))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        limits.append(MemoryLimit(str(device), free, ("device",)))
    return tuple(limits)


def _estimate(name: str, place: Place, nbytes: int, *settings: str) -> MemoryItem:
    return MemoryItem(name, place, nbytes, settings, estimate=True)


EVALUATION_ITEMS = (_estimate("evaluation's process (eval_interval)", "private", PROCESS_BYTES),)
"""What a run takes that evaluates while it trains."""


def _common_items(config: Config, sizes: RunSizes) -> list[MemoryItem]:
    """Return what every run allocates, except pipes, logs, and what the final evaluation takes."""
    workers = config.num_collectors
    published = SnapshotCell.nbytes(sizes.snapshot, readers=workers)
    metrics = SharedMetrics.nbytes(workers, sizes.metrics)
    policies = workers * sizes.snapshot.nbytes
    envs = workers * config.num_envs * ENVIRONMENT_BYTES
    learnt = sizes.weights + 3 * sizes.trained
    return [
        MemoryItem("weight snapshots", "shared", published, ("hidden",)),
        MemoryItem("collectors' metrics", "shared", metrics, ("num_collectors",), segments=workers),
        _estimate("locks", "shared", LOCK_BYTES, "num_collectors"),
        _estimate("networks, gradients, Adam", sizes.learner, learnt, "hidden"),
        _estimate("collectors' policies", "private", policies, "hidden", "num_collectors"),
        _estimate("environments", "private", envs, "num_envs"),
        # The learner's process has what it needs by now.
        _estimate("collectors' processes", "private", workers * PROCESS_BYTES, "num_collectors"),
    ]


def ring_items(config: APPOConfig, sizes: RunSizes) -> list[MemoryItem]:
    """Return what APPO allocates besides what every run does."""
    workers, frames = config.num_collectors, config.frames_per_rollout
    rollout = frames * sizes.frame_bytes
    layout = BlockLayout.of_specs(
        (key, (frames, *leaf.shape), leaf.dtype) for key, leaf in sizes.frame.items()
    )
    slots = 1 if config.slots is None else -(-config.slots // workers)  # per collector
    ring = RolloutRing.nbytes(layout, slots, workers)
    by, place = ("num_steps", "num_envs"), sizes.learner
    return [
        MemoryItem("rollout ring", "shared", ring, ("slots", *by)),
        # At most: the pool leaves out what the loss does not read.
        _estimate("rollout pool", place, config.pool * rollout, "pool", *by),
        # The copy that leaves the ring; then estimates and shuffled minibatches of the pool.
        MemoryItem("rollout copy", "private", rollout, by),
        _estimate("learner's working copies", place, 2 * config.pool * rollout, "pool", *by),
        _estimate("collectors' steps", "private", workers * rollout, *by),
    ]


def replay_items(config: OffPolicyConfig, sizes: RunSizes) -> list[MemoryItem]:
    """Return what SAC and TD3 allocate besides what every run does."""
    form = RowForm.of(TensorSchema.of(sizes.transition), config.n_step)
    shards = config.num_collectors
    replay = SharedRows.nbytes(form.layout.widths, shards, config.capacity // shards)
    batch = batch_nbytes(form, config.batch_size * config.updates_per_step)
    steps = 2 * config.frames_per_tick * sizes.frame_bytes
    by = ("batch_size", "updates_per_step")
    on_device = sizes.learner == "device"
    slots = "batch slots, page-locked" if on_device else "batch slots"
    return [
        MemoryItem("packed replay", "shared", replay, ("replay_buffer_n", "num_envs")),
        MemoryItem(slots, "private", SLOTS * batch, by),
        *([MemoryItem("batch slots", "device", SLOTS * batch, by)] if on_device else []),
        _estimate("learner's working copies", sizes.learner, 2 * batch, *by),
        _estimate("collectors' steps", "private", steps, "env_steps_per_sync", "num_envs"),
    ]
