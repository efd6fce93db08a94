"""Returns of a policy that acts without exploration."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(
    env: EnvBase, policy: TensorDictModuleBase, *, max_steps: int = 100_000
) -> torch.Tensor:
    """Run each environment of `env` for one episode, acting deterministically.

    Args:
        env: Batch size [N] or [].
        policy: Writes the action.
        max_steps: Stop here even if an episode goes on.

    Returns:
        The return of each environment's first episode, float64, [N] ([1] for batch
        size []).
    """
    returns = torch.zeros(env.batch_size.numel(), dtype=torch.float64)
    running = torch.ones_like(returns, dtype=torch.bool)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        current = env.reset()
        for _ in range(max_steps):
            stepped, current = env.step_and_maybe_reset(policy(current))
            after = stepped["next"]
            returns += after["reward"].reshape(-1).double() * running
            running &= ~after["done"].reshape(-1)
            if not running.any():
                break
    return returns
