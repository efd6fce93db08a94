"""Which arguments and settings our trainers take: refused are those that would have no effect.

A trainer takes what TorchRL's does, but what its settings (`torchrl_unilab.configs`) decide.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Number
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torchrl.trainers import Trainer

from torchrl_unilab.checks import as_instance
from torchrl_unilab.configs import APPOConfig, OffPolicyConfig
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.limits import launcher_env
from torchrl_unilab.trainers.runs.directory import check_can_be_made

_OURS = ("frame_skip", "num_epochs", "optim_steps_per_batch", "optimizer", "optimization_stepper")
"""Arguments of TorchRL's `Trainer` that our trainers pass themselves."""

_STOCK, _TYPES = inspect.signature(Trainer.__init__).parameters, get_type_hints(Trainer.__init__)
isclose = partial(math.isclose, rel_tol=1e-6)  # float32 beside float64
_PLAIN = (str, Number, Mapping, Sequence)  # other objects may do as well, as clients of loggers do

_UNSET: Mapping[str, tuple[object, ...]] = {
    name: (None, parameter.default) for name, parameter in _STOCK.items() if name not in _OURS
}
"""Values of each other argument of TorchRL's `Trainer` that count as not given."""

_COMMON_REPLACEMENTS: Mapping[str, str] = {
    "frame_skip": "",
    "optimization_stepper": "put what it does into the loss",
    "lr_scheduler": "set anneal in config",
    "actor_network": "set hidden in config",
    "critic_network": "set hidden in config",
    "target_net_updater": "set tau in config",
    "gamma": "set gamma in config",
    "learner_backend": "pass ranks to learn in several processes",
    "learner_backend_options": "",
    "learner_poll_interval": "",
}

REPLACEMENTS: Mapping[type, Mapping[str, str]] = {
    APPOConfig: {
        **_COMMON_REPLACEMENTS,
        "optimizer": "set lr in config",
        "replay_buffer": "set pool in config",
        "optim_steps_per_batch": "set minibatches in config",
        "batch_size": "set minibatches in config",
        "num_epochs": "set epochs in config",
        "lmbda": "set lambda_ in config",
        "clip_norm": "set max_grad_norm in config",
        "clip_grad_norm": "set max_grad_norm in config",
        "async_collection": "set lockstep in config",
    },
    OffPolicyConfig: {
        **_COMMON_REPLACEMENTS,
        "optimizer": "set lr_actor, lr_critic or lr_alpha in config",
        "replay_buffer": "rows are in the collector's replay; set replay_buffer_n in config",
        "optim_steps_per_batch": "set updates_per_step in config",
        "batch_size": "set batch_size in config",
        "num_epochs": "set updates_per_step in config",
        "clip_norm": "gradients are not clipped",
        "clip_grad_norm": "gradients are not clipped",
        "async_collection": "set sync_collection in config",
    },
}
"""What to do instead of giving arguments of TorchRL's trainers that ours do not take."""


def leave_out(names: Iterable[str], kind: type) -> str:
    """Return what to do instead of giving these arguments to the trainer of these settings."""
    remedies = {name: REPLACEMENTS[kind].get(name) for name in names}
    return f"Leave out {', '.join(f'{n} ({how})' if how else n for n, how in remedies.items())}."


def check_effect(config: Any, counts: Mapping[str, object], where: str) -> None:
    """Refuse settings that were changed, and that something else decides than the trainer.

    Args:
        config: The settings.
        counts: By the name of a setting, what counts.
        where: Where that is decided.

    Raises:
        ConfigError: Names one.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, value in counts.items():
        given = getattr(config, name)
        near = isinstance(given, float) and isinstance(value, float) and isclose(given, value)
        if given not in (value, defaults[name]) and not near:
            raise ConfigError(
                f"{name}: {given} in config (expected {value}, that of {where}, which counts). "
                f"Give {where} the same, or leave it out of config."
            )


def check_arguments(given: Mapping[str, object], config: object, kind: type) -> None:
    """Refuse settings of another algorithm, and stock arguments that cannot work or have no effect.

    Raises:
        ConfigError: Names them.
    """
    as_instance("config", config, kind, "Pass the settings of this algorithm.")
    own = [n for n, v in given.items() if n in REPLACEMENTS[kind] and v not in _UNSET.get(n, ())]
    if own:
        raise ConfigError(
            f"{', '.join(own)}: given (expected to follow from config). {leave_out(own, kind)}"
        )
    for name in [name for name in given if name in _TYPES and name not in REPLACEMENTS[kind]]:
        hints, value = get_args(_TYPES[name]) or [_TYPES[name]], given[name]
        kinds = [Integral if hint is int else get_origin(hint) or hint for hint in hints]
        if isinstance(value, _PLAIN) and not isinstance(value, tuple(kinds)):
            raise ConfigError(
                f"{name}: {value!r} (expected {_STOCK[name].annotation}). Correct it, or leave it "
                "out."
            )
    saved = given.get("save_trainer_file")
    if isinstance(saved, str | Path) and not launcher_env("RANK", 0):  # only rank 0 saves
        check_can_be_made(f"save_trainer_file {saved}", Path(saved).parent)
