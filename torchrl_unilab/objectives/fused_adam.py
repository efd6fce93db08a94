"""One step of Adam on one tensor, in the kernel's time alone."""

from __future__ import annotations

import torch

__all__ = ["fused_adam"]


def fused_adam(optimizer: torch.optim.Adam, parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Do what the optimiser's ``step`` does, which takes five times the kernel's time.

    Args:
        optimizer: Has `parameter` alone, and its state.
        parameter: Is changed.
        grad: Its gradient, of the same shape.
    """
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    state["step"].add_(1)
    torch._fused_adam_(
        [parameter],
        [grad],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
