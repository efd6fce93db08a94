"""What a run learns: networks and loss, from an environment's specs and settings."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.objectives import LossModule, SACLoss, TD3Loss

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import (
    ObservationNormalizer,
    make_actor,
    make_critic,
    make_q_value,
    make_sac_actor,
    make_td3_actor,
)
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers.configs.appo import APPOConfig
from torchrl_unilab.trainers.configs.off_policy import OffPolicyConfig

__all__ = ["Learner", "build_appo", "build_off_policy"]


@dataclass
class Learner:
    """What is learned: the networks, and the loss over them.

    Attributes:
        normalizers: Observation key to normaliser.
        actor: What acts and is published.
        loss: Holds actor and critics.
    """

    normalizers: dict[str, ObservationNormalizer]
    actor: TensorDictModuleBase
    loss: LossModule


def _observation_sizes(env: EnvBase, config: APPOConfig | OffPolicyConfig) -> dict[str, int]:
    """Return the sizes of the vectors that the networks read, by key."""
    spec, dims = env.observation_spec, len(env.batch_size) + 1
    vectors = {
        key: spec[key].shape[-1]
        for key in spec.keys(True, True)
        if isinstance(key, str) and len(spec[key].shape) == dims
    }
    for name in ("observation", "critic_observation"):
        key = getattr(config, name)
        if key not in vectors:
            raise ConfigError(
                f"{name}: {key!r} (expected a vector that the environment observes, one of "
                f"{sorted(vectors)}). Choose one of them."
            )
    return {key: vectors[key] for key in (config.observation, config.critic_observation)}


def build_appo(env: EnvBase, config: APPOConfig) -> Learner:
    """Return APPO's networks and loss."""
    sizes = _observation_sizes(env, config)
    normalizers = {key: ObservationNormalizer(size) for key, size in sizes.items()}
    key, critic_key = config.observation, config.critic_observation
    actor = make_actor(
        sizes[key],
        env.action_spec.shape[-1],
        in_key=key,
        normalizer=normalizers[key],
        hidden=config.hidden,
        log_std=config.log_std,
    )
    critic = make_critic(
        sizes[critic_key],
        in_key=critic_key,
        normalizer=normalizers[critic_key],
        hidden=config.hidden,
    )
    loss = APPOLoss(
        actor,
        critic,
        clip_epsilon=config.clip_epsilon,
        value_clip=config.value_clip,
        entropy_coeff=config.entropy_coeff,
        critic_coeff=config.critic_coeff,
        gamma=config.gamma,
        lambda_=config.lambda_,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
        tau=config.tau,
        target_update_freq=(
            config.epochs * config.minibatches
            if config.target_update_freq is None
            else config.target_update_freq
        ),
    )
    return Learner(normalizers, actor, loss)


def build_off_policy(env: EnvBase, config: OffPolicyConfig) -> Learner:
    """Return SAC's or TD3's networks and TorchRL's loss over them.

    Both losses count in units of the environment's actions. SAC's target entropy is -1 per
    dimension of actions scaled to [-1, 1], and TD3's target noise is in halves of the action's
    range, whatever the bounds are: here they are converted.
    """
    sizes = _observation_sizes(env, config)
    normalizers = (
        {key: ObservationNormalizer(size) for key, size in sizes.items()}
        if config.obs_normalization
        else {}
    )
    space = env.action_spec.space
    low, high = (bound.reshape(-1, bound.shape[-1])[0] for bound in (space.low, space.high))
    reach = (high - low) / 2
    actions = env.action_spec.shape[-1]
    key, critic_key = config.observation, config.critic_observation
    make = make_sac_actor if config.algorithm == "sac" else make_td3_actor
    actor = make(
        sizes[key],
        actions,
        low=low,
        high=high,
        in_key=key,
        normalizer=normalizers.get(key),
        hidden=config.hidden,
        layer_norm=config.layer_norm,
    )
    critic = make_q_value(
        sizes[critic_key],
        actions,
        in_key=critic_key,
        normalizer=normalizers.get(critic_key),
        hidden=config.hidden,
        layer_norm=config.layer_norm,
    )
    loss: LossModule
    if config.algorithm == "sac":
        loss = SACLoss(
            actor,
            critic,
            num_qvalue_nets=2,
            alpha_init=config.alpha,
            loss_function="l2",
            # Scaling an action by its reach adds log(reach) to its entropy.
            target_entropy=float(reach.log().sum() - actions),
        )
    else:
        loss = TD3Loss(
            actor,
            critic,
            bounds=(low, high),
            num_qvalue_nets=2,
            loss_function="l2",
        )
        for name, value in (
            ("policy_noise", config.target_noise),
            ("noise_clip", config.target_noise_clip),
        ):
            delattr(loss, name)  # a number for all dimensions; a buffer follows the device
            loss.register_buffer(name, value * reach, persistent=False)
    loss.make_value_estimator(gamma=config.gamma)
    return Learner(normalizers, actor, loss)
