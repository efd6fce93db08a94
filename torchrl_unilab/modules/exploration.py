"""Exploration noise whose strength differs between environments."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.envs.utils import ExplorationType, exploration_type

from torchrl_unilab.checks import as_range, entry_of
from torchrl_unilab.errors import ConfigError


class PerEnvNoise(TensorDictModuleBase):
    """Adds Gaussian noise to a collector's actions, stronger in some environments than others.

    Each environment draws a standard deviation, uniform between two bounds, and keeps it for an
    episode: when ``is_init`` is true (`torchrl.envs.InitTracker` writes it), it draws a new one.
    Noise is in units of half the distance between an action's bounds, and actions are clipped to
    the bounds. Without exploration, that is for an exploration type other than RANDOM, actions pass
    unchanged, while episodes are still tracked.

    The deviations are neither parameters nor buffers: publishing weights, loading a state
    dict and `TensorDict.from_module` neither see nor change them.

    Args:
        low: Lowest action, one number or one per dimension.
        high: Highest action, likewise.
        std_min: Lowest standard deviation.
        std_max: Highest standard deviation.
        init_key: Where the first steps of episodes are marked, [*B, 1] or [*B]; None keeps each
            environment's first deviation permanently.

    Attributes:
        std: Each environment's standard deviation now, [*B, 1]; None before the first action.

    Raises:
        ConfigError: Bounds or standard deviations are not in order.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.modules import PerEnvNoise
        >>> noise = PerEnvNoise(-1.0, 1.0, std_min=0.1, std_max=0.5, init_key=None)
        >>> batch = noise(TensorDict(action=torch.zeros(8, 2), batch_size=[8]))
        >>> noise.std.shape
        torch.Size([8, 1])
    """

    out_keys = ("action",)

    def __init__(
        self,
        low: float | torch.Tensor,
        high: float | torch.Tensor,
        *,
        std_min: float,
        std_max: float,
        init_key: NestedKey | None = "is_init",
    ) -> None:
        remedy = "They are in units of half the distance between the bounds."
        as_range("PerEnvNoise std_min and std_max", (std_min, std_max), remedy, "[0, inf)")
        super().__init__()
        self.in_keys = ["action"] if init_key is None else ["action", init_key]
        self.init_key = init_key
        self.std_min, self.std_max = std_min, std_max
        low_bound, high_bound = torch.as_tensor(low), torch.as_tensor(high)
        # In a tuple, where `nn.Module` does not look for tensors: nothing here is published.
        self._bounds = low_bound, high_bound
        self.std: torch.Tensor | None = None
        finite = all(bound.isfinite().all() for bound in self._bounds)
        if not finite or not (low_bound < high_bound).all():
            raise ConfigError(
                f"PerEnvNoise: low {low}, high {high} (expected low < high in all dimensions, "
                "finite). Take the action spec's, or bounds of your own where it has none."
            )

    def snapshot(self) -> torch.Tensor | None:
        """Return `std`, for a checkpoint of a worker."""
        return self.std

    def restore(self, snapshot: torch.Tensor | None) -> None:
        """Continue with the deviations that `snapshot` returned; None: draw anew."""
        self.std = snapshot

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add noise to ``action``, [*B, n]."""
        action = tensordict.get("action")
        std = self._draw(action[..., :1], self._first_steps(tensordict, action))
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return tensordict
        low, high = (bound.to(action) for bound in self._bounds)
        noise = torch.empty_like(action).normal_()
        noise = noise.mul_(std).mul_((high - low) / 2).add_(action)
        return tensordict.set("action", noise.clamp_(low, high))

    def _first_steps(self, tensordict: TensorDictBase, action: torch.Tensor) -> torch.Tensor | None:
        """Return where episodes start, [*B, 1]; None where they are not followed."""
        if self.init_key is None:
            return None
        remedy = "Append torchrl.envs.InitTracker to the environment, or give init_key=None."
        first: torch.Tensor = entry_of("PerEnvNoise", tensordict, self.init_key, remedy)
        return first.reshape(*action.shape[:-1], 1)

    def _draw(self, like: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
        """Return the deviations, new ones where an episode starts or none is known yet."""
        known = self.std
        if known is not None and (known.shape, known.device) != (like.shape, like.device):
            known = None  # those were other environments
        if known is not None and first is None:
            return known
        drawn = torch.empty_like(like).uniform_(self.std_min, self.std_max)
        self.std = drawn if known is None or first is None else torch.where(first, drawn, known)
        return self.std
