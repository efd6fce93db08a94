from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict

from tests.support.transitions import replay_of, stamped, transitions
from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter
from torchrl_unilab.shm.rows import SharedRows


def test_what_is_attached_to_the_storage_hears_where_rows_were_written():
    with PackedReplayStorage(8) as storage:
        attached, writer = Mock(), PackedReplayWriter()
        storage.attach(attached)
        writer.register_storage(storage)

        writer.extend(transitions(3))

        (index,) = attached.mark_update.call_args.args
        assert index.tolist() == [0, 1, 2]


def test_a_stock_writers_cursor_counts_once_all_positions_are_written():
    with PackedReplayStorage(4) as storage:
        writer = PackedReplayWriter()
        writer.register_storage(storage)
        writer.extend(transitions(3))
        writer.load_state_dict({"_cursor": 1})
        assert writer.extend(transitions(1)).tolist() == [3]
        writer.load_state_dict({"_cursor": 2})
        assert writer.extend(transitions(1)).tolist() == [2]


@pytest.mark.parametrize("other", [(7,), (1, 2)])
def test_rows_since_a_count_of_another_replay_are_all_of_them(other):
    with replay_of(transitions(3), 8) as storage:
        rows, counted = storage.read_since(other)
        assert (len(rows), counted) == (3, (3,))
        assert torch.equal(rows["action"], transitions(3)["action"])
        assert len(storage.read_since(counted)[0]) == 0


@pytest.mark.parametrize("way", ["loaded", "beside others", "behind others", "in their place"])
def test_a_row_that_is_not_finite_is_counted_once_whatever_way_it_is_written(way):
    rows = transitions(4)
    rows["next", "reward"][1] = torch.nan
    with replay_of(transitions(4), 8, non_finite="count") as storage:
        if way == "loaded":
            storage.load_rows(rows)
        else:
            first = {"beside others": 2, "behind others": 4, "in their place": 0}[way]
            storage.set(torch.arange(first, first + 4), rows)
        assert storage.non_finite == 1


def test_memory_for_large_writes_is_not_kept(monkeypatch):
    monkeypatch.setattr("torchrl_unilab.data.replay.append._STAGE_BYTES", 5000)
    with PackedReplayStorage(64) as storage:
        storage.load_rows(transitions(64))  # 170 bytes each
        storage.append(transitions(32))
        storage.append(transitions(16))
        assert [*storage._appender._memory.stages] == [16]


@pytest.mark.parametrize("writers", [1, 2])
def test_rows_that_are_overwritten_while_they_are_read_come_once_with_the_next_call(
    writers, monkeypatch
):
    read_at = SharedRows.read_at

    def late(*arguments: object) -> None:
        """Read after another process has written."""
        monkeypatch.undo()
        storage.append(stamped(torch.arange(8, 11)))
        read_at(*arguments)

    with replay_of(stamped(torch.arange(8)), 8 * writers, writers=writers) as storage:
        monkeypatch.setattr(SharedRows, "read_at", late)
        rows, counted = storage.read_since(())
        assert rows["count"][:, 0].tolist() == [3, 4, 5, 6, 7]
        assert storage.read_since(counted)[0]["count"][:, 0].tolist() == [8, 9, 10]


@pytest.mark.parametrize("bad", [False, True])
def test_rewards_of_8_bits_are_checked_too(bad):
    rewards = torch.tensor([1.0, torch.nan if bad else 2.0]).to(torch.float8_e4m3fn)
    rows = TensorDict({"next": {"reward": rewards}}, [2])
    with PackedReplayStorage(4, non_finite="count") as storage:
        storage.append(rows)
        assert (len(storage), storage.non_finite) == (2, int(bad))
