"""What a run needs of its environment: the networks' inputs, the actions, and the batch size."""

from __future__ import annotations

import torch
from torchrl.data.tensor_specs import ContinuousBox
from torchrl.envs import EnvBase

from torchrl_unilab.checks import as_choice
from torchrl_unilab.configs import APPOConfig, Config
from torchrl_unilab.errors import ConfigError


def observation_sizes(env: EnvBase, config: Config) -> dict[str, int]:
    """Return the sizes of the vectors that the networks read, by key.

    Raises:
        ConfigError: The environment does not observe them, or in another dtype.
    """
    spec, dims = env.observation_spec, len(env.batch_size) + 1
    vectors = {
        key: spec[key].shape[-1]
        for key in spec.keys(True, True)
        if isinstance(key, str) and len(spec[key].shape) == dims
    }
    for name in ("observation", "critic_observation"):
        remedy = "Choose a vector that the environment observes."
        key = as_choice(name, getattr(config, name), sorted(vectors), remedy)
        if spec[key].dtype != torch.get_default_dtype():
            raise ConfigError(
                f"{name}: {key!r} is {spec[key].dtype} (expected {torch.get_default_dtype()}, as "
                f"the networks are). Append torchrl.envs.DTypeCastTransform({spec[key].dtype}, "
                f"{torch.get_default_dtype()}, in_keys=[{key!r}]) to the environment."
            )
    return {key: vectors[key] for key in (config.observation, config.critic_observation)}


def action_space(env: EnvBase) -> ContinuousBox:
    """Return the space of the environment's actions.

    Raises:
        ConfigError: Actions are not one continuous vector of floats.
    """
    spec = env.action_spec
    if not isinstance(spec.space, ContinuousBox):
        raise ConfigError(
            f"actions: {type(spec).__name__} (expected continuous ones, of a Bounded or Unbounded "
            "spec). Choose another environment, or train by APPOTrainer or OffPolicyTrainer with a "
            "loss and networks for these."
        )
    if len(spec.shape) != len(env.batch_size) + 1 or not spec.dtype.is_floating_point:
        raise ConfigError(
            f"actions: {spec.dtype} {tuple(spec.shape)} of a batch {tuple(env.batch_size)} "
            "(expected one vector of floats each). Append a transform that makes one."
        )
    return spec.space


def fit_environments(env: EnvBase, config: Config) -> str | None:
    """Say how many steps a batch size other than ``num_envs`` takes for the same frames.

    The environment is what a caller's ``create_env`` made.

    Returns:
        A line for a person; None if the batch is as set.

    Raises:
        ConfigError: The steps are not whole, actions or rewards have other keys than a run's, or
            a reward is several numbers.
    """
    keys = {"action": env.action_keys, "reward": env.reward_keys}
    if other := {name: found for name, found in keys.items() if found != [name]}:
        raise ConfigError(
            f"environment: its keys are {other} (expected {[*other]}, which runs write and read). "
            "Append torchrl.envs.RenameTransform, or train by a trainer with your own loss."
        )
    made = env.batch_size.numel()
    if env.reward_spec.shape.numel() != made:
        raise ConfigError(
            f"environment: rewards of shape {tuple(env.reward_spec.shape)} for a batch "
            f"{tuple(env.batch_size)} (expected one number each). Append a transform that sums "
            "them, such as torchrl.envs.LineariseRewards."
        )
    if made == config.num_envs:
        return None
    name = "num_steps" if isinstance(config, APPOConfig) else "env_steps_per_sync"
    steps = getattr(config, name)
    frames = config.num_envs * steps
    if frames % made:
        raise ConfigError(
            f"num_envs: {config.num_envs}, where create_env makes {made} (expected as many, or a "
            f"number of which {frames} frames, num_envs x {name}, are a multiple). Set num_envs to "
            f"{made}."
        )
    return (
        f"create_env makes {made} environments, not {config.num_envs} (num_envs): each takes "
        f"{frames // made} steps in place of {steps} ({name}), for as many frames"
    )
