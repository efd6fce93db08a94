"""`PackedSliceSampler`: TorchRL's `SliceSampler`, which knows where old trajectories end.

TorchRL's looks for the ends of trajectories among all rows whenever it samples. Rows of a shard
are numbered for ever, so an end that was found stays where it is until its row is overwritten:
this one looks at the rows that are new. `ReplayBuffer` calls it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torchrl.data import SliceSampler

from torchrl_unilab.data.replay.storage import PackedReplayStorage
from torchrl_unilab.errors import ConfigError, UsageError

_Boundaries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Ends(NamedTuple):
    """The ends of trajectories found so far in the rows of a shard.

    Attributes:
        source: The rows, the key and the count of rewrites that the ends are valid for.
        seen: The number of the first row that has not been searched.
        numbers: Ascending numbers of rows before it that end a trajectory, int64 [n].
    """

    source: Hashable
    seen: int
    numbers: torch.Tensor


class PackedSliceSampler(SliceSampler):
    """Samples slices of trajectories of a `PackedReplayStorage`.

    The arguments are `SliceSampler`'s. If one writer has extended the storage, so are the batches
    for a seed. Rows of several environments, which `PackedReplayStorage.add` writes step by step,
    and rows of several writers are put in order of time; `SliceSampler` is refused for these. Only
    steps that have the same number of environments as the newest step are sampled.

    Other storages, and arguments that ask for more than one key of the rows (``end_keys``,
    ``ends``, ``trajectories``) or a GPU (``use_gpu``), are left to `SliceSampler`. For
    ``fragmented``, which TorchRL refuses to classes derived from it, use `SliceSampler` itself.
    Writes through views are not noticed: change the trajectory key by assignment,
    ``buffer[positions] = rows``.

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

        Steps of two environments, which take turns:

        >>> storage = PackedReplayStorage(1000)
        >>> env, step = torch.meshgrid(torch.arange(2), torch.arange(10), indexing="ij")
        >>> done = {"done": (step == 9).unsqueeze(-1)}
        >>> _ = storage.add(TensorDict({"env": env, "step": step, "next": done}, [2, 10]))
        >>> sampler = PackedSliceSampler(slice_len=4, end_key=("next", "done"))
        >>> batch = ReplayBuffer(storage=storage, sampler=sampler, batch_size=8).sample()
        >>> batch["env"].view(2, 4).diff(dim=1).any().item()
        False
        >>> storage.close()
    """

    _known: tuple[_Ends, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is known of this process's storage."""
        return {**super().__getstate__(), "_known": ()}

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Return positions of rows, one slice after the other, and what to mark in them.

        Raises:
            UsageError: There are no rows.
            ConfigError: Rows take turns, and the arguments leave them to TorchRL.
        """
        if isinstance(storage, PackedReplayStorage):
            storage = _Timeline(storage)
        sampled: tuple[Any, dict[Any, Any]] = super().sample(storage, batch_size)
        return sampled

    def _get_stop_and_length(self, storage: Any, fallback: bool = True) -> _Boundaries:
        """Return first and last places of trajectories, int64 [n, 1], and lengths [n].

        A place is an index of the timeline; it is a position unless rows are interleaved. Raises as
        `sample`.
        """
        if isinstance(storage, PackedReplayStorage):
            storage = _Timeline(storage)
        if isinstance(storage, _Timeline):
            if (found := self._find_boundaries(storage)) is not None:
                return found
            if storage.interleaved:
                raise ConfigError(
                    "slices of rows that take turns between writers or environments: by "
                    f"{self._key or self.end_keys!r} (expected one key of the rows, with one flag "
                    "or number per row, and no end_keys, ends, trajectories or use_gpu). Give "
                    "end_key=('next', 'done') or a traj_key."
                )
            storage = storage.storage
        left: _Boundaries = super()._get_stop_and_length(storage, fallback)
        return left

    @property
    def _key(self) -> Any:
        """The key that slices are cut by, once TorchRL has resolved it."""
        return self._used_traj_key if self._fetch_traj else self.end_key

    def _find_boundaries(self, timeline: _Timeline) -> _Boundaries | None:
        """Return the boundaries from the known ends; None if TorchRL has to look for them."""
        if self._cache or self._gpu_device is not None:
            return None
        storage = timeline.storage
        if self._traj_key_auto:
            self._resolve_traj_key(storage)
        key = self._key
        column = None if key is None else storage._views.get(key, None)
        if column is None or column.numel() != len(column):
            return None
        rows, known = storage.rows, dict(enumerate(self._known))
        found = []
        for shard, steps in enumerate(timeline.shards):
            own = column[shard :: rows.shards]
            source = (weakref.ref(storage), key, shard, rows.rewritten)
            found.append(_ends(own, source, steps, known.get(shard), changes=self._fetch_traj))
        self._known = tuple(found)
        numbers = [ends.numbers for ends in found]
        if timeline.interleaved:
            return timeline.boundaries(numbers)
        (steps,) = timeline.shards
        return _boundaries(numbers[0], steps.first, steps.head, storage.max_size)

    def _finalize_index(self, *, index: torch.Tensor, storage: Any, **parts: Any) -> Any:
        """Let TorchRL mark where slices end, for which it needs flags, and not whole rows."""
        if isinstance(storage, _Timeline):
            index, views = storage.positions(index), storage.storage._views
            key = self.truncated_key or ()
            path = () if isinstance(key, str) else key[:-1]
            keys = [(*path, "done"), (*path, "terminated"), self.init_key or "is_init"]
            storage = views.select(*keys, strict=False)
        return super()._finalize_index(index=index, storage=storage, **parts)


class _Steps(NamedTuple):
    """The newest steps of a shard that have the same number of rows, one per environment.

    Attributes:
        first: The number of the first row.
        length: Steps.
        stride: Rows of a step.
        place: Place of the first row: the rows of the shards before this one.
    """

    first: int
    length: int
    stride: int
    place: int

    @property
    def head(self) -> int:
        """One above the number of the last row."""
        return self.first + self.length * self.stride


class _Timeline:
    """A storage as TorchRL's sampler sees it: all steps of one environment, then of the next.

    Args:
        storage: Its rows lie step by step in each shard.

    Raises:
        UsageError: There are no rows.
    """

    ndim = 1

    def __init__(self, storage: PackedReplayStorage) -> None:
        self.storage = storage
        window = storage.rows.readable()
        self.shards: list[_Steps] = []
        place = 0
        for floor, head, (first, stride) in zip(*window, storage.rows.steps(), strict=True):
            length = max(0, head - max(floor, first)) // stride
            self.shards.append(_Steps(head - length * stride, length, stride, place))
            place += length * stride
        if not place:
            raise UsageError(
                "cannot sample slices: 0 rows (expected at least one step of all environments). "
                "Extend the buffer, or sample again if another process has replaced the rows."
            )
        steps = self.shards[0]
        self.interleaved = len(self.shards) > 1 or steps.stride > 1 or steps.length < window.size
        """Whether rows of environments or shards alternate: then places differ from positions."""
        self.shape = (place if self.interleaved else storage.max_size,)

    def boundaries(self, ends: Sequence[torch.Tensor]) -> _Boundaries:
        """Return the places between ends, given as ascending numbers of rows for each shard."""
        stops = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for steps, numbers in zip(self.shards, ends, strict=True):
            first, length, stride, place = steps
            past = numbers[int(torch.searchsorted(numbers, first)) :] - first
            stops.append(past % stride * length + past // stride + place)
            if length:
                stops.append(torch.arange(1, stride + 1, device="cpu") * length + (place - 1))
        last = torch.cat(stops).unique()
        lengths = last.diff(prepend=last.new_tensor([-1]))
        return (last - lengths + 1).unsqueeze(1), last.unsqueeze(1), lengths

    def positions(self, places: torch.Tensor) -> torch.Tensor:
        """Return the positions of rows at places, int64 of any shape."""
        if not self.interleaved:
            return places
        table = torch.tensor(self.shards, device="cpu")
        shard = torch.bucketize(places, table[1:, 3].contiguous(), right=True)
        first, length, stride, place = table[shard].unbind(-1)
        own = places - place
        rows = self.storage.rows
        numbers = first + own % length * stride + own // length
        return rows.positions(numbers * rows.shards + shard)


def _ends(
    column: torch.Tensor, rows: Hashable, steps: _Steps, known: _Ends | None, *, changes: bool
) -> _Ends:
    """Return which rows of a shard end a trajectory.

    Args:
        column: Its flags or numbers, [shard_rows] or [shard_rows, 1].
        rows: Identifies the rows, the key and the count of rewrites.
        steps: The rows to search.
        known: The ends found so far, if any.
        changes: Whether a trajectory ends where the column changes from one row of an environment
            to the next; else it ends where the column is true.
    """
    first, head, stride = steps.first, steps.head, steps.stride
    source = (rows, stride, first % stride)
    # A thread beside this one may have seen newer rows:
    if known is None or known.source != source or not first <= known.seen <= head:
        known = _Ends(source, first, torch.empty(0, dtype=torch.int64, device="cpu"))
    start = known.seen
    if changes:
        start = max(first, start - stride)
        values = _numbered(column, start, head)
        ends = values[:-stride] != values[stride:]
    else:
        ends = _numbered(column, start, head)
    numbers = known.numbers[int(torch.searchsorted(known.numbers, first)) :]
    return _Ends(source, head, torch.cat([numbers, ends.nonzero().squeeze(1).add_(start)]))


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
