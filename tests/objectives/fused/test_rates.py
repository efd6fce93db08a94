"""How a fused update of APPO steers its learning rate, and what a critics' step draws."""

from __future__ import annotations

import pytest
import torch

from tests.support import appo, off_policy
from torchrl_unilab.errors import SegmentClosedError
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.runtime.worker_thread import Task


@pytest.mark.parametrize(("current", "share"), [(True, 1.0), (False, 1.0 / 1.1)])
def test_the_rate_stays_on_a_pool_whose_target_is_the_policy(monkeypatch, current, share):
    monkeypatch.setattr(APPOLoss, "target_is_current", current)
    loss = appo.make_loss()
    update = appo.fused(loss, lr=1e-3, desired_kl=1e-6)
    update.step(update.prepare(appo.make_pool(loss, 16)))
    assert update.lr.item() == pytest.approx(1e-3 * share)


def test_the_rate_rises_to_the_highest_that_is_set_and_no_further():
    loss = appo.make_loss()
    update = appo.fused(loss, lr=1e-3, desired_kl=1e6)
    columns, rates = update.prepare(appo.make_pool(loss, 16)), []
    for update.max_lr in (1e-3, 2e-3):
        update.step(columns)
        rates.append(update.lr.item())
    assert rates == pytest.approx([1e-3, 1.1e-3])


def test_a_step_without_the_policy_draws_the_critics_noise_alone():
    loss = off_policy.make_loss("sac")
    update = off_policy.fused(loss)
    rows = update.prepare(off_policy.transitions_of(loss, 32, 0))
    torch.manual_seed(0)
    update.step(rows, update_policy=False)
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    torch.empty(32, off_policy.ACT, dtype=rows.dtype).normal_()
    assert torch.equal(drawn, torch.get_rng_state())


@pytest.mark.parametrize("update_policy", [False, True])
def test_a_step_after_the_end_of_its_thread_is_taken_without_one(update_policy):
    loss = off_policy.make_loss("sac")
    update = off_policy.fused(loss, policy_thread=True)
    rows, thread = update.prepare(off_policy.transitions_of(loss, 32, 0)), update._thread
    update.close()
    with pytest.raises(SegmentClosedError, match="'policy' is closed"):
        thread.start(Task(bool))
    assert update.step(rows, update_policy=update_policy)[:3].isfinite().all()
    update.close()
