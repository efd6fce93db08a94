"""An algorithm of your own, in five steps.

1. Write its loss as a TorchRL `LossModule`, or take one of TorchRL's; here DDPG's.
2. Make its networks; workers act with the loss's actor.
3. Off-policy: give a collector and the loss to `OffPolicyTrainer`; the general update takes
   gradients by autograd and moves the targets. On-policy: `APPOTrainer` takes `APPOLoss` or a
   subclass; any other loss goes into TorchRL's `Trainer`, with `APPOCollector` and
   `PublishWeights`.
4. For the command line, add an entry to `ALGORITHMS` of `torchrl_unilab.trainers.runs.builders`:
   networks, collector and trainer; and its settings to `SETTINGS` of `torchrl_unilab.configs`. The
   names that `OffPolicyConfig` accepts are those of `Algorithm` in
   `torchrl_unilab.configs.off_policy`.
5. Only if it is worth it: write the gradients out, as `torchrl_unilab.objectives.fused` does, and
   compare bit for bit with the loss.
"""

from __future__ import annotations

from functools import partial

from torchrl.objectives import DDPGLoss

from torchrl_unilab.collectors import ReplayCollector
from torchrl_unilab.envs import MujocoBatchEnv
from torchrl_unilab.modules import make_q_value, make_td3_actor
from torchrl_unilab.trainers import OffPolicyConfig, OffPolicyTrainer
from torchrl_unilab.weight_update import UniLabShmScheme

create_env = partial(MujocoBatchEnv, "InvertedPendulum-v5", num_envs=4, num_threads=1)


def make_loss() -> DDPGLoss:
    """Return DDPG's loss over our networks."""
    actor = make_td3_actor(4, 1, low=-3.0, high=3.0, hidden=(8,))
    loss = DDPGLoss(actor, make_q_value(4, 1, hidden=(8,)), delay_actor=True, delay_value=True)
    loss.make_value_estimator(gamma=0.99)
    return loss


def make_trainer(ticks: int) -> OffPolicyTrainer:
    """Return a trainer that collects in this process."""
    config = OffPolicyConfig(
        num_envs=4, batch_size=16, learning_starts=4, replay_buffer_n=100, updates_per_step=2
    )
    loss, scheme = make_loss(), UniLabShmScheme()
    collector = ReplayCollector(
        create_env,
        loss.actor_network,
        capacity=config.capacity,
        frames_per_batch=config.frames_per_tick,
        weight_sync_schemes={"policy": scheme},
        inline=True,
        seed=0,
    )
    return OffPolicyTrainer(
        collector=collector,
        loss_module=loss,
        total_frames=ticks * config.frames_per_tick,
        config=config,
        scheme=scheme,
        progress_bar=False,
        seed=0,
    )
