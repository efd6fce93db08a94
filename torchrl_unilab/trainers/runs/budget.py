"""What a run of some settings needs, known before any of it is allocated.

`RunForm` measures one transition and the networks. From it and the settings, `memory_items`
is arithmetic: it asks the segments' own size functions and allocates nothing, so that other
settings are tried by computing them.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_unilab.collectors.metrics import PHASES, WINDOW
from torchrl_unilab.collectors.replay import transition_keys
from torchrl_unilab.collectors.rollout_worker import example_rollout
from torchrl_unilab.data.packed_form import RowForm
from torchrl_unilab.data.packed_sampling import RowGatherer
from torchrl_unilab.data.packers import SLOTS
from torchrl_unilab.data.rollout_form import named_leaves
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.runtime import ThreadPlan, available_cores, plan_threads
from torchrl_unilab.runtime.budget import (
    MemoryBudget,
    MemoryItem,
    MemoryLimit,
    Place,
    available_memory,
    readable,
)
from torchrl_unilab.shm.layout import BlockLayout
from torchrl_unilab.shm.ring import ring_nbytes
from torchrl_unilab.shm.row_store import RowStore
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.segment import default_kind, free_bytes, named_directory
from torchrl_unilab.shm.seqlock import DEFAULT_SLOTS, cell_nbytes
from torchrl_unilab.trainers.configs.appo import APPOConfig
from torchrl_unilab.trainers.configs.off_policy import OffPolicyConfig
from torchrl_unilab.trainers.learners import Learner, build_learner
from torchrl_unilab.weight_update.transport import named_tensors

__all__ = [
    "RunBudget",
    "RunForm",
    "check_memory",
    "memory_items",
    "memory_limits",
    "plan_run",
    "run_threads",
]

Config: TypeAlias = APPOConfig | OffPolicyConfig

PROCESS_BYTES = 300 << 20
"""Private memory of a process with Python, torch and TorchRL: 285 to 310 MiB measured on Linux."""
ENVIRONMENT_BYTES = 16 << 10
"""Of one environment of a batch: 8 KiB measured for Humanoid-v5, and its steps."""
LOCK_BYTES = 64 << 10
"""Of locks and counters of Python's own, each on a page of the shared-memory mount."""


@dataclass(frozen=True)
class RunForm:
    """What there is to know of a task and its networks to compute the size of a run.

    Attributes:
        rollout: Dotted key to one frame of a rollout, shapes and dtypes.
        transition: One row of the replay, shapes and dtypes.
        snapshot: The published weights.
        weights: Bytes of all networks' parameters and buffers.
        trained: Bytes of the parameters that have gradients.
        device: Where the learner is.
    """

    rollout: Mapping[str, torch.Tensor]
    transition: TensorDictBase
    snapshot: BlockLayout
    weights: int
    trained: int
    device: torch.device

    @classmethod
    def of(cls, env: EnvBase, learner: Learner) -> RunForm:
        """Measure one environment, which is reset and stepped once, and what is to be learnt.

        Args:
            env: One of the run's, of any batch size.
            learner: Networks and loss.
        """
        frame = example_rollout(env, learner.actor, 1).reshape(-1)[0].to("meta")
        loss = learner.loss
        held = {t.data_ptr(): t.nbytes for t in (*loss.parameters(), *loss.buffers())}
        return cls(
            rollout=named_leaves(frame),
            transition=frame.select(*transition_keys(env)),
            snapshot=BlockLayout.of(named_tensors(learner.actor)),
            weights=sum(held.values()),
            trained=sum(p.nbytes for p in loss.parameters() if p.requires_grad),
            device=next(loss.parameters()).device,
        )

    def rollout_layout(self, frames: int) -> BlockLayout:
        """Lay out a slot of the ring for rollouts of `frames` frames."""
        return BlockLayout.of_specs(
            (key, (frames, *leaf.shape), leaf.dtype) for key, leaf in self.rollout.items()
        )

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        return sum(leaf.nbytes for leaf in self.rollout.values())


def run_threads(config: Config) -> ThreadPlan:
    """Share this process's cores out among learner and collectors.

    Raises:
        ConfigError: A count is not positive.
    """
    cores = available_cores()
    learner = 1
    if isinstance(config, OffPolicyConfig):
        learner = cores if config.learner_threads is None else config.learner_threads
    return plan_threads(cores, config.num_collectors, config.physics_threads, learner)


def memory_items(config: Config, form: RunForm) -> tuple[MemoryItem, ...]:
    """Return what a run allocates. Allocates nothing itself.

    Not in it: pipes, logs, and what the final evaluation takes when the collectors have ended.

    Raises:
        ConfigError: The settings do not fit each other.
    """
    workers = config.num_collectors
    metrics = BlockLayout.of_specs(
        [
            ("frames", (), torch.int64),
            ("trajectories", (), torch.int64),
            ("episodes", (), torch.int64),
            ("seconds", (len(PHASES),), torch.float64),
            ("last", (WINDOW, 3), torch.float64),
        ]
    )
    on_device: Place = "private" if form.device.type == "cpu" else "device"
    if isinstance(config, APPOConfig):
        specific = _appo_items(config, form, on_device)
    else:
        specific = _off_policy_items(config, form, on_device)
    hidden, collectors = ("hidden",), ("num_collectors",)
    items = [
        *specific,
        MemoryItem(
            "weight snapshots",
            "shared",
            cell_nbytes(form.snapshot, DEFAULT_SLOTS, workers),
            hidden,
        ),
        MemoryItem(
            "collectors' metrics",
            "shared",
            workers * cell_nbytes(metrics, DEFAULT_SLOTS, 0),
            segments=workers,
        ),
        MemoryItem("locks", "shared", LOCK_BYTES, estimate=True),
        MemoryItem(
            "networks, gradients, Adam",
            on_device,
            form.weights + 3 * form.trained,
            hidden,
            estimate=True,
        ),
        MemoryItem(
            "collectors' policies",
            "private",
            workers * form.snapshot.nbytes,
            hidden + collectors,
            estimate=True,
        ),
        MemoryItem(
            "environments",
            "private",
            workers * config.num_envs * ENVIRONMENT_BYTES,
            ("num_envs",),
            estimate=True,
        ),
        MemoryItem(
            "collectors' processes",  # the learner's has what it needs by now
            "private",
            workers * PROCESS_BYTES,
            collectors,
            estimate=True,
        ),
    ]
    return tuple(items)


def _appo_items(config: APPOConfig, form: RunForm, on_device: Place) -> list[MemoryItem]:
    workers = config.num_collectors
    rollout = config.frames_per_rollout * form.frame_bytes
    slots = workers if config.slots is None else config.slots
    sizes = ("num_steps", "num_envs")
    return [
        MemoryItem(
            "rollout ring",
            "shared",
            ring_nbytes(form.rollout_layout(config.frames_per_rollout), slots, workers),
            ("slots", *sizes),
        ),
        MemoryItem("rollout counts", "shared", 8 * (4 + 3 * workers)),
        # At most: the pool leaves out what the loss does not read.
        MemoryItem(
            "rollout pool", on_device, config.pool * rollout, ("pool", *sizes), estimate=True
        ),
        # The copy that leaves the ring; then estimates and shuffled minibatches of the pool.
        MemoryItem("rollout copy", "private", rollout, sizes),
        MemoryItem(
            "learner's working copies",
            on_device,
            2 * config.pool * rollout,
            ("pool", *sizes),
            estimate=True,
        ),
        MemoryItem("collectors' steps", "private", workers * rollout, sizes, estimate=True),
    ]


def _off_policy_items(config: OffPolicyConfig, form: RunForm, on_device: Place) -> list[MemoryItem]:
    store, row_form = _row_store(config, form)
    count = config.batch_size * config.updates_per_step
    # A gatherer's sizes depend on the layout alone, which the store has too.
    gatherer = RowGatherer(cast(SharedRows, store), row_form, config.n_step, config.gamma)
    batch = gatherer.nbytes(count)
    sizes = ("batch_size", "updates_per_step")
    items = [
        MemoryItem("packed replay", "shared", store.nbytes, ("replay_buffer_n", "num_envs")),
        MemoryItem(
            "batch slots" if on_device == "private" else "batch slots, page-locked",
            "private",
            SLOTS * batch,
            sizes,
        ),
    ]
    if on_device == "device":
        items.append(MemoryItem("batch slots", "device", SLOTS * batch, sizes))
    return [
        *items,
        MemoryItem("learner's working copies", on_device, 2 * batch, sizes, estimate=True),
        MemoryItem(
            "collectors' steps",
            "private",
            2 * config.frames_per_tick * form.frame_bytes,
            ("env_steps_per_sync", "num_envs"),
            estimate=True,
        ),
    ]


def _row_store(config: OffPolicyConfig, form: RunForm) -> tuple[RowStore, RowForm]:
    """The replay's parts, as `PackedReplayStorage` has them by the collector's settings."""
    derived = config.next_observation == "derived"
    row_form = RowForm.of(form.transition, links=derived or config.n_step > 1, derived=derived)
    finals = min(config.capacity, config.capacity // 64 + 256) if derived else 0
    meta = len(json.dumps(row_form.to_json()).encode())
    layout = row_form.layout(config.capacity + 1 + finals)
    return RowStore(layout, config.capacity, config.num_collectors, finals, meta), row_form


def memory_limits(device: torch.device | str = "cpu") -> tuple[MemoryLimit, ...]:
    """Return what is free now: memory, the mount of shared segments, the learner's device.

    Segments without a name are bounded by memory alone, not by the mount.
    """
    device = torch.device(device)
    limits = [MemoryLimit("memory", available_memory(), ("shared", "private"))]
    if default_kind() == "named":
        name = f"shared-memory mount {named_directory()}"
        limits.insert(0, MemoryLimit(name, free_bytes("named"), ("shared",)))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        limits.append(MemoryLimit(str(device), free, ("device",)))
    return tuple(limits)


@dataclass(frozen=True)
class RunBudget:
    """Threads and memory of a run, beside what there is.

    Attributes:
        config: The run's settings.
        form: What its sizes follow from.
        limits: What is free.
    """

    config: Config
    form: RunForm
    limits: tuple[MemoryLimit, ...]

    @property
    def threads(self) -> ThreadPlan:
        """Who gets which threads."""
        return run_threads(self.config)

    @property
    def memory(self) -> MemoryBudget:
        """Who takes which memory."""
        return MemoryBudget(memory_items(self.config, self.form), self.limits)

    def __str__(self) -> str:
        """Return threads and memory as lines for a person."""
        return f"threads: {self.threads}\nmemory:\n{self.memory.table()}"

    def as_dict(self) -> dict[str, Any]:
        """Return threads and memory as plain data; sizes in bytes."""
        return {"threads": dataclasses.asdict(self.threads), "memory": self.memory.as_dict()}

    def refusal(self) -> str | None:
        """Return why the run cannot start and which setting to lower; None if it can."""
        memory = self.memory
        if not memory.exceeded:
            return None
        limit = memory.exceeded[0]  # its remedy is for all of them
        return (
            f"memory of the run: {readable(memory.needed(limit))} do not fit {limit.name} "
            f"(expected at most {readable(limit.nbytes)}, which is free). {self._remedy(limit)}"
        )

    def check(self) -> None:
        """Refuse a run that does not fit.

        Raises:
            ConfigError: With the breakdown, and the setting to lower.
        """
        refusal = self.refusal()
        if refusal is not None:
            raise ConfigError(f"{refusal}\n{self.memory.table()}")

    def _remedy(self, limit: MemoryLimit) -> str:
        tried = dict.fromkeys(s for item in self.memory.under(limit) for s in item.settings)
        for setting in tried:
            most = self._most(setting)
            if most is not None:
                now = getattr(self.config, setting)
                return f"Lower {setting} from {now} to {most}, with which the run fits."
        larger = "enlarge the mount" if limit.places == ("shared",) else "make room"
        return (
            f"No one setting alone makes it fit: lower several ({', '.join(tried)}), or {larger}."
        )

    def _most(self, setting: str) -> int | None:
        """The largest value of a setting with which all fits, if there is one."""
        now = getattr(self.config, setting)
        if not isinstance(now, int):
            return None  # a default that follows others, or widths of layers
        low, high = self._least(setting), now - 1
        if low > high or not self._fits(setting, low):
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(setting, middle) else (low, middle - 1)
        return low

    def _least(self, setting: str) -> int:
        """The smallest value of a setting with which the others can work."""
        if setting == "slots":
            return self.config.num_collectors
        now = getattr(self.config, setting)
        return 1 + bisect_left(range(1, now), True, key=partial(self._works, setting))

    def _works(self, setting: str, value: int) -> bool:
        try:
            self._with(setting, value)
        except ConfigError:
            return False
        return True

    def _fits(self, setting: str, value: int) -> bool:
        changed = dataclasses.replace(self, config=self._with(setting, value))
        return not changed.memory.exceeded

    def _with(self, setting: str, value: int) -> Config:
        other: dict[str, Any] = {setting: value}
        return dataclasses.replace(self.config, **other)


def check_memory(config: Config, env: EnvBase, learner: Learner) -> None:
    """Refuse a run that does not fit the memory that is free, before it is allocated.

    Args:
        config: The run's settings.
        env: One of its environments.
        learner: What it learns.

    Raises:
        ConfigError: With the breakdown, and the setting to lower.
    """
    form = RunForm.of(env, learner)
    RunBudget(config, form, memory_limits(form.device)).check()


def plan_run(env: str, config: Config) -> RunBudget:
    """Return what a run on a task of `MujocoBatchEnv` would take, and what there is.

    One environment and the networks are made to know their shapes; nothing else.

    Args:
        env: The task.
        config: The run's settings.

    Raises:
        ValueError: Unknown task (lists what exists).

    Example:
        >>> budget = plan_run("HalfCheetah-v5", APPOConfig())
        >>> [item.name for item in budget.memory.items][0]
        'rollout ring'
    """
    proxy = MujocoBatchEnv(env, num_envs=1, num_threads=1)
    try:
        with torch.random.fork_rng(devices=[]):
            form = RunForm.of(proxy, build_learner(proxy, config))
    finally:
        proxy.close()
    return RunBudget(config, form, memory_limits(form.device))
