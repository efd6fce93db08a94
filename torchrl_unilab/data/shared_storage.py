"""The base of storages in shared memory: lifetime, copies, checkpointers and writers."""

from __future__ import annotations

import copy
import sys
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torchrl.data import Composite
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase
from torchrl.data.replay_buffers.storages import Storage, TensorStorage
from torchrl.data.replay_buffers.writers import Writer

from torchrl_unilab.checks import as_instance
from torchrl_unilab.data.positions import MASKS
from torchrl_unilab.errors import ConfigError, UsageError
from torchrl_unilab.owner import Owner, closed_error
from torchrl_unilab.shm.handover import check_spawning


class SharedStorageCheckpointer(StorageCheckpointerBase):
    """Saves a `SharedStorage`, without hooks.

    Hooks of TorchRL's checkpointers expect the whole content as tensors of one long
    trajectory, which is never built here; they are refused.
    """

    def _refuse_hook(self, hook: Any) -> None:
        raise ConfigError(
            f"hook of a {type(self).__name__}: {hook!r} (expected none). "
            "Change what is written with a transform of the replay buffer."
        )

    register_save_hook = _refuse_hook
    register_load_hook = _refuse_hook


class SharedStorage(Owner, TensorStorage):
    """A storage whose content and counts lie in memory that several processes share.

    The counts lie next to the content, in place of TorchRL's own counters, whose named semaphores
    stay behind when a process is killed. Pickle the storage to spawned processes; each starts as
    one that has neither written nor read.

    Args:
        max_size: How many items.
        writers: How many processes may write.
    """

    supports_conditional_update = False
    _process_local: ClassVar[tuple[str, ...]]
    """Attributes that are not sent to other processes; `_start_process` sets them."""

    def __init__(self, max_size: int, writers: int) -> None:
        Storage.__init__(self, max_size)  # not TensorStorage's: shared memory has what it adds
        del self._mutation_revision_value, self._last_cursor_index_value
        self.device = torch.device("cpu")
        self.writers = writers
        self.closed = False
        """Whether this process has closed the storage."""

    @classmethod
    def from_spec(cls, spec: Composite, *size: int, **settings: Any) -> Self:
        """Build the storage for items of `spec`.

        Args:
            spec: The spec of one item, a row or a rollout: its shape is the item's batch size.
            *size: How many, as for the storage.
            **settings: As for the storage.

        Raises:
            LayoutDtypeError: An entry is not of tensors.
        """
        build: Callable[..., Self] = cls
        return build(*size, example=spec.zero(), **settings)

    @abstractmethod
    def _start_process(self) -> None:
        """Start as a process that has neither written nor read."""

    def _count_readable(self) -> int:
        """Return how many positions hold an item, counted from 0 without a gap."""
        return len(self)

    def contains(self, item: Any) -> Any:
        """Return whether there is an item at a position: a bool, or one each for a tensor.

        Raises:
            ConfigError: `item` is no position.
        """
        length = self._count_readable()
        if isinstance(item, (int, np.integer)):
            return -length <= int(item) < length
        if isinstance(item, torch.Tensor) and not (item.is_floating_point() or item.is_complex()):
            if item.dtype in MASKS:  # stock storages take each flag for a valid position
                return torch.ones_like(item, dtype=torch.bool)
            item = item.long()  # torch cannot compare some unsigned types
            return (item >= -length) & (item < length)
        what = item.dtype if isinstance(item, torch.Tensor) else type(item).__name__
        raise ConfigError(
            f"position in a {type(self).__name__}: {what} (expected an int, or a tensor of "
            "integers). Convert it."
        )

    # What TorchRL keeps counters for

    @property
    def _len(self) -> int:
        return len(self)

    @_len.setter
    def _len(self, value: int) -> None:
        """Ignore what a writer sets after it has written: the storage counts by itself."""

    @property
    def _total_shape(self) -> torch.Size:
        return torch.Size([self.max_size])

    def _bump_mutation_revision(self) -> None:
        """Do nothing: writing and reading count by themselves."""

    # Checkpoints

    @TensorStorage.checkpointer.setter
    def checkpointer(self, value: StorageCheckpointerBase | None) -> None:
        """Set what `dumps` and `loads` use: one of the storage's own kind, also if None is given.

        Raises:
            ConfigError: The checkpointer is of another kind.
        """
        value = self._default_checkpointer() if value is None else value
        what = f"checkpointer of a {type(self).__name__}"
        as_instance(what, value, self._default_checkpointer, "Leave it out.")
        self._checkpointer = value

    # End

    def _check_open(self) -> None:
        if self.closed:
            raise closed_error(type(self).__name__, "Build it again.")

    def _schema_unknown(self, action: str) -> UsageError:
        """Return the error for an action that needs the schema before it is known."""
        return UsageError(
            f"cannot {action} {type(self).__name__}: 0 of {self.max_size} written (expected keys, "
            "shapes and dtypes to be known). Make it from an example or a spec, or write first."
        )

    _is_ending = staticmethod(sys.is_finalizing)  # kept here: at exit the module may be empty

    def close(self) -> None:
        """Give up the storage; its creator frees the memory. Idempotent."""
        if self._is_ending():  # then the kernel frees it
            return
        self.closed = True
        self._leave()  # again, if an interrupt kept an earlier call from it

    @abstractmethod
    def _leave(self) -> None:
        """Release what this process holds of the storage. Idempotent."""

    # Copies

    @abstractmethod
    def _empty_copy(self) -> Self:
        """Return an empty storage of the same settings, in new memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a storage of the same settings and items, in new memory."""
        other = self._empty_copy()
        memo[id(self)] = other
        other.load_state_dict(self.state_dict())
        other._attached_entities_list = copy.deepcopy(self._attached_entities_list, memo)
        # TorchRL's writers keep the generations of rows here. A generator is not copied, as there.
        more = self.__dict__.keys() - other.__dict__.keys() - {"_rng"}
        other.__dict__.update(copy.deepcopy({name: self.__dict__[name] for name in more}, memo))
        return other

    def __copy__(self) -> Self:
        """Return a storage over the same memory: closing either closes both."""
        other = type(self).__new__(type(self))
        other.__setstate__(self._shared_state())
        return other

    def without_buffers(self) -> Self:
        """Return this storage without the buffers that read it, for processes that write."""
        other = copy.copy(self)
        other._attached_entities_list = []
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = self._shared_state()
        check_spawning(self)
        return state

    def _shared_state(self) -> dict[str, Any]:
        self._check_open()
        if not self.initialized:
            raise self._schema_unknown("share")
        state = {k: v for k, v in self.__dict__.items() if k not in self._process_local}
        return state | {"_rng": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_process()


class Stateless:
    """A part of a replay buffer that saves nothing: it has no state, or the storage holds it."""

    def dumps(self, path: str | Path) -> None:
        """Save nothing."""

    def loads(self, path: str | Path) -> None:
        """Load nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""


class SharedStorageWriter(Stateless, Writer):
    """A writer to storages of one kind."""

    _kind: ClassVar[type[SharedStorage]]

    def register_storage(self, storage: Storage) -> None:
        """Write to `storage`.

        Raises:
            ConfigError: `storage` is of another kind.
        """
        what = f"storage of a {type(self).__name__}"
        as_instance(what, storage, self._kind, "Use TorchRL's own writer.")
        super().register_storage(storage)
