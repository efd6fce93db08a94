from __future__ import annotations

import torch

from tests.examples.add_a_hook.log_action_norm import LogActionNorm
from tests.support.collecting import CountingEnv, actor
from torchrl_unilab.collectors import APPOCollector
from torchrl_unilab.modules import make_critic
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers import APPOConfig, APPOTrainer


def test_the_hook_logs_in_each_iteration():
    config = APPOConfig(num_envs=2, num_steps=4, epochs=1, minibatches=1)
    loss = APPOLoss(actor(), make_critic(3, hidden=(8,)))
    collector = APPOCollector(CountingEnv, loss.actor_network, frames_per_batch=8, inline=True)
    trainer = APPOTrainer(
        collector=collector, loss_module=loss, total_frames=24, config=config, progress_bar=False
    )
    hook = LogActionNorm()
    hook.register(trainer)
    trainer.train()
    logged = list(trainer._log_dict["largest_action"])
    assert len(logged) == 3
    assert torch.tensor(logged).diff().min() >= 0
