"""What is SAC's own: its temperature, and actions that its squashing saturates."""

from __future__ import annotations

import pytest
import torch

from tests.support.off_policy import (
    ACT,
    LRS,
    assert_same_step,
    fused,
    make_loss,
    stock,
    transitions_of,
)
from torchrl_unilab.objectives import FusedSACUpdate

pytestmark = pytest.mark.usefixtures("double_precision")


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
