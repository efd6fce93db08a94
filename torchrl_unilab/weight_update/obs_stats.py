"""Observation statistics that a learner publishes and collectors look up, in a snapshot cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrl_unilab.checks import as_integer
from torchrl_unilab.errors import LayoutError
from torchrl_unilab.owner import Owner
from torchrl_unilab.shm import BlockLayout, SnapshotCell


class SharedObsNormStats(Owner):
    """The latest mean and standard deviation, in shared memory.

    Pickle it to a spawned process as an argument, or `attach` it by name.

    Args:
        size: Shape of mean and standard deviation: the length of the observation, or a
            full shape.
        name: Name to attach by from an unrelated process; anonymous if not given.

    Raises:
        ConfigError: A size is no positive integer.
        SegmentSpaceError: The statistics do not fit shared memory.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.weight_update import SharedObsNormStats
        >>> stats = SharedObsNormStats(2)
        >>> stats.get() is None
        True
        >>> stats.put((torch.zeros(2), torch.ones(2)))
        >>> stats.get()
        (tensor([0., 0.]), tensor([1., 1.]))
        >>> stats.get() is None
        True
        >>> stats.close()
    """

    _seen = 0  # the version that this process returned last

    def __init__(self, size: int | tuple[int, ...], *, name: str | None = None) -> None:
        self._cell = SnapshotCell(_initial(size), name=name)

    @classmethod
    def attach(cls, name: str, size: int | tuple[int, ...]) -> SharedObsNormStats:
        """Attach the statistics that an unrelated process created under `name`."""
        stats = cls.__new__(cls)
        stats._cell = SnapshotCell.attach(name, BlockLayout.of(_initial(size)))
        return stats

    @property
    def name(self) -> str | None:
        """The name to attach by, or None if anonymous."""
        return self._cell.name

    @property
    def version(self) -> int:
        """How many times statistics have been put."""
        return self._cell.version

    def put(self, stats: tuple[npt.ArrayLike, npt.ArrayLike]) -> None:
        """Publish (mean, standard deviation), tensors or arrays, as float32. Never blocks.

        Raises:
            LayoutError: A shape differs, or these are not two tensors; the last statistics stay.
            SegmentError: Another living process has put statistics: only one process may.
        """
        try:
            # Copies of arrays: torch shares none that is reversed, and warns of read-only ones.
            tensors = (v if isinstance(v, torch.Tensor) else np.array(v, np.float32) for v in stats)
            mean, std = (torch.as_tensor(v, dtype=torch.float32, device="cpu") for v in tensors)
        except (TypeError, ValueError) as error:
            raise LayoutError(
                f"statistics: {type(stats).__name__} (expected a mean and a standard deviation). "
                "Put both, as tensors or arrays."
            ) from error
        self._cell.publish([mean, std])

    def get(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the latest (mean, standard deviation); None if this process has it already."""
        if self._cell.version == self._seen:
            return None
        self._seen, tensors = self._cell.newest()
        return tensors["mean"], tensors["std"]

    def close(self) -> None:
        """Close the statistics; their creator frees them. Idempotent."""
        self._cell.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_cell": self._cell}


def _initial(size: int | tuple[int, ...]) -> dict[str, torch.Tensor]:
    shape = size if isinstance(size, tuple) else (size,)
    checked = [as_integer("size of observations", n, "Give their shape.") for n in shape]
    # Expanded, they take no memory, which may not be there.
    zeros = torch.zeros((), dtype=torch.float32, device="cpu").expand(checked)
    return {"mean": zeros, "std": zeros}
