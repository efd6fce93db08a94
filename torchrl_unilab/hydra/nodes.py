"""Our parts as structured configs, in the groups that TorchRL registers its own in.

Each node has the arguments of what it instantiates, read from the signature, and those that
TorchRL's own YAML files set on the stock part in its place. `NodeSource` lists the nodes; one is
made, and torch imported, when a configuration names it.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.utils import get_class
from omegaconf import MISSING, OmegaConf

from torchrl_unilab.configs import SETTINGS

_FACTORIES = "torchrl_unilab.hydra.factories"

_TAKEN = """
    collector total_frames create_env_fn logger seed progress_bar save_trainer_file
    save_trainer_interval log_interval log_timings auto_log_optim_steps
    checkpoint checkpoint_rotation checkpoint_metadata hooks
"""
TAKEN = frozenset(_TAKEN.split())
"""Arguments of TorchRL's trainers that ours take; of the others, they accept only None."""


_PLAIN = (bool, int, float, str, bool | None, int | None, float | None, str | None)


def _node(target: str, values: Mapping[str, Any], hints: Mapping[str, Any], **hydra: Any) -> type:
    """Return the structured config of a target.

    Args:
        target: What it instantiates, by its dotted name.
        values: The default of each of its arguments.
        hints: Their types. Where one is a number, a flag or a text, Hydra refuses or converts
            others; the target checks the rest.
        **hydra: Hydra's own keys; without them it calls the target at once.
    """
    fields: list[tuple[str, Any, Any]] = []
    for name, value in ({**values, "_partial_": False, "_target_": target} | hydra).items():
        hint = hints.get(name)
        kind = (hint | None if value is None else hint) if hint in _PLAIN else Any
        as_dict = isinstance(value, dict)
        default = {"default_factory": partial(dict, value)} if as_dict else {"default": value}
        fields.append((name, kind, dataclasses.field(**default)))
    return dataclasses.make_dataclass("Node", fields)


def _arguments(target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the defaults and the types of a class's arguments."""
    kind: Any = get_class(target)
    _, *known = inspect.signature(kind.__init__).parameters.values()
    values = {
        each.name: MISSING if each.default is each.empty else each.default
        for each in known
        if each.kind is not each.VAR_KEYWORD
    }
    if "dtype" in values:
        values["dtype"] = {"_target_": "hydra.utils.get_object", "path": str(values["dtype"])}
    return values, typing.get_type_hints(kind.__init__)


def _part(target: str, nullable: Mapping[str, Any] | None = None, **hydra: Any) -> type:
    """Return the node of a class; `nullable` arguments may be None under our trainers."""
    values, hints = _arguments(target)
    return _node(target, values, {**hints, **(nullable or {})}, **hydra)


def _packed_replay(target: str) -> type:
    """Return the node of `PackedReplayStorage`, with the arguments of TorchRL's storages."""
    from torchrl_unilab.data.stock import STORAGE_ARGUMENTS

    values, hints = _arguments(target)
    stock = {name: accepted[0] for name, (accepted, _) in STORAGE_ARGUMENTS.items()}
    return _node(target, values | stock, hints)


def _collector(target: str, factory: str) -> type:
    """Return the node of a collector, in which None leaves an argument to the settings."""
    from torchrl_unilab.collectors.arguments import WorkerSettings

    hints = _arguments(target)[1] | typing.get_type_hints(WorkerSettings)
    hints["num_workers"] = hints.pop("num_collectors")  # TorchRL's name
    unset = dict.fromkeys(name for name in hints if name not in ("workers", "return"))
    return _node(f"{_FACTORIES}.{factory}", unset, hints, _partial_=True)


def _trainer(stock: str, factory: str) -> type:
    """Return the node of a trainer, in the place of a stock one; its own fields are `TAKEN`."""
    known: Any = get_class(f"torchrl.trainers.algorithms.configs.trainers.{stock}")
    fields = {each.name: each.default for each in dataclasses.fields(known)}
    fields.pop("_target_", None)
    own = {"config": MISSING, "total_frames": MISSING, "seed": 0}
    kept = {k: v for k, v in fields.items() if k in TAKEN and v is not dataclasses.MISSING}
    hints = {"total_frames": int, **{name: type(value) for name, value in kept.items()}}
    return _node(f"{_FACTORIES}.{factory}", {**dict.fromkeys(fields), **kept, **own}, hints)


def _settings(name: str) -> type:
    """Return the node of an algorithm's settings, in which None leaves one to the task."""
    kind = SETTINGS[name].kind
    names = [each.name for each in dataclasses.fields(kind) if each.metadata["of"] in (None, name)]
    values = {**dict.fromkeys(names), "algorithm": name, "task": ""}
    # Where None is a value, "none" is given for it.
    hints = {n: h for n, h in typing.get_type_hints(kind).items() if h in (bool, int, float)}
    return _node(f"{_FACTORIES}.make_settings", values, hints)


NODES: Mapping[str, Callable[[], type]] = {
    "env/mujoco_batch": partial(
        _part,
        "torchrl_unilab.envs.MujocoBatchEnv",
        nullable={"num_envs": int | None},  # then the settings say it
        _convert_="all",  # for `randomization`: a sequence of objects
    ),
    "transform/action_delay": partial(_part, "torchrl_unilab.envs.ActionDelay"),
    "transform/observation_delay": partial(_part, "torchrl_unilab.envs.ObservationDelay"),
    "transform/observation_noise": partial(_part, "torchrl_unilab.envs.ObservationNoise"),
    "weight_sync_scheme/unilab_shm": partial(_part, "torchrl_unilab.weight_update.UniLabShmScheme"),
    "storage/packed_replay": partial(_packed_replay, "torchrl_unilab.data.PackedReplayStorage"),
    "writer/packed_replay": partial(_part, "torchrl_unilab.data.PackedReplayWriter"),
    "sampler/packed_prioritized": partial(_part, "torchrl_unilab.data.PackedPrioritizedSampler"),
    "sampler/packed_slice": partial(_part, "torchrl_unilab.data.PackedSliceSampler"),
    "storage/rollout_ring": partial(_part, "torchrl_unilab.data.RolloutRingStorage"),
    "writer/rollout_ring": partial(_part, "torchrl_unilab.data.RolloutRingWriter"),
    "sampler/rollout_ring": partial(_part, "torchrl_unilab.data.RolloutRingSampler"),
    "collector/appo": partial(
        _collector, "torchrl_unilab.collectors.APPOCollector", "make_appo_collector"
    ),
    "collector/replay": partial(
        _collector, "torchrl_unilab.collectors.ReplayCollector", "make_replay_collector"
    ),
    "hook/episode_returns": partial(_part, "torchrl_unilab.trainers.EpisodeReturns"),
    "trainer/appo": partial(_trainer, "OnPolicyTrainerConfig", "make_appo_trainer"),
    "trainer/off_policy": partial(_trainer, "SACTrainerConfig", "make_off_policy_trainer"),
    **{f"settings/{name}": partial(_settings, name) for name in SETTINGS},
}
"""What makes each structured config, by group and name."""


class NodeSource(ConfigSource):
    """Where Hydra finds our nodes: they are listed by name, and made when they are loaded."""

    @staticmethod
    def scheme() -> str:
        """Return how addresses of this source begin."""
        return "torchrl-unilab"

    def available(self) -> bool:
        """Return True: the nodes are always there."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether there are nodes of a group."""
        return bool(_below(config_path))

    def is_config(self, config_path: str) -> bool:
        """Return whether there is a node of a name."""
        return config_path.removesuffix(".yaml") in NODES

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the nodes of a group; of no group, the groups."""
        below = _below(config_path)
        kind = ObjectType.GROUP if any("/" in name for name in below) else ObjectType.CONFIG
        found = {name.partition("/")[0] for name in below}
        return sorted(found) if results_filter in (None, kind) else []

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a node."""
        node = OmegaConf.structured(NODES[config_path.removesuffix(".yaml")]())
        return ConfigResult(self.provider, self.full_path(), node, header={"package": None})


def _below(group: str) -> list[str]:
    """Return the names of nodes relative to a group."""
    start = f"{group.strip('/')}/".lstrip("/")
    return [name.removeprefix(start) for name in NODES if name.startswith(start)]
