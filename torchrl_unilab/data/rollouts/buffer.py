"""Writer, sampler and replay buffer for a `RolloutRingStorage`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_unilab.checks import as_choice, as_instance, as_seconds
from torchrl_unilab.data.rollouts.storage import RolloutRingStorage, RolloutSampler
from torchrl_unilab.data.shared_storage import SharedStorageWriter, Stateless

Take = Literal["oldest", "newest"]


class RolloutRingWriter(SharedStorageWriter):
    """Commits rollouts to a `RolloutRingStorage`; with `RolloutRingSampler`, in any buffer.

    `extend` takes one rollout, several along an additional leading dimension, or, if the buffer
    passes it on, a list; `add` takes one. Both return positions among the unread rollouts, which
    are valid until the reader takes some out.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.data import RolloutRingStorage, RolloutRingWriter
        >>> storage = RolloutRingStorage(4)
        >>> writer = RolloutRingWriter()
        >>> writer.register_storage(storage)
        >>> writer.extend(TensorDict({"reward": torch.ones(2, 3)}, [2, 3]))
        tensor([0])
        >>> storage.close()
    """

    _kind = RolloutRingStorage
    _storage: RolloutRingStorage

    def add(self, data: TensorDictBase) -> int:
        """Commit one rollout; return its position. Raises as `RolloutRingStorage.write_all`."""
        return int(self.extend([data])[0])

    def extend(self, data: TensorDictBase | Sequence[TensorDictBase]) -> torch.Tensor:
        """Commit one or several rollouts.

        Returns:
            Their positions, int64 of shape [K]. Raises as `RolloutRingStorage.write_all`.
        """
        count = self._storage.write_all(data)
        end = len(self._storage)
        return torch.arange(end - count, end, device="cpu").clamp_(min=0)

    @property
    def _write_count(self) -> int:
        return self._storage.write_count

    def _empty(self, empty_write_count: bool = True) -> None:
        self._storage._empty(counts=empty_write_count)


class RolloutRingSampler(Stateless, RolloutSampler):
    """Takes whole rollouts out of a `RolloutRingStorage`, each once.

    ``sample(K)`` of the buffer returns the K oldest unread rollouts, or the K newest, skipping
    those before them. An iteration over a `RolloutReplayBuffer` ends when fewer unread rollouts
    than a batch are left; the next iteration continues with what was written since. A buffer that
    prefetches more than one batch may return batches in another order, because its threads race for
    its lock.

    Args:
        take: ``"oldest"`` or ``"newest"``.
        timeout: Seconds a sample waits for enough rollouts of other processes. The buffer's
            locks are held meanwhile: use it in a `RolloutReplayBuffer`, which has no lock
            between processes, or wait before sampling (`RolloutRingStorage.wait`).

    Raises:
        ConfigError: `take` is neither, or `timeout` no seconds.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.data import RolloutReplayBuffer, RolloutRingStorage
        >>> from torchrl_unilab.data import RolloutRingSampler
        >>> storage = RolloutRingStorage(4)
        >>> sampler = RolloutRingSampler(take="newest")
        >>> rb = RolloutReplayBuffer(storage=storage, sampler=sampler, batch_size=1)
        >>> for reward in (1.0, 2.0):
        ...     _ = rb.extend(TensorDict({"reward": torch.full((2, 3), reward)}, [2, 3]))
        >>> rb.sample()["reward"].unique().tolist(), storage.skipped
        ([2.0], (1,))
        >>> storage.close()
    """

    ran_out = False
    """Whether fewer rollouts than a batch were left after the last sample."""

    def __init__(self, take: Take = "oldest", timeout: float = 0.0) -> None:
        self.take: Take = as_choice("take", take, get_args(Take), "Leave it out for the oldest.")
        self.timeout = as_seconds("timeout of a RolloutRingSampler", timeout, zero=True)
        self._empty()

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Choose rollouts, which leave the storage with the ``storage.get`` of the index.

        Returns:
            Their positions, int64 of shape [batch_size], and an empty dict.

        Raises:
            ConfigError: `batch_size` is above the number of slots, or `storage` is of another kind.
            WaitTimeoutError: There are not enough unread rollouts; none was taken.
        """
        what, remedy = "storage of a RolloutRingSampler", "Use TorchRL's own sampler."
        as_instance(what, storage, RolloutRingStorage, remedy)
        index = storage.draw(batch_size, newest=self.take == "newest", timeout=self.timeout)
        left = len(storage) - int(index[-1]) - 1
        self._remaining_batches = left // batch_size
        self.ran_out = left < batch_size
        return index, {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether enough rollouts are unread."""
        return len(storage) >= batch_size

    def _empty(self) -> None:
        self.ran_out = False
        self._remaining_batches = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(take={self.take!r})"


class RolloutReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` of rollouts that takes no lock between processes.

    A stock buffer works with the ring as well. But once it is shared, as collectors do, it holds a
    lock across all processes while it writes or samples: writers copy one after the other, a writer
    that is killed blocks all others, and a writer that waits for a slot (``overflow="block"``)
    keeps the sampler from freeing one until its timeout. The ring does not need that lock.

    Args:
        storage: The `RolloutRingStorage`.
        sampler: A `RolloutRingSampler` of the oldest rollouts if not given.
        **settings: As for `TensorDictReplayBuffer`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_unilab.data import RolloutReplayBuffer, RolloutRingStorage
        >>> rb = RolloutReplayBuffer(storage=RolloutRingStorage(4), batch_size=1)
        >>> rb.extend(TensorDict({"reward": torch.ones(2, 3)}, [2, 3]))
        tensor([0])
        >>> rb.sample()["reward"].shape
        torch.Size([1, 2, 3])
        >>> rb.storage.close()
    """

    def __init__(
        self, *, storage: RolloutRingStorage, sampler: Sampler | None = None, **settings: Any
    ) -> None:
        super().__init__(
            storage=storage,
            sampler=RolloutRingSampler() if sampler is None else sampler,
            writer=RolloutRingWriter(),
            **settings,
        )

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Sample until fewer than a batch are unread; a sampler with a timeout waits for one."""
        while self.stats()["prefetch_queue_size"]:  # fetched in an iteration that was left
            yield self.sample()
        sampler, count = self.sampler, self.batch_size
        polls = isinstance(sampler, RolloutRingSampler) and not sampler.timeout
        if polls and count is not None and not sampler.can_sample(self.storage, count):
            return
        yield from super().__iter__()

    def __setitem__(self, index: Any, value: Any) -> None:
        """Refuse to change unread rollouts; stock buffers would change copies of a key."""
        self.storage.set(index, value, set_cursor=False)

    def share(self, shared: bool = True) -> RolloutReplayBuffer:
        """Share the buffer and its transforms between processes."""
        super().share(shared)
        self._write_lock = contextlib.nullcontext()
        return self
