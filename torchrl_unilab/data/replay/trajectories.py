"""Which rows of a shard follow each other: their trajectory, in one number per row.

Row ``i`` of a trajectory with a stride of ``k`` rows per step is followed by row ``i + k``, if
that has the same trajectory. The number is ``first << 24 | k``, where `first` numbers the
trajectory's first row, or is above the numbers of the step before it, so no other trajectory
continues it, and rows of different strides never match.
It lies in the row itself: what was written last is found in the shard, also by a process that
has replaced the writer or loaded the rows. `RowAppender` marks rows, `RowReader` follows them.
"""

from __future__ import annotations

from functools import partial

import torch

from torchrl_unilab.data.replay.form import DONE, RowForm
from torchrl_unilab.errors import ConfigError
from torchrl_unilab.shm.layout import dotted
from torchrl_unilab.shm.row_layout import RowLayout
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.shards import STRIDE_BITS, Parts

_IDS = "collector.traj_ids"


def stride_of(trajectory: torch.Tensor) -> torch.Tensor:
    """Return the rows per step of trajectories, int64 of the same shape."""
    return trajectory.bitwise_and((1 << STRIDE_BITS) - 1)


class TrajectoryMarker:
    """Marks rows before they are appended.

    A row is followed by the one a step later that observes, exactly, its next observation,
    unless it is done, or the two have other ``("collector", "traj_ids")``.

    Args:
        rows: Where rows are appended.
        form: Their form, of several steps.
    """

    def __init__(self, rows: SharedRows, form: RowForm) -> None:
        self._rows, self._layout, self._n_step = rows, form.layout, form.n_step
        self._done = form.index[DONE]
        names = [dotted(path) for path in form.observed]
        self._pairs = [(form.index[f"next.{name}"], form.index[name]) for name in names]
        if _IDS in form.index:
            self._pairs.append((form.index[_IDS], form.index[_IDS]))
        rows.detach = partial(_detach, form.layout)

    def mark(self, views: list[torch.Tensor], envs: int | None, shard: int, head: int) -> None:
        """Set the trajectories of rows to append.

        Args:
            views: Their tensors, [n, ...]; the last is the trajectory.
            envs: Rows per step; None for rows of unknown order: one trajectory after the
                other, or one step of several environments.
            shard: Where they are appended, and nothing else meanwhile.
            head: The number of the first one.

        Raises:
            ConfigError: Another living process writes to the shard.
        """
        if other := self._rows.other_writer(shard):
            raise ConfigError(
                f"replay writer {shard} with n_step={self._n_step}: process {other} writes to it "
                "too (expected one process per shard, whose steps follow each other). Make the "
                "storage with writers=<number of writing processes>."
            )
        count = len(views[-1])
        if envs is None:
            envs = self._rows_per_step(views, shard, head)
        before = self._last_step(envs, shard, head)
        # Numbers ascend, also those of rows that follow loaded ones, which keep their numbers.
        last = -1 if before is None else int(before[-1].max()) >> STRIDE_BITS
        numbers = torch.arange(count, device="cpu").add_(max(head, last + 1))
        new = (numbers << STRIDE_BITS) | envs
        if before is not None:
            first = [view[:envs] for view in views]
            new[:envs] = torch.where(self._follows(before, first), before[-1], new[:envs])
        ahead, behind = [view[:-envs] for view in views], [view[envs:] for view in views]
        new[envs:].masked_fill_(self._follows(ahead, behind), -1)
        views[-1].copy_(new.view(-1, envs).cummax(0).values.view(-1))

    def _rows_per_step(self, views: list[torch.Tensor], shard: int, head: int) -> int:
        """Find whether rows are a step of several environments, or one trajectory after the other.

        They are a step if they continue a step with the same number of rows. Otherwise they are
        trajectories if most rows that are not done are followed by the next one (a few may be by
        chance if observations are few, and a trajectory's last row is not), or if all but the last
        are done and the first continues a trajectory.
        """
        count = len(views[-1])
        if self._continues_step(views, count, shard, head):
            return count
        ahead = [view[:-1] for view in views]
        followed = int(self._follows(ahead, [view[1:] for view in views]).sum())
        unfinished = int((~self._ended(ahead)).sum())
        if unfinished:
            return 1 if 2 * followed >= unfinished else count
        return 1 if self._continues_step(views, 1, shard, head) else count

    def _continues_step(self, views: list[torch.Tensor], envs: int, shard: int, head: int) -> bool:
        """Return whether the first `envs` rows continue a step with the same number of rows."""
        before = self._last_step(envs, shard, head)
        first = [view[:envs] for view in views]
        return before is not None and bool(self._follows(before, first).any())

    def _last_step(self, envs: int, shard: int, head: int) -> list[torch.Tensor] | None:
        """Return the tensors of a shard's last `envs` rows if these were one step; else None."""
        rows = self._rows
        if head - envs < rows.window().floors[shard]:
            return None
        places = torch.arange(head - envs, head, device="cpu").remainder_(rows.shard_rows)
        views = self._layout.views([part[places] for part in rows.parts[shard]])
        return views if (stride_of(views[-1]) == envs).all() else None

    def _ended(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return which rows are done, bool [n]."""
        return rows[self._done].unsqueeze(-1).flatten(1).any(1)

    def _follows(self, rows: list[torch.Tensor], later: list[torch.Tensor]) -> torch.Tensor:
        """Return which rows are followed by the later ones, bool [n]."""
        follows = ~self._ended(rows)
        for next_field, field in self._pairs:
            left, right = rows[next_field], later[field]
            same = left == right
            if left.is_floating_point():
                same |= left.isnan() & right.isnan()  # some environments mask by NaN
            follows &= same.unsqueeze(-1).flatten(1).all(1)
        return follows


def _detach(layout: RowLayout, parts: Parts, positions: torch.Tensor) -> None:
    """Give each row a trajectory of its own, a negative number that no other row has."""
    torch.sub(-1, positions, out=layout.views(parts)[-1])
