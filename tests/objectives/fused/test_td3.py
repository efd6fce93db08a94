"""TD3's formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torchrl.objectives import TD3Loss

from tests.support.off_policy import fused, make_transitions
from torchrl_unilab.modules import make_q_value, make_td3_actor

pytestmark = pytest.mark.usefixtures("double_precision")


def _linear() -> TD3Loss:
    """One observation, one action within [-2, 2]; all networks linear and known; no noise."""
    actor = make_td3_actor(1, 1, low=-2.0, high=2.0, hidden=())
    settings = {"loss_function": "l2", "policy_noise": 0.0, "bounds": (-2.0, 2.0)}
    loss = TD3Loss(actor, make_q_value(1, 1, hidden=()), **settings)
    loss.make_value_estimator(gamma=0.9)
    values = {
        "actor_network_params": ([[0.0]], [0.0]),
        "target_actor_network_params": ([[0.0]], [math.atanh(0.25)]),
        "qvalue_network_params": ([[[1.0, 2.0]], [[1.0, 2.0]]], [[0.5], [0.3]]),
        "target_qvalue_network_params": ([[[1.0, 1.0]], [[1.0, 1.0]]], [[0.4], [0.6]]),
    }
    state = loss.state_dict()
    for prefix, (weight, bias) in values.items():
        state[f"{prefix}.net.0.weight"] = torch.tensor(weight)
        state[f"{prefix}.net.0.bias"] = torch.tensor(bias)
    loss.load_state_dict(state)
    return loss


@pytest.mark.parametrize(
    ("terminated", "done", "target"),
    [(False, False, 3.61), (False, True, 3.61), (True, True, 1.0)],
    ids=["goes on", "cut off", "terminated"],
)
def test_losses_and_first_step_of_linear_networks_are_those_computed_by_hand(
    terminated, done, target
):
    # The target actor acts 2 * 0.25; the target critics see 2 + 0.5 + 0.4 and 2 + 0.5 + 0.6;
    # 1 + 0.9 * 2.9 = 3.61. The critics say 1 + 2 * 0.5 + 0.5 = 2.5 and 2.3, and of the
    # policy's action, 0, the first one says 1.5.
    loss = _linear()
    update = fused(loss, tau=0.25)
    batch = make_transitions(1, 1, 1)
    batch["observation"], batch["action"] = torch.tensor([[1.0]]), torch.tensor([[0.5]])
    batch["next", "observation"] = torch.tensor([[2.0]])
    batch["next", "reward"] = torch.tensor([[1.0]])
    batch["next", "terminated"] = torch.tensor([[terminated]])
    batch["next", "done"] = torch.tensor([[done]])
    statistics = update.step(update.prepare(batch)).tolist()
    errors = 2.5 - target, 2.3 - target
    assert dict(zip(update.statistics, statistics, strict=True)) == pytest.approx(
        {
            "loss_qvalue": errors[0] ** 2 + errors[1] ** 2,
            "q_value": 2.4,
            "td_error": (abs(errors[0]) + abs(errors[1])) / 2,
            "loss_actor": -1.5,
        }
    )
    assert update.td_error.tolist() == pytest.approx([max(error**2 for error in errors)])
    # Adam's first step is of the learning rate's size, against the gradient.
    moved = 2e-3 if not terminated else -2e-3
    bias = loss.qvalue_network_params["net", "0", "bias"].flatten().tolist()
    assert bias == pytest.approx([0.5 + moved, 0.3 + moved], abs=1e-9)
    follower = loss.target_qvalue_network_params["net", "0", "bias"].flatten().tolist()
    followed = [0.75 * 0.4 + 0.25 * (0.5 + moved), 0.75 * 0.6 + 0.25 * (0.3 + moved)]
    assert follower == pytest.approx(followed, abs=1e-9)
    assert loss.actor_network.net[0].bias.tolist() == pytest.approx([1e-3], abs=1e-9)
    target_bias = loss.target_actor_network_params["net", "0", "bias"].tolist()
    assert target_bias == pytest.approx([0.75 * math.atanh(0.25) + 0.25 * 1e-3], abs=1e-9)


def test_target_actions_are_noisy_within_the_clip_and_the_bounds():
    loss = _linear()
    loss.policy_noise, loss.noise_clip = 5.0, 1.8
    update = fused(loss)
    batch = make_transitions(200, 1, 1)
    batch["next", "terminated"].zero_()
    seen = []
    update._target_critics.forward = lambda x: seen.append(x) or (torch.zeros(2, len(x), 1), [])
    update.step(update.prepare(batch))
    # 0.5 - 1.8, and 0.5 + 1.8 cut off at 2
    actions = seen[0][:, 1].unique()
    assert (actions.min().item(), actions.max().item()) == (pytest.approx(-1.3), 2.0)
    assert len(actions) > 10  # some are within
