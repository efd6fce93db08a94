"""Transitions, and steps of SAC and TD3 by TorchRL's own parts."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.objectives import LossModule, SoftUpdate


def make_transitions(
    size: int, observation: int, action: int, *, state: int = 0, seed: int = 0
) -> TensorDict:
    """Random transitions, [size], some terminated and some cut off; `state` adds a key."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width: int) -> torch.Tensor:
        return torch.randn(size, width, generator=generator)

    def flag(share: float) -> torch.Tensor:
        return torch.rand(size, 1, generator=generator) < share

    terminated = flag(0.3)
    after = {
        "observation": 3.0 * normal(observation),
        "reward": normal(1),
        "done": terminated | flag(0.3),
        "terminated": terminated,
    }
    batch = TensorDict(
        {"observation": 3.0 * normal(observation), "action": normal(action).tanh(), "next": after},
        batch_size=[size],
    )
    if state:
        batch["state"], batch["next", "state"] = normal(state), normal(state)
    return batch


class StockStepper:
    """A loss's backward pass, Adam for each of its networks, and `SoftUpdate`.

    Args:
        loss: `SACLoss` or `TD3Loss`.
        lrs: Learning rates by the parameters' first names.
        tau: Share that targets take over.
    """

    def __init__(self, loss: LossModule, lrs: dict[str, float], tau: float) -> None:
        self.loss = loss
        self.adams = {}
        for prefix, lr in lrs.items():
            parameters = [p for name, p in loss.named_parameters() if name.startswith(prefix)]
            self.adams[prefix] = torch.optim.Adam(parameters, lr=lr, fused=True)
        state = {key: value.clone() for key, value in loss.state_dict().items()}
        self.targets = SoftUpdate(loss, tau=tau)
        loss.load_state_dict(state)  # it has put the targets where their networks are

    def step(self, batch: TensorDict) -> TensorDict:
        """Take one step; return the losses. Priorities are written into the batch."""
        for adam in self.adams.values():
            adam.zero_grad()
        losses = self.loss(batch)
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        for adam in self.adams.values():
            adam.step()
        self.targets.step()
        return losses.detach()


def assert_equal_parameters(
    left: LossModule, right: LossModule, *, rtol: float = 1e-9, atol: float = 1e-10
) -> None:
    """All parameters, targets and buffers of two losses are close."""
    other = right.state_dict()
    for name, tensor in left.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(tensor, other[name], rtol=rtol, atol=atol, msg=name)
