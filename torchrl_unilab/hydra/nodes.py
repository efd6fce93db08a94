"""Our parts as structured configs, in the groups that TorchRL registers its own in.

Each node has the fields of its target's signature, and those that TorchRL's own YAML files set on
the stock part in its place; a test compares them. The nodes of settings are made from the
settings. `register` stores them all.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from torchrl_unilab.configs import SETTINGS
from torchrl_unilab.configs.settings import Settings


@dataclass
class _Node:
    """Base of the nodes. Hydra calls their target at once, or returns a partial of it."""

    _partial_: bool = False


def _float32() -> dict[str, str]:
    return {"_target_": "hydra.utils.get_object", "path": "torch.float32"}


@dataclass
class MujocoBatchEnvNode(_Node):
    """`MujocoBatchEnv`."""

    task: str = MISSING
    num_envs: int | None = 64
    num_threads: int | None = None
    seed: int | None = None
    max_episode_steps: int | None = None
    device: Any = None
    dtype: Any = field(default_factory=_float32)
    with_reward_terms: bool = False
    randomization: Any = None
    stagger: bool = False
    from_pixels: bool = False
    pixels_only: bool = True
    render_width: int = 320
    render_height: int = 240
    render_camera: Any = None
    render_ids: Any = None
    _convert_: str = "all"  # for `randomization`: a sequence of objects
    _target_: str = "torchrl_unilab.envs.MujocoBatchEnv"


@dataclass
class UniLabShmSchemeNode(_Node):
    """`UniLabShmScheme`."""

    strategy: str = "tensordict"
    sync: bool = True
    per_worker_weights: bool = False
    pull: str = "rollout"
    slots: int = 3
    first_version: int = 0
    _target_: str = "torchrl_unilab.weight_update.UniLabShmScheme"


@dataclass
class PackedReplayStorageNode(_Node):
    """`PackedReplayStorage`, with the arguments of TorchRL's storages."""

    max_size: int = MISSING
    example: Any = None
    writers: int = 1
    n_step: int = 1
    gamma: float = 0.99
    observation_keys: Any = None
    non_finite: str = "refuse"
    timeout: float = 10.0
    device: Any = "cpu"
    ndim: int = 1
    compilable: bool = False
    consolidated: bool = False
    shared_init: bool = False
    cleanup_memmap: bool = True
    scratch_dir: Any = None
    existsok: bool = False
    auto_cleanup: Any = None
    _target_: str = "torchrl_unilab.data.PackedReplayStorage"


@dataclass
class PackedReplayWriterNode(_Node):
    """`PackedReplayWriter`."""

    compilable: bool = False
    _target_: str = "torchrl_unilab.data.PackedReplayWriter"


@dataclass
class PackedPrioritizedSamplerNode(_Node):
    """`PackedPrioritizedSampler`."""

    max_capacity: int = MISSING
    alpha: float = MISSING
    beta: float = MISSING
    eps: float = 1e-8
    dtype: Any = field(default_factory=_float32)
    reduction: str = "max"
    max_priority_within_buffer: bool = False
    device: Any = None
    _target_: str = "torchrl_unilab.data.PackedPrioritizedSampler"


@dataclass
class PackedSliceSamplerNode(_Node):
    """`PackedSliceSampler`."""

    num_slices: int | None = None
    slice_len: int | None = None
    end_key: Any = None
    end_keys: Any = None
    traj_key: Any = None
    step_key: Any = "step_count"
    fragmented: bool = False
    ends: Any = None
    trajectories: Any = None
    cache_values: bool = False
    truncated_key: Any = ("next", "truncated")
    init_key: Any = "is_init"
    strict_length: bool = True
    pad_output: bool = False
    compile: Any = False
    span: Any = False
    use_gpu: Any = False
    _target_: str = "torchrl_unilab.data.PackedSliceSampler"


@dataclass
class RolloutRingStorageNode(_Node):
    """`RolloutRingStorage`."""

    slots: int = 4
    example: Any = None
    writers: int = 1
    overflow: str = "overwrite"
    timeout: float | None = 60.0
    _target_: str = "torchrl_unilab.data.RolloutRingStorage"


@dataclass
class RolloutRingWriterNode(_Node):
    """`RolloutRingWriter`."""

    compilable: bool = False
    _target_: str = "torchrl_unilab.data.RolloutRingWriter"


@dataclass
class RolloutRingSamplerNode(_Node):
    """`RolloutRingSampler`."""

    take: str = "oldest"
    timeout: float = 0.0
    _target_: str = "torchrl_unilab.data.RolloutRingSampler"


@dataclass
class ActionDelayNode(_Node):
    """`ActionDelay`."""

    delay: Any = MISSING
    before: Any = 0.0
    in_keys_inv: Any = ("action",)
    _target_: str = "torchrl_unilab.envs.ActionDelay"


@dataclass
class ObservationDelayNode(_Node):
    """`ObservationDelay`."""

    delay: Any = MISSING
    in_keys: Any = ("observation",)
    _target_: str = "torchrl_unilab.envs.ObservationDelay"


@dataclass
class ObservationNoiseNode(_Node):
    """`ObservationNoise`."""

    std: Any = MISSING
    in_keys: Any = ("observation",)
    _target_: str = "torchrl_unilab.envs.ObservationNoise"


@dataclass
class _WorkersNode:
    """Arguments of both collectors; under our trainers None leaves one to the settings."""

    create_env_fn: Any = None
    policy: Any = None
    frames_per_batch: int | None = None
    total_frames: int | None = None
    num_workers: int | None = None
    weight_sync_schemes: Any = None
    lockstep: bool | None = None
    inline: bool | None = None
    num_threads: int | None = None
    exploration_type: Any = None
    seed: int | None = None
    timeout: float | None = None
    restart_workers: int | None = None
    policy_device: Any = None
    measure: Any = None
    worker_idx: int | None = None
    policy_factory: Any = None
    _partial_: bool = True


@dataclass
class APPOCollectorNode(_WorkersNode):
    """`APPOCollector`."""

    slots: int | None = None
    overflow: str | None = None
    max_policy_lag: int | None = None
    use_buffers: bool | None = None
    _target_: str = "torchrl_unilab.hydra.factories.make_appo_collector"


@dataclass
class ReplayCollectorNode(_WorkersNode):
    """`ReplayCollector`."""

    capacity: int | None = None
    init_random_frames: int | None = None
    explore: Any = None
    replay: Any = None
    _target_: str = "torchrl_unilab.hydra.factories.make_replay_collector"


@dataclass
class EpisodeReturnsNode(_Node):
    """`EpisodeReturns`."""

    window: int = 64
    _target_: str = "torchrl_unilab.trainers.EpisodeReturns"


@dataclass
class TrainerNode:
    """What our trainers take, by the names of TorchRL's nodes."""

    config: Any = MISSING
    create_env_fn: Any = None
    collector: Any = None
    total_frames: int = MISSING
    logger: Any = None
    seed: int = 0
    progress_bar: bool = True
    save_trainer_file: Any = None
    save_trainer_interval: int = 10000
    log_interval: int = 10000
    log_timings: bool = False
    auto_log_optim_steps: bool = True
    checkpoint: Any = None
    checkpoint_rotation: Any = None
    checkpoint_metadata: Any = None
    hooks: Any = None


_REFUSED = """
    frame_skip loss_module optimizer replay_buffer actor_network critic_network target_net_updater
    optim_steps_per_batch batch_size clip_grad_norm clip_norm async_collection
    enable_logging log_rewards log_actions log_observations
    done_key terminated_key reward_key episode_reward_key action_key observation_key
"""
"""Further fields of the nodes of TorchRL's trainers, for which ours accept only None."""


def _trainer_node(target: str, refused: str) -> type:
    """Return the node of a trainer, with further fields of the node in whose place it is."""
    return dataclasses.make_dataclass(
        "TrainerNode",
        [
            *((name, Any, field(default=None)) for name in (_REFUSED + refused).split()),
            ("_target_", str, field(default=f"torchrl_unilab.hydra.factories.{target}")),
        ],
        bases=(TrainerNode,),
    )


def _settings_node(name: str, kind: type[Settings]) -> type:
    """Return the node of an algorithm's settings, in which None leaves one to the task."""
    types = typing.get_type_hints(kind)
    checked: Mapping[Any, Any] = {bool: bool | None, int: int | None, float: float | None}
    constants = [
        ("algorithm", str, field(default=name)),
        ("_target_", str, field(default="torchrl_unilab.hydra.factories.make_settings")),
        ("task", str, field(default="")),
    ]
    settings = [
        (each.name, checked.get(types[each.name], Any), field(default=None))
        for each in dataclasses.fields(kind)
        if each.name != "algorithm" and each.metadata["of"] in (None, name)
    ]
    return dataclasses.make_dataclass(f"{name.upper()}SettingsNode", [*constants, *settings])


NODES: Mapping[tuple[str, str], type] = {
    ("env", "mujoco_batch"): MujocoBatchEnvNode,
    ("transform", "action_delay"): ActionDelayNode,
    ("transform", "observation_delay"): ObservationDelayNode,
    ("transform", "observation_noise"): ObservationNoiseNode,
    ("weight_sync_scheme", "unilab_shm"): UniLabShmSchemeNode,
    ("storage", "packed_replay"): PackedReplayStorageNode,
    ("writer", "packed_replay"): PackedReplayWriterNode,
    ("sampler", "packed_prioritized"): PackedPrioritizedSamplerNode,
    ("sampler", "packed_slice"): PackedSliceSamplerNode,
    ("storage", "rollout_ring"): RolloutRingStorageNode,
    ("writer", "rollout_ring"): RolloutRingWriterNode,
    ("sampler", "rollout_ring"): RolloutRingSamplerNode,
    ("collector", "appo"): APPOCollectorNode,
    ("collector", "replay"): ReplayCollectorNode,
    ("hook", "episode_returns"): EpisodeReturnsNode,
    # In the places of TorchRL's OnPolicyTrainerConfig and SACTrainerConfig.
    ("trainer", "appo"): _trainer_node(
        "make_appo_trainer", "num_epochs add_gae gae lr_scheduler weight_update_map gamma lmbda"
    ),
    ("trainer", "off_policy"): _trainer_node(
        "make_off_policy_trainer", "learner_backend learner_backend_options learner_poll_interval"
    ),
    **{
        ("settings", name): _settings_node(name, algorithm.kind)
        for name, algorithm in SETTINGS.items()
    },
}
"""Structured configs by group and name."""


def register() -> None:
    """Store all nodes in Hydra's ConfigStore.

    Examples:
        >>> from hydra.core.config_store import ConfigStore
        >>> from torchrl_unilab.hydra.nodes import register
        >>> register()
        >>> "appo.yaml" in ConfigStore.instance().list("trainer")
        True
    """
    store = ConfigStore.instance()
    for (group, name), node in NODES.items():
        store.store(group=group, name=name, node=node, provider="torchrl-unilab")
