from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torchrl.modules import TanhNormal

from torchrl_unilab.errors import LayoutShapeError
from torchrl_unilab.objectives.distributions import check_log_prob, divergence_of, entropy_of


class _Sampled(torch.distributions.Distribution):
    """A normal distribution that knows neither its entropy nor its divergence from another."""

    def __init__(self, normal: Normal) -> None:
        super().__init__(normal.batch_shape, validate_args=False)
        self.normal = normal
        self.log_prob, self.rsample = normal.log_prob, normal.rsample

    has_rsample = True


def test_estimates_of_entropy_and_divergence_are_near_the_formulas():
    torch.manual_seed(0)
    rows = torch.ones(200_000)
    p = Normal(0.0 * rows, rows)
    q = Normal(0.3 * rows, 1.2 * rows)
    divergence = divergence_of(_Sampled(p), _Sampled(q))
    assert divergence.min() >= 0.0
    exact = kl_divergence(p, q).mean()
    torch.testing.assert_close(divergence.mean(), exact, rtol=0.05, atol=0.0)
    entropy = entropy_of(_Sampled(q)).mean()
    torch.testing.assert_close(entropy, q.entropy().mean(), rtol=0.02, atol=0.0)


def test_the_entropy_of_a_saturated_policy_is_that_of_what_was_drawn():
    loc = torch.full((100_000, 1), 9.0)
    log_std = torch.zeros((), requires_grad=True)
    torch.manual_seed(0)
    entropy = entropy_of(TanhNormal(loc, log_std.exp().expand_as(loc))).mean()
    (slope,) = torch.autograd.grad(entropy, log_std)
    # 1 - tanh(u)^2 is 4 exp(-2u) here, so it is the normal's entropy and 2 (log 2 - u).
    exact = 0.5 * math.log(2 * math.pi * math.e) + 2 * (math.log(2) - 9.0)
    assert entropy.item() == pytest.approx(exact, abs=0.02)
    assert slope.item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("shape", [(4, 6, 1), (4, 6, 2), (6,), ()])
def test_more_or_fewer_log_probabilities_than_actions_are_refused_by_name(shape):
    with pytest.raises(LayoutShapeError, match=r"^rollouts: 'b' has shape .*\(4, 6\), one number"):
        check_log_prob("rollouts", "b", torch.zeros(shape), torch.Size([4, 6]))
    check_log_prob("rollouts", "b", torch.zeros(4, 6), torch.Size([4, 6]))
