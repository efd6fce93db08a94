"""Workers and senders that are killed or stopped: nothing blocks, nothing tears."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
from torchrl.collectors import MultiSyncCollector
from torchrl.weight_update import SharedMemWeightSyncScheme

from tests.support.acting import StillEnv, actions, begun, make_policy, set_action
from tests.support.processes import DEADLINE, receive, spawned, wait_for, within
from tests.support.tearing import count_torn, make_cell, publish_until_told
from torchrl_unilab.errors import WaitTimeoutError
from torchrl_unilab.shm import SnapshotCell
from torchrl_unilab.weight_update import UniLabShmScheme


@contextlib.contextmanager
def _collecting(policy, scheme, workers=2):
    """A collector whose workers are killed in the end, as they may not listen."""
    settings = {"weight_sync_schemes": {"policy": scheme}, "frames_per_batch": 8}
    collector = MultiSyncCollector([StillEnv] * workers, policy, total_frames=-1, **settings)
    try:
        yield collector
    finally:
        for process in collector.procs:
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.join(DEADLINE)
        collector.shutdown(raise_on_error=False)


@pytest.mark.parametrize(
    ("fault", "state"), [("SIGKILL", "dead"), ("SIGSTOP", "stopped by a signal")]
)
def test_publishing_continues_without_a_lost_worker_which_is_named(fault, state):
    policy = make_policy(0.25)
    scheme = UniLabShmScheme()
    with _collecting(policy, scheme) as collector:
        next(iter(collector))
        lost = collector.procs[1]
        os.kill(lost.pid, getattr(signal, fault))
        if fault == "SIGKILL":
            lost.join(DEADLINE)
        else:
            wait_for(lambda: psutil.Process(lost.pid).status() == psutil.STATUS_STOPPED)

        def publish() -> None:
            for _ in range(100):
                collector.update_policy_weights_()

        assert within(DEADLINE, publish) is None
        assert scheme.version == 100
        expected = rf"worker 1 \(pid {lost.pid}, {state}\) at version 0"
        with pytest.raises(WaitTimeoutError, match=expected):
            scheme.wait_applied(100, worker_ids=1, timeout=0.1)
        assert scheme.lag == {0: 100, 1: 100}


def test_unlike_ours_the_stock_scheme_waits_for_ever_for_a_killed_worker():
    with _collecting(make_policy(), SharedMemWeightSyncScheme()) as collector:
        next(iter(collector))
        collector.procs[1].kill()
        collector.procs[1].join(DEADLINE)
        publishing = threading.Thread(target=collector.update_policy_weights_, daemon=True)
        publishing.start()
        publishing.join(0.5)
        assert publishing.is_alive()
        # Let the waiting thread go.
        collector._weight_sync_schemes["policy"]._ack_queues[1].put("updated")
        publishing.join(DEADLINE)


def test_a_stopped_worker_takes_the_newest_version_once_it_continues():
    policy = make_policy(0.25)
    scheme = UniLabShmScheme()
    with _collecting(policy, scheme, workers=1) as collector:
        batches = begun(collector)
        os.kill(collector.procs[0].pid, signal.SIGSTOP)
        for value in (0.5, 0.75):
            set_action(policy, value)
            collector.update_policy_weights_()
        os.kill(collector.procs[0].pid, signal.SIGCONT)
        assert actions(next(batches)) == {0.75}
        assert scheme.applied_versions == {0: 2}


def _read_for_ever(pipe: Connection, cell: SnapshotCell) -> None:
    torch.set_num_threads(1)
    pipe.send("reading")
    while True:
        count_torn(cell, 100, checked=True)


def test_readers_killed_in_mid_read_disturb_neither_writer_nor_other_readers():
    with make_cell(slots=2) as cell, spawned(publish_until_told, cell) as (_, pipe):
        receive(pipe)
        for _ in range(2):
            with spawned(_read_for_ever, cell) as (reader, readers_pipe):
                receive(readers_pipe)
                assert count_torn(cell, 500, checked=True)[0] == 0
                os.kill(reader.pid, signal.SIGKILL)
                reader.join(DEADLINE)
        before = cell.version
        assert count_torn(cell, 500, checked=True)[0] == 0
        wait_for(lambda: cell.version > before)
        pipe.send("stop")
        assert receive(pipe) > before
