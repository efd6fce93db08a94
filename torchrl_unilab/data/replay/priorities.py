"""`PackedPrioritizedSampler`: TorchRL's `PrioritizedSampler`, for rows that any process writes.

TorchRL's needs its C++ extension, and knows the rows that its own buffer writes. This one needs
none, and gives rows of other processes the highest priority so far, too, before it draws.
`ReplayBuffer` calls it.
"""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrl.data import PrioritizedSampler
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from torchrl_unilab.checks import as_choice, as_integer, as_number
from torchrl_unilab.data.positions import MASKS, flat_positions, is_single
from torchrl_unilab.data.replay.priority_tree import PriorityTree
from torchrl_unilab.data.replay.storage import PackedReplayStorage
from torchrl_unilab.errors import CheckpointError, ConfigError, LayoutShapeError, UsageError
from torchrl_unilab.limits import check_memory
from torchrl_unilab.shm.window import Window


class PackedPrioritizedSampler(PrioritizedSampler):
    """Draws rows of a replay by their priority (Schaul et al. 2016, arXiv 1511.05952).

    ``P(i) = p_i^alpha / sum_k p_k^alpha`` (eq. 1), weights ``(N P(i))^-beta`` over their maximum in
    the replay (section 3.4). Arguments and keys are those of `PrioritizedSampler`, over any storage
    of one dimension on the CPU. Each of the two loads files that the other's `dumps` wrote, and
    this one also loads the `state_dict` of TorchRL's. It draws from torch's generator, TorchRL's
    from NumPy's.

    TorchRL refuses to send a prioritised sampler, and therefore its buffer, to another process:
    send ``storage.without_buffers()``, and create a buffer there.

    Args:
        max_capacity: Rows of the storage.
        alpha: Exponent of priorities.
        beta: Exponent of the weights' correction.
        eps: Added to priorities.
        dtype: Of the weights.
        reduction: How priorities of more than one number become one: ``max``, ``min``,
            ``median`` or ``mean``.
        max_priority_within_buffer: New rows get the highest priority among the rows that are still
            stored, rather than the highest one ever; 1 if the row that had it was overwritten.
        device: The CPU, or None.

    Raises:
        ConfigError: A setting cannot work.

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

    _max_priority: Any  # (the priority without eps and alpha, its row), tensors; or (None, None)

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
        for what, number in (("alpha", alpha), ("eps", eps)):
            _check_number(what, number)
        name, remedy = "PackedPrioritizedSampler", "Choose one of them."
        where = None if device is None else torch.device(device).type
        move = "Rows are drawn where they are, in shared memory of the host; move what is sampled."
        as_choice(f"{name} device", where, ("cpu", None), move)
        max_capacity = as_integer(f"{name} max_capacity", max_capacity, "Make it the storage's.")
        needed = 10 * max_capacity  # float64, and a minimum and a sum of each block
        check_memory(f"{name} max_capacity {max_capacity}", needed, "Make it the storage's.")
        as_choice(f"{name} dtype", dtype, (torch.float32, torch.float64), remedy)
        as_choice(f"{name} reduction", reduction, ("max", "min", "median", "mean"), remedy)
        # Not PrioritizedSampler's: it warns if TorchRL's C++ extension is missing.
        Sampler.__init__(self)
        self._max_capacity, self._alpha, self._eps, self.beta = max_capacity, alpha, eps, beta
        self.dtype, self.reduction = dtype, reduction
        self._max_priority_within_buffer = max_priority_within_buffer
        self._device = None
        self._init()

    @PrioritizedSampler.alpha.setter
    def alpha(self, value: float) -> None:
        """Set the exponent of priorities, also of those that are set already."""
        _check_number("alpha", value)
        PrioritizedSampler.alpha.fset(self, value)

    @PrioritizedSampler.beta.setter
    def beta(self, value: float) -> None:
        """Set the exponent of the weights."""
        _check_number("beta", value)
        PrioritizedSampler.beta.fset(self, value)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `_seen`, which is of this process's storage."""
        return {**super().__getstate__(), "_seen": (None, (), ())}

    def _init(self) -> None:
        """Forget all priorities."""
        with torch.inference_mode(False):  # they are kept
            self._sum_tree = PriorityTree(self._max_capacity, self.dtype)
        self._min_tree = self._sum_tree  # TorchRL writes to both where alpha changes
        self._max_priority = None
        # The storage last seen, and per shard its first row since it was emptied, and its head.
        self._seen: tuple[Any, tuple[int, ...], tuple[int, ...]] = (None, (), ())

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and tensors, float64 [max_capacity] in place of each of the trees."""
        state: dict[str, Any] = super().state_dict()
        values = state["_sum_tree"].values
        return state | {"_sum_tree": values, "_min_tree": values.masked_fill(values == 0, math.inf)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; rows that are loaded with it are not new.

        State of a `PrioritizedSampler` is taken, too.

        Raises:
            CheckpointError: The state is of a sampler of another capacity; nothing was changed.
        """
        if (rows := len(state_dict["_sum_tree"])) != self._max_capacity:
            raise CheckpointError(
                f"state of a prioritised sampler: of {rows} rows (expected {self._max_capacity}, "
                "the max_capacity). Load it into a sampler of that size."
            )
        super().load_state_dict(state_dict)
        tree, (most, row) = self._sum_tree, self._max_priority
        self._init()
        index = torch.arange(self._max_capacity, device="cpu")
        self._sum_tree[index] = tree[index]
        if most is not None:  # files, and TorchRL's samplers after them, have plain numbers
            most = torch.as_tensor(most, dtype=torch.float64, device="cpu")
            self._max_priority = most, torch.as_tensor(row, dtype=torch.int64, device="cpu")

    def dumps(self, path: str | Path) -> None:
        """Save to the files that TorchRL's ``dumps`` writes."""
        path, state = Path(path), self.state_dict()
        path.mkdir(parents=True, exist_ok=True)
        state.pop("_sum_tree").numpy().tofile(path / "sumtree.memmap")
        state.pop("_min_tree").numpy().tofile(path / "mintree.memmap")
        most = [None if number is None else float(number) for number in state.pop("_max_priority")]
        numbers = {key: float(number) for key, number in state.items()}
        metadata = numbers | {"_max_priority": most, "_max_capacity": self._max_capacity}
        (path / "sampler_metadata.json").write_text(json.dumps(metadata))

    def loads(self, path: str | Path) -> None:
        """Restore what `dumps` wrote, as `load_state_dict` does.

        Raises:
            CheckpointError: The state is of a sampler of another capacity; nothing was changed.
        """
        path = Path(path)
        state = json.loads((path / "sampler_metadata.json").read_text())
        rows = int(state["_max_capacity"])  # an older, longer file may keep its length
        tree = torch.from_numpy(np.fromfile(path / "sumtree.memmap", count=rows))
        self.load_state_dict(state | {"_sum_tree": tree, "_min_tree": None})

    def mark_update(self, index: torch.Tensor | int, *, storage: Storage | None = None) -> None:
        """Give rows that were written the highest priority so far."""
        index = self._positions(index, storage)
        new = self._mark_new(storage) if isinstance(storage, PackedReplayStorage) else None
        if new is not None:
            if torch.equal(new, index):
                return
            index = index[~torch.isin(index, new)]  # more rows than fit repeat positions
        super().mark_update(index, storage=storage)

    def update_priority(
        self, index: Any, priority: Any, *, storage: TensorStorage | None = None
    ) -> None:
        """Set the priorities of rows.

        Args:
            index: Their positions, as an index of the storage; negative ones are left out.
            priority: One for each of these rows, or one for all.
            storage: The storage of these rows; rows that it does not have are left out.

        Raises:
            ConfigError: A priority is below 0, or not finite, or its power is 0 or no number;
                none was set.
            IndexError: A mask is of another length, or positions are no integers; none was set.
            LayoutShapeError: There is neither one priority per row nor a single one; none was set.
        """
        index = self._positions(index, storage)
        priority = torch.as_tensor(priority, device="cpu").detach().reshape(-1)
        if len(priority) not in (1, len(index)):
            raise LayoutShapeError(
                f"cannot set priorities: {len(priority)} of {len(index)} rows (expected one, or as "
                "many). Check the index."
            )
        written = self._written(index, storage) if len(index) else None
        if written is not None:
            index, priority = index[written], priority[written] if len(priority) > 1 else priority
        if not len(index):
            return
        least, most = map(float, priority.aminmax())  # both are NaN if one is
        if not 0.0 <= least <= most < math.inf:
            raise ConfigError(
                f"cannot set priorities: {least} to {most} (expected finite numbers of at least "
                "0). Check the loss that they come from."
            )
        limits = torch.finfo(self.dtype)
        if not limits.tiny <= self._power(least) <= self._power(most) <= limits.max:
            raise ConfigError(
                f"cannot set priorities: {least} is the least one, {most} the highest, with "
                f"eps={self._eps} and alpha={self._alpha} (expected powers that are numbers above "
                f"0 in {self.dtype}). Give the sampler an eps above 0, or a smaller alpha."
            )
        self._set(index, priority, most)

    def _positions(self, index: Any, storage: Storage | None) -> torch.Tensor:
        """Return an index as positions, int64 [n]."""
        if is_single(index):
            index = torch.as_tensor(index, device="cpu").view(1)
        # Positions do not depend on the length, which takes a look into shared memory.
        needs_length = not isinstance(index, torch.Tensor) or index.dtype in MASKS
        length = len(storage) if needs_length and storage is not None else self._max_capacity
        return flat_positions(index, length)

    def _power(self, priority: float) -> float:
        try:
            return float((priority + self._eps) ** self._alpha)
        except OverflowError:
            return math.inf

    def _written(self, index: torch.Tensor, storage: Storage | None) -> torch.Tensor | None:
        """Return which of the rows exist, bool [n]; None if all do.

        The others may have been sampled before the storage was emptied.
        """
        first, last = map(int, index.aminmax())
        self._check_capacity(last + 1)
        written, length = None, self._max_capacity
        if isinstance(storage, PackedReplayStorage):
            heads: tuple[int, ...] = ()
            if storage.initialized:
                self._mark_new(storage)
                _, bases, heads = self._seen  # the rows that have priorities here
            if not heads:
                return torch.zeros_like(index, dtype=torch.bool)
            if last >= storage.writers * min(map(int.__sub__, heads, bases)):
                written = ~storage.rows.hidden(index, Window(bases, heads))
            length = storage.max_size
        elif storage is not None:
            length = len(storage)
        if first < 0 or last >= length:
            there = (index >= 0) & (index < length)
            written = there if written is None else written & there
        return written

    def _set(self, index: torch.Tensor, priority: torch.Tensor, most: float) -> None:
        """Set priorities [n], or one [1], of rows [n], at least one; `most` is the highest."""
        if self._max_priority[0] is None or most > self._max_priority[0]:
            highest, at = priority.max(0)
            self._max_priority = highest, index[at].clone()
        self._sum_tree[index] = (priority.double() + self._eps).pow(self._alpha)
        if self._max_priority_within_buffer and (index == self._max_priority[1]).any():
            self._recompute_max_priority_from_tree()

    def sample(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return positions, int64 [n], and their ``priority_weight`` [n].

        Raises:
            UsageError: The storage is empty.
        """
        count = len(storage)
        if count and isinstance(storage, PackedReplayStorage):
            self._mark_new(storage)
        least = self._sum_tree.minimum() if count else math.inf
        if least == math.inf:
            raise UsageError("cannot sample: 0 rows (expected at least 1). Extend the buffer.")
        share = torch.rand(batch_size, generator=self._rng, dtype=torch.float64, device="cpu")
        index = self._sum_tree.find(share)
        if not isinstance(storage, PackedReplayStorage) and int(index.amax()) >= count:
            # Drop priorities of rows that the storage no longer has, and draw again.
            self._sum_tree[torch.arange(count, self._max_capacity, device="cpu")] = 0.0
            return self.sample(storage, batch_size)
        weight = (self._sum_tree[index] / least).pow(-self.beta)
        return index, {"priority_weight": weight}

    def _check_capacity(self, rows: int) -> None:
        if rows > self._max_capacity:
            raise ConfigError(
                f"PackedPrioritizedSampler max_capacity: {self._max_capacity} (expected at least "
                f"{rows}, the storage's rows). Make it as large as the storage."
            )

    def _mark_new(self, storage: PackedReplayStorage) -> torch.Tensor | None:
        """Give rows that were written since the last call the highest priority so far.

        Returns:
            Their positions, int64 [n]; None if there are none.
        """
        self._check_capacity(storage.max_size)
        rows, source = storage.rows, weakref.ref(storage)
        bases, _, window = rows.lineage()
        known, began, last = self._seen
        if known == source and began != bases:  # emptied or loaded meanwhile: all rows are new
            self._init()
            known = None
        if not window.size:  # no row is written, or all are being replaced
            return None
        last = storage.heads_now(last) if known == source else window.floors
        self._seen = source, bases, window.heads
        if last == window.heads:
            return None
        positions = rows.positions_in(window.above(last))
        if known != source:  # priorities may come from a checkpoint: drop those without a row
            absent = torch.ones(self._max_capacity, dtype=torch.bool, device="cpu")
            absent[positions] = False
            rowless = absent.nonzero().squeeze(1)
            self._sum_tree[rowless] = 0.0
            self._maybe_erase_max_priority(rowless)
            positions = positions[self._sum_tree[positions] == 0]
        if len(positions):
            most = float(self.default_priority)
            self._set(positions, torch.tensor([most], dtype=torch.float64, device="cpu"), most)
            self._maybe_erase_max_priority(positions)
        return positions


def _check_number(name: str, value: float) -> None:
    remedy = "Use for example alpha=0.6, beta=0.4, eps=1e-8."
    as_number(f"PackedPrioritizedSampler {name}", value, remedy, "[0, inf)")
