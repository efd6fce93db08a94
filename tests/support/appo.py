"""APPO losses and pools of samples, and the fused update on them."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic
from torchrl_unilab.modules.gaussian import DiagonalNormal
from torchrl_unilab.objectives import APPOLoss, FusedAPPOUpdate

OBS, ACT = 5, 3


def make_loss(*, hidden=((16, 16), (16, 16)), dtype=torch.float64, **kwargs) -> APPOLoss:
    """A loss whose parameters all differ, with a normaliser that clips."""
    torch.manual_seed(0)
    normalizer = ObservationNormalizer(OBS, clip=2.0)
    normalizer.update(torch.randn(50, OBS) * 3 + 1)
    actor = make_actor(OBS, ACT, normalizer=normalizer, hidden=hidden[0], log_std=-0.3)
    critic = make_critic(OBS, normalizer=normalizer, hidden=hidden[1])
    loss = APPOLoss(actor, critic, **kwargs).to(dtype)
    with torch.no_grad():
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and all deviations differ
    return loss


def make_pool(loss: APPOLoss, size: int, *, stale: float = 0.3) -> TensorDict:
    """Samples whose behaviour and target policies are `stale` away from the current one."""
    torch.manual_seed(size)
    device, dtype = loss.actor_network[0].log_std.device, loss.actor_network[0].log_std.dtype
    pool = TensorDict(observation=4 * torch.randn(size, OBS), batch_size=[size]).to(device, dtype)
    with torch.no_grad():
        pool = loss.actor_network(pool)  # its action is the mean, where the gradient vanishes
    pool["action"] = pool["loc"] + pool["scale"] * torch.randn_like(pool["loc"])
    log_p = DiagonalNormal(pool["loc"], pool["scale"]).log_prob(pool["action"])
    pool["target"] = TensorDict(
        loc=pool["loc"] + stale * torch.randn_like(pool["loc"]),
        scale=pool["scale"] * (1.0 + stale * torch.rand_like(pool["scale"])),
        batch_size=[size],
    )
    pool["action_log_prob"] = log_p + stale * torch.randn_like(log_p)
    pool["target_log_prob"] = log_p + stale * torch.randn_like(log_p)
    for key in ("advantage", "value_target", "state_value"):
        pool[key] = torch.randn_like(log_p)
    pool["advantage"][0] = 0.0
    return pool


def fused(loss: APPOLoss, **kwargs) -> FusedAPPOUpdate:
    """The loss's fused update."""
    return FusedAPPOUpdate(loss, **{"lr": 1e-3, "desired_kl": 0.02, "max_grad_norm": 1.0, **kwargs})
