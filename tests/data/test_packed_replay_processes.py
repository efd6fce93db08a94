"""Packed replay between processes: whole rows, whoever is stopped or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.support.processes import receive, spawned
from tests.support.transitions import (
    add_chain_until_told,
    append_until_told,
    die_in_rewrite,
    extend_and_tell,
    mixed,
    stamped,
    stop_half_way,
    wrong_chain,
)
from torchrl_unilab.data.packed_replay import PackedReplayStorage
from torchrl_unilab.data.packed_writer import PackedReplayWriter
from torchrl_unilab.errors import WaitTimeoutError

SAMPLE = 4096
EXAMPLE = stamped(torch.zeros(1))[0].contiguous()


def sample_while_written(rows: int, unchecked: int) -> tuple[int, int]:
    """Sample while two processes write; return mixed rows, and those without the check.

    Args:
        rows: How many to sample.
        unchecked: How many to gather at most, without a look at cursors, until one is mixed.
    """
    torch.set_num_threads(1)
    storage = PackedReplayStorage(8192, example=EXAMPLE, writers=2)
    bad = bad_unchecked = 0
    with storage, contextlib.ExitStack() as stack:
        pipes = [
            stack.enter_context(spawned(append_until_told, storage, writer, 300 + 57 * writer))[1]
            for writer in range(2)
        ]
        for pipe in pipes:
            receive(pipe)
        while storage.ptr < 8192:
            pass
        for i in range(rows // SAMPLE + 1):
            if i % 4:
                bad += mixed(storage.sample(SAMPLE))
            else:  # explicit positions, some of them in flight
                bad += mixed(storage.get(torch.randint(0, 8192, (SAMPLE,))))
        gatherer = storage._gatherer
        memory = gatherer.memory(SAMPLE)
        for _ in range(unchecked // SAMPLE + 1):
            gatherer._fill(memory.blocks, torch.randint(0, 8192, (SAMPLE,)))
            bad_unchecked += mixed(gatherer.tensordict(memory, index=False))
            if bad_unchecked:
                break
        for pipe in pipes:
            pipe.send("stop")
        written = sum(receive(pipe) for pipe in pipes)
        assert storage.ptr == written > rows // 100
    return bad, bad_unchecked


def test_no_row_is_mixed_and_without_the_check_some_are():
    assert sample_while_written(1_000_000, 20_000_000) == (0, pytest.approx(10_000, abs=9_999))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_row_is_mixed_in_ten_million():
    assert sample_while_written(10_000_000, 0)[0] == 0


def test_derived_rows_are_whole_while_two_processes_write():
    """With few slots the oldest rows are given up all the time."""
    torch.set_num_threads(1)
    episode, slots = 7, 128
    storage = PackedReplayStorage(
        2048, next_observation="derived", final_observations=slots, writers=2
    )
    with storage, contextlib.ExitStack() as stack:
        pipes = [
            stack.enter_context(spawned(add_chain_until_told, storage, writer, 8, episode))[1]
            for writer in range(2)
        ]
        for pipe in pipes:
            receive(pipe)
        while storage.ptr < 4096:
            pass
        for _ in range(300):
            assert wrong_chain(storage.sample(512), episode) == 0
        for pipe in pipes:
            pipe.send("stop")
        written = 8 * sum(receive(pipe) for pipe in pipes)
        assert storage.ptr == written
        assert wrong_chain(storage.sample(512), episode) == 0
        used = slots - storage.rows._slots_free()
        assert 0 < used <= slots


@pytest.mark.parametrize("packed", [True, False])
def test_processes_extend_one_buffer_that_knows_no_rows_yet(packed):
    """A stock writer needs the shared buffer's lock; the packed one needs none."""
    storage = PackedReplayStorage(100)
    if packed:
        writer = PackedReplayWriter()
        buffer = TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=8)
    else:
        buffer = ReplayBuffer(storage=storage, batch_size=8).share()
    with (
        spawned(extend_and_tell, buffer, 0, 10) as (_, one),
        spawned(extend_and_tell, buffer, 40, 10) as (_, two),
    ):
        for pipe in (one, two):
            receive(pipe)
        for pipe in (one, two):
            pipe.send("go")
        index = torch.tensor(receive(one) + receive(two))
        assert index.sort().values.tolist() == list(range(80))
        assert len(buffer) == buffer.write_count == 80
        assert torch.equal(buffer[index]["count"][:, 0], torch.arange(80, dtype=torch.int32))
        batch = buffer.sample()
        assert mixed(batch) == 0
        assert buffer.extend(stamped(torch.arange(80, 84))).tolist() == [80, 81, 82, 83]
    storage.close()


def test_a_writer_killed_in_mid_write_leaves_whole_rows():
    with PackedReplayStorage(64, example=EXAMPLE, writers=2) as storage:
        storage.use_writer(0)
        storage.append(stamped(torch.arange(100)))
        with spawned(stop_half_way, storage, 1, 8, signal.SIGKILL) as (process, pipe):
            receive(pipe)
            process.join(30.0)
            assert process.exitcode == -signal.SIGKILL
            assert storage.rows.window() == (44, 100, 108)
            assert mixed(storage.sample(200)) == 0  # which has noticed, and mended them
            assert mixed(storage[:]) == 0
            assert storage.snapshot() == (108, 64)
            assert not storage.recover(1)
            storage.append(stamped(torch.arange(64)))
            assert storage[:]["count"][:, 0].sort().values.tolist() == list(range(64))


def test_a_killed_writers_place_is_taken_and_its_rows_mended():
    with PackedReplayStorage(64, example=EXAMPLE, writers=1) as storage:
        with spawned(stop_half_way, storage, 0, 8, signal.SIGKILL) as (process, pipe):
            receive(pipe)
            process.join(30.0)
        storage.append(stamped(torch.arange(4)))
        assert storage.snapshot() == (12, 4)  # there was no complete row to copy
        assert storage.sample(20)["count"].max() == 3


def test_a_killed_writer_of_derived_rows_leaves_whole_ones():
    storage = PackedReplayStorage(64, next_observation="derived", writers=2)
    with storage:
        storage.use_writer(0)
        rows = stamped(torch.arange(20))
        rows["next", "observation"] = torch.cat([rows["observation"][1:], torch.zeros(1, 17)])
        storage.append(rows)
        with spawned(stop_half_way_derived, storage) as (process, pipe):
            receive(pipe)
            process.join(30.0)
        assert storage.snapshot() == (25, 25)
        got = storage.get(slice(None))
        stamp = got["count"][:, :1]
        assert len(got) == 25
        expected = torch.where(stamp == 19, 0, stamp + 1).float().expand(-1, 17)
        assert torch.equal(got["next", "observation"], expected)
        assert torch.equal(got["observation"], stamp.float().expand(-1, 17))


def stop_half_way_derived(pipe, storage: PackedReplayStorage) -> None:
    """Die in the middle of five rows whose next observations are derived."""
    rows = storage.rows
    rows.use_writer(1)
    with rows.reserve(5, 2) as (start, slots):
        rows.write_side(slots, torch.arange(start, start + 2), rows.side[:2] * 0 - 7)
        rows.write(start, torch.full((2, rows.layout.words), 2**31 - 1, dtype=torch.int32))
        pipe.send("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_stopped_writer_is_waited_for_and_named_where_its_rows_are_asked_for():
    with PackedReplayStorage(64, example=EXAMPLE, writers=2, timeout=0.3) as storage:
        storage.use_writer(0)
        storage.append(stamped(torch.arange(64)))
        buffer = ReplayBuffer(storage=storage, batch_size=300)
        with spawned(stop_half_way, storage, 1, 8, signal.SIGSTOP) as (process, pipe):
            pid = receive(pipe)
            # Random drawing does not wait, and points to none of its rows.
            for _ in range(10):
                batch, info = buffer.sample(return_info=True)
                assert info["index"].min() >= 8
                assert mixed(batch) == 0
                assert mixed(storage.sample(100)) == 0
            # Nor does another writer, until it comes round to these rows.
            storage.append(stamped(torch.arange(40)))
            assert storage.snapshot() == (64, 16)
            # Other rows can be read, also newer ones; its own cannot.
            assert mixed(storage.get(torch.arange(8, 64))) == 0
            for use in (lambda: storage.get(3), lambda: storage.append(stamped(torch.arange(40)))):
                with pytest.raises(WaitTimeoutError, match=rf"writer 1 \(process {pid}\)"):
                    use()
            with pytest.raises(RuntimeError, match="alive"):
                storage.recover(1)
            os.kill(process.pid, signal.SIGCONT)
            assert receive(pipe) == "went on"
            assert storage.snapshot() == (120, 64)
            assert mixed(storage.sample(500)) == 0


def test_when_all_rows_are_in_flight_sampling_waits_and_then_names_the_writer():
    with PackedReplayStorage(8, example=EXAMPLE, writers=2, timeout=0.2) as storage:
        storage.append(stamped(torch.arange(8)))
        with spawned(stop_half_way, storage, 1, 8, signal.SIGSTOP) as (_, pipe):
            receive(pipe)
            assert storage.size == 0
            buffer = ReplayBuffer(storage=storage, batch_size=4)
            for use in (lambda: storage.sample(4), buffer.sample):
                with pytest.raises(WaitTimeoutError, match="writer 1"):
                    use()


def test_a_process_killed_while_it_rewrites_rows_leaves_whole_ones():
    with PackedReplayStorage(16, example=EXAMPLE) as storage:
        storage.append(stamped(torch.arange(16)))
        with spawned(die_in_rewrite, storage) as (process, pipe):
            receive(pipe)
            process.join(30.0)
            got = storage[:]
            assert mixed(got) == 0
            kept = [i for i in range(16) if i not in (1, 3, 5)]
            assert got["count"][kept, 0].tolist() == kept
            assert storage.rows.version % 2 == 0


def test_a_batch_in_shared_memory_is_filled_by_another_process():
    with PackedReplayStorage(64, example=EXAMPLE, n_step=1) as storage:
        storage.append(stamped(torch.arange(64)))
        out = storage.empty_batch(32, shared=True)
        with spawned(sample_into, storage, out) as (_, pipe):
            assert receive(pipe) == "sampled"
        expected = storage.sample(32, seed=5)
        for key in expected.keys(True, True):
            assert torch.equal(out[key], expected[key])


def sample_into(pipe, storage: PackedReplayStorage, out) -> None:
    """Sample into a batch that the parent has made."""
    storage.sample(32, seed=5, out=out)
    pipe.send("sampled")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_thread_writes_on_when_its_process_has_nothing_else_to_do(method):
    with PackedReplayStorage(64, example=EXAMPLE, writers=1) as storage:
        with spawned(write_in_a_thread, storage, method=method) as (process, pipe):
            assert receive(pipe) == "main is done"
            pipe.send("go")  # the process is ending, but for the thread
            process.join(30.0)
            assert process.exitcode == 0
        assert storage.ptr == 50


def write_in_a_thread(pipe, storage: PackedReplayStorage) -> None:
    """Return while a thread is yet to write 50 rows."""

    def write() -> None:
        pipe.recv()
        for stamp in range(50):
            storage.append(stamped(torch.tensor([stamp])))

    threading.Thread(target=write).start()
    storage.append(stamped(torch.arange(0, 1)))
    storage._empty()
    pipe.send("main is done")
