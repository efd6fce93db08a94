"""The distribution of a policy's actions: what it is built from, entropy, divergence, density."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch.distributions import Distribution, kl_divergence
from torchrl.modules import set_recurrent_mode
from torchrl.modules.distributions.utils import sample_and_log_prob

from torchrl_unilab.errors import LayoutShapeError


def distribution_params(
    policy: ProbabilisticTensorDictSequential, tensordict: TensorDictBase
) -> TensorDictBase:
    """Run a policy up to its distribution's parameters, each step from its collected state."""
    selected = tensordict.select(*policy.in_keys)
    with set_recurrent_mode(False):  # a loss of TorchRL takes a batch for sequences
        return policy.get_dist_params(selected).select(*policy.dist_params_keys)


def entropy_of(dist: Distribution) -> torch.Tensor:
    """Return the entropy, from its formula or else estimated by one sample."""
    try:
        return dist.entropy()
    except NotImplementedError:  # estimated from a new draw: the action may be saturated
        _, log_prob = sample_and_log_prob(dist, reparameterize=dist.has_rsample)
        return torch.neg(log_prob)


def divergence_of(p: Distribution, q: Distribution) -> torch.Tensor:
    """Return the KL divergence from p to q, from its formula or else estimated by one sample."""
    try:
        return kl_divergence(p, q)
    except NotImplementedError:  # an estimate that is never negative
        sample = p.sample()
        log_ratio = q.log_prob(sample) - p.log_prob(sample)
        return log_ratio.exp() - 1.0 - log_ratio


def check_log_prob(what: str, key: Any, log_prob: torch.Tensor, shape: torch.Size) -> None:
    """Refuse log probabilities of another shape than the actions' batch size.

    Raises:
        LayoutShapeError: Names the key.
    """
    if log_prob.shape != shape:
        raise LayoutShapeError(
            f"{what}: {key!r} has shape {tuple(log_prob.shape)} (expected {tuple(shape)}, one "
            "number per action). Take a distribution of the whole action, such as "
            "IndependentNormal."
        )
