"""Checkpoints of a replay: consistent beside writers, whole or refused."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import tracemalloc
from collections.abc import Iterator

import psutil
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from tests.support.checkpoints import BOTH_WAYS
from tests.support.processes import receive, spawned, wait_for
from tests.support.striking import exit_code_of, forked, kill_self, stop_self, strike_at
from tests.support.transitions import (
    append_until_told,
    mixed,
    replay_of,
    same,
    stamped,
    transitions,
)
from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter
from torchrl_unilab.data.replay.checkpoint import save_rows
from torchrl_unilab.errors import CheckpointError, WaitTimeoutError

EXAMPLE = stamped(torch.zeros(1))[0].contiguous()


@BOTH_WAYS
@pytest.mark.parametrize("count", [0, 7, 33])
@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("known", [False, True])
def test_a_checkpoint_brings_back_rows_counts_and_samples(tmp_path, load, count, writers, known):
    example = transitions(1)[0]
    with (
        PackedReplayStorage(20, example=example, writers=writers) as one,
        PackedReplayStorage(20, example=example if known else None, writers=writers) as other,
    ):
        for shard in range(writers):
            if count:
                one.use_writer(shard)
                one.append(transitions(count, shard))
        load(one, other, tmp_path)

        assert other.snapshot()[:2] == one.snapshot()[:2]
        assert len(other) == len(one)
        assert same(other[:], one[:])
        if count:
            assert same(other.sample(9, seed=1), one.sample(9, seed=1))


@BOTH_WAYS
@pytest.mark.parametrize("count", [7, 33])
def test_a_buffer_of_torchrl_saves_and_loads_its_storage_and_extends_it_alike(
    tmp_path, load, count
):
    one, other = (
        TensorDictReplayBuffer(storage=PackedReplayStorage(20), batch_size=4) for _ in range(2)
    )
    one.extend(transitions(count))

    load(one, other, tmp_path)

    assert same(other[:], one[:])
    assert torch.equal(*(buffer.extend(transitions(5, 9)) for buffer in (one, other)))
    assert same(other[:], one[:])


def test_a_draft_is_not_left_beside_a_checkpoint(tmp_path):
    with replay_of(transitions(7), 20) as storage:
        storage.dumps(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.bin"]


@pytest.mark.parametrize(
    "settings",
    [{"max_size": 21}, {"writers": 2}, {"n_step": 2}, {"example": EXAMPLE}],
    ids=["size", "shards", "steps", "keys"],
)
@BOTH_WAYS
def test_a_checkpoint_of_other_rows_is_refused_and_the_rows_stay(tmp_path, load, settings):
    with replay_of(transitions(7), 20) as one:
        kind = {"max_size": 20, "example": transitions(1)[0], **settings}
        with PackedReplayStorage(**kind) as other:
            if "example" not in settings:
                other.append(transitions(3))
            with pytest.raises(CheckpointError, match=r"\(expected"):
                load(one, other, tmp_path)
            assert other.ptr == (0 if "example" in settings else 3)


@pytest.fixture
def pair() -> Iterator[tuple[PackedReplayStorage, PackedReplayStorage]]:
    """A replay of seven rows, and one of nine, which are to be there in the end as well."""
    with PackedReplayStorage(20) as one, PackedReplayStorage(20) as other:
        one.append(transitions(7))
        other.append(transitions(9))
        yield one, other
        assert same(other[:], transitions(9))


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_file_that_is_not_whole_is_refused_and_the_rows_stay(tmp_path, pair, kept):
    one, other = pair
    one.dumps(tmp_path)
    whole = (tmp_path / "rows.bin").read_bytes()
    (tmp_path / "rows.bin").write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match="whole file"):
        other.loads(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("floors", [-3]),
        ("floors", [0.0]),
        ("heads", [10**9]),
        ("starts", [5]),
        ("starts", ["0"]),
        ("bases", []),
        ("bases", [-(2**70)]),
        ("origins", [-1]),
        ("origins", [math.inf]),
        ("words", 0),
    ],
)
def test_a_header_that_lies_is_refused_and_the_rows_stay(tmp_path, pair, key, value):
    one, other = pair
    one.dumps(tmp_path)
    raw = (tmp_path / "rows.bin").read_bytes()
    length = int.from_bytes(raw[-8:], "little")
    text = json.dumps(json.loads(raw[-8 - length : -8]) | {key: value}).encode()
    lying = raw[: -8 - length] + text + len(text).to_bytes(8, "little")
    (tmp_path / "rows.bin").write_bytes(lying)
    with pytest.raises(CheckpointError):
        other.loads(tmp_path)


@pytest.mark.parametrize("shards", [0, 2])
def test_a_header_of_another_number_of_shards_is_refused_and_the_rows_stay(pair, shards):
    one, other = pair
    state = one.state_dict()
    for key in ("bases", "floors", "heads", "starts", "origins"):
        state["header"][key] *= shards
    with pytest.raises(CheckpointError, match="unknown header"):
        other.load_state_dict(state)


@pytest.mark.slow
@BOTH_WAYS
def test_what_is_saved_beside_writers_is_whole_and_without_a_gap(tmp_path, load):
    with (
        PackedReplayStorage(60_000, example=EXAMPLE, writers=2) as one,
        PackedReplayStorage(60_000, writers=2) as other,
        spawned(append_until_told, one, 1, 300) as (_, pipe),
    ):
        receive(pipe)
        wait_for(lambda: one.size == 30_000)
        load(one, other, tmp_path)
        pipe.send("stop")
        receive(pipe)

        (_, floor), (_, head) = other.rows.window()
        rows = other.get(torch.arange(floor, head) % 30_000 * 2 + 1)
        assert mixed(rows) == 0
        stamps = rows["count"][:, 0]
        assert ((stamps[1:] - stamps[:-1] == 8) | (stamps[1:] % 8 == 1)).all()


@BOTH_WAYS
@pytest.mark.parametrize(("appended", "kept"), [(900, 4592), (8192, 1024), (9000, 1024)])
def test_rows_overwritten_while_they_are_saved_are_left_out(
    tmp_path, monkeypatch, load, appended, kept
):
    with PackedReplayStorage(8192) as one, PackedReplayStorage(8192) as other:
        one.append(stamped(torch.arange(8192)))
        copies = one.rows.copies

        def beside_a_writer(*arguments):
            for copy in copies(*arguments):
                yield copy
                one.append(stamped(torch.arange(appended)))

        monkeypatch.setattr(one.rows, "copies", beside_a_writer)
        load(one, other, tmp_path)

        (floor,), (head,) = other.rows.window()
        rows = other.get(torch.arange(floor, head))
        assert rows["count"][:, 0].tolist() == [*range(8192 - kept, 8192)]


@BOTH_WAYS
def test_a_checkpoint_of_which_all_rows_were_overwritten_loads(tmp_path, monkeypatch, load):
    with PackedReplayStorage(20) as one, PackedReplayStorage(20) as other:
        one.append(transitions(7))
        monkeypatch.setattr(one.rows, "copies", lambda shard, window: iter(()))

        load(one, other, tmp_path)

        assert (other.size, other.ptr) == (0, 7)


def test_writers_do_not_wait_while_a_replay_is_saved(tmp_path, monkeypatch):
    """Each chunk's write to disk is followed by an append of another process."""
    with replay_of(transitions(8192), 8192) as storage:
        appended = []
        copies = storage.rows.copies

        def slow(*arguments):
            for copy in copies(*arguments):
                yield copy
                appended.append(exit_code_of(lambda: storage.append(transitions(8))))

        monkeypatch.setattr(storage.rows, "copies", slow)
        storage.dumps(tmp_path)

        assert len(appended) > 4
        assert not any(appended)


def test_memory_stays_flat_while_a_replay_is_saved_and_loaded(tmp_path):
    rows = 200_000
    with PackedReplayStorage(rows) as one, PackedReplayStorage(rows) as other:
        block = transitions(rows // 20)
        for _ in range(20):
            one.append(block)
        other.append(transitions(10))
        private = psutil.Process().memory_full_info().uss
        tracemalloc.start()
        one.dumps(tmp_path)
        other.loads(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        grown = psutil.Process().memory_full_info().uss - private

        assert peak < 4 << 20
        assert grown < other.nbytes + (16 << 20)  # its own pages, touched for the first time


@BOTH_WAYS
def test_a_process_killed_while_it_loads_leaves_all_rows_or_none_to_save(tmp_path, load):
    with replay_of(transitions(7), 20) as one:
        one.dumps(tmp_path)
    for nth in range(1, 30):
        example = transitions(1)[0]
        with PackedReplayStorage(20, example=example) as storage, PackedReplayStorage(20) as other:
            storage.append(transitions(9))

            def die(nth: int = nth, storage: PackedReplayStorage = storage) -> None:
                strike_at(storage.rows, nth, kill_self)
                storage.loads(tmp_path)

            code = exit_code_of(die)
            load(storage, other, tmp_path / "saved")

            assert len(storage) == len(other)
            assert len(storage) in (0, 7, 9)
            storage.append(transitions(3))
            if code == 0:
                assert nth > 5
                return
            assert code == -signal.SIGKILL
    pytest.fail("it never ends")


def test_what_is_saved_while_another_process_loads_is_waited_for_before_a_file_is_changed(tmp_path):
    with PackedReplayStorage(20, example=transitions(1)[0], timeout=0.1) as storage:
        storage.append(transitions(9))
        storage.dumps(tmp_path)

        def load() -> None:
            strike_at(storage.rows, 5, stop_self)
            storage.loads(tmp_path)

        with forked(load) as child:
            os.waitpid(child, os.WUNTRACED)
            for save in (lambda: storage.dumps(tmp_path / "other"), storage.state_dict):
                with pytest.raises(WaitTimeoutError, match=f"replaced by process {child}"):
                    save()
            assert not (tmp_path / "other").exists()
            os.kill(child, signal.SIGCONT)
            os.waitpid(child, 0)
        with copy.deepcopy(storage) as other:
            assert same(other[:], transitions(9))


def _numbered(first: int, count: int) -> TensorDict:
    return TensorDict(x=torch.arange(first, first + count), batch_size=[count])


@pytest.mark.parametrize("written", [5, 8, 11, 16])
@pytest.mark.parametrize("kind", [None, PackedReplayWriter])
@pytest.mark.parametrize("way", ["file", "state"])
def test_rows_continue_where_the_buffer_of_a_stock_checkpoint_would(tmp_path, written, kind, way):
    stock = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    for first in range(0, written, 4):
        stock.extend(_numbered(first, min(4, written - first)))
    with PackedReplayStorage(8, example=_numbered(0, 1)[0]) as storage:
        ours = ReplayBuffer(storage=storage, batch_size=4, **({"writer": kind()} if kind else {}))
        if way == "file":
            stock.dumps(tmp_path)
            ours.loads(tmp_path)
        else:
            ours.load_state_dict(stock.state_dict())
        read = storage.read_since(())[1]
        for first in (written, written + 3):
            for buffer in (stock, ours):
                buffer.extend(_numbered(first, 3))
            assert ours[:]["x"].tolist() == stock[:]["x"].tolist()
        assert storage.read_since(read)[0]["x"].tolist()[-6:] == [written + i for i in range(6)]
        assert storage.read_since(())[0]["x"].tolist() == [written - 2 + i for i in range(8)]


def test_what_was_saved_last_to_a_folder_is_loaded_also_of_stock_storages(tmp_path):
    stock = LazyTensorStorage(8)
    with PackedReplayStorage(8) as storage, PackedReplayStorage(8) as other:
        for first, saver in enumerate([stock, storage, stock, storage]):
            saver.set(torch.arange(4), _numbered(first, 4))
            saver.dumps(tmp_path)
            other.loads(tmp_path)
            assert other[:]["x"].tolist()[:4] == [first, first + 1, first + 2, first + 3]


def test_no_row_that_a_killed_process_left_torn_is_shown_by_the_next_that_continues_after_it():
    with PackedReplayStorage(8, example=EXAMPLE) as storage:
        storage.append(stamped(torch.arange(8)))

        def die() -> None:
            strike_at(storage.rows, 3, kill_self)  # when half of each row is written
            storage.append(stamped(torch.arange(8, 12)))

        assert exit_code_of(die) == -signal.SIGKILL
        assert storage.size == 4
        storage.continue_at(5)
        storage.continue_at(5)
        assert storage.size == 8
        rows = storage.read_since(())[0]
        assert rows["count"][:, 0].tolist() == [5, 6, 7, 7, 7, 7, 7, 4]
        assert mixed(rows) == 0


def test_what_is_saved_while_steps_change_is_loaded():
    with PackedReplayStorage(20) as one, PackedReplayStorage(20) as other:
        one.append(transitions(7))
        lineage, saved = one.rows.lineage(), []
        one.add(transitions(4))  # a step of four environments
        one.append(transitions(1))
        numbers = save_rows(one.rows, lineage, lambda at, rows: saved.append(rows.copy()))
        other.load_state_dict({"header": one.header() | numbers, "rows": torch.tensor(saved[0])})
        assert same(other[:], transitions(7))


def test_a_header_that_says_nothing_of_steps_is_loaded_as_rows_in_the_order_of_time():
    with PackedReplayStorage(20) as one, PackedReplayStorage(20) as other:
        one.append(transitions(7))
        state = one.state_dict()
        del state["header"]["firsts"], state["header"]["strides"]
        other.load_state_dict(state)
        assert same(other[:], transitions(7))
        assert other.rows.in_order(other.rows.window())


@pytest.mark.parametrize(
    "spoil", [torch.Tensor.float, lambda rows: rows[:, 1:]], ids=["dtype", "width"]
)
def test_rows_of_a_state_that_are_not_those_that_were_saved_are_refused(spoil):
    with replay_of(transitions(3), 8) as saved, replay_of(transitions(2, 1), 8) as storage:
        state = saved.state_dict()
        with pytest.raises(CheckpointError, match=r"of shape \[3, \d+\] \(expected torch\.int32"):
            storage.load_state_dict(state | {"rows": spoil(state["rows"])})
        assert same(storage[:], transitions(2, 1))
