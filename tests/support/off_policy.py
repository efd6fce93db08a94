"""Transitions, losses of SAC and TD3, and their steps, fused and by TorchRL's own parts."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import LossModule, SACLoss, SoftUpdate, TD3Loss

from torchrl_unilab.modules import (
    ObservationNormalizer,
    make_q_value,
    make_sac_actor,
    make_td3_actor,
)
from torchrl_unilab.objectives import FusedSACUpdate, FusedTD3Update

OBS, ACT, STATE = 5, 2, 7
BOTH = pytest.mark.parametrize("algorithm", ["sac", "td3"])
LRS = {"actor_network_params": 1e-3, "qvalue_network_params": 2e-3, "log_alpha": 3e-3}

CASES = {
    "plain": {},
    "layer norm": {"layer_norm": True},
    "normalised": {"normalized": True},
    "layer norm, normalised": {"layer_norm": True, "normalized": True},
    "bounds per dimension": {"bounds": (torch.tensor([-1.0, 0.5]), torch.tensor([0.3, 4.0]))},
    "critics that do not normalise": {"normalized": "actor"},
    "privileged critics": {"state": True, "normalized": True},
    "three and one layers": {"hidden": ((4, 5, 6), (9,))},
    "linear": {"hidden": ((), ())},
    "squares": {"loss_function": "l2"},
    "distances": {"loss_function": "l1"},
}
OWN = {
    "sac": {
        "fixed temperature": {"fixed_alpha": True, "alpha_init": 0.3},
        "bounded temperature": {"min_alpha": 0.1, "max_alpha": 0.5, "alpha_init": 0.7},
        "temperature of a least": {"min_alpha": 0.5, "alpha_init": 0.3},
        "temperature of a most": {"max_alpha": 0.5, "alpha_init": 0.7},
        "own target entropy": {"target_entropy": -0.3},
    },
    "td3": {"much noise, often clipped": {"policy_noise": 1.5, "noise_clip": 0.7}},
}
ALL = [(name, case) for name in OWN for case in CASES | OWN[name]]


def make_loss(
    algorithm: str,
    *,
    hidden=((16, 16), (16, 8)),
    layer_norm=False,
    normalized=False,
    state=False,
    bounds=(-1.0, 1.0),
    **kwargs,
) -> SACLoss | TD3Loss:
    """A loss whose parameters all differ, targets from what they follow, too.

    `normalized` may be ``"actor"``: its critics do not; `state` gives them another key.
    """
    torch.manual_seed(0)
    normalizer = None
    if normalized:
        normalizer = ObservationNormalizer(OBS, clip=2.0)
        normalizer.update(torch.randn(50, OBS) * 3 + 1)
    low, high = bounds
    own = {"log_std_bounds": (-3.0, 1.0)} if algorithm == "sac" else {}
    actor = {"sac": make_sac_actor, "td3": make_td3_actor}[algorithm](
        OBS,
        ACT,
        low=low,
        high=high,
        normalizer=normalizer,
        hidden=hidden[0],
        layer_norm=layer_norm,
        **own,
    )
    critic = make_q_value(
        STATE if state else OBS,
        ACT,
        in_key="state" if state else "observation",
        normalizer=None if state or normalized == "actor" else normalizer,
        hidden=hidden[1],
        layer_norm=layer_norm,
    )
    loss: SACLoss | TD3Loss
    if algorithm == "sac":
        loss = SACLoss(actor, critic, **kwargs)
    else:
        loss = TD3Loss(actor, critic, bounds=bounds, **kwargs)
    loss.make_value_estimator(gamma=0.9)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return loss


def fused(
    loss: SACLoss | TD3Loss, *, tau: float = 0.1, **kwargs
) -> FusedSACUpdate | FusedTD3Update:
    """The loss's fused update, at `LRS`."""
    actor, critic, alpha = LRS.values()
    rates = {"lr_actor": actor, "lr_critic": critic, "tau": tau, **kwargs}
    if isinstance(loss, SACLoss):
        return FusedSACUpdate(loss, **{"lr_alpha": alpha, **rates})
    return FusedTD3Update(loss, **rates)


def stock(loss: SACLoss | TD3Loss, tau: float = 0.1) -> StockStepper:
    """Steps of a copy of the loss, at the same settings."""
    other = deepcopy(loss)
    if isinstance(other, TD3Loss):  # shows its critics what its actor reads, and no more
        actor, critic = other.actor_network, other.qvalue_network
        actor.in_keys = list(dict.fromkeys([actor.in_keys[0], critic.in_keys[0]]))
    names = {name for name, _ in other.named_parameters()}
    rates = {key: lr for key, lr in LRS.items() if any(name.startswith(key) for name in names)}
    return StockStepper(other, rates, tau)


def transitions_of(loss: LossModule, size: int, seed: int) -> TensorDict:
    """Random transitions with the keys that the loss reads."""
    state = STATE if loss.qvalue_network.in_keys[0] == "state" else 0
    return make_transitions(size, OBS, ACT, state=state, seed=seed)


def assert_same_step(
    loss: SACLoss | TD3Loss, other: StockStepper, update, batch: TensorDict, **tolerances: float
) -> tuple[dict[str, torch.Tensor], TensorDict]:
    """A fused and a stock step by the same noise leave equal parameters; return what both say."""
    packed = update.prepare(batch)
    torch.manual_seed(1)
    expected = other.step(batch)
    torch.manual_seed(1)
    observed = dict(zip(update.statistics, update.step(packed), strict=True))
    assert_equal_parameters(loss, other.loss, **tolerances)
    return observed, expected


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
