"""The copies of networks that TorchRL's losses keep: targets, and a network per critic.

Their parameters follow by `torchrl.objectives.SoftUpdate` or a fused update; their
normalisers, which both leave alone, by `sync_normalizers`.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.objectives import LossModule

from torchrl_unilab.modules.normalizer import ObservationNormalizer


@torch.no_grad()
def sync_normalizers(loss: LossModule) -> None:
    """Copy the statistics of the networks' normalisers to the copies that a loss keeps.

    TorchRL's losses clone a network's buffers for its target, and for each of several
    critics; `torchrl.objectives.SoftUpdate` moves parameters alone. Without this they would
    normalise by the statistics of when the loss was made.

    Args:
        loss: An off-policy loss of TorchRL.

    Examples:
        >>> import torch
        >>> from torchrl.objectives import TD3Loss
        >>> from torchrl_unilab.modules import ObservationNormalizer, make_q_value, make_td3_actor
        >>> from torchrl_unilab.objectives.targets import sync_normalizers, targets_of
        >>> normalizer = ObservationNormalizer(3)
        >>> actor, critic = (f(3, 1, normalizer=normalizer) for f in (make_td3_actor, make_q_value))
        >>> loss = TD3Loss(actor, critic, bounds=(-1.0, 1.0))
        >>> normalizer.update(torch.ones(10, 3))
        >>> sync_normalizers(loss)
        >>> targets_of(loss, "actor_network")["normalizer", "mean"].tolist()
        [1.0, 1.0, 1.0]
    """
    children = dict(loss.named_children())
    for name in loss._has_update_associated:  # the names of all networks
        keys = (f"{name}_params", f"target_{name}_params")
        copies = [children[key] for key in keys if key in children]
        for path, module in getattr(loss, name).named_modules(remove_duplicate=False):
            if isinstance(module, ObservationNormalizer):
                for key, buffer in module.named_buffers():
                    for parameters in copies:
                        parameters.get((*path.split("."), key)).copy_(buffer)


def targets_of(loss: LossModule, name: str) -> TensorDictBase:
    """Return a network's target parameters, without the warning that nothing moves them."""
    return dict(loss.named_children())[f"target_{name}_params"]
