"""The newest rollouts on the learner's device, each learnt from several times.

A rollout is copied in once, over the oldest; all memory is taken with the first one. A rollout
of other keys or another size is refused before anything is copied. `APPOTrainer` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_unilab.checks import as_integer
from torchrl_unilab.configs.appo import MAX_POOL
from torchrl_unilab.data.schema import TensorSchema
from torchrl_unilab.errors import ConfigError, LayoutShapeError


class RolloutPool:
    """The newest `size` rollouts side by side; a new one replaces the oldest.

    IMPACT's circular buffer (Luo et al. 2019, arXiv 1912.00167, section 3.2): a learner that is
    faster than its collectors trains on each rollout `size` times, as part of `size` pools. Memory
    is allocated once, with the first rollout. Time is its first dimension, so that recurrences over
    time read memory in order: pass ``time_dim=0`` to TorchRL's estimators.

    Args:
        size: Rollouts to keep, K, 1 to 8.
        device: Where to keep them.

    Raises:
        ConfigError: `size` is out of range.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.data import RolloutPool
        >>> from tensordict import TensorDict
        >>> pool = RolloutPool(2)
        >>> for reward in (1.0, 2.0, 3.0):
        ...     _ = pool.add(TensorDict(reward=torch.full((4, 5), reward), batch_size=[4, 5]))
        >>> pool.data.batch_size, sorted(set(pool.data["reward"].flatten().tolist()))
        (torch.Size([5, 8]), [2.0, 3.0])
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        remedy = "Use 1 to learn from each rollout once."
        self.size = as_integer("rollouts of a pool", size, remedy, most=MAX_POOL)
        self.device = torch.device(device)
        self.added = 0
        self._memory: TensorDictBase | None = None
        self._schema: TensorSchema | None = None  # schema of one rollout in the pool, [T, N]

    def __len__(self) -> int:
        return min(self.added, self.size)

    def add(self, rollout: TensorDictBase) -> TensorDictBase:
        """Copy a rollout [N, T] in, over the oldest if the pool is full.

        Returns:
            Its copy in the pool, a view [T, N], which may be changed in place.

        Raises:
            LayoutError: Its batch size or keys, or a tensor's shape or dtype, are not those of the
                first; nothing was copied.
        """
        if rollout.ndim != 2:
            raise LayoutShapeError(
                f"rollout for the pool: batch size {list(rollout.batch_size)} (expected [N, T], "
                "time last). Unsqueeze or reshape it."
            )
        given, memory = rollout.detach().transpose(0, 1), self._memory
        if memory is None:
            steps, n = given.batch_size
            memory = given.to_tensordict().apply(
                lambda t: t.new_empty((steps, self.size, *t.shape[1:]), device=self.device),
                batch_size=[steps, self.size, n],
                device=self.device,
            )
        column = memory[:, self.added % self.size]
        schema = self._schema or TensorSchema.of(column)
        schema.select(given)
        self._memory, self._schema = memory, schema
        column.update_(given)
        self.added += 1
        return column

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the rollouts, and how many there have been."""
        memory = self._memory
        return {
            "added": self.added,
            "batch_size": None if memory is None else list(memory.batch_size),
            "rollouts": None if memory is None else memory.apply(torch.clone).to_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: The state is of a pool of another size. Nothing has changed then.
        """
        size = state_dict["batch_size"]
        if size is not None and size[1] != self.size:
            raise ConfigError(
                f"rollout pool: a state of {size[1]} rollouts (expected {self.size}). Load it "
                "into a pool of its size."
            )
        self.added = state_dict["added"]
        self._memory = self._schema = None
        if size is not None:
            saved = TensorDict(state_dict["rollouts"], size).to(self.device)
            self._memory = saved.apply(torch.clone)  # `clone` fails where torch cannot add

    @property
    def data(self) -> TensorDictBase:
        """The rollouts added so far, a view [T, K * N].

        Raises:
            ConfigError: The pool is empty.
        """
        if self._memory is None:
            raise ConfigError("rollout pool: it is empty (expected a rollout). Add one first.")
        filled: TensorDictBase = self._memory[:, : len(self)].flatten(1, 2)
        return filled
