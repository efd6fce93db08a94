"""`PackedSliceSampler`: TorchRL's `SliceSampler`, which knows where old trajectories end.

TorchRL's looks for the ends of trajectories among all rows whenever it samples. Rows of a shard
are numbered for ever, so an end that was found stays where it is until its row is overwritten:
this one looks at the rows that are new. `ReplayBuffer` calls it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torchrl.data import SliceSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_unilab.data.replay.storage import PackedReplayStorage
from torchrl_unilab.errors import UsageError
from torchrl_unilab.shm.shards import Window

_Boundaries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Ends(NamedTuple):
    """What is known of the rows of a storage.

    Attributes:
        source: Of which rows, by which key, since which rewriting.
        seen: The number of the first row that nobody has looked at.
        numbers: Ascending numbers of rows before it that end a trajectory, int64 [n].
    """

    source: Hashable
    seen: int
    numbers: torch.Tensor


class PackedSliceSampler(SliceSampler):
    """Samples slices of trajectories of a `PackedReplayStorage` of one writer.

    The arguments are `SliceSampler`'s, and so are its batches for a seed. Other storages, and
    what is more than one key of the rows (``end_keys``, ``ends``, ``trajectories``,
    ``fragmented``) or on a GPU (``use_gpu``), are left to it. It does not see what is written
    through views: change the trajectory key by assignment, ``buffer[positions] = rows``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter
        >>> from torchrl_unilab.data import PackedSliceSampler
        >>> storage = PackedReplayStorage(1000)
        >>> buffer = ReplayBuffer(
        ...     storage=storage,
        ...     sampler=PackedSliceSampler(slice_len=4, traj_key="episode"),
        ...     writer=PackedReplayWriter(),
        ...     batch_size=8,
        ... )
        >>> rows = {"episode": torch.arange(20) // 10, "step": torch.arange(20) % 10}
        >>> _ = buffer.extend(TensorDict(rows, [20]))
        >>> buffer.sample()["step"].view(2, 4).diff(dim=1)
        tensor([[1, 1, 1],
                [1, 1, 1]])
        >>> storage.close()
    """

    _known: _Ends | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is known of this process's storage."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"_known": None}

    def _get_stop_and_length(self, storage: Storage, fallback: bool = True) -> _Boundaries:
        """Return first and last positions of trajectories, int64 [n, 1], and lengths [n].

        Raises:
            UsageError: The storage is empty.
        """
        found = None
        if isinstance(storage, PackedReplayStorage):
            window = storage.rows.readable()
            if not window.size:
                raise UsageError(
                    "cannot sample slices: 0 rows (expected at least 1). Extend the buffer."
                )
            found = self._found(storage, window)
        return super()._get_stop_and_length(storage, fallback) if found is None else found

    def _found(self, storage: PackedReplayStorage, window: Window) -> _Boundaries | None:
        """Return the same of a window, by what is known; None if that is left to TorchRL."""
        if self._cache or self._gpu_device is not None:
            return None
        if self._traj_key_auto:
            self._resolve_traj_key(storage)
        key = self._used_traj_key if self._fetch_traj else self.end_key
        rows, views = storage.rows, storage._storage  # the views of all rows, written or not
        column = None if key is None or views is None else views.get(key, None)
        if column is None or storage.writers > 1 or column.numel() != len(column):
            return None
        source = (weakref.ref(storage), key, rows.rewritten)
        (floor,), (head,) = window
        known = self._known
        # A thread beside this one may have seen newer rows:
        if known is None or known.source != source or not floor <= known.seen <= head:
            known = _Ends(source, floor, torch.empty(0, dtype=torch.int64, device="cpu"))
        if self._fetch_traj:  # rows end a trajectory if the next ones are of another
            first = max(floor, known.seen - 1)
            values = _numbered(column, first, head)
            ends = values[:-1] != values[1:]
        else:
            first = known.seen
            ends = _numbered(column, first, head)
        numbers = known.numbers[int(torch.searchsorted(known.numbers, floor)) :]
        numbers = torch.cat([numbers, ends.nonzero().squeeze(1).add_(first)])
        self._known = _Ends(source, head, numbers)
        return _boundaries(numbers, floor, head, storage.max_size)

    def _get_index(self, *, storage_length: int, storage: Storage, **parts: Any) -> Any:
        """Let TorchRL choose slices; rows go round a storage's size, whatever it has by now."""
        if isinstance(storage, PackedReplayStorage):
            storage_length = storage.max_size
        return super()._get_index(storage_length=storage_length, storage=storage, **parts)

    def _finalize_index(self, *, storage: Storage, **parts: Any) -> Any:
        """Let TorchRL mark where slices end, for which it needs flags, and not whole rows."""
        flags: Any = storage
        if isinstance(storage, PackedReplayStorage) and storage._storage is not None:
            key = self.truncated_key or ()
            path = () if isinstance(key, str) else key[:-1]
            keys = [(*path, "done"), (*path, "terminated"), self.init_key or "is_init"]
            flags = storage._storage.select(*keys, strict=False)
        return super()._finalize_index(storage=flags, **parts)


def _numbered(column: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Return the values of rows numbered from `first` to before `end`, [end - first]."""
    capacity = len(column)
    at, count = first % capacity, end - first
    fit = min(count, capacity - at)
    return torch.cat([column[at : at + fit].reshape(fit), column[: count - fit].reshape(-1)])


def _boundaries(numbers: torch.Tensor, floor: int, head: int, capacity: int) -> _Boundaries:
    """Return what lies between ends, as TorchRL's `find_start_stop_traj` does.

    Args:
        numbers: Ascending numbers of rows that end a trajectory, int64 [n].
        floor: The number of the first row, which begins one.
        head: One above the number of the last row, which ends one.
        capacity: Positions.

    Returns:
        First and last positions, each [n, 1], and lengths [n], by ascending last positions.
    """
    tail = numbers.new_tensor([head - 1])
    stops = numbers if torch.equal(numbers[-1:], tail) else torch.cat([numbers, tail])
    lengths = stops.diff(prepend=numbers.new_tensor([floor - 1]))
    wrapped = floor - floor % capacity + capacity  # the number at position 0, if it is there
    turn = int(torch.searchsorted(stops, wrapped))
    last = torch.cat([stops[turn:] - wrapped, stops[:turn] - (wrapped - capacity)])
    lengths = torch.cat([lengths[turn:], lengths[:turn]])
    first = last - lengths + 1
    first[:1] %= capacity  # no other begins at the end of the storage
    return first.unsqueeze(1), last.unsqueeze(1), lengths
