from __future__ import annotations

import torch

from torchrl_unilab.shm.segment import SharedSegment
from torchrl_unilab.shm.shards import Shards, Window


def test_rows_are_drawn_from_the_window_of_each_shard_and_from_nowhere_else():
    with SharedSegment(Shards.nbytes([1], 2, 4)) as segment:
        shards, window = Shards(segment, [1], 2, 4, timeout=1.0), Window((0, 1), (1, 2))
        ids = shards.draw(64, window, torch.Generator().manual_seed(0))
    assert {*ids.tolist()} == {0, 3}


def test_no_row_is_above_floors_that_are_beyond_the_heads():
    assert Window((0, 0), (3, 3)).above((9, 1)) == Window((3, 1), (3, 3))
