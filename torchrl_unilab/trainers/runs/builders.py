"""Builds the parts of a run from its settings: `ALGORITHMS` is the registry.

`Run` takes environment, networks, collector and trainer from here; `plan_run` measures them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torchrl.envs import EnvBase
from torchrl.objectives import LossModule, SACLoss, TD3Loss

from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.collectors.arguments import CreateEnv, find_device
from torchrl_unilab.configs import APPOConfig, Config, OffPolicyConfig
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.limits import check_memory
from torchrl_unilab.modules import (
    ObservationNormalizer,
    PerEnvNoise,
    make_actor,
    make_critic,
    make_q_value,
    make_sac_actor,
    make_td3_actor,
)
from torchrl_unilab.modules.squashed import SquashedDeterministicActor
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.runtime.budget import MemoryItem
from torchrl_unilab.trainers.appo import LOSS_SETTINGS, APPOTrainer
from torchrl_unilab.trainers.off_policy import OffPolicyTrainer
from torchrl_unilab.trainers.runs.budget import (
    EVALUATION_ITEMS,
    RunBudget,
    RunSizes,
    replay_items,
    ring_items,
)
from torchrl_unilab.trainers.runs.environment import action_space, observation_sizes
from torchrl_unilab.weight_update import UniLabShmScheme

Loss = TypeVar("Loss", bound=LossModule, covariant=True)


@dataclass
class Learner(Generic[Loss]):
    """What is learned: the networks, and the loss over them.

    Attributes:
        normalizers: Observation key to normaliser.
        actor: What acts and is published.
        loss: Holds actor and critics.
    """

    normalizers: dict[str, ObservationNormalizer]
    actor: TensorDictModuleBase
    loss: Loss


def _network_arguments(
    env: EnvBase, config: Config, *, normalized: bool = True
) -> tuple[dict[str, ObservationNormalizer], dict[str, Any], dict[str, Any]]:
    """Return the normalisers, and the arguments that actor and critic have in common."""
    sizes = observation_sizes(env, config)
    widths = (min(sizes.values()), *config.hidden)
    needed = 3 * 4 * sum(map(mul, widths, config.hidden))  # actor, critic and a target at least
    check_memory(f"hidden {config.hidden}, networks", needed, "Lower it.")
    normalizers = {key: ObservationNormalizer(size) for key, size in sizes.items() if normalized}
    actor, critic = (
        {
            "observation_size": sizes[key],
            "in_key": key,
            "normalizer": normalizers.get(key),
            "hidden": config.hidden,
        }
        for key in (config.observation, config.critic_observation)
    )
    return normalizers, actor, critic


def build_appo(env: EnvBase, config: APPOConfig) -> Learner[APPOLoss]:
    """Return APPO's networks and loss."""
    normalizers, of_actor, of_critic = _network_arguments(env, config)
    action_space(env)
    of_actor |= {"log_std": config.log_std, "noise_correlation": config.noise_correlation}
    actor = make_actor(action_size=env.action_spec.shape[-1], **of_actor)
    critic = make_critic(**of_critic)
    loss = APPOLoss(actor, critic, **{name: getattr(config, name) for name in LOSS_SETTINGS})
    return Learner(normalizers, actor, loss)


def build_off_policy(env: EnvBase, config: OffPolicyConfig) -> Learner[LossModule]:
    """Return SAC's or TD3's networks and TorchRL's loss over them."""
    normalizers, of_actor, of_critic = _network_arguments(
        env, config, normalized=config.obs_normalization
    )
    space = action_space(env)
    low, high = (bound.reshape(-1, bound.shape[-1])[0] for bound in (space.low, space.high))
    make = make_sac_actor if config.algorithm == "sac" else make_td3_actor
    both: dict[str, Any] = {"action_size": len(low), "layer_norm": config.layer_norm}
    actor = make(low=low, high=high, **both, **of_actor)
    critic = make_q_value(**both, **of_critic)
    loss = _off_policy_loss(actor, critic, config, low, high)
    loss.make_value_estimator(gamma=config.gamma)
    return Learner(normalizers, actor, loss)


def _off_policy_loss(
    actor: Any, critic: Any, config: OffPolicyConfig, low: torch.Tensor, high: torch.Tensor
) -> LossModule:
    """Return TorchRL's loss, which counts in units of the environment's actions.

    SAC's target entropy is -1 per dimension of actions scaled to [-1, 1], and TD3's target noise is
    in halves of the action's range, whatever the bounds are: here they are converted.
    """
    reach, common = (high - low) / 2, {"num_qvalue_nets": 2, "loss_function": "l2"}
    if config.algorithm == "sac":
        # Scaling an action by its reach adds log(reach) to its entropy.
        entropy = float(reach.log().sum() - len(reach))
        return SACLoss(actor, critic, alpha_init=config.alpha, target_entropy=entropy, **common)
    loss = TD3Loss(actor, critic, bounds=(low, high), **common)
    noise = {"policy_noise": config.target_noise, "noise_clip": config.target_noise_clip}
    for name, value in noise.items():
        delattr(loss, name)  # a number for all dimensions; a buffer follows the device
        loss.register_buffer(name, value * reach, persistent=False)
    return loss


def ring_collector(
    create_env: CreateEnv,
    actor: TensorDictModuleBase,
    scheme: UniLabShmScheme,
    config: APPOConfig,
    seed: int,
    **overrides: Any,
) -> APPOCollector:
    """Return what collects an APPO run's rollouts."""
    arguments: dict[str, Any] = {
        "num_collectors": config.num_collectors,
        "frames_per_batch": config.frames_per_rollout,
        "weight_sync_schemes": {"policy": scheme},
        "slots": config.slots,
        "overflow": config.overflow,
        "max_policy_lag": config.max_policy_lag,
        "lockstep": config.lockstep,
        "seed": seed,
        "restart_workers": config.restart_workers,
        "policy_device": config.collector_device,
    }
    return APPOCollector(create_env, actor, **(arguments | overrides))


def replay_collector(
    create_env: CreateEnv,
    actor: TensorDictModuleBase,
    scheme: UniLabShmScheme,
    config: OffPolicyConfig,
    seed: int,
    **overrides: Any,
) -> ReplayCollector:
    """Return what fills a SAC or TD3 run's replay."""
    noise = partial(
        with_exploration_noise, std_min=config.noise_std_min, std_max=config.noise_std_max
    )
    arguments: dict[str, Any] = {
        "capacity": config.capacity,
        "num_collectors": config.num_collectors,
        "frames_per_batch": config.frames_per_tick,
        "init_random_frames": config.init_random_frames,
        "explore": noise if config.algorithm == "td3" else None,
        "weight_sync_schemes": {"policy": scheme},
        "lockstep": config.sync_collection,
        "seed": seed,
        "restart_workers": config.restart_workers,
        "policy_device": config.collector_device,
        "replay": {"n_step": config.n_step, "gamma": config.gamma},
    }
    return ReplayCollector(create_env, actor, **(arguments | overrides))


def with_exploration_noise(
    actor: SquashedDeterministicActor, *, std_min: float, std_max: float
) -> TensorDictSequential:
    """Return TD3's exploring policy: the actor, then noise of a strength per environment.

    A module-level function, so that a `functools.partial` of it can be sent to the workers.
    """
    low, high = actor.center - actor.reach, actor.center + actor.reach
    return TensorDictSequential(
        actor, PerEnvNoise(low, high, std_min=std_min, std_max=std_max, init_key=None)
    )


@dataclass(frozen=True)
class Algorithm:
    """The parts of an algorithm's runs, besides its settings. To add one: an entry of `ALGORITHMS`.

    Attributes:
        learner: Builds networks and loss from an environment and the settings.
        collector: Builds the collector.
        trainer: Builds the trainer.
        memory: Lists what only this algorithm allocates.
        replay: Whether its collector fills a replay, which checkpoints hold, and its trainer
            owns a pipeline, which is closed.
    """

    learner: Callable[[EnvBase, Any], Learner[Any]]
    collector: Callable[..., Any]
    trainer: Callable[..., Any]
    memory: Callable[[Any, RunSizes], Sequence[MemoryItem]]
    replay: bool


_OFF_POLICY = Algorithm(
    build_off_policy, replay_collector, OffPolicyTrainer, replay_items, replay=True
)

ALGORITHMS: Mapping[str, Algorithm] = {
    "appo": Algorithm(build_appo, ring_collector, APPOTrainer, ring_items, replay=False),
    "sac": _OFF_POLICY,
    "td3": _OFF_POLICY,
}
"""The parts of each algorithm that `torchrl_unilab.configs.SETTINGS` has settings of, by name."""


@overload
def build_learner(env: EnvBase, config: APPOConfig) -> Learner[APPOLoss]: ...


@overload
def build_learner(env: EnvBase, config: Config) -> Learner[LossModule]: ...


def build_learner(env: EnvBase, config: Config) -> Learner[Any]:
    """Return networks and loss of the settings' algorithm.

    Raises:
        ConfigError: The environment lacks a key that the networks read (the error names its keys),
            or this machine lacks the settings' device (the error names its devices).

    Examples:
        >>> from torchrl_unilab.envs import MujocoBatchEnv
        >>> from torchrl_unilab.trainers import APPOConfig, build_learner
        >>> env = MujocoBatchEnv("Hopper-v5", num_envs=2, num_threads=1)
        >>> learner = build_learner(env, APPOConfig.for_task("Hopper-v5"))
        >>> env.close()
        >>> sorted(learner.normalizers), type(learner.loss).__name__
        (['observation'], 'APPOLoss')
    """
    device = find_device("device", config.device)
    find_device("collector_device", config.collector_device)
    learner = ALGORITHMS[config.algorithm].learner(env, config)
    # Critics refer to their normaliser without containing it.
    for module in (learner.loss, *learner.normalizers.values()):
        module.to(device)
    # The buffers, of which the loss has copies; not the specs, as environments are on the CPU.
    torch.nn.Module.to(learner.actor, device)
    return learner


def run_budget(
    env: EnvBase, learner: Learner[Any], config: Config, *, evaluates: bool = False
) -> RunBudget:
    """Return what a run takes, and what is free; with a process that `evaluates` if there is one.

    The environment, of any batch size, is reset and stepped once.
    """
    sizes = RunSizes.of(env, learner.actor, learner.loss)
    own = ALGORITHMS[config.algorithm].memory(config, sizes)
    return RunBudget.of(config, sizes, [*own, *(EVALUATION_ITEMS if evaluates else ())])


def plan_run(env: str, config: Config) -> RunBudget:
    """Return what a run on a task of `MujocoBatchEnv` would take, and what is free.

    One environment and the networks are made to know their shapes; nothing else.

    Args:
        env: The task.
        config: The run's settings.

    Raises:
        ConfigError: Unknown task (lists what exists).

    Examples:
        >>> from torchrl_unilab.trainers import APPOConfig, plan_run
        >>> budget = plan_run("HalfCheetah-v5", APPOConfig())
        >>> [item.name for item in budget.memory.items][0]
        'rollout ring'
    """
    with (
        contextlib.closing(MujocoBatchEnv(env, num_envs=1, num_threads=1)) as proxy,
        torch.random.fork_rng(devices=[]),
    ):
        return run_budget(proxy, build_learner(proxy, config), config)


def child_seeds(seed: int | tuple[int, ...], count: int) -> list[int]:
    """Return seeds that follow from one, and share nothing with those of the next one."""
    children = np.random.SeedSequence(seed).spawn(count)
    return [int(child.generate_state(1)[0]) >> 1 for child in children]  # NumPy counts on from it
