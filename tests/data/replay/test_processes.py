"""Replay between processes: whole rows, whatever is stopped, killed or interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import psutil
import pytest
import torch
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.support.interrupts import each_interrupt
from tests.support.processes import receive, spawned, wait_for
from tests.support.transitions import (
    append_until_told,
    extend_and_tell,
    mixed,
    stamped,
    steps,
    strike_half_way,
)
from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter
from torchrl_unilab.data.replay import append as append_module
from torchrl_unilab.data.replay import shared as shared_module
from torchrl_unilab.data.replay import storage as storage_module
from torchrl_unilab.data.replay import trajectories as trajectories_module
from torchrl_unilab.errors import WaitTimeoutError
from torchrl_unilab.shm import lock as lock_module
from torchrl_unilab.shm import rows as rows_module
from torchrl_unilab.shm import shards as shards_module

SAMPLE = 4096
EXAMPLE = stamped(torch.zeros(1))[0].contiguous()


def sample_while_written(rows: int, unchecked: int, writers: int) -> tuple[int, int]:
    """Sample while two processes write; return mixed rows, and those without the check.

    Args:
        rows: How many to sample.
        unchecked: How many to gather at most, without a look at the words, until one is mixed.
        writers: Shards.
    """
    storage = PackedReplayStorage(8192, example=EXAMPLE, writers=writers)
    bad = bad_unchecked = 0
    with storage, contextlib.ExitStack() as stack:
        shards = [None, None] if writers == 1 else [0, 1]
        pipes = [
            stack.enter_context(spawned(append_until_told, storage, shard, 300 + 57 * i))[1]
            for i, shard in enumerate(shards)
        ]
        for pipe in pipes:
            receive(pipe)
        wait_for(lambda: len(storage) >= 8192)
        for i in range(rows // SAMPLE + 1):
            if i % 4:
                bad += mixed(storage.sample(SAMPLE))
            else:  # explicit positions, some of them in flight
                bad += mixed(storage.get(torch.randint(0, 8192, (SAMPLE,))))
        for _ in range(unchecked // SAMPLE + 1):
            at = torch.randint(0, 8192, (SAMPLE,))
            bad_unchecked += mixed(storage[:][at])
            if bad_unchecked:
                break
        for pipe in pipes:
            pipe.send("stop")
        written = sum(receive(pipe) for pipe in pipes)
        assert storage.ptr == written > rows // 100
    return bad, bad_unchecked


@pytest.mark.parametrize("writers", [1, 2])
def test_no_row_is_mixed_and_without_the_check_some_are(writers):
    found = sample_while_written(200_000, 20_000_000, writers)
    assert found == (0, pytest.approx(10_000, abs=9_999))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("writers", [1, 2])
def test_no_row_is_mixed_in_ten_million(writers):
    assert sample_while_written(10_000_000, 0, writers)[0] == 0


@pytest.mark.parametrize(("packed", "writers"), [(True, 1), (True, 2), (True, 3), (False, 1)])
def test_processes_extend_one_buffer(packed, writers):
    """A stock writer needs the shared buffer's lock, and one shard; ours needs neither."""
    storage = PackedReplayStorage(120, example=EXAMPLE, writers=writers)
    if packed:
        writer = PackedReplayWriter()
        buffer = TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=8)
    else:
        buffer = ReplayBuffer(storage=storage, batch_size=8).share()
    with (
        storage,
        spawned(extend_and_tell, buffer, 0, 5) as (_, one),
        spawned(extend_and_tell, buffer, 20, 5) as (_, two),
    ):
        for pipe in (one, two):
            receive(pipe)
        for pipe in (one, two):
            pipe.send("go")
        index = torch.tensor(receive(one) + receive(two))
        assert len(index.unique()) == 40
        assert storage.ptr == buffer.write_count == 40
        assert torch.equal(storage.get(index)["count"][:, 0], torch.arange(40, dtype=torch.int32))
        assert mixed(buffer.sample()) == 0
        if writers == 1:
            assert index.sort().values.tolist() == list(range(40))
            assert buffer.extend(stamped(torch.arange(40, 44))).tolist() == [40, 41, 42, 43]


def test_a_stopped_writer_is_waited_for_and_named_only_where_its_rows_are_asked_for():
    with PackedReplayStorage(64, example=EXAMPLE, timeout=0.3) as storage:
        storage.append(stamped(torch.arange(64)))
        storage.rows.leave()
        buffer = ReplayBuffer(storage=storage, batch_size=300)
        with spawned(strike_half_way, storage, 0, 8, signal.SIGSTOP) as (process, pipe):
            pid = receive(pipe)
            wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            # Random drawing does not wait, and shows none of its rows.
            for _ in range(10):
                batch, info = buffer.sample(return_info=True)
                assert info["index"].min() >= 8
                assert mixed(batch) == 0
                assert mixed(storage.sample(100)) == 0
            # Other rows can be read; its own cannot.
            assert mixed(storage.get(torch.arange(8, 64))) == 0
            for use in (
                lambda: storage.get([3]),
                lambda: storage.append(stamped(torch.arange(40))),
            ):
                with pytest.raises(WaitTimeoutError, match=rf"writer 0 \(process {pid}\)"):
                    use()
            os.kill(process.pid, signal.SIGCONT)
            assert receive(pipe) == "went on"
            assert storage.snapshot()[:2] == (72, 64)
            assert mixed(storage.sample(500)) == 0


def test_another_shard_is_written_and_read_while_a_writer_is_stopped():
    with PackedReplayStorage(64, example=EXAMPLE, timeout=0.3, writers=2) as storage:
        storage.use_writer(0)
        storage.append(stamped(torch.arange(32)))
        with spawned(strike_half_way, storage, 1, 8, signal.SIGSTOP) as (_, pipe):
            receive(pipe)
            storage.append(stamped(torch.arange(40)))
            assert mixed(storage.sample(200)) == 0
            assert mixed(storage.get(torch.arange(0, 64, 2))) == 0


def test_when_all_rows_are_being_written_sampling_waits_and_then_names_the_writer():
    with PackedReplayStorage(8, example=EXAMPLE, timeout=0.2) as storage:
        storage.append(stamped(torch.arange(8)))
        storage.rows.leave()
        with spawned(strike_half_way, storage, 0, 8, signal.SIGSTOP) as (_, pipe):
            receive(pipe)
            assert storage.size == 0
            buffer = ReplayBuffer(storage=storage, batch_size=4)
            for use in (lambda: storage.sample(4), buffer.sample):
                with pytest.raises(WaitTimeoutError, match="writer 0"):
                    use()


@pytest.mark.parametrize("how", ["add", "append", "set"])
def test_an_interrupt_at_any_point_of_a_write_leaves_a_storage_that_others_use(how):
    modules = [
        append_module,
        shared_module,
        storage_module,
        trajectories_module,
        lock_module,
        rows_module,
        shards_module,
    ]
    step = steps(4, 1)[0]
    with PackedReplayStorage(16, example=step[0], n_step=3, timeout=0.5) as storage:
        for _ in range(5):
            storage.add(step)
        write = {
            "add": lambda: storage.add(step),
            "append": lambda: storage.append(step),
            "set": lambda: storage.set([3, 1, 2, 0], step),
        }[how]
        errors: list[BaseException] = []

        def use() -> None:
            try:
                storage.add(step)
                storage.sample(8)
                storage.get(torch.arange(16))
            except BaseException as error:
                errors.append(error)

        for interrupt in each_interrupt(*modules, least=40):
            interrupt.during(write)
            assert interrupt.leaves_gradients
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
            assert not errors


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_a_thread_writes_on_when_its_process_has_nothing_else_to_do(method):
    with PackedReplayStorage(64, example=EXAMPLE) as storage:
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
