"""What the nodes of settings, collectors and trainers instantiate.

Hydra instantiates each ``${...}`` anew, so that a collector's policy and the loss's actor would be
two networks. Networks, loss and collector of our trainers therefore follow from one ``config``,
and the collector's node has what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_unilab.checks import as_choice, as_integer
from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.collectors.arguments import policy_scheme
from torchrl_unilab.collectors.worker import closing_env
from torchrl_unilab.configs import SETTINGS, APPOConfig, Config, OffPolicyConfig
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.hydra.nodes import TAKEN
from torchrl_unilab.trainers.arguments import check_arguments, leave_out
from torchrl_unilab.trainers.runs.budget import check_frames, run_threads
from torchrl_unilab.trainers.runs.builders import ALGORITHMS, build_learner, child_seeds
from torchrl_unilab.weight_update import UniLabShmScheme


def make_settings(algorithm: str, task: str = "", **values: Any) -> Config:
    """Return the settings of a task, with all values that are not None on top.

    The value ``"none"`` is None in place of the task's.

    Raises:
        ConfigError: There is no such setting, or a value cannot work.

    Examples:
        >>> from torchrl_unilab.hydra.factories import make_settings
        >>> make_settings("appo", "Swimmer-v5", epochs=3, gamma=None).gamma
        0.998
    """
    given = {name: None if v == "none" else v for name, v in _given(values).items()}
    try:
        known = as_choice("algorithm", algorithm, SETTINGS, "Choose one.")
        return SETTINGS[known].for_task(task, **given)
    except TypeError as error:  # an unknown setting
        raise ConfigError(str(error)) from None


def make_appo_collector(**arguments: Any) -> APPOCollector:
    """Return an `APPOCollector` from those arguments that are not None.

    ``num_workers`` is TorchRL's name for ``num_collectors``.
    """
    return APPOCollector(**_collector_arguments(arguments))


def make_replay_collector(**arguments: Any) -> ReplayCollector:
    """Return a `ReplayCollector` from those arguments that are not None."""
    return ReplayCollector(**_collector_arguments(arguments))


def make_appo_trainer(*, config: APPOConfig, **arguments: Any) -> Trainer:
    """Return an `APPOTrainer` with networks, loss and collector of its settings.

    Args:
        config: The settings.
        **arguments: ``create_env_fn`` makes a collector's environment; of a `MujocoBatchEnv`,
            what is None follows the settings, and ``stagger`` holds where either has it.
            ``collector`` is a partial with what differs from the settings, ``seed`` seeds as
            `train_appo` does, ``hooks`` are registered; the rest is TorchRL's.

    Raises:
        ConfigError: The settings are of another algorithm, or an argument has no meaning here;
            names what to set instead.
    """
    return _make_trainer("trainer=appo", APPOConfig, config, **arguments)


def make_off_policy_trainer(*, config: OffPolicyConfig, **arguments: Any) -> Trainer:
    """Return an `OffPolicyTrainer` with networks, loss and collector of its settings.

    Arguments and errors are those of `make_appo_trainer`.
    """
    return _make_trainer("trainer=off_policy", OffPolicyConfig, config, **arguments)


def _make_trainer(
    name: str,
    kind: type,
    config: Config,
    *,
    create_env_fn: Any = None,
    collector: Any = None,
    total_frames: int,
    seed: int = 0,
    hooks: Sequence[TrainerHookBase] | None = None,
    **others: Any,
) -> Trainer:
    passed = {name: value for name, value in others.items() if name in TAKEN}
    check_arguments(passed, config, kind)
    hooks = [] if hooks is None else hooks
    if not (isinstance(hooks, Sequence) and all(isinstance(h, TrainerHookBase) for h in hooks)):
        raise ConfigError(
            f"{name} hooks: {hooks!r} (expected a list of TorchRL's hooks). List them, as in "
            "trainer.hooks=[${h}]."
        )
    _refuse(name, [k for k, v in others.items() if v is not None and k not in TAKEN], kind)
    overrides = _overrides(name, collector, kind)
    create_env = _sized(overrides.pop("create_env_fn", None) or create_env_fn, config)
    if (frames := overrides.pop("total_frames", -1)) not in (-1, total_frames):
        raise ConfigError(
            f"collector.total_frames: {frames} with total_frames {total_frames} (expected null, or "
            "the same: the trainer ends with them). Set total_frames."
        )
    schemes = overrides.pop("weight_sync_schemes", None)
    scheme = policy_scheme(schemes or {"policy": UniLabShmScheme(pull=config.pull)})
    check_frames(total_frames, config, name="total_frames")
    seed = as_integer(f"{name} seed", seed, "Use 0, for example.", least=0)
    network_seed, acting_seed = child_seeds(seed, 2)
    torch.set_num_threads(run_threads(config).learner_threads)
    torch.manual_seed(network_seed)
    with closing_env(create_env()) as env:
        learner = build_learner(env, config)
    algorithm = ALGORITHMS[config.algorithm]
    collecting = algorithm.collector(
        create_env, learner.actor, scheme, config, acting_seed, **overrides
    )
    try:
        trainer: Trainer = algorithm.trainer(
            collector=collecting,
            loss_module=learner.loss,
            total_frames=total_frames,
            config=config,
            normalizers=learner.normalizers,
            scheme=scheme,
            seed=acting_seed,
            **passed,
        )
        for hook in hooks:
            hook.register(trainer)
    except BaseException:
        collecting.shutdown()
        raise
    return trainer


def _refuse(name: str, given: Sequence[str], kind: type) -> None:
    if given:
        raise ConfigError(
            f"{name}: {', '.join(given)} (expected null: networks, loss and collector follow "
            f"config). {leave_out(given, kind)}"
        )


def _refuse_seed(node: str, given: Mapping[str, Any]) -> None:
    if given.get("seed") is not None:
        raise ConfigError(
            f"{node}.seed: {given['seed']} (expected null: the trainer seeds it). Set the "
            "trainer's seed."
        )


def _overrides(name: str, collector: Any, kind: type) -> dict[str, Any]:
    """Return what a collector's node has, by the names of the collector's arguments."""
    if collector is None:
        return {}
    makes = make_appo_collector if kind is APPOConfig else make_replay_collector
    if not (isinstance(collector, partial) and collector.func is makes):
        what = type(collector) if isinstance(collector, BaseCollector) else collector
        what = what.func if isinstance(what, partial) else what
        what = getattr(what, "__name__", what)
        choice = "appo" if kind is APPOConfig else "replay"
        raise ConfigError(
            f"{name} collector: {what} (expected collector={choice}, with _partial_). Choose that, "
            "or leave it out."
        )
    if collector.keywords.get("policy") is not None:
        _refuse(name, ["policy"], kind)
    _refuse_seed("collector", collector.keywords)
    return _collector_arguments(collector.keywords)


def _collector_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    given = _given(arguments)
    if "num_workers" in given:
        given["num_collectors"] = given.pop("num_workers")
    return given


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _sized(create_env: Any, config: Config) -> Any:
    """Return what makes a collector's environment, of the size that the settings say."""
    if not callable(create_env):
        raise ConfigError(
            f"create_env_fn: {create_env!r} (expected what makes an environment). Give a node of "
            "the group env, with _partial_: true."
        )
    if isinstance(create_env, partial) and create_env.func is MujocoBatchEnv:
        given, threads = create_env.keywords, run_threads(config).physics_threads
        _refuse_seed("env", given)
        from_settings = {"num_envs": config.num_envs, "num_threads": threads}
        if given.get("num_envs") not in (None, config.num_envs):
            raise ConfigError(
                f"env.num_envs: {given['num_envs']} with settings.num_envs {config.num_envs} "
                "(expected null, or the same). Set settings.num_envs."
            )
        missing = {k: v for k, v in from_settings.items() if given.get(k) is None}
        stagger = config.stagger or bool(given.get("stagger"))
        return partial(create_env, **missing, stagger=stagger)
    return create_env
