"""Running observation statistics, and the base of all networks that normalise by them.

The statistics are buffers: they are published and saved with the policy, and change by
`ObservationNormalizer.merge` alone, by which the trainers count each new observation once.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_unilab.checks import as_integer, as_number
from torchrl_unilab.errors import LayoutShapeError


class ObservationNormalizer(nn.Module):
    """Scales observations to zero mean and unit variance by running statistics.

    The statistics are float64 buffers, so they are published with the policy, and every worker
    normalises as the learner does.

    Args:
        size: Length of the observation vector.
        epsilon: Added to the variance; above 0.
        clip: Bound of the normalised values; above 0, infinity for none.

    Raises:
        ConfigError: A number is not positive.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.modules import ObservationNormalizer
        >>> normalizer = ObservationNormalizer(2)
        >>> normalizer.update(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
        >>> normalizer.mean.tolist()
        [1.0, 2.0]
    """

    mean: torch.Tensor
    variance: torch.Tensor
    count: torch.Tensor

    def __init__(self, size: int, *, epsilon: float = 1e-8, clip: float = 10.0) -> None:
        super().__init__()
        size = as_integer("size of observations", size, "Give the length of their vector.")
        remedy = "Leave it out for the default."
        as_number("ObservationNormalizer epsilon", epsilon, remedy, "(0, inf)")
        as_number("ObservationNormalizer clip", clip, remedy, "(0, inf]")
        self.epsilon, self.clip = epsilon, clip
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the statistics but keep them float64: with fewer digits they would stop learning."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        super()._apply(moved, recurse)
        return self

    def update(self, observation: torch.Tensor) -> None:
        """Take a batch, [..., size], of any device and dtype, into the statistics.

        Merges the batch's moments with the running ones (Chan, Golub and LeVeque 1979, eq. 2.1), so
        that the result does not depend on how the data was split into batches.
        """
        self.merge(self.moments(observation))

    @torch.no_grad()
    def moments(self, observation: torch.Tensor) -> torch.Tensor:
        """Return what `merge` takes of a batch, [..., size]: means, variances, count; float64.

        Raises:
            LayoutShapeError: Its observations are of another size.
        """
        self._check_size(observation)
        batch = observation.reshape(-1, self.mean.shape[0]).to(self.mean)
        if not len(batch):
            return self.mean.new_zeros(2 * batch.shape[1] + 1)
        variance, mean = torch.var_mean(batch, dim=0, correction=0)
        return torch.cat([mean, variance, mean.new_full((1,), len(batch))])

    @torch.no_grad()
    def merge(self, moments: torch.Tensor) -> None:
        """Take the `moments` of a batch, of this process or another, into the statistics."""
        size = len(self.mean)
        mean, variance, n = moments[:size], moments[size:-1], moments[-1]
        total = self.count + n
        share = n / total.clamp(min=1.0)
        spread = (mean - self.mean).square() * (share * (1.0 - share))
        self.variance.lerp_(variance, share).add_(spread)  # exact where a share is 0 or 1
        self.mean.lerp_(mean, share)
        self.count.copy_(total)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Normalise observations, [..., size], in their own dtype; integers in torch's default.

        Raises:
            LayoutShapeError: The observations are of another size.
        """
        self._check_size(observation)
        if not observation.is_floating_point():
            observation = observation.to(torch.get_default_dtype())
        mean = self.mean.to(observation.dtype)
        scale = (self.variance + self.epsilon).rsqrt().to(observation.dtype)
        return ((observation - mean) * scale).clamp(-self.clip, self.clip)

    def _check_size(self, observation: torch.Tensor) -> None:
        if observation.shape[-1:] != self.mean.shape:
            raise LayoutShapeError(
                f"observation to normalise: {tuple(observation.shape)} (expected [..., "
                f"{len(self.mean)}]). Make the ObservationNormalizer of the observation's size."
            )


class NormalizedNetwork(TensorDictModuleBase):
    """Base of the modules that write a network's output for a normalised observation.

    Does what a ``TensorDictModule`` around a function would, without its dispatch, which
    costs as much as a small network's forward pass.

    Args:
        in_key: Where the observation is.
        normalizer: Normalises observations; None leaves them as they are.
        net: Observation to output.
    """

    def __init__(self, in_key: str, normalizer: nn.Module | None, net: nn.Module) -> None:
        super().__init__()
        self.in_keys = (in_key,)
        self.normalizer = nn.Identity() if normalizer is None else normalizer
        self.net = net

    def output(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return the network's output, [..., n]."""
        output: torch.Tensor = self.net(self.normalizer(tensordict.get(self.in_keys[0])))
        return output
