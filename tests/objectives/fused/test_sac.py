"""SAC's formulas."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import SACLoss

from tests.support.off_policy import (
    ACT,
    LRS,
    assert_same_step,
    fused,
    make_loss,
    stock,
    transitions_of,
)
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules import make_q_value, make_sac_actor
from torchrl_unilab.objectives import FusedSACUpdate

pytestmark = pytest.mark.usefixtures("double_precision")


def _linear() -> SACLoss:
    """One observation, one action within [-2, 2]; all networks linear and known."""
    actor = make_sac_actor(1, 1, low=-2.0, high=2.0, hidden=(), log_std_bounds=(-1.0, 1.0))
    loss = SACLoss(actor, make_q_value(1, 1, hidden=()), loss_function="l2", alpha_init=0.5)
    loss.make_value_estimator(gamma=0.9)
    values = {"actor_network_params": ([[0.2], [0.0]], [0.1, 0.0])}
    values["qvalue_network_params"] = ([[[1.0, 2.0]], [[1.0, 2.0]]], [[0.5], [0.3]])
    values["target_qvalue_network_params"] = ([[[1.0, 1.0]], [[1.0, 1.0]]], [[0.4], [0.6]])
    state = loss.state_dict()
    for prefix, (weight, bias) in values.items():
        inner = ".module.0.net.0" if prefix.startswith("actor") else ".net.0"
        state[f"{prefix}{inner}.weight"] = torch.tensor(weight)
        state[f"{prefix}{inner}.bias"] = torch.tensor(bias)
    loss.load_state_dict(state)
    return loss


def _transition(*, terminated: bool, done: bool) -> TensorDict:
    after = {"observation": [[2.0]], "reward": [[1.0]]}
    after = {key: torch.tensor(value) for key, value in after.items()}
    after |= {"terminated": torch.tensor([[terminated]]), "done": torch.tensor([[done]])}
    tensors = {"observation": torch.tensor([[1.0]]), "action": torch.tensor([[0.5]])}
    return TensorDict({**tensors, "next": after}, batch_size=[1])


def _drawn(loc: float, noise: float) -> tuple[float, float]:
    """Action and log probability of a standard normal's draw, squashed into [-2, 2]."""
    u = loc + noise
    normal = -0.5 * noise**2 - 0.5 * math.log(2 * math.pi)
    return 2.0 * math.tanh(u), normal - math.log(2.0 * (1.0 - math.tanh(u) ** 2))


@pytest.mark.parametrize(("terminated", "done"), [(False, False), (False, True), (True, True)])
def test_losses_of_linear_networks_are_those_computed_by_hand(terminated, done):
    update = fused(_linear())
    first, second = torch.randn(2, generator=torch.Generator().manual_seed(5)).tolist()
    packed = update.prepare(_transition(terminated=terminated, done=done))
    statistics = update.step(packed, generator=torch.Generator().manual_seed(5)).tolist()
    observed = dict(zip(update.statistics, statistics, strict=True))

    next_action, next_log_p = _drawn(0.2 * 2.0 + 0.1, first)
    soft_value = (2.0 + next_action + 0.4) - 0.5 * next_log_p
    target = 1.0 if terminated else 1.0 + 0.9 * soft_value  # cut off is not terminated
    errors = [1.0 + 2.0 * 0.5 + bias - target for bias in (0.5, 0.3)]
    action, log_p = _drawn(0.2 * 1.0 + 0.1, second)
    assert observed == pytest.approx(
        {
            "loss_qvalue": errors[0] ** 2 + errors[1] ** 2,
            "q_value": 2.4,
            "td_error": (abs(errors[0]) + abs(errors[1])) / 2,
            "alpha": 0.5,
            "loss_actor": 0.5 * log_p - (1.0 + 2.0 * action + 0.3),
            "entropy": -log_p,
            "loss_alpha": -math.log(0.5) * (log_p - 1.0),
        }
    )
    assert update.td_error.tolist() == pytest.approx([max(abs(error) for error in errors)])


def test_the_statistics_are_named_as_the_loss_names_them():
    losses = {"loss_qvalue", "loss_actor", "loss_alpha", "alpha", "entropy"}
    assert losses <= set(FusedSACUpdate.statistics)


@pytest.mark.parametrize(("target", "sign"), [(-50.0, -1.0), (50.0, 1.0)])
def test_the_temperature_moves_as_the_entropy_lacks(target, sign):
    loss = make_loss("sac", target_entropy=target)
    update = fused(loss)
    before = loss.log_alpha.item()
    for minibatch in update.minibatches(update.prepare(transitions_of(loss, 64, 0)), 4):
        update.step(minibatch)
    # Adam's first steps are of the learning rate's size.
    assert loss.log_alpha.item() - before == pytest.approx(sign * 4 * LRS["log_alpha"], rel=1e-3)


def test_saturated_actions_keep_finite_gradients_and_the_stock_losses():
    loss = make_loss("sac")
    with torch.no_grad():
        loss.actor_network_params["module", "0", "net", "4", "bias"][:ACT] = 30.0
    observed, expected = assert_same_step(
        loss, stock(loss), fused(loss), transitions_of(loss, 32, 0)
    )
    assert observed["entropy"] < -50.0
    for key in ("loss_qvalue", "loss_actor"):
        torch.testing.assert_close(observed[key], expected[key], rtol=1e-9, atol=1e-9)


def test_a_temperature_whose_memory_has_moved_is_refused():
    loss = make_loss("sac")
    update, batch = fused(loss), transitions_of(loss, 8, 0)
    loss.log_alpha.data = loss.log_alpha.data.clone()
    with pytest.raises(ConfigError, match=r"parameter of shape \(\): its memory has moved"):
        update.prepare(batch)
