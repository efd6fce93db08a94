"""What collects in a whole run, from its settings."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict.nn import TensorDictModuleBase, TensorDictSequential

from torchrl_unilab.collectors import APPOCollector, ReplayCollector
from torchrl_unilab.collectors.base import CreateEnv
from torchrl_unilab.modules import PerEnvNoise
from torchrl_unilab.trainers.configs.appo import APPOConfig
from torchrl_unilab.trainers.configs.off_policy import OffPolicyConfig
from torchrl_unilab.weight_update import UniLabShmScheme

__all__ = ["replay_collector", "ring_collector"]


def ring_collector(
    create_env: CreateEnv,
    actor: TensorDictModuleBase,
    scheme: UniLabShmScheme,
    config: APPOConfig,
    seed: int,
) -> APPOCollector:
    """Return what collects an APPO run's rollouts."""
    return APPOCollector(
        create_env,
        actor,
        num_collectors=config.num_collectors,
        frames_per_batch=config.frames_per_rollout,
        total_frames=-1,  # the trainer counts
        weight_sync_schemes={"policy": scheme},
        slots=config.slots,
        overflow=config.overflow,
        max_policy_lag=config.max_policy_lag,
        lockstep=config.lockstep,
        use_buffers=False,
        num_threads=1,
        seed=seed,
        restart_workers=config.restart_workers,
    )


def replay_collector(
    create_env: CreateEnv,
    actor: TensorDictModuleBase,
    scheme: UniLabShmScheme,
    config: OffPolicyConfig,
    seed: int,
) -> ReplayCollector:
    """Return what fills a SAC or TD3 run's replay."""
    return ReplayCollector(
        create_env,
        actor,
        capacity=config.capacity,
        num_collectors=config.num_collectors,
        frames_per_batch=config.frames_per_tick,
        total_frames=-1,  # the trainer counts
        init_random_frames=config.init_random_frames,
        explore=_Explore(config) if config.algorithm == "td3" else None,
        weight_sync_schemes={"policy": scheme},
        lockstep=config.sync_collection,
        num_threads=1,
        seed=seed,
        restart_workers=config.restart_workers,
        n_step=config.n_step,
        gamma=config.gamma,
        next_observation=config.next_observation,
    )


@dataclass(frozen=True)
class _Explore:
    """Makes of TD3's actor what explores."""

    config: OffPolicyConfig

    def __call__(self, actor: TensorDictModuleBase) -> TensorDictModuleBase:
        noise = PerEnvNoise(
            actor.center - actor.reach,
            actor.center + actor.reach,
            std_min=self.config.noise_std_min,
            std_max=self.config.noise_std_max,
            init_key=None,
        )
        return TensorDictSequential(actor, noise)
