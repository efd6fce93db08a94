"""`PackedPrioritizedSampler`: TorchRL's `PrioritizedSampler`, for rows that any process writes.

TorchRL's needs its C++ extension, and knows the rows that its own buffer writes. This one needs
none, and gives rows of other processes the highest priority so far, too, before it draws.
`ReplayBuffer` calls it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torchrl.data import PrioritizedSampler
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from torchrl_unilab.data.replay.reduction_tree import ReductionTree
from torchrl_unilab.data.replay.storage import PackedReplayStorage
from torchrl_unilab.errors import ConfigError, UsageError

_OWN = 1000
"""Writes that are noted one by one."""


class PackedPrioritizedSampler(PrioritizedSampler):
    """Draws rows of a replay by their priority (Schaul et al. 2016, arXiv 1511.05952).

    ``P(i) = p_i^alpha / sum_k p_k^alpha`` (eq. 1), weights ``(N P(i))^-beta`` over their
    maximum in the replay (section 3.4). Arguments, keys and checkpoints are those of
    `PrioritizedSampler`, over any storage of one dimension on the CPU. Draws come from torch's
    generator, where TorchRL's come from NumPy's.

    Args:
        max_capacity: Rows of the storage.
        alpha: Exponent of priorities.
        beta: Exponent of the weights' correction.
        eps: Is added to priorities.
        dtype: Of the weights.
        reduction: How priorities of more than one number become one: ``max``, ``min``,
            ``median`` or ``mean``.
        max_priority_within_buffer: New rows take the highest priority of rows that are still
            there, rather than the highest one ever.
        device: The CPU.

    Raises:
        ConfigError: Another device, or an exponent below 0.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> from torchrl_unilab.data import PackedPrioritizedSampler, PackedReplayStorage
        >>> storage = PackedReplayStorage(1000)
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=storage,
        ...     sampler=PackedPrioritizedSampler(1000, alpha=0.6, beta=0.4),
        ...     batch_size=4,
        ... )
        >>> rows = TensorDict({"x": torch.arange(8.0)}, [8])
        >>> _ = buffer.extend(rows)
        >>> buffer.update_priority(torch.arange(8), torch.tensor([1e-8] * 7 + [1e8]))
        >>> buffer.sample()["x"]
        tensor([7., 7., 7., 7.])
        >>> storage.close()
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if device is not None and torch.device(device).type != "cpu":
            raise ConfigError(
                f"PackedPrioritizedSampler device: {device} (expected cpu or None). Rows are drawn "
                "where they are, in shared memory of the host; move what is sampled."
            )
        for name, value in (("alpha", alpha), ("beta", beta)):
            if value < 0:
                raise ConfigError(
                    f"PackedPrioritizedSampler {name}: {value} (expected at least 0). 0 draws "
                    "all rows alike, or does not weight them."
                )
        # Not TorchRL's, which warns that its extension is not there.
        Sampler.__init__(self)
        self._max_capacity, self._alpha, self._beta, self._eps = max_capacity, alpha, beta, eps
        self.dtype, self.reduction = dtype, reduction
        self._max_priority_within_buffer = max_priority_within_buffer
        self._device = None
        self._init()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was seen of this process's storage."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"_seen": (None, (), ()), "_own": []}

    def _init(self) -> None:
        """Forget all priorities."""
        self._sum_tree = ReductionTree(self._max_capacity, self.dtype, "sum")
        self._min_tree = ReductionTree(self._max_capacity, self.dtype, "min")
        self._max_priority = None
        # A storage, the first rows of its shards, and their heads.
        self._seen: tuple[Any, tuple[int, ...], tuple[int, ...]] = (None, (), ())
        self._own: list[torch.Tensor] = []  # positions that this buffer has written since

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; rows that are loaded beside it are not new."""
        super().load_state_dict(state_dict)
        self._seen, self._own = (None, (), ()), []

    def loads(self, path: Any) -> None:
        """Restore what `dumps` wrote; rows that are loaded beside it are not new."""
        super().loads(path)
        self._seen, self._own = (None, (), ()), []

    def extend(self, index: torch.Tensor | tuple[Any, ...]) -> None:
        """Note rows that this buffer wrote: their priority comes from there."""
        super().extend(index)
        self._note(index)

    def add(self, index: torch.Tensor | int) -> None:
        """Note a row that this buffer wrote."""
        super().add(index)
        self._note(index)

    def _note(self, index: Any) -> None:
        self._own.append(torch.as_tensor(index, device="cpu").reshape(-1))
        if len(self._own) > _OWN:  # a process that writes may never sample
            self._own = [torch.cat(self._own).unique()]

    def update_priority(
        self, index: Any, priority: Any, *, storage: TensorStorage | None = None
    ) -> None:
        """Set the priorities of rows.

        Args:
            index: Their positions, [n].
            priority: As many, or one for all.
            storage: What they are of; unused.

        Raises:
            ConfigError: A priority is below 0, or not finite; none was set.
        """
        index = torch.as_tensor(index, device="cpu")
        priority = torch.as_tensor(priority, device="cpu")
        rows = int(index.max()) + 1
        self._check_capacity(rows)
        packed = isinstance(storage, PackedReplayStorage) and storage.writers == 1
        length = len(storage) if packed else rows  # type: ignore[arg-type]
        if rows > length:  # some were sampled before the rows were emptied
            there = index < length
            index, priority = index[there], priority[there] if priority.ndim else priority
            if not len(index):
                return
        bad = priority[~((priority >= 0) & priority.isfinite())]
        if len(bad):
            raise ConfigError(
                f"cannot set priorities: {bad[0].item()} is one (expected finite numbers of at "
                "least 0). Check the loss that they come from."
            )
        super().update_priority(index, priority, storage=storage)

    def sample(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return positions, int64 [n], and their ``priority_weight`` [n].

        Raises:
            UsageError: The storage is empty.
        """
        count = len(storage)
        if not count:
            raise UsageError("cannot sample: 0 rows (expected at least 1). Extend the buffer.")
        own, self._own = self._own, []
        if isinstance(storage, PackedReplayStorage):
            count = storage.max_size  # a shard may be ahead of the others; what is not has no part
            self._check_capacity(count)
            self._mark_new(storage, own)
        total = self._sum_tree.query(0, count)
        least = self._min_tree.query(0, count)
        if not least > 0:
            raise ConfigError(
                f"cannot sample by priority: {least} is the least one (expected above 0). Give the "
                "sampler an eps above 0."
            )
        share = torch.rand(batch_size, generator=self._rng, dtype=torch.float64, device="cpu")
        index = self._sum_tree.scan_lower_bound(share * total)
        return index, {"priority_weight": (self._sum_tree[index] / least).pow(-self._beta)}

    def _check_capacity(self, rows: int) -> None:
        if rows > self._max_capacity:
            raise ConfigError(
                f"PackedPrioritizedSampler max_capacity: {self._max_capacity} (expected at least "
                f"{rows}, the storage's rows). Make it as large as the storage."
            )

    def _mark_new(self, storage: PackedReplayStorage, own: list[torch.Tensor]) -> None:
        """Give rows that others wrote since the last sample the highest priority so far.

        Args:
            storage: The rows.
            own: Positions that this buffer has written since.
        """
        rows, source = storage.rows, weakref.ref(storage)
        bases, _, window = rows.lineage()
        known, began, last = self._seen
        if known == source and began != bases:  # all rows are others
            self._init()
            known, own = None, []
        if known != source:
            last = window.floors
        self._seen = source, bases, window.heads
        if last == window.heads:
            return
        new = [
            torch.arange(max(first, floor), head, device="cpu") * rows.shards + shard
            for shard, (first, floor, head) in enumerate(
                zip(last, window.floors, window.heads, strict=True)
            )
        ]
        positions = rows.positions(torch.cat(new))
        if known != source:  # a checkpoint may have priorities
            positions = positions[self._sum_tree[positions] == 0]
        elif own:
            positions = positions[~torch.isin(positions, torch.cat(own))]
        if len(positions):
            self._maybe_erase_max_priority(positions)
            self.mark_update(positions)
